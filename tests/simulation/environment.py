"""Replacements for a simulation of this package's surroundings: time, ids, threads."""

from __future__ import annotations

import asyncio
import builtins
import functools
import secrets
import socket
import sys
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import anyio.to_thread
import torch
from anyio._backends import _asyncio as anyio_backend

from nano_inference.bus.redis import bus as redis_bus
from nano_inference.config import EngineConfig, clock
from nano_inference.pipeline import pipeline as pipelines
from nano_inference.stages.admission import stage as admission
from nano_inference.stages.admission.parts import constraints as admission_constraints

# Imported before the clocks are replaced, as the other stages are.
from nano_inference.stages.batching import stage as _batching  # noqa: F401
from nano_inference.stages.executor import stage as executor
from nano_inference.stages.executor.changes import shell as changes
from nano_inference.stages.executor.runner.adapters import peft
from nano_inference.stages.executor.runner.adapters.peft import Adapter
from nano_inference.stages.executor.runner.weights import transports
from nano_inference.stages.fairness import stage as _fairness  # noqa: F401
from nano_inference.stages.streaming import stage as streaming
from nano_inference.text import longest_token
from nano_inference.text.tokenizer import find_tokenizer

from . import model
from .constraints import TriedCompiler
from .executor import SimulatedExecutor
from .loop import PROCESS, OrderedSet, SimulatedLoop, SimulatedProcess
from .redis.client import SimulatedServer
from .redis.network import Network
from .states import State
from .tiers import Block, SimulatedTiers

EPOCH_NS = 1_800_000_000 * 1_000_000_000
"""Wall time at the beginning of each simulation."""

_PACKAGE = "nano_inference."

_NOTHING = object()

_cached_tokenizer = functools.cache(find_tokenizer)
_cached_longest = functools.cache(longest_token.longest_token_bytes)


class _Time:
    """The module `time` in simulated time. A process's wall clock may be wrong."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop

    def monotonic_ns(self) -> int:
        return self._loop.now_ns

    def monotonic(self) -> float:
        return self._loop.now_ns / 1e9

    perf_counter, perf_counter_ns = monotonic, monotonic_ns
    thread_time, thread_time_ns = monotonic, monotonic_ns
    process_time, process_time_ns = monotonic, monotonic_ns

    def time_ns(self) -> int:
        process = PROCESS.get()
        return EPOCH_NS + self._loop.now_ns + (process.wall_offset_ns if process else 0)

    def time(self) -> float:
        return self.time_ns() / 1e9


_Work = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class SimulatedThread:
    """A thread of each process that runs functions in order, each when its time is over."""

    def __init__(self, loop: SimulatedLoop, random: Random, factor: Callable[[], float]) -> None:
        """`factor`: how much slower than usual the machine is."""
        self._loop = loop
        self._random = random.random
        self.adapters: dict[tuple[str, int], set[int]] = defaultdict(set)
        self._factor = factor
        self._free_ns: dict[Any, int] = {}
        self._queues: dict[Any, deque[_Work]] = defaultdict(deque)

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        process = PROCESS.get()
        plan = args[0] if args and type(args[0]).__name__ == "StepPlan" else None
        lasts = 50_000 if plan is None else SimulatedExecutor.duration_ns(plan)
        lasts = int(lasts * (0.5 + self._random()) * self._factor())
        start_ns = max(self._loop.now_ns, self._free_ns.get(process, 0))
        self._free_ns[process] = start_ns + lasts
        queue = self._queues[process]
        queue.append((future, function, args))
        # Not this one, but the next in the queue: a paused process may run timers in any order.
        self._loop.call_in(start_ns + lasts - self._loop.now_ns, _run_next, queue)
        return future

    def close(self) -> None:
        """There is no thread."""


def _run_next(queue: deque[_Work]) -> None:
    future, function, args = queue.popleft()
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(*args))
    except Exception as error:  # noqa: BLE001  (the future carries it)
        future.set_exception(error)


class Environment:
    """Replacements for one simulation.

    Attributes:
        executors: Executors of each started stage object, with its process.
        note_weights: Called with process, version and number of weights in place.
        capacity: Capacity of each executor.
        host_slots, disk_blocks: Host slots and disk blocks of its tiers.
        fatal: Ids of requests that fail each step.
        adapters: By id and version, the numbers that adapters consist of.
        more: Replacements of single names, beside those of all simulations.
        ran: By seed, the ids of the requests that executors have begun.
    """

    def __init__(
        self, loop: SimulatedLoop, network: Network, random: Random, factor: Callable[[], float]
    ) -> None:
        self._loop = loop
        self._network = network
        self._ids = Random(random.random())
        self._thread = SimulatedThread(loop, Random(random.random()), factor)
        self.executors: list[tuple[Any, SimulatedExecutor]] = []
        self.note_weights: Callable[[Any, int, int], object] = lambda process, version, number: None
        self.capacity = {"num_blocks": 64, "max_batch_size": 8, "max_model_len": 512}
        self.host_slots = self.disk_blocks = 0
        self.fatal: frozenset[str] = frozenset()
        self.adapters: dict[tuple[str, int], set[int]] = defaultdict(set)
        self.more: list[tuple[Any, str, Any]] = []
        self.ran: dict[int, set[str]] = defaultdict(set)
        self._factor = factor
        self._peers: dict[str, SimulatedTiers] = {}
        # By program: what a process has written is there when it starts again.
        self._disks: dict[str, dict[bytes, Any]] = defaultdict(dict)

    def modules(self) -> dict[ModuleType, Any]:
        """Return replacements of modules, wherever this package has imported them."""
        ids = self._ids

        def uuid4() -> uuid.UUID:
            return uuid.UUID(int=ids.getrandbits(128), version=4)

        fixed: dict[ModuleType, Any] = {
            time: _Time(self._loop),
            uuid: SimpleNamespace(uuid4=uuid4, UUID=uuid.UUID),
            secrets: SimpleNamespace(randbits=ids.getrandbits, token_hex=secrets.token_hex),
            socket: SimpleNamespace(gethostname=self._host),
        }
        return fixed

    def attributes(self) -> list[tuple[Any, str, Any]]:
        """Return replacements of single names."""
        network, ids = self._network, self._ids

        class Server(SimulatedServer):
            pass

        Server.network = network

        async def run_sync(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
            return await asyncio.wrap_future(self._thread.submit(function, *args))

        def load(config: EngineConfig, device: int | None, shares_kv: bool) -> tuple[Any, None]:
            process = PROCESS.get()
            note = partial(self.note_weights, process)
            tiers = None
            if shares_kv or self.host_slots:
                tiers = partial(self._tiers, process)
            made = SimulatedExecutor(
                config,
                clock.now_ns,
                **self.capacity,
                note_weights=note,
                make_tiers=tiers,
                fatal=self.fatal,
                note_request=self._note_request,
            )
            self.executors.append((process, made))
            return made, None

        jitter = SimpleNamespace(uniform=ids.uniform)
        process = SimpleNamespace(**{"getpid": self._pid})
        return [
            (anyio.to_thread, "run_sync", run_sync),
            (anyio_backend, "set", OrderedSet),
            (clock, "_OFFSET_NS", EPOCH_NS),
            (redis_bus, "Server", Server),
            (redis_bus, "os", process),
            (pipelines, "os", process),
            (pipelines, "identity_of", lambda pid: f"{pid}"),
            (pipelines.ProcessUse, "read", lambda self: (0.0, 0)),
            (executor, "_TORCH_THREAD", self._thread),
            (executor, "facts_of_model", lambda core: {}),
            (executor, "_WAITING_THREAD", self._thread),
            (executor, "_load", load),
            (executor, "facts_of", lambda folder: None),
            (changes, "Background", lambda *args: self._thread),
            (transports, "fetch", lambda source, *more: _weights_in(source.path)),
            (transports.folder, "stamp_of", lambda path, limits: f"stamp of {path}"),
            (changes, "stamp_of", lambda path, limits: f"stamp of {path}"),
            (peft, "read_adapter", self._adapter_in),
            (changes, "stamp_of_adapter", lambda folder: f"stamp of {folder}"),
            (admission, "find_tokenizer", _cached_tokenizer),
            (longest_token, "longest_token_bytes", _cached_longest),
            (admission_constraints, "GrammarCompiler", TriedCompiler),
            (streaming, "find_tokenizer", _cached_tokenizer),
            (sys.modules[_PACKAGE + "store.redis.client"], "random", jitter),
        ]

    def _tiers(
        self,
        process: SimulatedProcess | None,
        memory: list[Block],
        weight_version: int,
        snapshots: list[State] | None = None,
    ) -> SimulatedTiers:
        name = process.name if process is not None else ""
        slots, disk, run = max(self.host_slots, 16), self.disk_blocks, (self._loop, self._ids)

        def make(memory: list[Any], folder: str, slots: int, disk: int, **more: Any) -> Any:
            of_disk = (self._disks[folder], slots, disk, weight_version, self._factor)
            return SimulatedTiers(*run, process, memory, self._peers, *of_disk, **more)

        tiers: SimulatedTiers = make(memory, name, slots, disk)
        if snapshots is not None:
            make(snapshots, f"{name}, states", slots // 8, disk // 4, blocks=tiers)
        return tiers

    def _adapter_in(self, id: str, version: int, folder: str, *more: Any) -> Adapter:
        self.adapters[id, version].add(model.number_of(folder))
        return Adapter(id, version, rank=1, pairs={}, folder=folder, stamp=f"stamp of {folder}")

    def _note_request(self, seed: int | None, request_id: str) -> None:
        self.ran[seed or 0].add(request_id)

    def _host(self) -> str:
        process = PROCESS.get()
        return process.host if process is not None else "world"

    def _pid(self) -> int:
        process = PROCESS.get()
        return process.pid if process is not None else 1

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace everything while the context is open."""
        undo: list[tuple[Any, str, Any]] = []
        replaced = self.modules()
        try:
            for module, attribute, value in _imports(len(sys.modules)):
                undo.append((module, attribute, value))
                setattr(module, attribute, replaced[value])
            for owner, attribute, value in (*self.attributes(), *self.more):
                before = getattr(owner, attribute, _NOTHING)
                # A name that was moved elsewhere would be replaced here in vain.
                assert before is not _NOTHING or hasattr(builtins, attribute), (owner, attribute)
                undo.append((owner, attribute, before))
                setattr(owner, attribute, value)
            yield
        finally:
            for owner, attribute, value in reversed(undo):
                if value is _NOTHING:
                    delattr(owner, attribute)
                else:
                    setattr(owner, attribute, value)


@functools.lru_cache(maxsize=1)
def _imports(number: int) -> list[tuple[ModuleType, str, ModuleType]]:
    """Return where this package's modules have imported what is replaced; `number`: of modules."""
    found = []
    for name, module in list(sys.modules.items()):
        if name.startswith(_PACKAGE) and ".tests." not in name:
            for attribute in ("time", "uuid", "secrets", "socket"):
                value = vars(module).get(attribute)
                if value in (time, uuid, secrets, socket):
                    found.append((module, attribute, value))
    return found


def _weights_in(path: str) -> dict[str, torch.Tensor]:
    """Return the weights of a folder, which is named by their number."""
    return {"weight": torch.full((1, 1), float(model.number_of(path)))}


__all__ = ["EPOCH_NS", "Environment"]
