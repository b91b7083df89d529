"""A model's open weight update, and trainers' names of versions, which all gateways share."""

from __future__ import annotations

from typing import Annotated

import msgspec

from .in_place import LARGEST
from .records import Records, readable
from .redis.keys import Keys

_STATE, _LABELS = b"state", b"labels"

Version = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]


class WeightUpdateState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of trainers' weight updates through gateways.

    `committed` is the decision of an update over several executors: it is written after all of them
    have checked the weights, and before the first puts them in place. Any gateway, and any executor
    with the weights, completes a decided update; an undecided one is dropped.

    Attributes:
        update: The executors' name of the open update; "" before the first.
        parts: The number of its staged parts.
        failure: Why a part was not staged; then none is put in place.
        label: The trainer's name of the version that the parts make.
        abort: Whether requests in flight end when the parts are put in place.
        session: Whether an update was begun explicitly.
        paused: Whether generation was paused through a gateway.
        asleep: Whether the pause is part of a sleep, and ends with it.
        released: The memory that was released through a gateway.
        committed: The version that the parts become; 0 while that is undecided.
        group: The group that the trainer sends through.
        packed_bytes: The size of its packed broadcasts; 0 if each tensor is one.
        logged: The place of the decided weights in the log of weights (`Outcome.logged`).
        last: The version of the update that was finished last; 0 after its failure, and once
            another is begun.
        last_label: Its label.
        last_failure: Why it was not put in place.
    """

    update: str = ""
    parts: int = 0
    failure: str = ""
    label: str | None = None
    abort: bool = False
    session: bool = False
    paused: bool = False
    asleep: bool = False
    released: tuple[str, ...] = ()
    committed: Version = 0
    logged: str = ""
    group: str = ""
    packed_bytes: int = 0
    last: Version = 0
    last_label: str | None = None
    last_failure: str = ""


class Stored(msgspec.Struct, frozen=True):
    """A state as it was read; `raw` is compared by the next write."""

    state: WeightUpdateState
    raw: bytes


_decode = msgspec.json.Decoder(WeightUpdateState).decode
_decode_labels = msgspec.json.Decoder(dict[int, str]).decode


class WeightUpdateRecord:
    """Storage of the state and the labels, as a hash. It outlives gateways and lanes."""

    def __init__(self, keys: Keys, records: Records) -> None:
        self._key = keys.weight_update
        self._records = records

    async def read(self) -> Stored:
        """Return the state; the first one if there is none or it can't be decoded.

        Raises:
            BusError: The transport can't be reached.
        """
        raw = await self._records.run("HGET", self._key, _STATE)
        found = None if raw is None else readable(_decode, raw, self._key.decode())
        return Stored(found or WeightUpdateState(), raw or b"")

    async def labels(self) -> dict[int, str]:
        """Return the names of versions. Raises BusError."""
        raw = await self._records.run("HGET", self._key, _LABELS)
        found = None if raw is None else readable(_decode_labels, raw, self._key.decode())
        return found or {}

    async def replace(
        self, known: Stored, state: WeightUpdateState, labels: dict[int, str] | None = None
    ) -> Stored | None:
        """Replace the state if it is still the known one; None if it has changed.

        Args:
            known: As read or replaced before.
            state: The new state.
            labels: The new labels, written in the same step; None to keep them.

        Raises:
            BusError: The transport can't be reached; the write may have taken effect.
        """
        raw = msgspec.json.encode(state)
        fields = {_STATE: raw}
        if labels is not None:
            fields[_LABELS] = msgspec.json.encode(labels)
        if not await self._records.replace(self._key, _STATE, known.raw, fields):
            return None
        return Stored(state, raw)
