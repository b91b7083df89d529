"""The models of a deployment: what each is, how it is, and whether it takes requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from ..config import ModelConfig, RequestError, nearest, shown
from ..config.models import default_of

ModelState = Literal["unloaded", "loading", "ready", "draining", "failed"]

NOT_FOUND = "unknown_model"
NOT_LOADED = "model_not_loaded"
NOT_ROUTED = "not_routed"
MALFORMED = "malformed"


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One model of a deployment.

    Attributes:
        spec: What was said of it.
        state: "loading" from when it is asked for until a lane of it is ready, "draining" while it
            takes no more requests and answers those that it has; "failed" when it could not be
            loaded.
        reason: Why it is in that state; of a failed one the error.
        since_ns: Since when, wall clock.
        load_ns: How long it took to load; 0 before that.
        memory_bytes: What its processes take, as far as they are there.
        takes_requests: Whether what is asked of it gets on its stream.
        adapters: Those that requests may name instead of it, beside those of `spec`.
    """

    spec: ModelConfig
    state: ModelState = "unloaded"
    reason: str = ""
    since_ns: int = 0
    load_ns: int = 0
    memory_bytes: int = 0
    takes_requests: bool = False
    adapters: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names by which requests may ask for it, its id first."""
        return tuple(dict.fromkeys((*self.spec.names, *self.adapters)))


Records = dict[str, ModelRecord]


class Traffic(NamedTuple):
    """What is on a requests stream.

    Attributes:
        entries: Requests that are not answered.
        last_ms: When the last one came, wall clock of the transport; 0 when none has.
    """

    entries: int
    last_ms: int


class ModelRegistry(Protocol):
    """The models of a deployment by their ids, as whoever runs them has written it down."""

    async def read(self) -> Records:
        """All of them, in the order of their ids; none where the deployment has one model, which is
        nowhere written down.

        Raises:
            BusError: The transport can't be reached.
        """

    async def put(self, record: ModelRecord) -> None:
        """Replaces what was said of a model. From then on it takes requests, or none.

        Raises:
            BusError: The transport can't be reached; it may be written nevertheless.
        """

    async def remove(self, model: str) -> None:
        """The model is not a part of the deployment any more. Raises BusError as `put`."""

    async def traffic(self, models: Sequence[str]) -> list[Traffic]:
        """What is on the requests streams of these models, in their order. Cheap: for polling.

        Raises:
            BusError: The transport can't be reached.
        """


class MemoryModelRegistry:
    """The `ModelRegistry` within one process, with which it ends."""

    def __init__(self) -> None:
        self._records: Records = {}

    async def read(self) -> Records:
        return dict(sorted(self._records.items()))

    async def put(self, record: ModelRecord) -> None:
        self._records[record.spec.id] = record

    async def remove(self, model: str) -> None:
        self._records.pop(model, None)

    async def traffic(self, models: Sequence[str]) -> list[Traffic]:
        """None: there is one model, whose requests this does not see."""
        return [Traffic(0, 0) for _ in models]


def find_model(name: str, records: Iterable[ModelRecord]) -> ModelConfig:
    """The model that a name is of: its id, an alias, one of its adapters; "" is the default.

    Raises:
        RequestError: unknown_model.
    """
    listed = list(records)
    wanted = name or default_of(record.spec for record in listed)
    for record in listed:
        if wanted in record.spec.names:
            return record.spec
    # Of these nobody has seen to it that a name stands for one thing: what was there first wins.
    for record in listed:
        if wanted in record.adapters:
            return record.spec
    known = [each for record in listed for each in record.names]
    raise RequestError(
        f"there is no model {shown(name)} here{nearest(name, known)}", code=NOT_FOUND
    )
