"""Routing of a deployment's requests stream to the streams of its models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from ..config.errors import bus_closed
from .public import Completion

if TYPE_CHECKING:
    from .channel import RequestEntry


class Unrouted(msgspec.Struct, frozen=True):
    """A request at the entrance.

    Attributes:
        entry_id: Its entry.
        model: What it asks for; "" for the default, and where it could not be read.
    """

    entry_id: str
    model: str


class Unmoved(NamedTuple):
    """A request that stays at the entrance.

    Attributes:
        entry_id: Its entry.
        code: "model_not_loaded": the model takes no requests. "not_routed": its stream has an entry
            that came later. "malformed": it has more fields than any request.
    """

    entry_id: str
    code: str


class RequestRouting(Protocol):
    """The entrance of a deployment of several models: any process may see to it, and several may.

    Entries keep their ids, and their order for each model, whoever moves them.
    """

    async def unrouted(self, max_items: int = 64) -> list[Unrouted]:
        """Waits for requests at the entrance; the oldest, which stay there.

        Raises:
            ChannelClosed: The bus was closed.
            BusError: The transport refuses.
        """

    async def move(self, places: Sequence[tuple[str, str]]) -> list[Unmoved]:
        """Moves entries to the streams of their models, each as one step, once.

        Args:
            places: (entry id, model id), in the order of `unrouted`.

        Returns:
            Those that are where they were.

        Raises:
            BusError: As `unrouted`.
        """

    async def refuse(
        self, entry_ids: Sequence[str], answer: Callable[[RequestEntry], Completion], epoch: int
    ) -> None:
        """Answers entries that can't be moved, and removes them.

        Args:
            answer: An entry's terminal message.
            epoch: The writer's.

        Raises:
            BusError: As `unrouted`.
        """


class MemoryRouting:
    """The `RequestRouting` within one process, where there is one model, to which all goes."""

    def __init__(self) -> None:
        self._closed = asyncio.Event()

    async def unrouted(self, max_items: int = 64) -> list[Unrouted]:
        await self._closed.wait()
        raise bus_closed()

    async def move(self, places: Sequence[tuple[str, str]]) -> list[Unmoved]:
        return []

    async def refuse(
        self, entry_ids: Sequence[str], answer: Callable[[RequestEntry], Completion], epoch: int
    ) -> None:
        """Does nothing: there is nothing to refuse."""

    def close(self) -> None:
        self._closed.set()
