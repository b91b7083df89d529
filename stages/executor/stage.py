"""The executor stage's shell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

import anyio
import msgspec
import torch
from anyio.abc import TaskGroup

from ...bus import Inbox
from ...bus.control import (
    FinishUpdate,
    JoinWeightsGroup,
    LeaveWeightsGroup,
    LoadAdapter,
    ReleaseMemory,
    ResumeMemory,
    StageReady,
    StageStarted,
    TellWeightVersion,
    UnloadAdapter,
    UpdateWeights,
)
from ...bus.links import CONTROL, STEPS_BATCHING, STEPS_STREAMING
from ...bus.messages import Envelope, StepPlan, StepResult
from ...bus.scoring import ScoreSample
from ...config import EngineConfig, WeightsError
from ...telemetry import instruments, names, now_ns
from ...text.gguf import facts_of, folder_of
from ..actor import Actor, StageContext
from .changes.adapter_operations import AdapterOperations
from .changes.updates import WeightUpdates
from .core import ExecutorCore
from .draft_counts import DraftCounts, SourceCounts
from .driver.step import LaunchedStep
from .facts import model_facts
from .reference import ReferenceModel
from .runner.attention.choose import kernels_of
from .runner.device import device_of_replica, is_unverified
from .runner.model import load_model
from .scoring import Scoring
from .spans import ExecutorSpans

# All torch work of a process happens in this one thread, over restarts of the stage too: with a
# second thread, OpenMP would keep two teams of workers that take each other's cores.
_TORCH_THREAD = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch")


# Waits for the device and does nothing else, so that the torch thread can launch the next step.
_WAITING_THREAD = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")


# How long a stage that ends may take to answer what it leaves undone.
_PARTING_S = 2.0

# Below this a step is so short that handing out its parts costs more than they do, and where
# other processes want the cores, waiting for the last part costs many times more.
_SMALL_MODEL_PARAMETERS = 30_000_000


def _load(config: EngineConfig, device: int | None) -> tuple[ExecutorCore, ReferenceModel | None]:
    """Runs on the torch thread, like all that follows. `device`: which of several devices."""
    if device is not None and (name := device_of_replica(config.device, device)) != config.device:
        chosen = torch.device(name)
        torch.get_device_module(chosen.type).set_device(chosen.index)
        config = msgspec.structs.replace(config, device=name)
    model = load_model(config)
    if model.device.type == "cpu":
        # What is compared and measured from here on is what steps will do.
        size = sum(parameter.numel() for parameter in model.module.parameters())
        automatic = 1 if size < _SMALL_MODEL_PARAMETERS else torch.get_num_threads()
        torch.set_num_threads(config.cpu_threads or automatic)
    # First, since the KV cache of the other takes what memory is left.
    reference = ReferenceModel(config) if config.reference_model_path else None
    core = ExecutorCore(config, now_ns=now_ns, model=model)
    if reference is not None:
        reference.check_fits(core)
    return core, reference


_OPERATIONS = (
    UpdateWeights,
    FinishUpdate,
    JoinWeightsGroup,
    LeaveWeightsGroup,
    TellWeightVersion,
    ReleaseMemory,
    ResumeMemory,
)


async def _on_torch(function: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.wrap_future(_TORCH_THREAD.submit(function, *args))


class ExecutorStage(Actor):
    """Runs plans on the torch thread in the order in which they come, and reports the results."""

    name: ClassVar[str] = "executor"

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self._core: ExecutorCore
        self._under_way: asyncio.Queue[tuple[int, StepPlan, Future[StepResult | LaunchedStep]]] = (
            asyncio.Queue()
        )
        # For `load`: plans under way, steps done.
        self._plans = self._steps = self._measured_steps = 0
        # The last epoch whose plans can't be run.
        self._given_up = 0
        self._device = self._backend = ""
        self._capabilities: tuple[str, ...] = ()
        self._facts: dict[str, int | float | str] = {}
        self._layer_kinds: dict[str, int] = {}
        self._max_model_len = 0
        self._weight_version = 0
        self._updates: WeightUpdates
        self._adapters: AdapterOperations
        self._scoring: Scoring
        self._group: TaskGroup
        self._spans = ExecutorSpans(self)
        engine = self.config.engine
        sources = (*engine.draft_sources, *(["model"] if engine.draft_model_path else []))
        # None without speculation.
        self._drafts = None if engine.speculation == "off" else DraftCounts(sources)

    async def open(self) -> None:
        self.log.debug("model_loading", path=str(self.config.engine.model_folder))
        started = now_ns()
        # Replicas in one process share its torch thread, and so its device.
        device = self.config.pipeline.replica
        self._core, reference = await asyncio.wrap_future(
            _TORCH_THREAD.submit(_load, self.config.engine, device)
        )
        self._scoring = Scoring(self, reference, _on_torch)
        self._updates = WeightUpdates(self, self._core, _on_torch, self._start_soon)
        self._adapters = AdapterOperations(self, self._core, _on_torch)
        capacity = self._core.capacity()
        self._device = capacity.device
        self._facts = await _on_torch(model_facts, self._core)
        self._facts["capabilities"] = ",".join(capacity.capabilities)
        self._facts["load_ns"] = now_ns() - started
        self._backend, self._layer_kinds = self._core.backend.name, self._core.layer_kinds
        self._max_model_len = capacity.max_model_len
        self._capabilities = capacity.capabilities
        seconds = (now_ns() - started) / 1e9
        self.log.info(
            "model_loaded",
            brief=f"loaded {self.config.engine.model_name} in {seconds:.1f} s, "
            f"{capacity.max_batch_size:,} sequences, {capacity.num_blocks:,} blocks",
            seconds=round(seconds, 2),
            device=capacity.device,
            kv_blocks=capacity.num_blocks,
            block_size=capacity.block_size,
            max_model_len=capacity.max_model_len,
            kernels=self._core.without_kernels or kernels_of(self._core.model),
            attention=self._backend,
            graphs=self._core.without_graphs or "recorded",
            speculation=self._core.without_speculation or "in use",
            deterministic=self._core.without_determinism or "yes",
            reference=self.config.engine.reference_model_path or "none",
        )
        self._warn()

    def _warn(self) -> None:
        """What whoever starts it should know of the model and its device."""
        model = self._core.model
        if is_unverified(model.device):
            self.log.warning(
                "device_unverified", device=self._device, reason="no test has run on such a device"
            )
        facts = facts_of(folder_of(self.config.engine.model_folder))
        if facts is None:
            return
        if facts.quantized:
            types, dtype = ", ".join(facts.quantized), str(model.dtype).removeprefix("torch.")
            self.log.warning(
                "gguf_dequantized",
                types=types,
                dtype=dtype,
                file_bytes=facts.size_bytes,
                bytes=facts.num_parameters * model.dtype.itemsize,
            )
        if facts.unread:
            self.log.warning(
                "gguf_positions_unread",
                unread=", ".join(facts.unread),
                reason="Transformers does not read how the file scales positions, and the model "
                "may not be what it was made as",
            )

    async def receive_forever(self, inbox: Inbox) -> None:
        async with anyio.create_task_group() as self._group:
            self._group.start_soon(self._report_forever)
            self._group.start_soon(self._scoring.score_forever)
            self._group.start_soon(self._updates.tick_forever)
            await super().receive_forever(inbox)

    def _start_soon(
        self, function: Callable[..., Coroutine[Any, Any, None]], *args: object
    ) -> None:
        self._group.start_soon(function, *args)

    async def close(self) -> None:
        self._updates.close()
        self._adapters.close()
        # Behind the plans that are under way, and then also when nobody waits any longer.
        _TORCH_THREAD.submit(self._scoring.close)
        closed = _TORCH_THREAD.submit(self._core.close)
        del self._core
        with anyio.move_on_after(_PARTING_S, shield=True):
            await self._updates.abandon()
            await self._adapters.abandon()
            await asyncio.shield(asyncio.wrap_future(closed))

    async def reset(self) -> None:
        self._spans.clear()
        # In order behind the plans that are under way, whose results nobody waits for any more.
        _TORCH_THREAD.submit(self._core.reset)

    async def announce(self) -> None:
        await self._updates.begin_epoch(self.leader)
        await self._adapters.begin_epoch(self.leader)
        # Behind those plans, too: one of them may put new weights in place.
        capacity = await _on_torch(self._core.capacity)
        self._weight_version = capacity.weight_version
        ready = StageReady(self.role, self.incarnation, capacity)
        await self.send(CONTROL["admission"], ready)
        # Should this stage be lost from here on, admission knows that batching may rely on it.
        await self.flush(CONTROL["admission"])
        await self.send(self.own(CONTROL["batching"]), ready)
        self.takes_part()
        # What the capacity says of memory may have changed since it was asked for.
        await self._updates.epoch_begun(capacity.weight_version)
        await self._adapters.epoch_begun()

    def load(self) -> dict[str, int | float | str]:
        load: dict[str, int | float | str] = {
            "plans": self._plans,
            "steps": self._steps,
            "device": self._device,
            "weight_version": self._weight_version,
            "max_model_len": self._max_model_len,
            "capabilities": ",".join(self._capabilities),
            "model": self.config.engine.model_name,
            "model_path": str(self.config.engine.model_folder),
            "aliases": ",".join(self.config.engine.model_aliases),
            **self._facts,
        }
        if behind := self._updates.core.behind:
            load["behind_version"] = behind
        if lacks := ", ".join(self._core.memory.lacks):
            load["lacks"] = lacks
        if lost := self._core.weights.lost:
            load["weights_lost"] = lost
        if self._drafts is not None:
            load |= self._drafts.load()
        return load

    def waits_for(self) -> str:
        return self._updates.restoring or self._adapters.restoring or super().waits_for()

    async def measure(self) -> None:
        self.metrics.record(instruments.WEIGHT_VERSION, self._weight_version)
        self.metrics.record(instruments.WEIGHT_BEHIND, self._updates.core.behind)
        self.metrics.record(instruments.ADAPTERS, len(self._core.adapters))
        backend = {names.BACKEND: self._backend}
        self.metrics.record(instruments.ATTENTION_BACKEND, 1, backend)
        steps, self._measured_steps = self._steps - self._measured_steps, self._steps
        for kind, layers in self._layer_kinds.items():
            labels = backend | {names.LAYER_KIND: kind}
            self.metrics.record(instruments.ATTENTION_LAYERS, steps * layers, labels)
        for counts in self._drafts.take() if self._drafts is not None else ():
            self._measure_drafts(counts)

    def _measure_drafts(self, counts: SourceCounts) -> None:
        source = {names.DRAFT_SOURCE: counts.source}
        self.metrics.record(instruments.DRAFTS, counts.drafts, source)
        self.metrics.record(instruments.DRAFT_TOKENS, counts.draft_tokens, source)
        self.metrics.record(instruments.ACCEPTED_TOKENS, counts.accepted, source)
        for position, number in enumerate(counts.accepted_at or (0,)):
            labels = source | {names.DRAFT_POSITION: str(position)}
            self.metrics.record(instruments.ACCEPTED_TOKENS_PER_POS, number, labels)

    async def handle(self, envelope: Envelope) -> None:
        if isinstance(envelope.body, StepPlan):
            core = self._core
            run = core.launch if core.runs_ahead else core.execute
            future: Future[StepResult | LaunchedStep] = _TORCH_THREAD.submit(run, envelope.body)
            self._plans += 1
            self._under_way.put_nowait((self.epoch, envelope.body, future))
        elif isinstance(envelope.body, ScoreSample):
            self._scoring.ask(envelope.body)
        elif isinstance(envelope.body, _OPERATIONS):
            self._group.start_soon(self._updates.obey, envelope.body, envelope.operation_id)
        elif isinstance(envelope.body, LoadAdapter | UnloadAdapter):
            self._group.start_soon(self._adapters.obey, envelope.body, envelope.operation_id)
        else:
            self.log.warning("message_not_understood", type=type(envelope.body).__name__)

    async def _report_forever(self) -> None:
        while True:
            epoch, plan, future = await self._under_way.get()
            try:
                result = await self._result(future)
            except WeightsError as error:
                await self._begin_anew(epoch, error)
                continue
            finally:
                self._plans -= 1
            self._steps += 1
            await self.send(self.own(STEPS_BATCHING), result, epoch=epoch)
            await self.send(self.own(STEPS_STREAMING), result, epoch=epoch)
            self._weight_version = result.weight_version
            await self._updates.step_done(plan, result.weight_version)
            await self._adapters.step_done(plan)
            if plan.seq_ids:
                seconds = (result.end_ns - result.start_ns) / 1e9
                self.metrics.record(instruments.DEVICE_TIME, seconds)
            if self._drafts is not None:
                self._drafts.add(result.drafts)
                if failure := self._core.take_draft_failure():
                    self.log.warning("draft_model_failed", reason=failure)
            for wait_ns in self._core.take_mask_waits_ns():
                self.metrics.record(instruments.MASK_WAIT, wait_ns / 1e9)
            if self.tracing.enabled and epoch == self.epoch:
                self._spans.step(plan, result)

    async def _begin_anew(self, epoch: int, error: WeightsError) -> None:
        """No weights are in place, so the plans under way were not run: a new epoch shall begin.

        In it batching plans no step until weights have come; requests go on then.
        """
        if epoch != self.epoch or epoch == self._given_up:
            return
        self._given_up = epoch
        await self._updates.weights_lost(error)
        started = StageStarted(self.role, self.incarnation)
        await self.send(CONTROL["admission"], started, epoch=0)

    async def _result(self, future: Future[StepResult | LaunchedStep]) -> StepResult:
        """What a plan gave. Plans that come meanwhile are launched before it is read."""
        outcome = await asyncio.wrap_future(future)
        if isinstance(outcome, StepResult):
            return outcome
        await asyncio.wrap_future(_WAITING_THREAD.submit(outcome.wait))
        return await asyncio.wrap_future(_TORCH_THREAD.submit(self._core.finish, outcome))
