"""One model of a deployment: its lane, its record, its memory, and its waiting requests."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import anyio
import anyio.to_thread
from msgspec.structs import replace
from safetensors import SafetensorError, safe_open

from ..bus import Bus, RequestEntry
from ..bus.control import Drain
from ..bus.links import CONTROL
from ..bus.public import Completion, ErrorInfo
from ..config import (
    BusError,
    ChannelClosed,
    Config,
    ModelConfig,
    ModelError,
    NanoInferenceError,
    shown,
    split_role,
)
from ..config.logger import get_logger
from ..store.registry import NOT_LOADED, ModelRecord, ModelState
from ..telemetry import Metrics, instruments, names, now_ns
from .deployment import terminal_message
from .health import lanes_of, verdict
from .models import adapters_of, admits

PROCESSES_BYTES = 300 << 20
"""Approximate memory of a lane's processes without weights and KV: Python, and torch once."""

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf")
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1.1, "int4": 0.7}
"""Bytes of a weight; of codes about so many, with scales and what stays plain."""


def memory_of(pids: Iterable[int]) -> int:
    """Return the memory of processes in bytes; 0 if unknown.

    Shared memory counts in equal parts (Linux's PSS), so that the sum over all processes is right.
    """
    return sum(map(_proportional_bytes, pids))


def _proportional_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # it has ended, or this is not Linux
        return 0
    line = next((line for line in text.splitlines() if line.startswith("Pss:")), "Pss: 0 kB")
    return int(line.split()[1]) << 10


def expected_memory(config: Config) -> int:
    """Return the approximate memory of a model's processes with these settings, in bytes."""
    engine = config.engine
    draft = engine.draft_model_path if engine.speculation == "auto" else ""
    others = [Path(draft).expanduser()] if draft else []
    if engine.reference_model_path:
        others.append(engine.of_reference().model_folder)
    form = engine.dtype if engine.quantization == "auto" else engine.quantization
    weights = weight_bytes(engine.model_folder, form)
    weights += sum(weight_bytes(each, engine.dtype) for each in others)
    return PROCESSES_BYTES + (weights + engine.kv_cache_bytes) * config.pipeline.replicas


def weight_bytes(model: Path, form: str) -> int:
    """Return the size of the weights in a folder or file, in a dtype or as codes ("int8", "int4");
    0 if they can't be read."""
    try:
        if model.is_file():
            return model.stat().st_size
        files = next((found for each in _WEIGHT_FILES if (found := list(model.glob(each)))), [])
        return sum(_loaded_bytes(file, form) for file in files)
    except OSError:  # the load reports it
        return 0


def _loaded_bytes(file: Path, form: str) -> int:
    size = file.stat().st_size
    if file.suffix != ".safetensors" or form not in _ITEM_BYTES:
        return size
    try:
        with safe_open(file, "numpy") as opened:
            shapes = [opened.get_slice(name).get_shape() for name in opened.keys()]  # noqa: SIM118
    except SafetensorError:
        return size
    return int(_ITEM_BYTES[form] * sum(map(math.prod, shapes)))


_POLL_S = 0.05
_RETRY_S = 1.0
# Smaller changes of memory are not written to the record.
_NOTABLE = 0.02
# Time for requests to end with an error after their time limit.
_GRACE_S = 5.0
# The limit of a drain without a limit; a control message must have one.
_ANY_TIME_S = 7 * 86_400.0
# Longest wait for the last record of a deployment that stops, while the bus may be away.
_LAST_WORD_S = 2.0


class ModelLane(Protocol):
    """Runs the lane of one model."""

    @property
    def pids(self) -> Sequence[int]:
        """Its current processes."""

    async def run(self) -> None:
        """Run the lane until it is stopped.

        Raises:
            NanoInferenceError: It can't go on.
        """

    async def stop(self, *, drain: bool = False) -> None:
        """End the lane and wait for it; `drain`: requests in flight finish first."""


@dataclass(eq=False)
class Job:
    """One change of a model's state, made by one task; others wait for `done`.

    Attributes:
        kind: The change.
        remove: For an unload: whether to remove the model from the deployment.
        error: Why it failed.
        ends_at: Its time limit, by the monotonic clock.
    """

    kind: Literal["load", "unload", "fail"]
    remove: bool = False
    error: ModelError | None = None
    ends_at: float = float("inf")
    done: anyio.Event = field(default_factory=anyio.Event)

    def hurry(self, timeout_s: float | None) -> None:
        """Limit the remaining time."""
        if timeout_s is not None:
            self.ends_at = min(self.ends_at, time.monotonic() + timeout_s)

    @property
    def left_s(self) -> float:
        """The remaining seconds."""
        return max(0.0, self.ends_at - time.monotonic())


class ManagedModel:
    """The manager's state of a model. Only the task of its `job` changes the model's state.

    Attributes:
        config: The settings of its processes.
        added: Whether it was added while the deployment ran.
        was_ready: Whether it has ever been ready.
        record: Its record in the registry.
        job: The change in progress.
        last_request_ms: Time of its last request, by the bus's clock.
        used_at: When it was loaded or last seen with a request, by the monotonic clock.
        reserved_bytes: Memory reserved for it while it loads.
        largest_bytes: Its memory once all KV is in use; 0 before it was loaded.
    """

    def __init__(
        self,
        config: Config,
        spec: ModelConfig,
        bus: Bus,
        make: Callable[[], ModelLane],
        on_end: Callable[[ManagedModel, str], None],
        metrics: Metrics | None = None,
    ) -> None:
        """A model that is not loaded.

        Args:
            config: The settings of its processes.
            spec: Its settings in the deployment.
            bus: The deployment's bus.
            make: Makes the runner of its lane.
            on_end: Called with the reason when a lane has ended by itself.
            metrics: The metrics of this process.
        """
        self.config = config
        self.added = False
        self.was_ready = False
        self.record = ModelRecord(spec=spec)
        self.job: Job | None = None
        self.last_request_ms = self.reserved_bytes = self.largest_bytes = 0
        self.used_at = time.monotonic()
        self._registry = bus.store.models
        self._bus = bus.of_model(spec.id)
        self._metrics = metrics or Metrics()
        self._make = make
        self._on_end = on_end
        self._runner: ModelLane | None = None
        self._task: asyncio.Task[None] | None = None
        # Set when the lane has ended by itself; `_why` is the reason.
        self._over = anyio.Event()
        self._why = ""
        self._kv_bytes = 0
        self._writing = anyio.Lock()
        self._log = get_logger().bind(model=spec.id)

    @property
    def spec(self) -> ModelConfig:
        """Its settings in the deployment."""
        return self.record.spec

    @property
    def taken_bytes(self) -> int:
        """Its memory, current or reserved."""
        return max(self.largest_bytes if self._runner else 0, self.reserved_bytes)

    @property
    def last_used_ms(self) -> int:
        """Time of its last request, or of its load."""
        return max(self.last_request_ms, self.record.since_ns // 1_000_000)

    # --- record -----------------------------------------------------------------------------

    async def put(
        self,
        state: ModelState,
        reason: str = "",
        *,
        takes_requests: bool,
        load_ns: int = 0,
        memory_bytes: int = 0,
    ) -> None:
        """Write its state to the registry; retry while the bus is away."""
        before = self.record
        self.record = replace(
            before,
            state=state,
            reason=reason,
            since_ns=(before.since_ns if before.state == state else 0) or now_ns(),
            load_ns=load_ns,
            memory_bytes=memory_bytes,
            takes_requests=takes_requests,
            adapters=before.adapters if state == "draining" else (),
        )
        await self._write()

    async def _write(self) -> None:
        """Write the current record, one write at a time, so that the last one is the newest even
        after a wait for the bus."""
        async with self._writing:
            await self.persist(lambda: self._registry.put(self.record))

    async def persist(self, operation: Callable[[], Awaitable[None]]) -> None:
        """Retry an operation while the bus is away."""
        while True:
            try:
                return await operation()
            except ChannelClosed:
                raise
            except BusError as error:
                self._log.warning("model_not_written_down", error=str(error))
                await anyio.sleep(_RETRY_S)

    async def measure(self) -> None:
        """Write its memory to the record, if that has changed."""
        memory_bytes, before = await self._memory(), self.record.memory_bytes
        if abs(memory_bytes - before) > _NOTABLE * before:
            await self._change(memory_bytes=memory_bytes)

    async def update_adapters(self) -> None:
        """Write its lanes' adapters to the record, if they have changed.

        While admission is started anew they stay: requests for them wait, as all others do.
        """
        with suppress(BusError):
            reports = await self._bus.store.board.read()
            adapters = tuple(each.id for each in adapters_of(reports))
            if admits(reports) and adapters != self.record.adapters:
                await self._change(adapters=adapters)

    async def _change(self, **fields: Any) -> None:
        if self.record.state == "ready":
            self.record = replace(self.record, **fields)
            await self._write()

    async def _memory(self) -> int:
        pids = list(self._runner.pids) if self._runner else []
        memory_bytes = await anyio.to_thread.run_sync(
            memory_of, pids, limiter=anyio.CapacityLimiter(1)
        )
        self.largest_bytes = max(self.largest_bytes, memory_bytes)
        return memory_bytes

    # --- load and unload----------------------------------------------------------------------

    async def load(self, timeout_s: float) -> None:
        """Start its lane and return when it is ready; requests wait meanwhile.

        Raises:
            ModelError: `model_load_failed`; its lane has ended.
        """
        started = time.monotonic_ns()
        await self.put("loading", takes_requests=True)
        self._over, self._why = anyio.Event(), ""
        try:
            runner = self._runner = self._make()
        except NanoInferenceError as error:
            raise self.not_loaded(error.message) from None
        self._task = asyncio.create_task(self._run(runner), name=f"model {self.spec.id}")
        reason = await self._until_ready(runner, timeout_s)
        if not reason:
            load_ns = time.monotonic_ns() - started
            memory_bytes = await self._memory()
            # The system allocates KV memory page by page, as it is written.
            self.largest_bytes = max(self.largest_bytes, memory_bytes + self._kv_bytes)
            await self.put("ready", takes_requests=True, load_ns=load_ns, memory_bytes=memory_bytes)
            self.was_ready = True
            self.used_at = time.monotonic()
        if reason or self._over.is_set():
            await self._stop()
            raise self.not_loaded(reason or self._why)
        self._log.info("model_ready", seconds=round(self.record.load_ns / 1e9, 2))

    def not_loaded(self, reason: str) -> ModelError:
        """Return the error of a load that failed."""
        return ModelError(
            f"the model {shown(self.spec.id)} could not be loaded: {reason}",
            code="model_load_failed",
        )

    async def _run(self, runner: ModelLane) -> None:
        try:
            await runner.run()
            self._why = "its processes have ended"
        except NanoInferenceError as error:
            self._why = error.message
        except Exception as error:  # noqa: BLE001  (a defect must not end other models)
            self._why = repr(error)
            self._log.exception("model_lane_failed")
        if self._runner is runner:
            self._over.set()
            self._on_end(self, self._why)

    async def _until_ready(self, runner: ModelLane, timeout_s: float) -> str:
        """Wait until its lane serves; return "", or the reason why it can't."""
        host, ends_at = socket.gethostname(), time.monotonic() + timeout_s
        while not self._over.is_set():
            try:
                reports = await self._bus.store.board.read()
            except BusError:
                reports = []
            pids = set(runner.pids)  # other processes belong to a former load
            lanes = lanes_of(each for each in reports if each.pid in pids and each.host == host)
            reason = verdict(lanes)
            if lanes and not reason:
                loads = [report.load for report in reports if report.pid in pids]
                on_cpu = [load for load in loads if load.get("device") == "cpu"]
                self._kv_bytes = sum(int(load.get("kv_bytes", 0)) for load in on_cpu)
                return ""
            if time.monotonic() > ends_at:
                return f"it was not ready within {timeout_s:g} s: {reason}"
            with anyio.move_on_after(_POLL_S):
                await self._over.wait()
        return self._why

    async def may_sleep(self) -> bool:
        """Return whether loading would bring back all that its lane has now: no weights or adapters
        came later, and it is not paused."""
        try:
            reports = await self._bus.store.board.read()
        except BusError:
            return False
        loads = [report.load for report in reports]
        changed = any(load.get("weight_version") or "held" in load for load in loads)
        adapters = {each.id for each in adapters_of(reports)}
        # Reports that are missing, as of a busy machine, say nothing.
        is_known = admits(reports) and any(
            split_role(report.stage)[0] == "executor" for report in reports
        )
        return not changed and is_known and adapters <= set(self.spec.adapters)

    async def unload(self, job: Job, *, keeps_requests: bool) -> None:
        """Let its requests end, then stop its lane.

        Args:
            job: The time limit.
            keeps_requests: Whether requests that its lane has not taken wait for the next load;
                otherwise it takes no more, and answers all that it has.
        """
        await self.put(
            "draining", takes_requests=keeps_requests, memory_bytes=self.record.memory_bytes
        )
        if self._runner is not None:
            await self._drain(job, keeps_requests)
        await self._stop()
        await self.put("unloaded", takes_requests=keeps_requests)
        if not keeps_requests:
            await self.end_requests()

    async def _drain(self, job: Job, keeps_requests: bool) -> None:
        """Return when its requests are answered, or the time limit has passed."""
        if keeps_requests:  # admission must take no more of them
            await self._send_drain(min(job.left_s, _ANY_TIME_S))
        hurried_at = 0.0
        while not self._over.is_set():
            try:
                backlog = await self._bus.requests.backlog()
                pending, waiting = backlog.pending, 0 if keeps_requests else backlog.waiting
            except BusError as error:
                self._log.debug("backlog_not_known", error=str(error))
                pending, waiting = 1, 0
            if not pending + waiting:
                return
            if job.left_s <= 0:
                if not hurried_at:
                    hurried_at = time.monotonic()
                    await self._send_drain(0)
                elif time.monotonic() - hurried_at > _GRACE_S or not pending:
                    return
            await anyio.sleep(_POLL_S)

    async def _send_drain(self, timeout_s: float) -> None:
        sender = self._bus.sender(CONTROL["admission"], "client-models", self.config.bus.lane)
        try:
            with anyio.move_on_after(_GRACE_S):
                await sender.send(Drain(int(timeout_s * 1e9)))
                await sender.flush()
        except BusError as error:
            self._log.warning("not_told_to_drain", error=str(error))

    async def fail(self, reason: str) -> None:
        """Mark it as failed; its requests end with an error."""
        await self.put("failed", reason, takes_requests=False)
        await self._stop()
        error = f"the model {shown(self.spec.id)} has failed: {reason}"
        await self.end_requests(ModelError(error, code="model_failed"))

    async def leave(self) -> None:
        """Stop with the deployment: requests in flight finish, others wait for the next start."""
        takes_requests = self.record.takes_requests
        await self._stop(drain=True)
        with anyio.move_on_after(_LAST_WORD_S):
            await self.put("unloaded", "the deployment was stopped", takes_requests=takes_requests)

    async def aclose(self) -> None:
        """Close its connections."""
        await self._bus.aclose()

    async def _stop(self, *, drain: bool = False) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.stop(drain=drain)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    # --- requests ---------------------------------------------------------------------------

    async def end_requests(self, error: ModelError | None = None) -> None:
        """End the requests of its stream; it must take no requests, and have no lane of ours.

        Requests of lanes in other deployments are not ended.

        Args:
            error: The requests' error; None: the model is not loaded.
        """
        if error is None:
            error = ModelError(
                f"the model {shown(self.spec.id)} was unloaded before this request ended; load "
                "it, or choose another",
                code=NOT_LOADED,
            )
        info = ErrorInfo(code=error.code, message=error.message)

        def answer(entry: RequestEntry) -> Completion:
            return terminal_message(entry, info, model=self.spec.id)

        async def end() -> None:
            if set(await self._bus.lanes()) - {self.config.bus.lane}:
                return
            number = await self._bus.requests.end_all(answer, await self._bus.next_epoch())
            if number:
                self._log.warning("requests_ended", number=number, code=info.code)
                labels = {names.STATUS: "error", names.ERROR_TYPE: info.code}
                self._metrics.record(instruments.REQUESTS, number, labels)

        await self.persist(end)
