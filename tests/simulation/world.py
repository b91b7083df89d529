"""One simulation: programs, clients and faults of a story, in simulated time."""

from __future__ import annotations

import gc
import hashlib
import sys
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from contextvars import Context
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import structlog

from nano_inference.bus import Bus, open_bus
from nano_inference.config import Config, LaneReplaced, NanoInferenceError
from nano_inference.pipeline.client import BusClient
from nano_inference.pipeline.pipeline import Pipeline
from nano_inference.stages.actor import Actor
from nano_inference.telemetry import Tracing

from .calls import Call
from .checks import check_call, check_end, check_state, is_at_rest
from .environment import EPOCH_NS, Environment
from .faults import ORDERS, Faults
from .loop import PROCESS, SimulatedLoop, SimulatedProcess
from .redis.commands import Arguments
from .redis.network import MS, Network
from .settings import config_of, message_of
from .story import Request, Story

if TYPE_CHECKING:
    from .gateways import SimulatedGateway

PATIENCE_MS = 240_000
"""So long after the last request and fault everything must have ended."""

EVENTS, EVENTS_EACH = 100_000, 1_000
"""A story with more callbacks, and as many more for each request, doesn't end."""

SETTLE_MS = 30_000

CHECK_EVERY = 97
"""Callbacks between two checks of the stages' state."""

NOTED = 4096
"""Parts of the trace that are hashed at once."""


class World:
    """A simulation of one story.

    Attributes:
        calls: The requests, by name; one that is sent twice has a second one.
        gateways: By program, those that run.
        answers: By the id of a gateway's answer, what it answers.
        longest_prefill, longest_sample: Most tokens of a request's prompts, and of a sample.
        pipelines: By program, the running one.
        weights: The numbers of the weights of a lane and version.
        adapters: The numbers of the adapters of an id and version.
        failures: Times of failures of each lane, when a stage of it has failed by an error.
        given_up: How often admission has given up each request.
        slow: Factor of all times.
        losable: Requests that a server may have lost.
        updates: Orders with new weights so far.
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
        self.slow = 1.0
        self.environment = Environment(
            self.loop, self.network, Random(random.random()), lambda: self.slow * story.slowness
        )
        self.environment.capacity = {
            "num_blocks": story.num_blocks,
            "max_batch_size": story.max_batch_size,
            "num_snapshots": story.snapshots,
            "max_model_len": min(512, story.num_blocks * story.block_size),
        }
        self.environment.host_slots = story.host_slots
        self.environment.fatal = frozenset(each.name for each in story.requests if each.fatal)
        # A folder is for one executor.
        own = story.split or story.replicas == 1
        self.environment.disk_blocks = story.disk_blocks if own else 0
        self.network.record = self._note_command
        self.network.noise = story.noise
        self.environment.note_weights = self._note_weights
        self.weights: dict[tuple[str, int], set[int]] = {}
        self.adapters = self.environment.adapters
        self.calls = {request.name: Call(request) for request in story.requests}
        self.calls |= {f"{each.name}'": Call(each) for each in story.requests if each.twice}
        self._open = [*self.calls.values()]  # less those at its end that have ended
        self.longest_prefill = max((len(r.prompt) * r.n for r in story.requests), default=0)
        self.longest_sample = max((r.max_tokens for r in story.requests), default=0)
        if story.gateways:  # now, since modules of theirs are replaced, too
            from . import gateways, http_clients  # noqa: F401

            self.environment.more = gateways.replaced()
        self.gateways: dict[str, SimulatedGateway] = {}
        self.answers: dict[str, Request] = {}
        self.ran = self.environment.ran
        # Of all clients over HTTP; no fault strikes it.
        self._outside = SimulatedProcess("http", 0)
        self.processes: dict[str, SimulatedProcess] = {}
        self.pipelines: dict[str, Pipeline] = {}
        self._running: dict[SimulatedProcess, Pipeline] = {}
        self.clients: dict[int, tuple[SimulatedProcess | None, BusClient]] = {}
        self.violations: list[str] = []
        self.lines: list[str] | None = [] if trace else None
        self._digest = hashlib.blake2b(digest_size=16)
        self._noted: list[bytes] = []
        self._pids = 0
        self.losable: set[str] = set()
        self.failures: dict[str, list[int]] = {}
        self.given_up: Counter[str] = Counter()
        self.updates = 10  # the adapters of the settings have the numbers before
        self._faults = Faults(self, self._random)
        self._dead: list[Any] = [self._outside]
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
            self.note("end", str(self.loop.num_events), str(self.loop.now_ns))

    def digest(self) -> str:
        """Return the digest of all that has happened."""
        self._hash_notes()
        return self._digest.hexdigest()

    @property
    def is_disturbed(self) -> bool:
        """Whether a lane may fail, and leave an order without an answer."""
        kinds = {fault.kind for fault in self.story.faults}
        return bool(kinds - {*ORDERS, "garbage", "slow"}) or any(
            each.fatal for each in self.story.requests
        )

    def violate(self, what: str) -> None:
        """Note that something is wrong; the first such note ends the story."""
        if self._stopped:
            return
        self.violations.append(what)
        self.note("VIOLATION", what)

    def _begin(self) -> None:
        for program in (*self.story.programs, *self.story.gateway_programs):
            if program not in self.processes:
                self.start(program)
        for number in range(self.story.clients):
            self.start_client(number)
        lines = [each for each in self.story.requests if each.interface == "batch"]
        if lines:
            self.at(min(each.at_ms for each in lines), partial(self._begin_batch, lines))
        for request in self.story.requests:
            if request.interface != "batch":
                send = self._send if request.interface == "bus" else self._call_gateway
                self.at(request.at_ms, partial(send, request))
        self._faults.begin()
        self.loop.most_events = EVENTS + EVENTS_EACH * len(self.story.requests)
        self.loop.check, self.loop.check_every = self._check, CHECK_EVERY

    def _is_over(self) -> bool:
        if self.violations:
            return True
        if self._faults.num_open:
            return False
        while self._open and self._open[-1].ended:
            self._open.pop()
        return not self._open

    def _settle(self) -> None:
        """Wait until nothing is in flight, and check what is left."""
        for call in self.calls.values():
            for what in check_call(self, call):
                self.violate(f"{call.request.name}: {what}")
        limit_ns = self.loop.now_ns + SETTLE_MS * MS
        self.loop.run_until(lambda: is_at_rest(self), limit_ns, every=50)
        for what in check_end(self):
            self.violate(what)

    def _check(self) -> None:
        for what in check_state(self):
            self.violate(what)

    def at(self, at_ms: int, action: Callable[[], object]) -> None:
        self.loop.call_in(at_ms * MS - self.loop.now_ns, action, context=Context())

    # --- programs -----------------------------------------------------------------------------

    def start(self, program: str) -> None:
        """Start a program, again if it was killed."""
        process = self._process(program)
        self.note("start", program)
        self.processes[program] = process
        serve = self._serve_gateway if program.startswith("gateway") else self._serve
        self.loop.start(process, serve(program, process))

    def replace(self, program: str, process: SimulatedProcess) -> None:
        """Start a program although its process may go on."""
        if self.processes.get(program) is process:
            self.pipelines.pop(program, None)
            self.start(program)

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
            async with pipeline, AsyncExitStack() as opened:
                self.pipelines[program] = self._running[process] = pipeline
                if self.story.bus == "memory":
                    self.clients[0] = process, pipeline.client
                    if self.story.gateways:
                        gateway = self._gateway(program, process, pipeline.client, config)
                        await opened.enter_async_context(gateway)
                await pipeline.failed()
        except LaneReplaced as error:
            self.note("replaced", program)
            if self.processes.get(program) is process and not self._goes_on(program, process):
                self.violate(f"{program}: {error.message}")
        except Exception as error:  # noqa: BLE001  (a program that fails is a finding)
            self.violate(f"{program} failed: {error!r}")
        finally:
            self._running.pop(process, None)

    def _goes_on(self, program: str, replaced: SimulatedProcess) -> bool:
        """Return whether another process of a program runs: one that stood still during its start,
        and so is the newer one for the bus."""
        for process, pipeline in self._running.items():
            if process is not replaced and process.alive and process.name == program:
                self.processes[program], self.pipelines[program] = process, pipeline
                return True
        return False

    async def _serve_gateway(self, program: str, process: SimulatedProcess) -> None:
        try:
            config = config_of(self.settings, "0")
            client = BusClient(open_bus(config.bus))
            async with self._gateway(program, process, client, config):
                await self.loop.create_future()  # until the process is killed
        except Exception as error:  # noqa: BLE001  (a program that fails is a finding)
            self.violate(f"{program} failed: {error!r}")

    @asynccontextmanager
    async def _gateway(
        self, program: str, process: SimulatedProcess, client: BusClient, config: Config
    ) -> AsyncIterator[None]:
        """Run a gateway while the context is open."""
        from .gateways import SimulatedGateway

        delay_ns = self.network.draw_delay_ns
        async with SimulatedGateway(self.loop, process, client, config, delay_ns) as gateway:
            self.gateways[program] = gateway
            yield

    def kill(self, program: str) -> None:
        """End a process at once; nothing of it runs any more."""
        process = self.processes.pop(program)
        self.note("kill", program)
        process.alive = False
        self.pipelines.pop(program, None)
        if (gateway := self.gateways.pop(program, None)) is not None:
            gateway.kill()
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

    def start_client(self, number: int) -> None:
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
            self.at(self.loop.now_ns // MS + 1, lambda: self._send(request))
            return
        process, client = self.clients[request.client]
        assert process is not None
        call = self.calls[request.name]
        call.process = process
        self.loop.start(process, self._call(client, call))

    def _call_gateway(self, request: Request) -> None:
        from .http_clients import HttpCall

        programs, name = self.story.gateway_programs, request.name
        for number, each in enumerate((name, f"{name}'")[: 1 + request.twice]):
            call = self.calls[each]
            call.process = self._outside
            first = request.client + number
            self.loop.start(self._outside, HttpCall(self, call, programs, first).run())

    def _begin_batch(self, lines: list[Request]) -> None:
        from .batch_clients import BatchCall

        calls = [self.calls[each.name] for each in lines]
        for call in calls:
            call.process = self._outside
        programs = self.story.gateway_programs
        self.loop.start(self._outside, BatchCall(self, calls, programs, "the batch").run())

    async def _call(self, client: BusClient, call: Call) -> None:
        request = call.request
        outputs = client.submit(message_of(request))
        try:
            if request.leave_ms:
                with anyio.move_on_after(request.leave_ms / 1000) as scope:
                    await self._read(call, outputs)
                call.left = scope.cancelled_caught
            else:
                await self._read(call, outputs)
        except NanoInferenceError as error:
            call.error = error
            self.note("error", request.name, error.code)
        finally:
            await outputs.aclose()
            call.ended, call.ended_ns = True, self.loop.now_ns

    async def _read(self, call: Call, outputs: Any) -> None:
        async for output in outputs:
            call.outputs.append(output)
            self.note("output", call.request.name, msgspec.json.encode(output).decode())

    def _note_weights(self, process: SimulatedProcess, version: int, number: int) -> None:
        lane = process.name.partition("/")[0]
        numbers = self.weights.setdefault((lane, version), set())
        numbers.add(number)
        # A lane that starts again has its first weights, and counts from there.
        restarts = any(fault.kind in ("kill", "crash") for fault in self.story.faults)
        if len(numbers) > 1 and not restarts:
            self.violate(f"lane {lane} has weights {sorted(numbers)} as version {version}")

    # --- the trace ----------------------------------------------------------------------------

    def note(self, *parts: str) -> None:
        line = f"{self.loop.now_ns / MS:12.3f} {' '.join(parts)}"
        self._noted.append(line.encode("utf-8", "surrogatepass"))
        if self.lines is not None:
            self.lines.append(line)

    def _note_command(self, owner: SimulatedProcess | None, command: Arguments, reply: Any) -> None:
        noted = self._noted
        noted.append(b"%d %d" % (self.loop.now_ns, owner.pid if owner else 0))
        noted += command
        if len(noted) > NOTED:
            self._hash_notes()
        if self.lines is not None:
            shown = " ".join(_shown(each) for each in command)
            name = owner.name if owner else "-"
            text = f"{self.loop.now_ns / MS:12.3f} {name}: {shown} -> {_brief(reply)}"
            self.lines.append(text)

    def _hash_notes(self) -> None:
        """Add what was noted to the digest."""
        self._digest.update(b" ".join(self._noted))
        self._noted.clear()

    def _log(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
        process = PROCESS.get()
        if process is not None and process.alive and not self._stopped:
            name = str(event.get("event"))
            fields = {k: v for k, v in event.items() if k not in ("event", "exc_info", "brief")}
            if self.lines is not None:  # not in the digest, since only a trace has all of them
                about = f"log {process.name} {method} {name} {fields}"
                self.lines.append(f"{self.loop.now_ns / MS:12.3f} {about}")
            error = event.get("exc_info")
            if name == "stage_failed":
                lane = process.name.partition("/")[0]
                self.failures.setdefault(lane, []).append(self.loop.now_ns)
            if name == "request_given_up":
                self.given_up[str(fields.get("request_id"))] += 1
            if name == "stage_failed" and not self._may_fail(str(fields.get("error"))):
                self.violate(f"{process.name}: a stage failed: {fields}")
                if self.lines is not None and isinstance(error, BaseException):
                    import traceback

                    self.lines += traceback.format_exception(error)
            if name in ("http_handler_failed", "call_failed"):
                self.violate(f"{process.name}: a gateway failed: {error!r}")
            if name == "bus.task_failed":
                self.violate(f"{process.name}: a task of the bus failed: {fields}")
        raise structlog.DropEvent

    def _may_fail(self, error: str) -> bool:
        """Return whether a stage may fail with an error."""
        if "SimulatedCrash" in error or "FatalRequest" in error:
            return True
        # One that stood still misses the plans that its successor has removed.
        doubled = {fault.target for fault in self.story.faults if fault.kind == "double"}
        if any("/executor" in target for target in doubled) and "LostPlan" in error:
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
        self._running.clear()
        self.clients.clear()
        self.gateways.clear()
        self._faults.drop()


def _shown(raw: bytes) -> str:
    text = raw.decode("utf-8", "backslashreplace")
    return text if len(text) <= 80 else f"{text[:60].strip()!r}..({len(text)})"


def _brief(reply: Any) -> str:
    text = repr(reply)
    return text if len(text) <= 200 else text[:200] + "..."
