"""What a lane remembers of its weights, for an executor that starts anew while the lane lives."""

from __future__ import annotations

from typing import Annotated, Protocol

import msgspec

_LARGEST = (1 << 63) - 1
"""Of the integers that every message can carry."""


class WeightsInPlace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The newest weights of a lane.

    Attributes:
        version: What they are counted as; above 0, which those of `engine.model_path` are.
        leader: The incarnation of admission under which they were in place. Another one that has
            begun since means that the lane itself may be a new one.
        folder: Where all of them were read; "" when they can't be had again.
        stamp: Which files those were; see `stamp_of` of the executor's weights.
    """

    version: Annotated[int, msgspec.Meta(ge=1, le=_LARGEST)]
    leader: str
    folder: str = ""
    stamp: str = ""


class WeightsRecord(Protocol):
    """The last word of a lane's executors on their weights."""

    async def put(self, weights: WeightsInPlace) -> None:
        """Replaces it.

        Raises:
            BusError: The transport can't be reached, or was closed.
        """

    async def read(self) -> WeightsInPlace | None:
        """None when there was no update, or what stands there can't be understood.

        While the transport is away it waits.

        Raises:
            ChannelClosed: The bus was closed.
        """


class MemoryWeightsRecord:
    """The `WeightsRecord` within one process, with which it ends."""

    def __init__(self) -> None:
        self._last: WeightsInPlace | None = None

    async def put(self, weights: WeightsInPlace) -> None:
        self._last = weights

    async def read(self) -> WeightsInPlace | None:
        return self._last
