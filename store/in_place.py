"""What a lane remembers of its weights and adapters, for an executor that starts anew."""

from __future__ import annotations

from typing import Annotated, Generic, Protocol, TypeVar

import msgspec

_LARGEST = (1 << 63) - 1
"""Of the integers that every message can carry."""

T = TypeVar("T")


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


class AdapterInPlace(msgspec.Struct, frozen=True, omit_defaults=True):
    """One adapter; the fields are those of WeightsInPlace."""

    id: str
    version: Annotated[int, msgspec.Meta(ge=1, le=_LARGEST)]
    folder: str = ""
    stamp: str = ""


class AdaptersInPlace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The adapters of a lane.

    Attributes:
        leader: As in WeightsInPlace.
        adapters: Those that are loaded.
        versions: The last version of each id, those that are not loaded any more among them.
    """

    leader: str
    adapters: tuple[AdapterInPlace, ...] = ()
    versions: dict[str, int] = {}


class InPlaceRecord(Protocol[T]):
    """The last word of a lane's executors on one of these."""

    async def put(self, last: T) -> None:
        """Replaces it.

        Raises:
            BusError: The transport can't be reached, or was closed.
        """

    async def read(self) -> T | None:
        """None when nothing was said, or what stands there can't be understood.

        While the transport is away it waits.

        Raises:
            ChannelClosed: The bus was closed.
        """


class MemoryRecord(Generic[T]):
    """The `InPlaceRecord` within one process, with which it ends."""

    def __init__(self) -> None:
        self._last: T | None = None

    async def put(self, last: T) -> None:
        self._last = last

    async def read(self) -> T | None:
        return self._last
