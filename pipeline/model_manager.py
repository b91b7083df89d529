"""The model manager: loads and unloads the models of a deployment while others serve."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from ..bus import Bus, Outcome
from ..bus.control import LoadModel, UnloadModel
from ..bus.envelope import Envelope
from ..bus.links import MODEL_MANAGER
from ..config import (
    BusError,
    ChannelClosed,
    Config,
    ConfigError,
    ModelConfig,
    ModelError,
    NanoInferenceError,
    RequestError,
    shown,
)
from ..config.logger import get_logger
from ..config.models import check_models
from ..store.board import StageReport, StageState
from ..store.registry import NOT_FOUND, find_model
from ..telemetry import Metrics
from .managed_model import Job, ManagedModel, ModelLane, expected_memory

POLL_S = 0.2
"""Interval of the check for requests of models that are loaded on demand."""

_BEAT_S = 1.0
# Measuring a process costs the system some milliseconds.
_MEASURE_S = 30.0
# Longest time until a new adapter's name is known.
_ADAPTERS_S = 1.0


class ModelManager:
    """Loads and unloads the models of a deployment.

    Its state is in the registry (`Bus.store.models`), which it alone writes, and writes anew at its
    start. A deployment has one manager at a time. The memory of a model is that of its processes,
    and is free when they have ended.
    """

    def __init__(
        self,
        config: Config,
        bus: Bus,
        run: Callable[[ModelConfig, Config], ModelLane],
        metrics: Metrics | None = None,
    ) -> None:
        """A manager that begins with `run_forever`.

        Args:
            config: The deployment's settings, with its models.
            bus: The deployment's bus, not a model's.
            run: Makes the runner of a model, given the settings of its processes.
            metrics: The metrics of this process.
        """
        self._config = config
        self._bus = bus
        self._run = run
        self._metrics = metrics
        self._models: dict[str, ManagedModel] = {}
        self._group: TaskGroup
        self._incarnation = f"{MODEL_MANAGER}-{uuid.uuid4().hex[:8]}"
        self._started = anyio.Event()
        # One load at a time chooses the models to evict.
        self._making_room = anyio.Lock()
        self._stopping = False
        self._log = get_logger().bind(stage=MODEL_MANAGER)

    async def run_forever(self) -> None:
        """Load the models that start with the deployment, then obey messages until cancelled."""
        async with anyio.create_task_group() as self._group:
            inbox = await self._bus.open_inbox(MODEL_MANAGER)
            await self._begin()
            self._started.set()
            poll_s = POLL_S if self._config.deployment.load_on_demand else _BEAT_S
            for interval_s, operation in (
                (_BEAT_S, self._report),
                (poll_s, self._watch),
                (_MEASURE_S, partial(self._for_each_at_rest, ManagedModel.measure)),
                (_ADAPTERS_S, partial(self._for_each_at_rest, ManagedModel.update_adapters)),
            ):
                self._group.start_soon(_repeat, interval_s, operation)
            while True:
                try:
                    envelopes = await inbox.receive()
                except ChannelClosed:
                    return
                for envelope in envelopes:
                    self._group.start_soon(self._obey, envelope)

    async def begun(self) -> None:
        """Return when all models of the settings are in the registry."""
        await self._started.wait()

    async def stop(self) -> None:
        """Stop all models concurrently; their requests in flight finish first."""
        if self._stopping:
            return
        self._stopping = True
        async with anyio.create_task_group() as group:
            for model in self._models.values():
                group.start_soon(model.leave)
        await self._report("gone")
        for model in self._models.values():
            await model.aclose()

    # --- operations ---------------------------------------------------------------------------

    async def load(self, name: str, spec: ModelConfig | None = None) -> None:
        """Load a model; see `BusClient.load_model`."""
        while True:
            if self._stopping:
                raise ModelError(
                    "the deployment is being stopped",
                    code="model_load_failed",
                    remedy="start it again, and load the model there",
                )
            model = self._find(name) if spec is None else self._find_or_add(spec)
            job = model.job
            if job is None:
                if model.record.state == "ready":
                    return
                job = self._begin_load(model)
            await job.done.wait()
            if job.kind == "load":
                if job.error is not None:
                    raise job.error
                return

    async def unload(
        self, name: str, timeout_s: float | None = None, *, remove: bool = False
    ) -> None:
        """Unload a model; see `BusClient.unload_model`."""
        while True:
            model = self._find(name)
            job = model.job
            if job is None:
                if model.record.state == "unloaded" and not remove:
                    return
                job = self._begin_unload(model, timeout_s, remove=remove)
            elif job.kind == "unload":
                job.hurry(timeout_s)
                job.remove = job.remove or remove
            await job.done.wait()
            if job.kind == "unload":
                return

    def _begin_load(self, model: ManagedModel, *, evict: bool = True) -> Job:
        job = Job("load")
        return self._begin_job(model, job, partial(self._load, model, job, evict))

    def _begin_unload(
        self, model: ManagedModel, timeout_s: float | None = None, *, remove: bool = False
    ) -> Job:
        job = Job("unload", remove)
        job.hurry(timeout_s)
        return self._begin_job(model, job, partial(self._unload, model, job))

    def _begin_job(self, model: ManagedModel, job: Job, work: Callable[[], Awaitable[None]]) -> Job:
        async def run() -> None:
            try:
                await work()
            finally:
                model.reserved_bytes = 0
                model.job = None
                job.done.set()

        model.job = job
        self._group.start_soon(run)
        return job

    async def _obey(self, envelope: Envelope) -> None:
        error: NanoInferenceError | None = None
        try:
            match envelope.body:
                case LoadModel(id, spec):
                    await self.load(id, spec)
                case UnloadModel(id, timeout_s, remove):
                    await self.unload(id, timeout_s, remove=remove)
                case _:
                    self._log.warning("message_not_understood", type=type(envelope.body).__name__)
                    return
        except NanoInferenceError as failure:
            error = failure
        outcome = Outcome(
            lane=self._config.bus.lane,
            role=MODEL_MANAGER,
            code=error.code if error else "",
            message=error.message if error else "",
        )
        try:
            await self._bus.replies.answer(envelope.operation_id, outcome)
        except BusError as reason:
            self._log.warning("answer_lost", reason=str(reason))

    def _find(self, name: str) -> ManagedModel:
        records = [model.record for model in self._models.values()]
        try:
            return self._models[find_model(name, records).id]
        except RequestError as error:
            raise ModelError(error.message, code=error.code) from None

    def _find_or_add(self, spec: ModelConfig) -> ManagedModel:
        """Return the model with this path and these overrides, or add it.

        Raises:
            ModelError: `model_exists`, or `model_load_failed` for invalid settings.
        """
        known = self._models.get(spec.id)
        if known is not None:
            if (known.spec.path, known.spec.overrides) == (spec.path, spec.overrides):
                return known
            raise ModelError(
                f"there is a model {shown(spec.id)} with other settings here; unload and remove it "
                "first, or choose another id",
                code="model_exists",
            )
        try:
            check_models([*(model.spec for model in self._models.values()), spec])
        except ConfigError as error:
            raise ModelError(error.message, code="model_exists") from None
        return self._add(spec, added=True)

    def _add(self, spec: ModelConfig, *, added: bool = False) -> ManagedModel:
        try:
            own = self._config.of_model(spec)
        except ConfigError as error:
            raise ModelError(error.message, code="model_load_failed") from None
        make = partial(self._run, spec, own)
        model = ManagedModel(own, spec, self._bus, make, self._over, self._metrics)
        model.added = added
        self._models[spec.id] = model
        return model

    # --- jobs -------------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Replace the registry's records, which a former manager wrote."""
        for spec in self._config.models:
            self._add(spec)
        for model_id, record in (await self._bus.store.models.read()).items():
            if model_id not in self._models:
                await self._remove(self._add(record.spec))
        for model in self._models.values():
            wanted = model.spec.preload or self._config.deployment.load_on_demand
            await model.put("unloaded", takes_requests=wanted)
        for model in self._models.values():
            if model.spec.preload:
                self._begin_load(model, evict=False)

    async def _load(self, model: ManagedModel, job: Job, evict: bool) -> None:
        evicted: list[ManagedModel] = []
        try:
            await self._make_room(model, evicted, evict=evict)
            await model.load(self._config.deployment.load_timeout_s)
            return
        except ModelError as error:
            job.error = error
        except NanoInferenceError:
            raise
        except Exception as error:  # noqa: BLE001  (such as a path that Python can't read)
            self._log.exception("model_load_broke", model=model.spec.id)
            job.error = model.not_loaded(f"{error!r:.200}")
        self._log.error("model_not_loaded", model=model.spec.id, error=str(job.error))
        await self._not_loaded(model, job.error)
        for other in evicted:  # restore the former state
            there = self._models.get(other.spec.id) is other
            if there and other.job is None and other.record.state == "unloaded":
                self._begin_load(other)

    async def _not_loaded(self, model: ManagedModel, error: ModelError) -> None:
        """Answer the requests that waited for a model that could not be loaded."""
        if model.added and not model.was_ready:
            await self._remove(model, error)
        elif error.code == "out_of_memory_budget":
            await model.put("unloaded", error.message, takes_requests=False)
            await model.end_requests(error)
            if self._config.deployment.load_on_demand:  # there may be room next time
                await model.put("unloaded", error.message, takes_requests=True)
        else:
            await model.fail(error.message)

    async def _unload(self, model: ManagedModel, job: Job) -> None:
        on_demand = self._config.deployment.load_on_demand
        await model.unload(job, keeps_requests=on_demand and not job.remove)
        if job.remove:
            await self._remove(model)

    async def _remove(self, model: ManagedModel, error: ModelError | None = None) -> None:
        await model.put("unloaded", "it is removed", takes_requests=False)
        removed = f"the model {shown(model.spec.id)} was removed before this request ended"
        await model.end_requests(error or ModelError(removed, code=NOT_FOUND))
        await model.persist(partial(self._bus.store.models.remove, model.spec.id))
        del self._models[model.spec.id]
        await model.aclose()

    def _over(self, model: ManagedModel, reason: str) -> None:
        """Mark a model as failed whose lane has ended by itself; a job in progress handles it."""
        if model.job is None and not self._stopping and model.record.state == "ready":
            self._log.error("model_failed", model=model.spec.id, reason=reason)
            self._begin_job(model, Job("fail"), partial(model.fail, reason))

    # --- memory -----------------------------------------------------------------------------

    async def _make_room(
        self, model: ManagedModel, evicted: list[ManagedModel], *, evict: bool
    ) -> None:
        """Reserve memory for a model, and unload others for it.

        Args:
            model: The model to load.
            evicted: Receives the models that are unloaded for it.
            evict: Whether others may be unloaded.

        Raises:
            ModelError: `out_of_memory_budget`; nothing was unloaded.
        """
        budget = self._config.deployment.max_memory_bytes
        if not budget:
            return
        needed = model.largest_bytes or expected_memory(model.config)
        async with self._making_room:
            for other in self._others(model):
                # Its memory will be free soon.
                if other.job is not None and other.job.kind != "load":
                    await other.job.done.wait()
            await self._read_traffic()
            leaving = self._leaving(model, budget - needed) if evict else []
            taken = self._taken(model, leaving)
            if taken + needed > budget:
                raise ModelError(
                    f"{shown(model.spec.id)} needs about {needed} bytes, and of "
                    f"deployment.max_memory_bytes {budget} there are {max(0, budget - taken)} "
                    "left; raise it, or unload other models",
                    code="out_of_memory_budget",
                )
            for other in leaving:
                job = other.job
                if job is None and other.record.state == "ready":
                    reason = f"it was unloaded for {model.spec.id}"
                    self._log.info("model_evicted", model=other.spec.id, reason=reason)
                    job = self._begin_unload(other)
                    evicted.append(other)
                # A model that is loaded again meanwhile waits for this reservation.
                if job is not None and job.kind != "load":
                    await job.done.wait()
            model.reserved_bytes = needed

    def _others(self, model: ManagedModel) -> list[ManagedModel]:
        return [other for other in self._models.values() if other is not model]

    def _taken(self, model: ManagedModel, leaving: Sequence[ManagedModel]) -> int:
        return sum(each.taken_bytes for each in self._others(model) if each not in leaving)

    def _leaving(self, model: ManagedModel, most: int) -> list[ManagedModel]:
        """Return the least recently used models to unload until at most `most` bytes are taken."""
        candidates = [
            other
            for other in self._others(model)
            if other.record.state == "ready" and other.job is None and not other.spec.pinned
        ]
        leaving: list[ManagedModel] = []
        for other in sorted(candidates, key=lambda each: each.last_used_ms):
            if self._taken(model, leaving) <= most:
                break
            leaving.append(other)
        return leaving

    # --- periodic work ------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Load models that have requests, unload those that had none for long, and end requests of
        models that take none."""
        for model, entries in await self._read_traffic():
            if model.job is not None or self._stopping:
                continue
            if not entries:
                await self._unload_idle(model)
                continue
            if model.record.state not in ("unloaded", "failed"):
                continue
            if model.record.takes_requests:
                self._begin_load(model)
            else:
                await model.end_requests()

    async def _unload_idle(self, model: ManagedModel) -> None:
        limit_s = self._config.deployment.idle_unload_s
        idle_s = time.monotonic() - model.used_at
        if not limit_s or idle_s < limit_s or model.record.state != "ready" or model.spec.pinned:
            return
        if await model.may_sleep() and model.job is None:
            self._log.info("model_idle", model=model.spec.id, seconds=round(idle_s))
            self._begin_unload(model)
        else:
            model.used_at = time.monotonic()  # look again later

    async def _read_traffic(self) -> list[tuple[ManagedModel, int]]:
        """Return each model with the number of its requests; note the time of the last one."""
        models = list(self._models.values())
        try:
            traffic = await self._bus.store.models.traffic([model.spec.id for model in models])
        except BusError as error:
            self._log.debug("traffic_not_known", error=str(error))
            return []
        for model, (entries, last_ms) in zip(models, traffic, strict=True):
            if entries or last_ms != model.last_request_ms:
                model.used_at = time.monotonic()
            model.last_request_ms = last_ms
        return [(model, each.entries) for model, each in zip(models, traffic, strict=True)]

    async def _for_each_at_rest(self, do: Callable[[ManagedModel], Awaitable[None]]) -> None:
        """Do something with the ready models that have no job."""
        for model in list(self._models.values()):
            if model.record.state == "ready" and model.job is None:
                await do(model)

    async def _report(self, state: StageState = "ready") -> None:
        report = StageReport(
            lane=self._config.bus.lane,
            stage=MODEL_MANAGER,
            incarnation=self._incarnation,
            host=socket.gethostname(),
            pid=os.getpid(),
            epoch=0,
            state=state,
        )
        try:
            await self._bus.store.board.report([report])
        except NanoInferenceError as error:
            self._log.debug("heartbeat_not_told", error=str(error))


async def _repeat(interval_s: float, operation: Callable[[], Awaitable[None]]) -> None:
    while True:
        await operation()
        await anyio.sleep(interval_s)
