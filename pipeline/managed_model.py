"""One model of a deployment: its lane, its record, and the requests that wait for it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Literal

import anyio
import anyio.to_thread
import msgspec

from ..bus import Bus, RequestEntry
from ..bus.control import Drain
from ..bus.links import CONTROL
from ..bus.public import Completion, ErrorInfo, Timings
from ..config import (
    BusError,
    ChannelClosed,
    Config,
    ModelConfig,
    ModelError,
    NanoInferenceError,
    shown,
)
from ..config.logger import get_logger
from ..stages.admission.checks import request_id_of
from ..store.registry import NOT_FOUND, NOT_LOADED, ModelRecord, ModelState
from ..telemetry import Metrics, instruments, names, now_ns
from .client_adapters import adapters_of
from .health import lanes_of, verdict
from .model_memory import memory_of

if TYPE_CHECKING:
    from .model_manager import ModelRunner

_POLL_S = 0.05
_RETRY_S = 1.0
# A change of memory below this share is not worth telling.
_NOTABLE = 0.02
# For what is in flight to end with an error, once its time is over.
_GRACE_S = 5.0
# What nobody has set a limit to may take; a control message has to have one.
_ANY_TIME_S = 7 * 86_400.0
# For the last word of a deployment that stops, while the bus may be away.
_LAST_WORD_S = 2.0


class Job:
    """What is being done with a model, by one task; others wait for its end.

    Attributes:
        kind: What it does.
        done: Set at the end.
        error: Why it did not succeed.
        remove: Of an unload: whether the model shall be none of the deployment afterwards.
    """

    def __init__(
        self,
        kind: Literal["load", "unload", "fail"],
        timeout_s: float | None = None,
        *,
        remove: bool = False,
    ) -> None:
        self.kind = kind
        self.done = anyio.Event()
        self.error: ModelError | None = None
        self.remove = remove
        self._ends_at = float("inf")
        self.hurry(timeout_s)

    def hurry(self, timeout_s: float | None) -> None:
        """From now on it may take so long at most."""
        if timeout_s is not None:
            self._ends_at = min(self._ends_at, time.monotonic() + timeout_s)

    @property
    def left_s(self) -> float:
        """Seconds until its time is over."""
        return max(0.0, self._ends_at - time.monotonic())


class ManagedModel:
    """What the manager holds of a model. One task at a time changes its state: that of its `job`.

    Attributes:
        config: The settings of its processes.
        added: Whether it came while the deployment ran.
        was_ready: Whether it has ever been.
        record: What stands in the registry.
        job: What is being done with it.
        last_request_ms: When it was last asked for something, by the bus's clock.
        reserved_bytes: Memory that is kept for it while it loads.
        largest_bytes: The most that it takes, once KV is in use; 0 before it was loaded.
    """

    def __init__(
        self,
        config: Config,
        spec: ModelConfig,
        bus: Bus,
        make: Callable[[], ModelRunner],
        on_end: Callable[[ManagedModel, str], None],
        metrics: Metrics | None = None,
    ) -> None:
        """A model that is not loaded.

        Args:
            config: The settings of its processes.
            spec: What was said of it.
            bus: The deployment's.
            make: Makes what runs its lane.
            on_end: Told when a lane has ended by itself, and why.
            metrics: Of this process.
        """
        self.config = config
        self.added = False
        self.was_ready = False
        self.record = ModelRecord(spec=spec)
        self.job: Job | None = None
        self.last_request_ms = self.reserved_bytes = self.largest_bytes = 0
        self._registry = bus.store.models
        self._bus = bus.of_model(spec.id)
        self._metrics = metrics or Metrics()
        self._make = make
        self._on_end = on_end
        self._runner: ModelRunner | None = None
        self._task: asyncio.Task[None] | None = None
        # Set when the lane has ended by itself, and why.
        self._over = anyio.Event()
        self._why = ""
        self._kv_bytes = 0
        self._writing = anyio.Lock()
        self._log = get_logger().bind(model=spec.id)

    @property
    def spec(self) -> ModelConfig:
        """What was said of it."""
        return self.record.spec

    @property
    def taken_bytes(self) -> int:
        """What it takes of the memory, or will."""
        return max(self.largest_bytes if self._runner else 0, self.reserved_bytes)

    @property
    def last_used_ms(self) -> int:
        """When it was asked for something, or loaded."""
        return max(self.last_request_ms, self.record.since_ns // 1_000_000)

    # --- its record -------------------------------------------------------------------------

    async def put(
        self,
        state: ModelState,
        reason: str = "",
        *,
        takes_requests: bool,
        load_ns: int = 0,
        memory_bytes: int = 0,
    ) -> None:
        """Writes down how it is; while the bus is away it waits."""
        since_ns = self.record.since_ns if self.record.state == state else 0
        self.record = ModelRecord(
            spec=self.spec,
            state=state,
            reason=reason,
            since_ns=since_ns or now_ns(),
            load_ns=load_ns,
            memory_bytes=memory_bytes,
            takes_requests=takes_requests,
            adapters=self.record.adapters if state == "draining" else (),
        )
        await self._write()

    async def _write(self) -> None:
        """One at a time and each what holds then, so that the last written is the newest: also when
        one has waited for the bus."""
        async with self._writing:
            await self.persist(lambda: self._registry.put(self.record))

    async def persist(self, operation: Callable[[], Awaitable[None]]) -> None:
        """Does it as often as it takes, while the bus is away."""
        while True:
            try:
                return await operation()
            except ChannelClosed:
                raise
            except BusError as error:
                self._log.warning("model_not_written_down", error=error.message)
                await anyio.sleep(_RETRY_S)

    async def measure(self) -> None:
        """Writes down what it takes now, if that has changed."""
        memory_bytes = await self._memory()
        before = self.record.memory_bytes
        if self.record.state == "ready" and abs(memory_bytes - before) > _NOTABLE * before:
            self.record = msgspec.structs.replace(self.record, memory_bytes=memory_bytes)
            await self._write()

    async def look_at_adapters(self) -> None:
        """Writes down which adapters its lanes have, if that has changed."""
        try:
            reports = await self._bus.store.board.read()
        except BusError:
            return
        adapters = tuple(each.id for each in adapters_of(reports))
        if self.record.state == "ready" and adapters != self.record.adapters:
            self.record = msgspec.structs.replace(self.record, adapters=adapters)
            await self._write()

    async def _memory(self) -> int:
        pids = list(self._runner.pids) if self._runner else []
        memory_bytes = await anyio.to_thread.run_sync(memory_of, pids)
        self.largest_bytes = max(self.largest_bytes, memory_bytes)
        return memory_bytes

    # --- its life ---------------------------------------------------------------------------

    async def load(self, timeout_s: float) -> None:
        """Starts its lane, and returns when it is ready. Meanwhile it takes requests, which wait.

        Raises:
            ModelError: `model_load_failed`; its lane has ended.
        """
        started = time.monotonic_ns()
        await self.put("loading", takes_requests=True)
        self._over, self._why = anyio.Event(), ""
        try:
            runner = self._runner = self._make()
        except NanoInferenceError as error:
            raise self._not_loaded(error.message) from None
        self._task = asyncio.create_task(self._look_after(runner), name=f"model {self.spec.id}")
        reason = await self._until_ready(runner, timeout_s)
        if not reason:
            load_ns = time.monotonic_ns() - started
            memory_bytes = await self._memory()
            # The system gives KV memory page by page, as it is written.
            self.largest_bytes = max(self.largest_bytes, memory_bytes + self._kv_bytes)
            await self.put("ready", takes_requests=True, load_ns=load_ns, memory_bytes=memory_bytes)
            self.was_ready = True
        if reason or self._over.is_set():
            await self._stop()
            raise self._not_loaded(reason or self._why)
        self._log.info("model_ready", seconds=round(self.record.load_ns / 1e9, 2))

    def _not_loaded(self, reason: str) -> ModelError:
        return ModelError(
            f"the model {shown(self.spec.id)} could not be loaded: {reason}",
            code="model_load_failed",
        )

    async def _look_after(self, runner: ModelRunner) -> None:
        try:
            await runner.run()
            self._why = "its processes have ended"
        except NanoInferenceError as error:
            self._why = error.message
        except Exception as error:  # noqa: BLE001  (a defect; no other model is to end of it)
            self._why = repr(error)
            self._log.exception("model_lane_failed")
        if self._runner is runner:
            self._over.set()
            self._on_end(self, self._why)

    async def _until_ready(self, runner: ModelRunner, timeout_s: float) -> str:
        """Waits until its lane serves; returns why it does not come to that, else ""."""
        host, ends_at = socket.gethostname(), time.monotonic() + timeout_s
        while not self._over.is_set():
            try:
                reports = await self._bus.store.board.read()
            except BusError:
                reports = []
            pids = set(runner.pids)  # others tell of a former life
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

    async def unload(self, job: Job, *, keeps_requests: bool) -> None:
        """Has its requests end, and then its lane.

        Args:
            job: Its time.
            keeps_requests: Whether requests that nobody has taken wait until it is loaded again;
                else it takes no more, and answers all that it has.
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
        """Returns when its requests are answered, or its time is over."""
        if keeps_requests:  # admission is to take no more of them
            await self._tell_to_drain(min(job.left_s, _ANY_TIME_S))
        hurried_at = 0.0
        while not self._over.is_set():
            try:
                backlog = await self._bus.requests.backlog()
                if not backlog.pending + (0 if keeps_requests else backlog.waiting):
                    return
            except BusError as error:
                self._log.debug("backlog_not_known", error=error.message)
            if job.left_s <= 0:
                if not hurried_at:
                    hurried_at = time.monotonic()
                    await self._tell_to_drain(0)
                elif time.monotonic() - hurried_at > _GRACE_S or not await self._in_flight():
                    return
            await anyio.sleep(_POLL_S)

    async def _in_flight(self) -> int:
        try:
            return (await self._bus.requests.backlog()).pending
        except BusError:
            return 1

    async def _tell_to_drain(self, timeout_s: float) -> None:
        lane = self.config.bus.lane
        sender = self._bus.sender(CONTROL["admission"], "client-models", lane)
        try:
            with anyio.move_on_after(_GRACE_S):
                await sender.send(Drain(int(timeout_s * 1e9)))
                await sender.flush()
        except BusError as error:
            self._log.warning("not_told_to_drain", error=error.message)

    async def fail(self, reason: str) -> None:
        """Its lane can't be had: what waits for it, or ran, ends with an error."""
        await self.put("failed", reason, takes_requests=False)
        await self._stop()
        error = f"the model {shown(self.spec.id)} has failed: {reason}"
        await self.end_requests(ModelError(error, code="model_failed"))

    async def leave(self) -> None:
        """The deployment stops: requests in flight may finish, and others wait for the next."""
        takes_requests = self.record.takes_requests
        await self._stop(drain=True)
        with anyio.move_on_after(_LAST_WORD_S):
            await self.put("unloaded", "the deployment was stopped", takes_requests=takes_requests)

    async def aclose(self) -> None:
        """Closes its connections."""
        await self._bus.aclose()

    async def _stop(self, *, drain: bool = False) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.stop(drain=drain)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    # --- its requests -----------------------------------------------------------------------

    async def end_requests(self, error: ModelError | None = None) -> None:
        """Ends what is on its stream; it must take no requests, and have no lane of ours.

        What lanes of others work on is left to them.

        Args:
            error: What they end with; None: it is not loaded, or not there.
        """
        if error is None:
            error = ModelError(
                f"the model {shown(self.spec.id)} was unloaded before this request ended; load "
                "it, or ask for another",
                code=NOT_LOADED,
            )
        info = ErrorInfo(code=error.code, message=error.message)

        def answer(entry: RequestEntry) -> Completion:
            return Completion(
                request_id=request_id_of(entry),
                entry_id=entry.entry_id,
                status="error",
                error=info,
                model=self.spec.id,
                timings=Timings(finished_ns=now_ns()),
            )

        async def end() -> None:
            if set(await self._bus.lanes()) - {self.config.bus.lane}:
                return
            number = await self._bus.requests.end_all(answer, await self._bus.next_epoch())
            if number:
                self._log.warning("requests_ended", number=number, code=info.code)
                labels = {names.STATUS: "error", names.ERROR_TYPE: info.code}
                self._metrics.record(instruments.REQUESTS, number, labels)

        await self.persist(end)

    @staticmethod
    def removed(spec: ModelConfig) -> ModelError:
        """What requests end with when it is removed."""
        return ModelError(
            f"the model {shown(spec.id)} was removed before this request ended", code=NOT_FOUND
        )
