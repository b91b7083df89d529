"""Records of a lane's weights and adapters, for an executor that restarts."""

from __future__ import annotations

from typing import Annotated, Generic, Protocol, TypeVar

import msgspec

_LARGEST = (1 << 63) - 1
"""The largest integer that every message can carry."""

T = TypeVar("T")


class WeightsInPlace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The newest weights of a lane.

    Attributes:
        version: At least 1; version 0 is the weights of `engine.model_path`.
        leader: The incarnation of admission at the time. A different one since means that the lane
            itself may be new.
        folder: The folder that holds all of them; "" if the weights can't be read again.
        stamp: Identity of the files; see `stamp_of` of the executor's weights.
    """

    version: Annotated[int, msgspec.Meta(ge=1, le=_LARGEST)]
    leader: str
    folder: str = ""
    stamp: str = ""


class AdapterInPlace(msgspec.Struct, frozen=True, omit_defaults=True):
    """One adapter; the fields are as in WeightsInPlace."""

    id: str
    version: Annotated[int, msgspec.Meta(ge=1, le=_LARGEST)]
    folder: str = ""
    stamp: str = ""


class AdaptersInPlace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The adapters of a lane.

    Attributes:
        leader: As in WeightsInPlace.
        adapters: The loaded adapters.
        versions: The last version of each id, unloaded adapters included.
    """

    leader: str
    adapters: tuple[AdapterInPlace, ...] = ()
    versions: dict[str, int] = {}


class InPlaceRecord(Protocol[T]):
    """The last record written by a lane's executors."""

    async def put(self, last: T) -> None:
        """Replace the record.

        Raises:
            BusError: The transport can't be reached, or was closed.
        """

    async def read(self) -> T | None:
        """Return the record, or None if there is none or it can't be decoded.

        Waits while the transport is unreachable.

        Raises:
            ChannelClosed: The bus was closed.
        """


class MemoryRecord(Generic[T]):
    """`InPlaceRecord` within one process."""

    def __init__(self) -> None:
        self._last: T | None = None

    async def put(self, last: T) -> None:
        self._last = last

    async def read(self) -> T | None:
        return self._last
