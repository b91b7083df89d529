"""Routing of a deployment's requests stream to the streams of its models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

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
