"""The policy document that all gateways of a bus read. It is replaced as a whole."""

from __future__ import annotations

import uuid
from typing import Protocol

import msgspec


class PolicyState(msgspec.Struct, frozen=True):
    """The document and its version.

    Attributes:
        version: Changes with each replacement, and when the transport lost the document.
        document: Encoded by its writer.
    """

    version: str
    document: bytes


class PolicyRecord(Protocol):
    """Storage of the policy document."""

    async def read(self, known: str) -> PolicyState | None:
        """Return the document, or None if its version is still `known` ("" for no version).

        A document never written is empty, with version "".

        Raises:
            BusError: The transport can't be reached.
        """

    async def replace(self, known: str, document: bytes) -> bool:
        """Replace the document if its version is still `known`; return whether it was replaced.

        Raises:
            BusError: The transport can't be reached; the write may have taken effect.
        """


NOTHING = PolicyState("", b"")
"""The state before the first write."""


def new_version() -> str:
    """Return a unique version."""
    return uuid.uuid4().hex


class MemoryPolicyRecord:
    """`PolicyRecord` within one process."""

    def __init__(self) -> None:
        self._state = NOTHING

    async def read(self, known: str) -> PolicyState | None:
        return None if self._state.version == known else self._state

    async def replace(self, known: str, document: bytes) -> bool:
        if self._state.version != known:
            return False
        self._state = PolicyState(new_version(), document)
        return True
