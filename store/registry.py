"""The models of a deployment: specification, state, and whether they accept requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from ..config import ModelConfig, RequestError, nearest, shown
from ..config.models import default_of

ModelState = Literal["unloaded", "loading", "ready", "draining", "failed"]

NOT_FOUND = "unknown_model"
NOT_LOADED = "model_not_loaded"
MALFORMED = "malformed"


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One model of a deployment.

    Attributes:
        spec: Its settings.
        state: "loading" until a lane is ready; "draining" while it accepts no more requests and
            finishes those in flight; "failed" if it could not be loaded.
        reason: The cause of the state; of a failed model the error.
        since_ns: Start of the state, wall clock.
        load_ns: Duration of loading; 0 before that.
        memory_bytes: Memory of its processes.
        takes_requests: Whether its stream accepts requests.
        adapters: Adapters that requests may name, besides those of `spec`.
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
        """All names in requests, the id first."""
        return tuple(dict.fromkeys((*self.spec.names, *self.adapters)))


Records = dict[str, ModelRecord]


class Traffic(NamedTuple):
    """Contents of a requests stream.

    Attributes:
        entries: Unanswered requests.
        last_ms: Time of the last request, by the transport's clock; 0 if there was none.
    """

    entries: int
    last_ms: int


class ModelRegistry(Protocol):
    """The models of a deployment by id, as written by the model manager."""

    async def read(self) -> Records:
        """Return all models, sorted by id; empty for a deployment of one model, which isn't
        recorded.

        Raises:
            BusError: The transport can't be reached.
        """

    async def put(self, record: ModelRecord) -> None:
        """Replace a model's record, and open or close its requests stream.

        Raises:
            BusError: The transport can't be reached; the write may have taken effect.
        """

    async def remove(self, model: str) -> None:
        """Remove a model from the deployment. Raises BusError as `put`."""

    async def traffic(self, models: Sequence[str]) -> list[Traffic]:
        """Return the traffic of these models' requests streams, in their order. Cheap enough to
        poll.

        Raises:
            BusError: The transport can't be reached.
        """


class MemoryModelRegistry:
    """`ModelRegistry` within one process."""

    def __init__(self) -> None:
        self._records: Records = {}

    async def read(self) -> Records:
        return dict(sorted(self._records.items()))

    async def put(self, record: ModelRecord) -> None:
        self._records[record.spec.id] = record

    async def remove(self, model: str) -> None:
        self._records.pop(model, None)

    async def traffic(self, models: Sequence[str]) -> list[Traffic]:
        """Return zeros: in memory there is one model, whose requests the registry doesn't see."""
        return [Traffic(0, 0) for _ in models]


def find_model(name: str, records: Iterable[ModelRecord]) -> ModelConfig:
    """Return the model with this name: its id, an alias or one of its adapters; "" is the default.

    Raises:
        RequestError: unknown_model.
    """
    listed = list(records)
    wanted = name or default_of(record.spec for record in listed)
    for record in listed:
        if wanted in record.spec.names:
            return record.spec
    # Adapters' names may be ambiguous; the first model wins.
    for record in listed:
        if wanted in record.adapters:
            return record.spec
    known = [each for record in listed for each in record.names]
    raise RequestError(
        f"there is no model {shown(name)} here{nearest(name, known)}", code=NOT_FOUND
    )
