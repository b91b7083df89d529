"""The models of a deployment, for a client: how they are, and having them loaded and unloaded."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import msgspec

from ..bus import Bus, Outcome
from ..bus.backlog import Backlog
from ..bus.control import LoadModel, UnloadModel
from ..bus.links import MODEL_MANAGER, MODELS
from ..config import BusError, ModelConfig, ModelError, split_role
from ..store.board import StageReport
from ..store.registry import ModelRecord, ModelState, find_model
from .client_adapters import adapters_of
from .health import lanes_of
from .operators import LOOK_S, PARTING_S

FACTS = (
    *("model", "model_path", "aliases", "parameters", "weight_bytes", "kv_bytes", "vocab_size"),
    *("dtype", "experts", "active_experts", "capabilities", "max_batch_size", "load_ns"),
)
"""What executors tell of their models, in `StageReport.load`."""

NO_MANAGER = "no_model_manager"


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One model of a deployment, as it was about a second ago.

    What only an executor knows is 0, or empty, while no lane of the model is ready.

    Attributes:
        id: What requests give in `model`.
        path: Where it is.
        revision: As its settings say.
        aliases: Other names for it.
        default: Whether requests that name no model are for it.
        pinned: Whether it stays, whoever else needs the memory.
        state: See `ModelRecord`.
        reason: Why it is in that state; of a failed one the error.
        since_ns: Since when, wall clock.
        load_ns: How long it took to load; 0 before that.
        memory_bytes: What its processes take; what they share with others is counted in part. 0
            without a model manager, which measures it.
        takes_requests: Whether what is asked of it gets on its stream.
        ready_lanes: Names of the lanes that serve it.
        replicas: How many executors these have.
        parameters: Of the model, all experts counted.
        weight_bytes: What its weights take, in all replicas together.
        kv_bytes: What KV takes, in all replicas together.
        max_model_len: Tokens of a prompt and its answer.
        vocab_size: Rows of the output layer.
        dtype: Of its weights.
        device: Where it runs.
        is_moe: Whether it has experts, of which each token asks some.
        n_experts: How many a layer has; 0 where it has none.
        n_active_experts: How many of them a token asks.
        capabilities: Of "generate", "score", "embed".
        adapters: Ids of the adapters that it has.
        waiting: Requests that nobody has taken.
        in_flight: Requests that were taken, and are not answered.
    """

    id: str
    path: str = ""
    revision: str = ""
    aliases: tuple[str, ...] = ()
    default: bool = False
    pinned: bool = False
    state: ModelState = "unloaded"
    reason: str = ""
    since_ns: int = 0
    load_ns: int = 0
    memory_bytes: int = 0
    takes_requests: bool = False
    ready_lanes: tuple[str, ...] = ()
    replicas: int = 0
    parameters: int = 0
    weight_bytes: int = 0
    kv_bytes: int = 0
    max_model_len: int = 0
    vocab_size: int = 0
    dtype: str = ""
    device: str = ""
    is_moe: bool = False
    n_experts: int = 0
    n_active_experts: int = 0
    capabilities: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    waiting: int = 0
    in_flight: int = 0


class ModelOperations(ABC):
    """What a client does with the models of a deployment."""

    bus: Bus
    # To what is another model's, or the whole deployment's.
    _buses: dict[str, Bus] | None = None

    @abstractmethod
    def _on(self, bus: Bus) -> Self:
        """Another client, which has this bus to itself."""

    def of_model(self, model: str) -> Self:
        """A client of one model of the deployment, with a connection of its own; close it.

        What it submits is for that model, whatever its requests name, and what it does to a
        pipeline is done to the lanes of that model.

        Args:
            model: Its id.

        Raises:
            BusError: The bus is in memory, where there is one model.
        """
        return self._on(self.bus.of_model(model))

    async def models(self) -> list[ModelStatus]:
        """The models of the deployment, in the order of their ids.

        One that serves a single model, without `models` in its settings, has that one, as soon as
        an executor has loaded it.

        Raises:
            BusError: The bus can't be reached.
        """
        records = await self.bus.store.models.read()
        if not records:
            return only_model(await self.bus.store.board.read(), await self.bus.requests.backlog())
        for model in set(self._buses or ()) - {*records, ""}:
            await self._forget_bus(model)
        statuses = [self._status(record) for _, record in sorted(records.items())]
        return list(await asyncio.gather(*statuses))

    async def backlog(self) -> Backlog:
        """What waits and what is worked on, of several models together.

        Raises:
            BusError: The bus can't be reached.
        """
        models = await self.bus.store.models.read()
        if not models:
            return await self.bus.requests.backlog()
        buses = [self._bus_of(model) for model in ("", *models)]
        before, *each = await asyncio.gather(*(bus.requests.backlog() for bus in buses))
        return Backlog(
            waiting=before.waiting + sum(one.waiting for one in each),
            # What was taken before the models is on its way to them.
            pending=sum(one.pending for one in each),
            dead=before.dead,  # all models share the dead letters
            queue_length=before.queue_length + sum(one.queue_length for one in each),
        )

    async def load_model(self, model: str | ModelConfig) -> ModelStatus:
        """Has a model loaded while the others serve, and returns when it is ready.

        One that is loaded is left as it is; one that others have asked for is loaded once. While
        it loads, requests for it wait.

        Args:
            model: One of its names, or what it is, where the deployment does not have it yet. From
                then on it does.

        Raises:
            ModelError: `unknown_model`; `model_exists`, one of its names is taken;
                `model_load_failed`, with the error; `out_of_memory_budget`, see
                `deployment.max_memory_bytes`. All is as it was.
            BusError: `no_model_manager`: nobody loads models here.
        """
        name, spec = (model, None) if isinstance(model, str) else (model.id, model)
        return await self._manage(LoadModel(name, spec))

    async def unload_model(
        self, model: str, *, timeout_s: float | None = None, remove: bool = False
    ) -> ModelStatus:
        """Has a model unloaded while the others serve, and returns when its processes have ended.

        It takes no more requests, and those that it has are answered first. One that is not loaded
        is left as it is.

        Args:
            model: One of its names.
            timeout_s: How long its requests may take; what is left then ends with an error.
            remove: Whether the deployment shall not have it any more.

        Returns:
            How it is then.

        Raises:
            ModelError: `unknown_model`.
            BusError: `no_model_manager`: nobody unloads models here.
        """
        return await self._manage(UnloadModel(model, timeout_s, remove))

    async def _manage(self, wish: LoadModel | UnloadModel) -> ModelStatus:
        bus = self._bus_of("")
        manager = await self._manager(bus)
        if manager is None:
            raise BusError(
                "nobody loads and unloads models here; start `nano-inference up` with `models` in "
                "its settings",
                code=NO_MANAGER,
            )
        before = await bus.store.models.read()
        operation_id = uuid.uuid4().hex
        sender = bus.sender(MODELS, f"client-{operation_id[:8]}", manager.lane)
        await sender.send(wish, operation_id=operation_id)
        await sender.flush()
        outcome = await self._answer(bus, operation_id, manager.incarnation)
        if outcome.code:
            raise ModelError(outcome.message, code=outcome.code)
        after = await bus.store.models.read()
        records = before | after
        record = records[find_model(wish.id, records.values()).id]
        if record.spec.id not in after:
            record = ModelRecord(spec=record.spec, reason="it is removed")
        return await self._status(record)

    async def _answer(self, bus: Bus, operation_id: str, incarnation: str) -> Outcome:
        """Waits as long as the manager is there that was asked."""
        while True:
            if outcomes := await bus.replies.outcomes(operation_id, 1, LOOK_S):
                return outcomes[0]
            manager = await self._manager(bus)
            if manager is None or manager.incarnation != incarnation:
                # It may have answered as its last act.
                if outcomes := await bus.replies.outcomes(operation_id, 1, PARTING_S):
                    return outcomes[0]
                raise BusError(
                    "the deployment was stopped or started anew before it answered; look at "
                    "`nano-inference models`",
                    code="no_answer",
                )

    async def _manager(self, bus: Bus) -> StageReport | None:
        reports = await bus.store.board.read()  # the youngest of a role comes first
        return next((each for each in reports if each.stage == MODEL_MANAGER), None)

    async def _status(self, record: ModelRecord) -> ModelStatus:
        bus = self._bus_of(record.spec.id)
        reports, backlog = await asyncio.gather(bus.store.board.read(), bus.requests.backlog())
        return status_of(record, reports, backlog)

    def _bus_of(self, model: str) -> Bus:
        """A bus of a model, "" for the whole deployment's; it is closed with this client."""
        if model == self.bus.model:
            return self.bus
        if self._buses is None:
            self._buses = {}
        if model not in self._buses:
            self._buses[model] = self.bus.of_model(model)
        return self._buses[model]

    async def _forget_bus(self, model: str) -> None:
        if self._buses and (bus := self._buses.pop(model, None)):
            await bus.aclose()

    async def _close_models(self) -> None:
        for model in list(self._buses or ()):
            await self._forget_bus(model)


def status_of(record: ModelRecord, reports: Sequence[StageReport], backlog: Backlog) -> ModelStatus:
    """What is written down of a model, and what its stages tell."""
    spec = record.spec
    return ModelStatus(
        id=spec.id,
        path=spec.path,
        revision=spec.revision,
        aliases=spec.aliases,
        default=spec.default,
        pinned=spec.pinned,
        state=record.state,
        reason=record.reason,
        since_ns=record.since_ns,
        load_ns=record.load_ns,
        memory_bytes=record.memory_bytes,
        takes_requests=record.takes_requests,
        waiting=backlog.waiting,
        in_flight=backlog.pending,
        **facts_of(reports),
    )


def only_model(reports: Sequence[StageReport], backlog: Backlog) -> list[ModelStatus]:
    """The model of a deployment that has one, out of what its executors tell; none if none does."""
    facts = facts_of(reports)
    executors = [report for report in reports if "model_path" in report.load]
    if not executors:
        return []
    oldest = max(executors, key=lambda each: each.since_s)
    ready = bool(facts["ready_lanes"])
    return [
        ModelStatus(
            id=str(oldest.load["model"]),
            path=str(oldest.load["model_path"]),
            aliases=_words(oldest.load.get("aliases", "")),
            default=True,
            pinned=True,
            state="ready" if ready else "loading",
            since_ns=time.time_ns() - int(oldest.since_s * 1e9),
            load_ns=int(oldest.load.get("load_ns", 0)),
            takes_requests=True,
            waiting=backlog.waiting,
            in_flight=backlog.pending,
            **facts,
        )
    ]


def facts_of(reports: Sequence[StageReport]) -> dict[str, Any]:
    """What the executors of a model's ready lanes tell, as fields of `ModelStatus`."""
    ready = {lane.lane: lane for lane in lanes_of(reports) if lane.ready}
    loads = [
        report.load
        for lane in ready.values()
        for role, report in lane.stages.items()
        if split_role(role)[0] == "executor" and report.state == "ready"
    ]
    first = loads[0] if loads else {}
    experts = int(first.get("experts", 0))
    return {
        "ready_lanes": tuple(ready),
        "replicas": len(loads),
        "parameters": int(first.get("parameters", 0)),
        "weight_bytes": sum(int(load.get("weight_bytes", 0)) for load in loads),
        "kv_bytes": sum(int(load.get("kv_bytes", 0)) for load in loads),
        "max_model_len": int(first.get("max_model_len", 0)),
        "vocab_size": int(first.get("vocab_size", 0)),
        "dtype": str(first.get("dtype", "")),
        "device": str(first.get("device", "")),
        "is_moe": experts > 0,
        "n_experts": experts,
        "n_active_experts": int(first.get("active_experts", 0)),
        "capabilities": _words(first.get("capabilities", "")),
        "adapters": tuple(adapter.id for adapter in adapters_of(reports)),
    }


def _words(value: object) -> tuple[str, ...]:
    """A list as a report has it, which holds numbers and text."""
    return tuple(filter(None, str(value).split(",")))
