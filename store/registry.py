"""The models of a deployment: specification, state, and whether they accept requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from ..config import ModelConfig, RequestError, nearest, shown
from ..config.models import default_of
from .records import Records as RecordStore
from .records import readable
from .redis.keys import Keys, parse_id

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


_decode = msgspec.json.Decoder(ModelRecord).decode


class ModelRegistry:
    """The models of a deployment by id, as written by the model manager: a hash of records, and a
    hash of models that accept no requests.

    Both share the slot of all requests streams, so that publishing and closing a model are atomic.
    """

    def __init__(self, keys: Keys, records: RecordStore) -> None:
        self._keys = keys
        self._records = records

    async def read(self) -> Records:
        """Return all models, sorted by id; empty for a deployment of one model, which isn't
        recorded.

        Raises:
            BusError: The transport can't be reached.
        """
        found = await self._records.run("HGETALL", self._keys.models)
        models = ((name, readable(_decode, raw, "models")) for name, raw in sorted(found.items()))
        return {name.decode(): record for name, record in models if record is not None}

    async def put(self, record: ModelRecord) -> None:
        """Replace a model's record, and open or close its requests stream.

        Raises:
            BusError: The transport can't be reached; the write may have taken effect.
        """
        models, closed, name = self._keys.models, self._keys.closed, record.spec.id
        takes = record.takes_requests
        gate = ("HDEL", closed, name) if takes else ("HSET", closed, name, record.state)
        body = msgspec.json.encode(record)
        await self._records.transact(models, [("HSET", models, name, body), gate])

    async def remove(self, model: str) -> None:
        """Remove a model from the deployment. Raises BusError as `put`."""
        models, closed = self._keys.models, self._keys.closed
        # Clients may still believe that a removed model is part of the deployment.
        gate = ("HSET", closed, model, "removed")
        await self._records.transact(models, [("HDEL", models, model), gate])

    async def traffic(self, models: Sequence[str]) -> list[Traffic]:
        """Return the traffic of these models' requests streams, in their order. Cheap enough to
        poll.

        Raises:
            BusError: The transport can't be reached.
        """
        ends = await self._records.stream_ends([self._keys.requests_of(each) for each in models])
        return [Traffic(length, parse_id(last)[0]) for length, last in ends]


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
