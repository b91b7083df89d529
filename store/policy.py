"""Who may do what, as all gateways of a bus read it: one document that is replaced as a whole."""

from __future__ import annotations

import uuid
from typing import Protocol

import msgspec


class PolicyState(msgspec.Struct, frozen=True):
    """The document as it stands.

    Attributes:
        version: Changes with each replacement, and when the transport has lost what it had.
        document: What whoever wrote it wants to find again.
    """

    version: str
    document: bytes


class PolicyRecord(Protocol):
    """Where it is kept."""

    async def read(self, known: str) -> PolicyState | None:
        """None while it is what it was in the version `known`; "" for no version.

        A document that nobody has written is empty, in the version "".

        Raises:
            BusError: The transport can't be reached.
        """

    async def replace(self, known: str, document: bytes) -> bool:
        """Writes it, unless somebody has since the version `known`; returns whether it did.

        Raises:
            BusError: The transport can't be reached; it may be written nevertheless.
        """


NOTHING = PolicyState("", b"")
"""What stands there until somebody writes."""


def new_version() -> str:
    """One that there was never before."""
    return uuid.uuid4().hex


class MemoryPolicyRecord:
    """The `PolicyRecord` within one process, with which it ends."""

    def __init__(self) -> None:
        self._state = NOTHING

    async def read(self, known: str) -> PolicyState | None:
        return None if self._state.version == known else self._state

    async def replace(self, known: str, document: bytes) -> bool:
        if self._state.version != known:
            return False
        self._state = PolicyState(new_version(), document)
        return True
