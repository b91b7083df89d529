"""The policy document that all gateways of a bus read. It is replaced as a whole."""

from __future__ import annotations

import uuid

import msgspec

from .records import Records
from .redis.keys import Keys

_VERSION, _DOCUMENT = b"version", b"document"


class PolicyState(msgspec.Struct, frozen=True):
    """The document and its version.

    Attributes:
        version: Changes with each replacement, and when the transport lost the document.
        document: Encoded by its writer.
    """

    version: str
    document: bytes


NOTHING = PolicyState("", b"")
"""The state before the first write."""


class PolicyRecord:
    """Storage of the policy document, as a hash with its version."""

    def __init__(self, keys: Keys, records: Records) -> None:
        self._key = keys.policy
        self._records = records

    async def read(self, known: str) -> PolicyState | None:
        """Return the document, or None if its version is still `known` ("" for no version).

        A document never written is empty, with version "".

        Raises:
            BusError: The transport can't be reached.
        """
        version = await self._records.run("HGET", self._key, _VERSION)
        if (version or b"").decode() == known:
            return None
        version, document = await self._records.run("HMGET", self._key, _VERSION, _DOCUMENT)
        return NOTHING if version is None else PolicyState(version.decode(), document)

    async def replace(self, known: str, document: bytes) -> bool:
        """Replace the document if its version is still `known`; return whether it was replaced.

        Raises:
            BusError: The transport can't be reached; the write may have taken effect.
        """
        fields = {_VERSION: uuid.uuid4().hex.encode(), _DOCUMENT: document}
        return await self._records.replace(self._key, _VERSION, known.encode(), fields)
