"""The executor shell's part in staged changes of weights, adapters and memory (`core` decides)."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec.structs import replace

from ....bus.control import (
    AdaptersChanged,
    FinishUpdate,
    LoadAdapter,
    UpdateWeights,
    WeightsChanged,
)
from ....bus.envelope import Message
from ....bus.links import CONTROL
from ....bus.parts.weights import WeightsPlan
from ....bus.steps import StepPlan
from ....bus.weights import FolderWeights
from ....config import AdapterError, BusError, WeightsError, shown
from ....store.in_place import AdapterInPlace, AdaptersInPlace, WeightsInPlace
from ....store.loaded_adapter import LoadedAdapter
from ....telemetry import instruments, names, now_ns
from ...actor import Actor
from ..core import ExecutorCore
from ..parts.adapters import AdapterChanges
from ..parts.experts import Experts, move_experts
from ..parts.memory import MemoryRelease
from ..parts.weights import WeightChanges
from ..runner.adapters.peft import Adapter, stamp_of_adapter
from ..runner.shards import NewWeight
from ..runner.weights.sync_manager import WeightSyncManager
from ..runner.weights.transports.background import Background, stay_single
from ..runner.weights.transports.folder import stamp_of
from . import effects as do
from .arguments import Operation, check_path
from .core import AdapterOperation, ChangesCore
from .succession import supersedes

_CONFIRM_S = 2.0
"""Seconds after which admission is asked again to confirm a change."""

_RESTORE_S = 300.0
"""The longest time to read a predecessor's weights."""


@dataclass(eq=False)
class StagedChanges:
    """Performs the effects of a `ChangesCore`.

    Attributes:
        actor: The stage.
        executor: Its core.
        on_torch: Calls a function on the torch thread.
        start_soon: Starts a coroutine function that ends with the stage.
        core: The decisions.
        restoring: Which weights or adapter are being restored, as a sentence; "" if none.
    """

    actor: Actor
    executor: ExecutorCore
    on_torch: Callable[..., Awaitable[Any]]
    start_soon: Callable[..., object]

    def __post_init__(self) -> None:
        self._weights = self.executor.part(WeightChanges)
        self._memory = self.executor.part(MemoryRelease)
        self._adapters = self.executor.part(AdapterChanges)
        logs = self._weights.log is not None
        self.core = ChangesCore(self._weights.manager.limits, logs=logs)
        self.restoring = ""
        # Wait for bytes and make tensors of them while the torch thread runs steps. Adapters
        # don't wait behind weights that don't come.
        self._weights_thread = Background("weights", stay_single)
        self._adapters_thread = Background("adapters", stay_single)
        # Set when there may be another deadline.
        self._changed = asyncio.Event()
        # Decided, not yet sent.
        self._answers: list[do.Answer] = []
        # The adapters in place.
        self._loaded: tuple[LoadedAdapter, ...] = ()
        self._leader = ""
        self._parting = False

    # --- events -------------------------------------------------------------------------------

    async def obey(self, operation: Operation, operation_id: str) -> None:
        """Begin an operation, to be answered under this id."""
        await self._perform(self.core.begin(operation, operation_id, now_ns()))

    async def begin_epoch(self, leader: str) -> None:
        """Restore the lane's weights and adapters, if this executor joined after they came.

        Call it at the beginning of each epoch, while no plan is in flight.

        Raises:
            AdapterError: An adapter of the settings can't be loaded.
        """
        await self._perform(self.core.succession.begin_epoch(leader))
        if self._weights.log is not None:
            self._weights.log.begin_run(leader)
        if leader == self._leader:
            return
        await self._complete_decided()
        first, self._leader = not self._leader, leader
        if first:
            record = await self._read_record(self.actor.bus.store.adapters, "adapters")
            if record is not None and record.leader == leader:
                await self._restore_adapters(record)
                await self._note_adapters()
                return
            for id, folder in self.actor.config.engine.adapters.items():
                self.restoring = f"it reads the adapter {id}"
                adapter = await self._read_adapter(LoadAdapter(id, folder))
                await self.on_torch(self._adapters.put, adapter)
            self.restoring = ""
        await self._record_adapters()

    async def epoch_begun(self, version: int) -> None:
        """Send batching its lost messages again. `version`: of the weights in place."""
        await self._perform(self.core.epoch_begun(version, now_ns()))

    async def step_done(self, plan: StepPlan, version: int) -> None:
        """Handle the end of a step with weights of this version."""
        # One update is staged at a time, so a refusal is this plan's.
        weights = WeightsPlan.find(plan.parts)
        is_refused = weights is not None and weights.version > version
        refused = self._weights.manager.take_refused() if is_refused else None
        pending = bool(self._memory.memory.pending)
        effects = self.core.step_done(plan, version, now_ns(), pending, refused)
        if effects:
            await self._perform(effects)

    async def weights_lost(self, error: WeightsError) -> None:
        """Handle a plan that was not run, since its weights could not be written."""
        self.actor.log.error("weights_lost", reason=str(error), exc_info=error.__cause__)
        await self._perform(self.core.weights_lost(error, now_ns()))

    def close(self) -> None:
        """Leave all groups, so that nothing waits for a trainer."""
        self._weights.close()
        del self.executor, self._weights, self._memory, self._adapters
        self._weights_thread.close()
        self._adapters_thread.close()

    async def abandon(self) -> None:
        """Answer open operations, since the stage ends."""
        # First those that don't wait for admission.
        owed = [*self.core.close(), *self._answers]
        self._answers.clear()
        self._parting = True
        await self._perform(owed)

    async def tick_forever(self) -> None:
        """Handle deadlines as they pass; to be run beside the stage."""
        while True:
            self._changed.clear()
            deadline_ns = self.core.next_deadline_ns()
            wait_s = None if deadline_ns is None else max(0, deadline_ns - now_ns()) / 1e9
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                await self._perform(self.core.tick(now_ns()))

    # --- effects ------------------------------------------------------------------------------

    async def _perform(self, effects: list[do.Effect]) -> None:
        self._changed.set()
        # If the stage ends meanwhile, these are still sent.
        self._answers += [effect for effect in effects if isinstance(effect, do.Answer)]
        for effect in effects:
            match effect:
                case do.Answer() if self._waits_for_admission(effect):
                    if self._parting:
                        await self._answer_behind_admission(effect)
                    else:  # beside the steps, which must not wait for admission
                        self.start_soon(self._answer_behind_admission, effect)
                case do.Answer():
                    self._answers.remove(effect)
                    await self._answer(effect)
                case do.SendBatching(message):
                    await self._send_batching(message)
                case do.SendMemory():
                    await self._send_batching(self._memory.state_now())
                case do.PublishAdapters():
                    await self._record_adapters()
                    changed = AdaptersChanged(self.actor.role, self._loaded)
                    await self.actor.send(CONTROL["admission"], changed)
                    # The answer that follows makes clients name the adapter at once.
                    await self.actor.flush(CONTROL["admission"])
                case do.SkipBroadcast(group):
                    self._weights.groups.skip(group)
                case do.Leave(group):
                    self._weights.groups.leave(group)
                case do.Log(event, fields, warning):
                    write = self.actor.log.warning if warning else self.actor.log.info
                    write(event, **fields)
                case do.Remember(weights):
                    await self._remember(weights)
                case do.ReadRecord():
                    record = await self._read_record(self.actor.bus.store.weights, "weights")
                    await self._perform(self.core.succession.read(record))
                case do.ReadDecision(update):
                    self.start_soon(self._read_decision, update)
                case do.Restore(weights):
                    await self._perform(await self._restore(weights))
                case do.ChangeJob():
                    self.start_soon(self._work, effect)

    def _waits_for_admission(self, answer: do.Answer) -> bool:
        """Return whether admission may have cached responses that must not be served any more."""
        operation = answer.operation
        return (
            bool(self.actor.config.engine.response_cache_bytes)
            and answer.error is None
            and (isinstance(operation, AdapterOperation) or replaces_weights(operation))
        )

    async def _answer_behind_admission(self, answer: do.Answer) -> None:
        """Answer once admission serves no response of former weights or adapters.

        A successor of admission has none, and gets the versions when this executor reports to it.
        """
        actor, leader, id = self.actor, self.actor.leader, uuid.uuid4().hex
        of_adapter = isinstance(answer.operation, AdapterOperation)
        changed = WeightsChanged(actor.role, 0 if of_adapter else answer.version)
        while actor.leader == leader:
            try:
                # Of no epoch: one may begin before it arrives. Again, since a server may lose it.
                await actor.send(CONTROL["admission"], changed, epoch=0, operation_id=id)
                if await actor.bus.replies.outcomes(id, 1, _CONFIRM_S):
                    break
            except BusError as error:
                actor.log.warning("admission_unreachable", reason=str(error))
                await asyncio.sleep(_CONFIRM_S)
        self._answers.remove(answer)
        await self._answer(answer)

    async def _answer(self, answer: do.Answer) -> None:
        operation, error = answer.operation, answer.error
        of_adapter = isinstance(operation, AdapterOperation)
        if error is not None:
            self.actor.log.warning(
                "adapter_refused" if of_adapter else "operation_refused",
                operation=type(operation).__name__,
                code=error.code,
                reason=str(error),
                exc_info=error.__cause__,
            )
        labels = {names.ERROR_TYPE: error.code if error else ""}
        if of_adapter:
            self.actor.metrics.record(instruments.ADAPTER_CHANGES, 1, labels)
        elif replaces_weights(operation) or (error and isinstance(operation, UpdateWeights)):
            self.actor.metrics.record(instruments.WEIGHT_UPDATES, 1, labels)
        await self.actor.answer(
            answer.operation_id,
            answer.version,
            error,
            answer.newest_version,
            checksums=answer.checksums,
            logged=answer.logged,
        )

    async def _send_batching(self, message: Message) -> None:
        await self.actor.send(self.actor.own(CONTROL["batching"]), message)

    async def _read_decision(self, update: str) -> None:
        """Read what was decided about a prepared update; an undecided one is decided against."""
        record, version = self.actor.bus.store.weight_update, 0
        try:
            stored = await record.read()
            if stored.state.update == update:
                version = stored.state.committed
                why = "the gateway did not finish the update in time"
                dropped = replace(stored.state, session=False, parts=0, last_failure=why)
                if not version and await record.replace(stored, dropped) is None:
                    raise BusError("it changes at the moment")
        except BusError as error:
            self.actor.log.warning("decision_unknown", update=update, reason=str(error))
            await self._perform(self.core.decided(update, None, now_ns()))
            return
        await self._perform(self.core.decided(update, version, now_ns()))

    async def _complete_decided(self) -> None:
        """Put an update in place that was decided while this executor was not there."""
        if self._weights.log is None:
            return
        try:
            state = (await self.actor.bus.store.weight_update.read()).state
        except BusError as error:
            self.actor.log.warning("decision_unknown", update="", reason=str(error))
            return
        if state.committed > self.core.version:
            finish = FinishUpdate(state.update, state.committed, state.logged)
            await self._perform(self.core.begin(finish, "", now_ns()))

    # --- the lane's records -------------------------------------------------------------------

    async def _remember(self, weights: WeightsInPlace) -> None:
        record = self.actor.bus.store.weights
        if (log := self._weights.log) is not None:
            digest = log.writer.digest_of(weights.version)
            weights = replace(weights, log=log.writer.run if digest else "", digest=digest)
        try:
            if supersedes(weights, await record.read()):
                await record.put(weights)
        except BusError as error:
            # Only a successor needs the record; it serves the weights that it loads instead.
            self.actor.log.warning("weights_not_remembered", reason=str(error))

    async def _read_record(self, record: Any, kind: str) -> Any:
        """Return a record of the lane; None if unknown."""
        try:
            return await record.read()
        except BusError as error:
            self.actor.log.warning(f"{kind}_of_the_lane_unknown", reason=str(error))
            return None

    async def _restore(self, weights: WeightsInPlace) -> list[do.Effect]:
        where = weights.folder or f"the log of weights, run {weights.log}"
        self.restoring = f"it reads the weights of version {weights.version} from {where}"
        try:
            async with asyncio.timeout(_RESTORE_S):
                with _as_refusal():
                    tensors = await self._in_background(_read_again, weights, self._weights)
            await self.on_torch(self._weights.manager.sync_blocking, tensors, weights.version)
        except (WeightsError, TimeoutError) as error:
            why = error.message if isinstance(error, WeightsError) else "reading took too long"
            return self.core.succession.fall_behind(weights.version, why)
        finally:
            self.restoring = ""
        return self.core.restored(weights)

    async def _note_adapters(self) -> list[Adapter]:
        """Note and return the adapters in place, which only the torch thread may read."""
        self._loaded = await self.on_torch(self.executor.runner.adapters.describe)
        self.core.adapters_loaded(each.id for each in self._loaded)
        adapters: list[Adapter] = await self.on_torch(list, self.executor.runner.adapters)
        return adapters

    async def _record_adapters(self) -> None:
        adapters = tuple(
            AdapterInPlace(each.id, each.version, each.folder, each.stamp)
            for each in await self._note_adapters()
        )
        versions = dict(self._adapters.versions)
        record = AdaptersInPlace(leader=self._leader, adapters=adapters, versions=versions)
        try:
            await self.actor.bus.store.adapters.put(record)
        except BusError as error:
            # Only a successor needs the record; it has the adapters of the settings instead.
            self.actor.log.warning("adapters_not_remembered", reason=str(error))

    async def _restore_adapters(self, record: AdaptersInPlace) -> None:
        """Restore the lane's adapters. Only requests for an adapter that is lost end."""
        for each in record.adapters:
            self.restoring = f"it reads the adapter {each.id} from {each.folder}"
            try:
                if not each.folder:
                    raise AdapterError("it was not read from a folder")
                if stamp_of_adapter(each.folder) != each.stamp:
                    raise AdapterError(f"the files of {each.folder} have changed")
                load = LoadAdapter(each.id, each.folder, version=each.version)
                adapter = await self._read_adapter(load)
                await self.on_torch(self._adapters.put, adapter)
            except WeightsError as error:
                self.actor.log.warning("adapter_lost", adapter=each.id, reason=str(error))
            else:
                self.actor.log.info("adapter_restored", adapter=each.id, version=each.version)
        self.restoring = ""
        self._adapters.versions = dict(record.versions)

    # --- jobs ---------------------------------------------------------------------------------

    async def _work(self, job: do.ChangeJob) -> None:
        """Run a job. An error before weights change is an answer. An unexpected error while memory
        changes is raised, since the executor's state is unknown then."""
        memory = isinstance(job, do.BeginRelease | do.ResumeTags)
        result: do.Result
        try:
            with nullcontext() if memory else _as_refusal():
                result = await self._result(job)
        except WeightsError as error:
            result = error
        await self._perform(self.core.done(job, result, now_ns()))

    async def _result(self, job: do.ChangeJob) -> do.Result:
        weights = self._weights.manager
        match job:
            case do.Fetch(_, update):
                started = now_ns()
                fetched: do.Fetched = await self._in_background(self._weights.fetch, update)
                record = self.actor.metrics.record
                record(instruments.WEIGHT_FETCH, (now_ns() - started) / 1e9)
                record(instruments.WEIGHT_BYTES, fetched.amount[0])
                record(instruments.WEIGHT_ELEMENTS, fetched.amount[1])
                return fetched
            case do.Combine(_, _, tensors, origin, base):
                prepared = await self._in_background(weights.prepare, tensors)
                combined = do.Fetched(prepared, origin, weights.covers(prepared), base=base)
                whole: do.Fetched = await self._in_background(self._weights.logged, combined)
                return whole
            case do.Check(_, update, fetched):
                await self.on_torch(check_fetched, update, fetched, weights)
            case do.Stage(_, update, fetched, version):
                is_partial = update.partial or fetched.base is not None
                start = partial(weights.start_sync, partial=is_partial, base=fetched.base)
                if fetched.prepared is not None:
                    version = await self.on_torch(weights.check_version, version)
                    await self._in_background(self._weights.commit, fetched, version)
                counted: int = await self.on_torch(start, fetched.tensors, version)
                return counted
            case do.StageAdapter(_, load):
                started = now_ns()
                adapter = await self._read_adapter(load)
                self.actor.metrics.record(instruments.ADAPTER_LOAD, (now_ns() - started) / 1e9)
                if not load.only_check:
                    await self.on_torch(self._adapters.stage, adapter)
                return adapter.version
            case do.Join(_, wish):
                await asyncio.wrap_future(self._weights.groups.join(wish, weights.device))
            case do.ReadLogged(_, update, place):
                about = place, update.version
                logged_again: do.Fetched = await self._in_background(self._weights.recover, *about)
                return logged_again
            case do.Checksum():
                from ..runner.weights.in_place import checksums

                found: dict[str, str] = await self._in_background(checksums, weights)
                return found
            case do.MoveExperts(_, owners):
                await self.on_torch(move_experts, self.executor.find(Experts), owners)
            case do.BeginRelease(_, tags):
                await self.on_torch(self._memory.memory.begin_release, tags)
                return bool(self._memory.memory.pending)
            case do.ResumeTags(_, tags):
                await self.on_torch(self._memory.resume, tags)
        return None

    def _in_background(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        return asyncio.wrap_future(self._weights_thread.submit(function, *args))

    async def _read_adapter(self, load: LoadAdapter) -> Adapter:
        reading = self._adapters_thread.submit(self._adapters.read, load)
        with _as_refusal(AdapterError, "the adapter could not be read", ""):
            return await asyncio.wrap_future(reading)


def check_fetched(update: UpdateWeights, fetched: do.Fetched, weights: WeightSyncManager) -> None:
    """Raises WeightsError if a part, or a whole update, could not be put in place."""
    if update.part_of:
        weights.check(fetched.tensors, partial=True)
        return
    weights.check_version(update.version)
    weights.check_base(fetched.base)
    weights.check(fetched.tensors, partial=update.partial or fetched.base is not None)
    weights.check_complete(fetched.tensors)


@contextmanager
def _as_refusal(
    kind: type[WeightsError] = WeightsError,
    what: str = "the operation failed",
    advice: str = "; the executor's log has the traceback, and its weights are unchanged",
) -> Iterator[None]:
    """Raises a WeightsError, which the sender of an operation gets, for any error."""
    try:
        yield
    except WeightsError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {shown(str(error))}"
        raise kind(f"{what} ({why}){advice}") from error


def replaces_weights(operation: Operation) -> bool:
    """Whether new weights are in place at the end."""
    match operation:
        case FinishUpdate(version=version):
            return version is not None
        case UpdateWeights(part_of=part, prepare_as=name):
            return not part and not name
    return False


def _read_again(record: WeightsInPlace, part: WeightChanges) -> Mapping[str, NewWeight]:
    """Return the weights that an earlier executor had, from their folder or the log.

    Raises:
        WeightsError: They are gone.
    """
    if part.log is not None and record.log:
        return part.log.catch_up(record.log, record.version, record.digest)
    if not record.folder:
        raise WeightsError("they were not read from one folder")
    check_path(record.folder)
    changed, limits = f"the files of {record.folder} have changed", part.manager.limits
    if stamp_of(record.folder, limits) != record.stamp:
        raise WeightsError(changed)
    fetched = part.fetch(UpdateWeights(FolderWeights(record.folder)))
    if stamp_of(record.folder, limits) != record.stamp:
        raise WeightsError(changed)
    return fetched.tensors
