"""Routing of a deployment's requests stream to the streams of its models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from ..config.errors import bus_closed
from .entries import RequestEntry
from .public import Completion

Refusal = Callable[[RequestEntry], Completion | None]


class Unrouted(msgspec.Struct, frozen=True):
    """A request on the deployment's requests stream.

    Attributes:
        entry_id: Its entry.
        model: The requested model; "" for the default, or if unreadable.
    """

    entry_id: str
    model: str


class Unmoved(NamedTuple):
    """A request that was not moved.

    Attributes:
        entry_id: Its entry.
        code: "model_not_loaded": the model accepts no requests. "not_routed": its stream has a
            later entry. "malformed": it has more fields than any request.
    """

    entry_id: str
    code: str


class RequestRouting(Protocol):
    """Routing from the deployment's requests stream to its models' streams, by any number of
    processes.

    Entries keep their ids, and their order per model.
    """

    async def unrouted(self, max_items: int = 64) -> list[Unrouted]:
        """Wait for requests, and return the oldest, which stay on the stream.

        Raises:
            ChannelClosed: The bus was closed.
            BusError: The transport refuses.
        """

    async def move(self, places: Sequence[tuple[str, str]]) -> list[Unmoved]:
        """Move entries to their models' streams, each atomically and once.

        Args:
            places: (entry id, model id), in the order of `unrouted`.

        Returns:
            The entries that were not moved.

        Raises:
            BusError: As `unrouted`.
        """

    async def refuse(self, entry_ids: Sequence[str], answer: Refusal, epoch: int) -> None:
        """Answer entries that can't be moved, and remove them.

        Args:
            answer: Makes an entry's terminal message; None for another entry with the id.
            epoch: The writer's.

        Raises:
            BusError: As `unrouted`.
        """


class MemoryRouting:
    """`RequestRouting` within one process, which has one model and nothing to route."""

    def __init__(self) -> None:
        self._closed = asyncio.Event()

    async def unrouted(self, max_items: int = 64) -> list[Unrouted]:
        await self._closed.wait()
        raise bus_closed()

    async def move(self, places: Sequence[tuple[str, str]]) -> list[Unmoved]:
        return []

    async def refuse(self, entry_ids: Sequence[str], answer: Refusal, epoch: int) -> None:
        """Do nothing: there are no entries to refuse."""

    def close(self) -> None:
        self._closed.set()
