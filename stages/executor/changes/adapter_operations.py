"""The executor shell's part in loading, replacing and unloading adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from ....bus.control import AdapterReady, AdaptersChanged, LoadAdapter, UnloadAdapter
from ....bus.links import CONTROL
from ....bus.messages import StepPlan
from ....bus.weights import InFlight, check_in_flight
from ....config import AdapterError, BusError, NanoInferenceError, WeightsError, shown
from ....store.board import LoadedAdapter
from ....store.in_place import AdapterInPlace, AdaptersInPlace
from ....telemetry import instruments, names, now_ns
from ...actor import Actor
from ..core import ExecutorCore
from ..runner.adapters.peft import (
    Adapter,
    check_adapter_id,
    next_version,
    read_adapter,
    stamp_of_adapter,
)
from ..runner.weights.transports import Background
from .arguments import check_path
from .updates import stay_single

Operation = LoadAdapter | UnloadAdapter


class _Ready(NamedTuple):
    """A change that waits for a plan; answered when its step is done."""

    version: int
    in_flight: InFlight
    operation_id: str


class AdapterOperations:
    """Loads, replaces and unloads adapters, and brings them back for an executor started anew.

    A change has three steps. The adapter is read and checked while plans run, and staged. Batching
    is told, and its next plan says that it be put in place: only it can tell which KV is older.
    When that plan's step is done, admission is told, and whoever asked gets the answer. There is
    one change of an adapter at a time.

    Attributes:
        restoring: What of the settings, or a predecessor's, is being read; "" when nothing is.
    """

    def __init__(
        self, actor: Actor, executor: ExecutorCore, on_torch: Callable[..., Awaitable[Any]]
    ) -> None:
        """Args: the stage and its core; what runs a function on its torch thread."""
        self._actor = actor
        self._executor = executor
        self._on_torch = on_torch
        self._thread = Background("adapters", stay_single)
        # The last version of each id; what is read; what waits for a plan; whom to answer.
        self._versions: dict[str, int] = {}
        self._busy: set[str] = set()
        self._ready: dict[str, _Ready] = {}
        self._unanswered: set[str] = set()
        self._leader = ""
        # Those that were in place when it was last looked, which only the torch thread can.
        self._told: tuple[LoadedAdapter, ...] = ()
        self.restoring = ""

    # --- events -------------------------------------------------------------------------------

    async def obey(self, operation: Operation, operation_id: str) -> None:
        """Does what somebody asks for, up to where a plan is needed."""
        self._unanswered.add(operation_id)
        id = operation.adapter
        try:
            check_in_flight(operation.in_flight)
            if id in self._busy or id in self._ready:
                raise AdapterError(
                    f"the adapter {shown(id)} is being changed; wait until that is done",
                    code="adapter_busy",
                )
            if isinstance(operation, UnloadAdapter):
                if id not in {adapter.id for adapter in self._told}:
                    raise AdapterError(
                        f"no adapter {shown(id)} is loaded", code="adapter_not_found"
                    )
                await self._make_ready(id, _Ready(0, operation.in_flight, operation_id))
                return
            self._busy.add(id)
            try:
                await self._load(operation, operation_id)
            finally:
                self._busy.discard(id)
        except NanoInferenceError as error:
            await self._answer(operation_id, 0, error)

    async def begin_epoch(self, leader: str) -> None:
        """Brings the lane's adapters, when this executor joins it; no plan is under way.

        The first time those of the settings are loaded, or, where this lane has lost an executor,
        those that it had.

        Raises:
            AdapterError: One of the settings can't be loaded.
        """
        if leader == self._leader:
            return
        first, self._leader = not self._leader, leader
        if first:
            record = await self._record()
            if record is not None and record.leader == leader:
                await self._restore(record)
                self._told = await self._on_torch(self._executor.adapters.told)
                return
            for id, folder in self._actor.config.engine.adapters.items():
                self.restoring = f"it reads the adapter {id}"
                adapter = await self._read(LoadAdapter(id, folder))
                await self._on_torch(self._executor.adapters.put, adapter)
                self._versions[id] = adapter.version
            self.restoring = ""
        await self._remember()

    async def epoch_begun(self) -> None:
        """This executor takes part; batching has forgotten what it was told."""
        for id, ready in self._ready.items():
            await self._tell_batching(id, ready)

    async def step_done(self, plan: StepPlan) -> None:
        """A plan has been executed."""
        if not plan.adapters:
            return
        await self._remember()
        changed = AdaptersChanged(self._actor.role, self._told)
        await self._actor.send(CONTROL["admission"], changed)
        # Whoever is answered may name it at once.
        await self._actor.flush(CONTROL["admission"])
        for id, version in plan.adapters:
            ready = self._ready.get(id)
            if ready is not None and ready.version == version:
                del self._ready[id]
                event = "adapter_in_place" if version else "adapter_unloaded"
                self._actor.log.info(event, adapter=id, version=version)
                await self._answer(ready.operation_id, version)

    def close(self) -> None:
        """Reads nothing any more."""
        del self._executor
        self._thread.close()

    async def abandon(self) -> None:
        """Answers what will not be done any more, since the stage ends."""
        error = AdapterError(
            "the executor stopped before it was done; look which adapters it has",
            code="adapter_interrupted",
        )
        for operation_id in list(self._unanswered):
            await self._answer(operation_id, 0, error)

    # --- inside -------------------------------------------------------------------------------

    async def _load(self, load: LoadAdapter, operation_id: str) -> None:
        started = now_ns()
        adapter = await self._read(load)
        self._actor.metrics.record(instruments.ADAPTER_LOAD, (now_ns() - started) / 1e9)
        if load.only_check:
            await self._answer(operation_id, adapter.version)
            return
        await self._on_torch(self._executor.adapters.stage, adapter)
        self._versions[load.adapter] = adapter.version
        ready = _Ready(adapter.version, load.in_flight, operation_id)
        await self._make_ready(load.adapter, ready)

    async def _read(self, load: LoadAdapter) -> Adapter:
        id, engine = load.adapter, self._actor.config.engine
        check_adapter_id(id, engine.model_name)
        check_path(load.folder)
        adapters = self._executor.adapters
        adapters.check_room(id)
        version = next_version(id, load.version, self._versions.get(id, 0))
        model, limits = self._executor.model, adapters.limits
        reading = self._thread.submit(read_adapter, id, version, load.folder, model, limits)
        try:
            return await asyncio.wrap_future(reading)
        except WeightsError:
            raise
        except Exception as error:
            raise AdapterError(
                f"the adapter could not be read ({type(error).__name__}: {shown(str(error))})"
            ) from error

    async def _make_ready(self, id: str, ready: _Ready) -> None:
        self._ready[id] = ready
        await self._tell_batching(id, ready)

    async def _tell_batching(self, id: str, ready: _Ready) -> None:
        message = AdapterReady(id, ready.version, ready.in_flight)
        await self._actor.send(self._actor.own(CONTROL["batching"]), message)

    async def _answer(
        self, operation_id: str, version: int, error: NanoInferenceError | None = None
    ) -> None:
        self._unanswered.discard(operation_id)
        if error is not None:
            self._actor.log.warning("adapter_refused", code=error.code, reason=error.message)
        labels = {names.ERROR_TYPE: error.code if error else ""}
        self._actor.metrics.record(instruments.ADAPTER_CHANGES, 1, labels)
        await self._actor.answer(operation_id, version, error)

    # --- what the lane remembers --------------------------------------------------------------

    async def _remember(self) -> None:
        self._told = await self._on_torch(self._executor.adapters.told)
        in_place: list[Adapter] = await self._on_torch(list, self._executor.adapters)
        adapters = tuple(
            AdapterInPlace(each.id, each.version, each.folder, each.stamp) for each in in_place
        )
        record = AdaptersInPlace(
            leader=self._leader, adapters=adapters, versions=dict(self._versions)
        )
        try:
            await self._actor.bus.store.adapters.put(record)
        except BusError as error:
            # Nobody loses anything by it but a successor, which has those of the settings.
            self._actor.log.warning("adapters_not_remembered", reason=error.message)

    async def _record(self) -> AdaptersInPlace | None:
        try:
            return await self._actor.bus.store.adapters.read()
        except BusError as error:
            self._actor.log.warning("adapters_of_the_lane_unknown", reason=error.message)
            return None

    async def _restore(self, record: AdaptersInPlace) -> None:
        """One that can't be had again is lost: requests that need it end, and nobody else does."""
        for each in record.adapters:
            self.restoring = f"it reads the adapter {each.id} from {each.folder}"
            try:
                if not each.folder:
                    raise AdapterError("it did not come from a folder")
                if stamp_of_adapter(each.folder) != each.stamp:
                    raise AdapterError(f"the files of {each.folder} are others than they were")
                load = LoadAdapter(each.id, each.folder, version=each.version)
                adapter = await self._read(load)
                await self._on_torch(self._executor.adapters.put, adapter)
            except WeightsError as error:
                self._actor.log.warning("adapter_lost", adapter=each.id, reason=error.message)
            else:
                self._actor.log.info("adapter_restored", adapter=each.id, version=each.version)
        self.restoring = ""
        self._versions = dict(record.versions)
