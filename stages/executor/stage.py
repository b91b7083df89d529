"""The executor stage's shell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

import anyio
import torch
from anyio.abc import TaskGroup

from ...bus import Inbox
from ...bus.links import CONTROL, STEPS_BATCHING, STEPS_STREAMING
from ...bus.messages import (
    Envelope,
    JoinWeightsGroup,
    LeaveWeightsGroup,
    RequestInfo,
    StageReady,
    StepPlan,
    StepResult,
    TellWeightVersion,
    UpdateWeights,
)
from ...config import EngineConfig
from ...telemetry import TraceContext, instruments, names, now_ns
from ..actor import Actor, StageContext
from .core import ExecutorCore
from .unread import LaunchedStep
from .updates import WeightUpdates

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


def _load(config: EngineConfig) -> ExecutorCore:
    """Runs on the torch thread, like all that follows."""
    core = ExecutorCore(config, now_ns=now_ns)
    if core.model.device.type == "cpu":
        size = sum(parameter.numel() for parameter in core.model.module.parameters())
        automatic = 1 if size < _SMALL_MODEL_PARAMETERS else torch.get_num_threads()
        core.set_threads(config.cpu_threads or automatic)
    return core


_OPERATIONS = (UpdateWeights, JoinWeightsGroup, LeaveWeightsGroup, TellWeightVersion)


async def _on_torch(function: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.wrap_future(_TORCH_THREAD.submit(function, *args))


class Execution:
    """A request's stay in the executor, for its spans: after a preemption it has another one."""

    __slots__ = ("first_token_ns", "info", "open", "resumed", "start_ns", "tokens", "trace")

    def __init__(self, info: RequestInfo, start_ns: int, trace: TraceContext) -> None:
        self.info = info
        self.start_ns = start_ns
        self.trace = trace
        self.resumed = False
        self.first_token_ns = 0
        self.tokens = 0
        self.open: set[int] = set()


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
        self._plans = self._steps = 0
        self._device = ""
        self._weight_version = 0
        self._updates = WeightUpdates(self, _on_torch)
        self._group: TaskGroup
        self._of_sequence: dict[int, Execution] = {}
        self._of_request: dict[str, Execution] = {}

    async def open(self) -> None:
        self.log.info("model_loading", path=str(self.config.engine.model_folder))
        started = now_ns()
        self._core = await asyncio.wrap_future(_TORCH_THREAD.submit(_load, self.config.engine))
        capacity = self._core.capacity()
        self._device = capacity.device
        self.log.info(
            "model_loaded",
            seconds=round((now_ns() - started) / 1e9, 2),
            device=capacity.device,
            kv_blocks=capacity.num_blocks,
            block_size=capacity.block_size,
            max_model_len=capacity.max_model_len,
            kernels=self._core.without_kernels or "in use",
            graphs=self._core.without_graphs or "recorded",
        )

    async def receive_forever(self, inbox: Inbox) -> None:
        try:
            async with anyio.create_task_group() as self._group:
                self._group.start_soon(self._report_forever)
                await super().receive_forever(inbox)
        finally:
            with anyio.move_on_after(_PARTING_S, shield=True):
                await self._updates.abandon(self._core.weights)

    async def reset(self) -> None:
        # What is in the batch goes on in another slice, when its request is sent again.
        for seq_id in list(self._of_sequence):
            self._close(seq_id, now_ns())
        # In order behind the plans that are under way, whose results nobody waits for any more.
        _TORCH_THREAD.submit(self._core.reset)

    async def announce(self) -> None:
        # Behind those plans, too: one of them may put new weights in place.
        capacity = await _on_torch(self._core.capacity)
        ready = StageReady(self.name, self.incarnation, capacity)
        await self.send(CONTROL["batching"], ready)
        await self.send(CONTROL["admission"], ready)
        self.takes_part()
        await self._updates.in_place(capacity.weight_version)
        await self._updates.stage()

    def load(self) -> dict[str, int | float | str]:
        return {"plans": self._plans, "steps": self._steps, "device": self._device}

    async def measure(self) -> None:
        self.metrics.record(instruments.WEIGHT_VERSION, self._weight_version)

    async def handle(self, envelope: Envelope) -> None:
        if isinstance(envelope.body, StepPlan):
            core = self._core
            run = core.launch if core.runs_ahead else core.execute
            future: Future[StepResult | LaunchedStep] = _TORCH_THREAD.submit(run, envelope.body)
            self._plans += 1
            self._under_way.put_nowait((self.epoch, envelope.body, future))
        elif isinstance(envelope.body, _OPERATIONS):
            self._group.start_soon(self._updates.obey, envelope.body, self._core.weights)
        else:
            self.log.warning("message_not_understood", type=type(envelope.body).__name__)

    async def _report_forever(self) -> None:
        while True:
            epoch, plan, future = await self._under_way.get()
            result = await self._result(future)
            self._plans -= 1
            self._steps += 1
            await self.send(STEPS_BATCHING, result, epoch=epoch)
            await self.send(STEPS_STREAMING, result, epoch=epoch)
            self._weight_version = result.weight_version
            await self._updates.in_place(result.weight_version)
            if plan.seq_ids:
                seconds = (result.end_ns - result.start_ns) / 1e9
                self.metrics.record(instruments.DEVICE_TIME, seconds)
            if self.tracing.enabled and epoch == self.epoch:
                self._trace(plan, result)

    async def _result(self, future: Future[StepResult | LaunchedStep]) -> StepResult:
        """What a plan gave. Plans that come meanwhile are launched before it is read."""
        outcome = await asyncio.wrap_future(future)
        if isinstance(outcome, StepResult):
            return outcome
        await asyncio.wrap_future(_WAITING_THREAD.submit(outcome.wait))
        return await asyncio.wrap_future(_TORCH_THREAD.submit(self._core.finish, outcome))

    # --- spans --------------------------------------------------------------------------------

    def _trace(self, plan: StepPlan, result: StepResult) -> None:
        for new in plan.new:
            request = self._of_request.get(new.info.request_id)
            if request is None:
                trace = TraceContext(new.info.traceparent, new.info.tracestate)
                if not trace.sampled:
                    continue
                request = Execution(new.info, result.start_ns, trace)
                self._of_request[new.info.request_id] = request
            request.resumed |= new.num_generated > 0
            request.open.add(new.seq_id)
            self._of_sequence[new.seq_id] = request
        if not self._of_sequence:
            return
        for seq_id, reason in zip(result.seq_ids, result.finish_reasons, strict=True):
            request = self._of_sequence.get(seq_id)
            if request is None:
                continue
            request.tokens += 1
            request.first_token_ns = request.first_token_ns or result.end_ns
            if reason:
                self._close(seq_id, result.end_ns)
        for seq_id in plan.finished:
            self._close(seq_id, result.start_ns)

    def _close(self, seq_id: int, end_ns: int) -> None:
        request = self._of_sequence.pop(seq_id, None)
        if request is None:
            return
        request.open.discard(seq_id)
        if request.open:
            return
        request_id = request.info.request_id
        del self._of_request[request_id]
        start, first_token = request.start_ns, request.first_token_ns
        events: tuple[tuple[str, int], ...] = ((names.RESUMED, start),) if request.resumed else ()
        if first_token:
            events += ((names.FIRST_TOKEN, first_token),)
        own = self.span(
            request_id, request.trace, start, {names.OUTPUT_TOKENS: request.tokens}, events=events
        )
        part = {names.STAGE: self.name, names.REQUEST_ID: request_id}
        self.tracing.span("prefill", own, start, first_token or end_ns, part)
        if first_token:
            self.tracing.span("decode", own, first_token, end_ns, part)
