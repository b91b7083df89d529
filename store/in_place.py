"""Records of a lane's weights and adapters, for an executor that restarts."""

from __future__ import annotations

from typing import Annotated, Generic, TypeVar

import msgspec

from .records import Records, readable

LARGEST = (1 << 63) - 1
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
        log: The run of the log of weights that has them; "" for none.
        digest: Of all weights, in that log.
    """

    version: Annotated[int, msgspec.Meta(ge=1, le=LARGEST)]
    leader: str
    folder: str = ""
    stamp: str = ""
    log: str = ""
    digest: str = ""


class AdapterInPlace(msgspec.Struct, frozen=True, omit_defaults=True):
    """One adapter; the fields are as in WeightsInPlace."""

    id: str
    version: Annotated[int, msgspec.Meta(ge=1, le=LARGEST)]
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


class InPlaceRecord(Generic[T]):
    """The last record written by a lane's executors. It outlives the lane's processes."""

    def __init__(self, key: bytes, kind: type[T], records: Records) -> None:
        self._key = key
        self._decode = msgspec.json.Decoder(kind).decode
        self._records = records

    async def put(self, last: T) -> None:
        """Replace the record.

        Raises:
            BusError: The transport can't be reached, or was closed.
        """
        await self._records.run("SET", self._key, msgspec.json.encode(last))

    async def read(self) -> T | None:
        """Return the record, or None if there is none or it can't be decoded.

        Waits while the transport is unreachable.

        Raises:
            ChannelClosed: The bus was closed.
        """
        (raw,) = await self._records.retry_all("in place", [("GET", self._key)])
        return None if raw is None else readable(self._decode, raw, self._key.decode())
