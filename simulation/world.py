"""One simulation: programs, clients and faults of a story, in simulated time."""

from __future__ import annotations

import gc
import hashlib
import sys
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import Context
from functools import lru_cache, partial
from random import Random
from typing import Any

import anyio
import msgspec
import structlog

from ..bus import Bus, open_bus
from ..bus.public import GenerateRequest
from ..bus.weights import FolderWeights
from ..config import (
    AdmissionConfig,
    BusConfig,
    Config,
    EngineConfig,
    LaneReplaced,
    NanoInferenceError,
    PipelineConfig,
    SamplingParams,
    split_role,
)
from ..pipeline.client import BusClient
from ..pipeline.pipeline import Pipeline
from ..stages.actor import Actor
from ..telemetry import Tracing
from .calls import Call
from .checks import check_call, check_end, check_state, is_at_rest
from .environment import EPOCH_NS, Environment, url_of
from .loop import PROCESS, SimulatedLoop, SimulatedProcess
from .redis.commands import Arguments
from .redis.network import MS, Network
from .story import Fault, Request, Story

PATIENCE_MS = 240_000
"""So long after the last request and fault everything must have ended."""

SETTLE_MS = 30_000

RESTART_MS = 200
"""After so long a program that has ended by itself starts again."""

ORDER_S = 60.0
"""So long an operator waits."""

CHECK_EVERY = 97
"""Callbacks between two checks of the stages' state."""


class SimulatedCrash(Exception):
    """An error in a stage, on purpose."""


class World:
    """A simulation of one story.

    Attributes:
        calls: The requests, by name.
        pipelines: By program, the running one.
        weights: The numbers of the weights of a lane and version.
        violations: What must not be, in order of discovery.
        lines: The trace, if it is wanted.
    """

    def __init__(self, story: Story, *, trace: bool = False) -> None:
        self.story = story
        # What programs are configured by; equal ones have equal settings.
        self.settings = msgspec.structs.replace(
            story, seed=0, clients=1, shuffled=True, requests=(), faults=()
        )
        random = Random(story.seed * 7919 + 1)
        self._random = Random(random.random())
        self.loop = SimulatedLoop(Random(random.random()), shuffled=story.shuffled)
        self.network = Network(
            self.loop, lambda: self.loop.now_ns, Random(random.random()), EPOCH_NS
        )
        self._slow = 1.0
        self.environment = Environment(
            self.loop, self.network, Random(random.random()), lambda: self._slow * story.slowness
        )
        self.environment.capacity = {
            "num_blocks": story.num_blocks,
            "max_batch_size": story.max_batch_size,
            "max_model_len": min(512, story.num_blocks * story.block_size),
        }
        self.network.record = self._note_command
        self.network.noise = story.noise
        self.environment.note_weights = self._note_weights
        self.weights: dict[tuple[str, int], set[int]] = {}
        self.calls = {request.name: Call(request) for request in story.requests}
        self.processes: dict[str, SimulatedProcess] = {}
        self.pipelines: dict[str, Pipeline] = {}
        self.clients: dict[int, tuple[SimulatedProcess | None, BusClient]] = {}
        self.violations: list[str] = []
        self.lines: list[str] | None = [] if trace else None
        self._digest = hashlib.blake2b(digest_size=16)
        self._pids = 0
        self._updates = 0
        self._snapshots: dict[int, Any] = {}
        self._dead: list[Any] = []
        self._stopped = False

    # --- running ------------------------------------------------------------------------------

    def run(self) -> None:
        """Run the whole story."""
        with self._surroundings():
            self._begin()
            last_ms = max(
                [fault.at_ms + fault.lasts_ms for fault in self.story.faults]
                + [request.at_ms for request in self.story.requests]
                + [0]
            )
            limit_ns = (last_ms + PATIENCE_MS) * MS
            if not self.loop.run_until(self._is_over, limit_ns) and not self.violations:
                waiting = [name for name, call in self.calls.items() if not call.ended]
                self.violate(f"{', '.join(waiting) or 'a fault'} never ended")
            if not self.violations:
                self._settle()
            for error in self.loop.unhandled:
                self.violate(f"no one handled an error: {error}")
            self._note("end", str(self.loop.num_events), str(self.loop.now_ns))

    def digest(self) -> str:
        """Return the digest of all that has happened."""
        return self._digest.hexdigest()

    def violate(self, what: str) -> None:
        """Note that something is wrong; the first such note ends the story."""
        if self._stopped:
            return
        self.violations.append(what)
        self._note("VIOLATION", what)

    def _begin(self) -> None:
        for program in self.story.programs:
            self.start(program)
        for number in range(self.story.clients):
            self._start_client(number)
        for request in self.story.requests:
            self._at(request.at_ms, partial(self._send, request))
        self._pending = len(self.story.faults)
        for number, fault in enumerate(self.story.faults):
            if fault.kind in ("restart", "failover") and fault.amount:
                self._at(max(0, fault.at_ms - fault.amount), partial(self._snap, number))
            self._at(fault.at_ms, partial(self._strike, number, fault))
        self.loop.after_event = self._after_event

    def _snap(self, number: int) -> None:
        """Keep the server's data as it is now, for a fault."""
        self._snapshots[number] = self.network.snapshot()

    def _is_over(self) -> bool:
        if self.violations:
            return True
        if self._pending or self.loop.num_events % 16:
            return False
        return all(call.ended for call in self.calls.values())

    def _settle(self) -> None:
        """Wait until nothing is in flight, and check what is left."""
        for call in self.calls.values():
            for what in check_call(self, call):
                self.violate(f"{call.request.name}: {what}")
        limit_ns = self.loop.now_ns + SETTLE_MS * MS
        self.loop.run_until(lambda: is_at_rest(self), limit_ns, every=50)
        for what in check_end(self):
            self.violate(what)

    def _after_event(self) -> None:
        if self.loop.num_events % CHECK_EVERY == 0:
            for what in check_state(self):
                self.violate(what)

    def _at(self, at_ms: int, action: Callable[[], object]) -> None:
        self.loop.call_in(at_ms * MS - self.loop.now_ns, action, context=Context())

    # --- programs -----------------------------------------------------------------------------

    def start(self, program: str) -> None:
        """Start a program, again if it was killed."""
        process = self._process(program)
        self._note("start", program)
        self.processes[program] = process
        self.loop.start(process, self._serve(program, process))

    def _process(self, name: str) -> SimulatedProcess:
        self._pids += 1
        process = SimulatedProcess(name, self._pids)
        self._dead.append(process)
        return process

    async def _serve(self, program: str, process: SimulatedProcess) -> None:
        try:
            config = config_of(self.settings, program)
            pipeline = Pipeline(
                config, tracing=Tracing(), wait_for_bus=True, wait_until_ready=False
            )
            async with pipeline:
                self.pipelines[program] = pipeline
                if self.story.bus == "memory":
                    self.clients[0] = process, pipeline.client
                await pipeline.failed()
        except LaneReplaced as error:
            self._note("replaced", program)
            if self.processes.get(program) is process:
                self.violate(f"{program}: {error.message}")
        except Exception as error:  # noqa: BLE001  (a program that fails is a finding)
            self.violate(f"{program} failed: {error!r}")

    def kill(self, program: str) -> None:
        """End a process at once; nothing of it runs any more."""
        process = self.processes.pop(program)
        self._note("kill", program)
        process.alive = False
        self.pipelines.pop(program, None)
        self.network.forget(process)
        for number, (owner, _) in list(self.clients.items()):
            if owner is process:
                del self.clients[number]
        for call in self.calls.values():
            if call.process is process:
                call.left = call.ended = True

    def actors(self) -> Iterator[Actor]:
        """Return the stages of all living programs."""
        for pipeline in self.pipelines.values():
            yield from pipeline._actors.values()

    # --- clients ------------------------------------------------------------------------------

    def _start_client(self, number: int) -> None:
        if self.story.bus == "memory":
            return  # it is the program's own

        async def connect(process: SimulatedProcess) -> None:
            bus: Bus = open_bus(config_of(self.settings, "0").bus)
            self.clients[number] = process, BusClient(bus)

        process = self._process(f"client{number}")
        self.processes[f"client{number}"] = process
        self.loop.start(process, connect(process))

    def _send(self, request: Request) -> None:
        if request.client not in self.clients:
            self._at(self.loop.now_ns // MS + 1, lambda: self._send(request))
            return
        process, client = self.clients[request.client]
        assert process is not None
        call = self.calls[request.name]
        call.process = process
        self.loop.start(process, self._call(client, call))

    async def _call(self, client: BusClient, call: Call) -> None:
        request = call.request
        outputs = client.submit(_message(request))
        try:
            if request.leave_ms:
                with anyio.move_on_after(request.leave_ms / 1000) as scope:
                    await self._read(call, outputs)
                call.left = scope.cancelled_caught
            else:
                await self._read(call, outputs)
        except NanoInferenceError as error:
            call.error = error
            self._note("error", request.name, error.code)
        finally:
            await outputs.aclose()
            call.ended = True

    async def _read(self, call: Call, outputs: Any) -> None:
        async for output in outputs:
            call.outputs.append(output)
            self._note("output", call.request.name, msgspec.json.encode(output).decode())

    def _operate(self, fault: Fault) -> None:
        """Begin an operator's order."""
        if not self.clients:
            self._pending -= 1
            return
        process, client = self.clients[min(self.clients)]
        assert process is not None
        self.loop.start(process, self._order(client, fault))

    async def _order(self, client: BusClient, fault: Fault) -> None:
        try:
            with anyio.move_on_after(ORDER_S):
                match fault.kind:
                    case "weights":
                        self._updates += 1
                        source = FolderWeights(f"/weights/{self._updates}")
                        await client.update_weights(source, in_flight=fault.mode)
                    case "hold":
                        await client.pause(fault.mode)
                        await anyio.sleep(fault.lasts_ms / 1000)
                    case "flush":
                        await client.flush_cache()
        except NanoInferenceError as error:
            # A lane that fails meanwhile doesn't answer.
            self._note("order failed", fault.kind, error.code, error.message)
        finally:
            if fault.kind == "hold":
                await self._go_on(client)
            self._pending -= 1

    async def _go_on(self, client: BusClient) -> None:
        """Resume generation in each lane that there is, until all have answered."""
        while True:
            try:
                await client.resume()
            except NanoInferenceError as error:
                self._note("not resumed", error.code, error.message)
                await anyio.sleep(1.0)
            else:
                return

    def _note_weights(self, process: SimulatedProcess, version: int, number: int) -> None:
        lane = process.name.partition("/")[0]
        numbers = self.weights.setdefault((lane, version), set())
        numbers.add(number)
        # A lane that starts again has its first weights, and counts from there.
        restarts = any(fault.kind in ("kill", "crash") for fault in self.story.faults)
        if len(numbers) > 1 and not restarts:
            self.violate(f"lane {lane} has weights {sorted(numbers)} as version {version}")

    # --- faults -------------------------------------------------------------------------------

    def _strike(self, number: int, fault: Fault) -> None:
        self._note("fault", msgspec.json.encode(fault).decode())
        if fault.kind in ("weights", "hold", "flush"):
            self._operate(fault)
            return
        end = self._end_of(number, fault)
        if end is None:
            self._pending -= 1
            return

        def finish() -> None:
            self._note("fault over", fault.kind)
            end()
            self._pending -= 1

        self._at(self.loop.now_ns // MS + max(1, fault.lasts_ms), finish)

    def _end_of(self, number: int, fault: Fault) -> Callable[[], object] | None:
        """Begin a fault; return what ends it."""
        process = self.processes.get(fault.target)
        network = self.network
        match fault.kind:
            case "kill" if process is not None:
                self.kill(fault.target)
                if fault.target.startswith("client"):
                    return lambda: self._start_client(int(fault.target.removeprefix("client")))
                return lambda: self.start(fault.target)
            case "crash":
                self._crash(fault.target)
            case "pause" if process is not None:
                self.loop.pause(process)
                return lambda: self.loop.resume(process)
            case "reset" if process is not None:
                network.reset(process)
            case "cut" if process is not None:
                network.cut(process)
                return lambda: network.join(process)
            case "restart" if network.node.up:
                network.stop()
                data = self._snapshots.get(number) or network.snapshot()
                return lambda: network.start(data)
            case "failover" if network.node.up:
                return self._fail_over(number, fault)
            case "clock" if process is not None:
                process.wall_offset_ns += fault.amount * MS
            case "clock":
                network.clock_offset_ns += fault.amount * MS
            case "slow":
                self._slow = network.slow = float(fault.amount)

                def restore() -> None:
                    self._slow = network.slow = 1.0

                return restore
        return None

    def _fail_over(self, number: int, fault: Fault) -> Callable[[], object]:
        owners = list(self.processes.values())
        old = self.network.node
        data = self._snapshots.get(number) or self.network.snapshot()
        self.network.fail_over(data, owners)
        for owner in owners:
            # Until then a process may still write to the former master.
            after_ms = self._random.randrange(max(1, fault.lasts_ms))
            at_ms = self.loop.now_ns // MS + after_ms
            self._at(at_ms, partial(self.network.learn, owner))

        def end() -> None:
            old.up = False

        return end

    def _crash(self, stage: str) -> None:
        """Make each actor of a stage fail at its next message, before or after it is handled."""
        for actor in list(self.actors()):
            if actor.name != stage or not actor.holds_all:
                continue
            handle, late = actor.handle, self._random.random() < 0.5

            async def fail(envelope: Any, handle: Any = handle, late: bool = late) -> None:
                if late:
                    await handle(envelope)
                raise SimulatedCrash("on purpose")

            actor.handle = fail  # type: ignore[method-assign]

    # --- the trace ----------------------------------------------------------------------------

    def _note(self, *parts: str) -> None:
        line = f"{self.loop.now_ns / MS:12.3f} {' '.join(parts)}"
        self._digest.update(line.encode("utf-8", "surrogatepass"))
        if self.lines is not None:
            self.lines.append(line)

    def _note_command(self, owner: SimulatedProcess | None, command: Arguments, reply: Any) -> None:
        raw = b" ".join(command)
        self._digest.update(b"%d %d " % (self.loop.now_ns, owner.pid if owner else 0))
        self._digest.update(raw)
        if self.lines is not None:
            shown = " ".join(_shown(each) for each in command)
            name = owner.name if owner else "-"
            text = f"{self.loop.now_ns / MS:12.3f} {name}: {shown} -> {_brief(reply)}"
            self.lines.append(text)

    def _log(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
        process = PROCESS.get()
        if process is not None and process.alive and not self._stopped:
            name = str(event.get("event"))
            fields = {k: v for k, v in event.items() if k not in ("event", "exc_info", "brief")}
            if self.lines is not None:  # not in the digest, since only a trace has all of them
                about = f"log {process.name} {method} {name} {fields}"
                self.lines.append(f"{self.loop.now_ns / MS:12.3f} {about}")
            error = event.get("exc_info")
            if name == "stage_failed" and not self._may_fail(str(fields.get("error"))):
                self.violate(f"{process.name}: a stage failed: {fields}")
                if self.lines is not None and isinstance(error, BaseException):
                    import traceback

                    self.lines += traceback.format_exception(error)
            if name == "bus.task_failed":
                self.violate(f"{process.name}: a task of the bus failed: {fields}")
        raise structlog.DropEvent

    def _may_fail(self, error: str) -> bool:
        """Return whether a stage may fail with an error."""
        if "SimulatedCrash" in error:
            return True
        # Plans or results between processes are lost with the server's last moments.
        lossy = any(fault.kind in ("restart", "failover") for fault in self.story.faults)
        return self.story.split and lossy and ("LostPlan" in error or "out of order" in error)

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """Install the environment; no garbage is collected, since finalisers come in any order."""
        configured = structlog.is_configured()
        config = structlog.get_config()
        collects, unraisable = gc.isenabled(), sys.unraisablehook
        level = 10 if self.lines is not None else 30
        structlog.configure(
            processors=[self._log],
            wrapper_class=structlog.make_filtering_bound_logger(level),
            cache_logger_on_first_use=False,
        )
        gc.disable()
        gc.freeze()  # so that what is left at the end is found quickly
        try:
            with self.environment.installed():
                yield
        finally:
            self._stopped = True
            # What the killed processes have left is closed by the collector, and complains.
            sys.unraisablehook = lambda error: None
            with warnings.catch_warnings(action="ignore"):
                self._bury()
                gc.collect()
            gc.unfreeze()
            sys.unraisablehook = unraisable
            if collects:
                gc.enable()
            if configured:
                structlog.configure(**config)
            else:
                structlog.reset_defaults()

    def _bury(self) -> None:
        """Drop all that has not ended."""
        for process in self._dead:
            process.alive = False
            process.drop()
        self.loop.drop()
        self.network.drop()
        self.pipelines.clear()
        self.clients.clear()


@lru_cache(maxsize=1024)
def config_of(story: Story, program: str) -> Config:
    """Return the settings of a program of a story."""
    lane, _, role = program.partition("/")
    stage, replica = split_role(role) if role else ("", 0)
    split: dict[str, Any] = {"stages": (stage,), "replica": replica} if role else {}
    return Config(
        engine=EngineConfig(
            block_size=story.block_size,
            cache_type=story.cache_type,
            max_tokens_per_batch=story.max_tokens_per_batch,
        ),
        bus=BusConfig(url=url_of(story.bus == "redis"), lane=lane),
        admission=AdmissionConfig(max_in_flight=story.max_in_flight, lease_s=5.0),
        pipeline=PipelineConfig(replicas=story.replicas, max_restarts=1000, **split),
    )


def _message(request: Request) -> GenerateRequest:
    return GenerateRequest(
        request_id=request.name,
        prompt_token_ids=request.prompt,
        n=request.n,
        sampling=SamplingParams(
            max_tokens=request.max_tokens,
            min_tokens=request.min_tokens,
            seed=request.seed,
            temperature=request.temperature,
            stop_token_ids=frozenset(request.stop_ids),
            ignore_eos=True,
        ),
        stream=request.stream,
        tenant=request.tenant,
        priority=request.priority,
        budget_ns=request.budget_ms * MS if request.budget_ms else None,
    )


def _shown(raw: bytes) -> str:
    text = raw.decode("utf-8", "backslashreplace")
    return text if len(text) <= 80 else f"{text[:60].strip()!r}..({len(text)})"


def _brief(reply: Any) -> str:
    text = repr(reply)
    return text if len(text) <= 200 else text[:200] + "..."
