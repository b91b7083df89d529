"""What hostile.py attacks, and how it looks at it: `up --gateway`, its memory, a bystander."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from statistics import median
from typing import IO, Any, Literal, NamedTuple

import redis
import redis.asyncio
from chaos_rig import free_port

PERIOD_S = 0.1
"""A bystander sends a request this often over HTTP, and another over Redis."""

_CONSTRAINED_EVERY = 5
"""Of so many requests over HTTP there is one more, with a regular expression that is new."""

GRACE_S = 60.0
"""How long its requests may take before they count as lost."""

START_LIMIT_S = 90.0

_FULL_BATCH = 256
"""Requests at once: two full batches on a CPU."""

WORST_S = 1.0
"""Longest wait of a bystander."""

MEMORY_MB = 100.0
"""More than before an attack that the processes may take after it."""


LOG_KB = 1024
"""What an attack may add to the log."""


class Surroundings(NamedTuple):
    """How a pipeline is started.

    Attributes:
        descriptors: The limit of open files that all processes start with.
        grpc: Whether it speaks gRPC, too.
        log: Where its log goes: a file, a disk that is full, or a pipe that nobody has open or
            reads.
        serve: Whether it is `serve`, in one process and without Redis, instead of `up --gateway`.
    """

    descriptors: int | None = None
    grpc: bool = False
    log: Literal["file", "full", "closed", "unread"] = "file"
    serve: bool = False


class Target(NamedTuple):
    """Where the attacked pipeline is; everything is on 127.0.0.1. Without Redis its port is 0."""

    http_port: int
    redis_port: int
    folder: str
    grpc_port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"


class Live:
    """`nano-inference up --gateway` with its embedded server, on free ports.

    Attributes:
        target: Where it is.
        surroundings: How it was started.
        pids: Of each process by its role, when it had just started.
        start_mb: What ours took when they had served two full batches.
    """

    def __init__(
        self,
        folder: Path,
        surroundings: Surroundings | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        """Starts it."""
        folder.mkdir(parents=True)
        self.surroundings = surroundings = surroundings or Surroundings()
        redis_port = 0 if surroundings.serve else free_port()
        self.target = Target(free_port(), redis_port, str(folder), free_port())
        self.log = folder / "up.log"
        self.log.touch()
        self.pids: dict[str, int] = {}
        self.start_mb = 0.0
        command = [sys.executable, "-m", "nano_inference"]
        if surroundings.serve:
            command += ["serve", "--port", str(self.target.http_port)]
        else:
            command += ["up", "--gateway", str(self.target.http_port), "--port", str(redis_port)]
        if surroundings.grpc:
            command += ["--grpc-port", str(self.target.grpc_port)]
        for name, value in {"pipeline.drain_timeout_s": 2, **(settings or {})}.items():
            command += ["--set", f"{name}={value}"]
        if (most := surroundings.descriptors) is not None:
            command = ["/bin/sh", "-c", f'ulimit -n {most}; exec "$@"', "sh", *command]
        # What a killed process leaves in the temporary folder goes with ours.
        environment = os.environ | {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
        self._unread: int | None = None
        with self._output() as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, start_new_session=True
            )

    def _output(self) -> IO[bytes]:
        """Where its log goes."""
        match self.surroundings.log:
            case "file":
                return self.log.open("ab")
            case "full":
                return open("/dev/full", "ab")
            case "closed" | "unread" as kind:
                reading, writing = os.pipe()
                if kind == "unread":
                    self._unread = reading
                else:
                    os.close(reading)
                return open(writing, "ab")

    def wait(self) -> None:
        """Until it has answered requests. Raises RuntimeError when it does not."""
        body = json.dumps({"text": "1 + 1 =", "sampling_params": {"max_new_tokens": 1}}).encode()
        request = urllib.request.Request(
            f"{self.target.url}/generate", body, {"Content-Type": "application/json"}
        )
        end = time.monotonic() + START_LIMIT_S
        while time.monotonic() < end and self._process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=30):
                self.pids = self.processes()
                asyncio.run(_use(self.target))
                self.start_mb = self.memory_mb()
                return
            time.sleep(0.2)
        raise RuntimeError(f"`up` did not start:\n{self.log.read_text()[-2000:]}")

    def processes(self) -> dict[str, int]:
        """Each process by its role; of a killed one there may be none."""
        found = {}
        for pid in self._tree():
            with contextlib.suppress(OSError):
                # Of a fork it is one text, of a program its arguments with a zero after each.
                arguments = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").split()
                found[_role(arguments)] = pid
        found.pop("", None)
        return found

    def memory_mb(self) -> float:
        """Proportional set size of our processes: what is shared counts once. Without the server,
        which keeps results for `bus.results_ttl_s`, whoever asked for them."""
        return sum(map(_pss_mb, self._tree())) - self.server_mb()

    def server_mb(self) -> float:
        """What the embedded server takes."""
        return _pss_mb(self.pids["server"]) if "server" in self.pids else 0.0

    def memory_by_role_mb(self) -> dict[str, int]:
        """The same by process."""
        return {role: round(_pss_mb(pid)) for role, pid in self.processes().items()}

    def is_idle(self) -> bool:
        """Whether no request waits or runs, as far as Redis tells."""
        if not self.target.redis_port:
            return True
        try:
            with redis.Redis(port=self.target.redis_port, socket_timeout=5) as client:
                return client.xlen("nano:requests") == 0
        except redis.RedisError:
            return False

    def stop(self) -> None:
        """Ends all processes, whatever state they are in."""
        # Some may have outlived `up`, if that has ended by itself.
        tree = {*self.pids.values(), *self._tree()}
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(15)
        for pid in tree | {*self._tree()}:
            with contextlib.suppress(ProcessLookupError):
                if _is_ours(pid, self.target.folder):
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()
        if self._unread is not None:
            os.close(self._unread)
            self._unread = None

    def _tree(self) -> list[int]:
        """The processes that descend from ours, which comes first."""
        return descendants(self._process.pid) if self._process.poll() is None else []


def descendants(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    for each in found:  # grows meanwhile
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += [int(child) for child in children.read_text().split()]
    return found


async def _use(target: Target) -> None:
    """Fill the batch, then all but the last blocks of the KV cache: memory that is touched for the
    first time is not charged to an attack."""
    everyday = {"text": "1 + 1 =", "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}}
    await asyncio.gather(*(generate(target, everyday, "everyday") for _ in range(_FULL_BATCH)))
    prompts = [[5 + number % 16, 5 + number // 16] * 200 for number in range(_FULL_BATCH)]
    one_token = {"max_new_tokens": 1}
    bodies = [{"input_ids": prompt, "sampling_params": one_token} for prompt in prompts]
    await asyncio.gather(*(generate(target, body, "everyday") for body in bodies))


def _pss_mb(pid: int) -> float:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0  # it has ended


def _role(arguments: list[str]) -> str:
    if "nano_inference.cli.fork_server" in arguments:
        return ""  # which names whom it forks
    if "--stages" in arguments:
        return arguments[arguments.index("--stages") + 1]
    for role in ("gateway", "up", "serve"):
        if role in arguments:
            return role
    return "server" if "valkey" in arguments[0] else ""


def _is_ours(pid: int, folder: str) -> bool:
    """Whether a process id is still that of a process with our temporary folder."""
    with contextlib.suppress(OSError):
        return f"TMPDIR={folder}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    return False


# --- the bystander, a process of its own ----------------------------------------------------------


class Waits:
    """How long requests took, in seconds."""

    def __init__(self) -> None:
        self._answered: list[float] = []
        self._lost: list[float] = []
        self._errors: list[str] = []

    async def measure(self, attempt: Callable[[], Awaitable[None]]) -> None:
        start = time.monotonic()
        try:
            async with asyncio.timeout(GRACE_S):
                await attempt()
        except Exception as error:  # noqa: BLE001  (whatever it is, this one was lost)
            self._lost.append(time.monotonic() - start)
            self._errors.append(f"{type(error).__name__} {error}"[:100])
        else:
            self._answered.append(time.monotonic() - start)

    def summary(self) -> dict[str, Any]:
        return {
            "sent": len(self._answered) + len(self._lost),
            "worst_s": round(max((*self._answered, *self._lost), default=0.0), 3),
            "median_s": round(median(self._answered), 3) if self._answered else None,
            "lost": len(self._lost),
            "errors": sorted(set(self._errors))[:3],
        }


async def ask_over_http(target: Target, number: int) -> None:
    """A small request on a connection of its own."""
    await _ask(target, number, _small("max_new_tokens"))


async def ask_constrained(target: Target, number: int) -> None:
    """The same with a constraint that has to be compiled."""
    regex = f"[0-9]{{1,9}}(x{number})?"
    await _ask(target, number, {"max_new_tokens": 4, "temperature": 0, "regex": regex})


async def _ask(target: Target, number: int, sampling: dict[str, Any]) -> None:
    body = {"text": f"{number % 90} + 25 =", "sampling_params": sampling}
    status = await generate(target, body, "bystander")
    if status != "200":
        raise RuntimeError(f"status {status or 'none: the connection was closed'}")


async def generate(target: Target, body: dict[str, Any], tenant: str) -> str:
    """`POST /generate`; the status. By hand, so that it costs next to nothing."""
    content = json.dumps(body)
    head = f"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Tenant: {tenant}\r\n"
    head += "Content-Type: application/json\r\nConnection: close\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", target.http_port)
    try:
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n{content}".encode())
        answer = await reader.read()
    finally:
        writer.close()
    return answer[9:12].decode()


async def ask_over_redis(client: redis.asyncio.Redis, number: int) -> None:
    """The same over the bus, as any program would."""
    request = {
        "prompt": f"{number % 90} + 25 =",
        "tenant": "bystander",
        "stream": False,
        "sampling": _small("max_tokens"),
    }
    entry_id = await client.xadd("nano:requests", {"json": json.dumps(request)})
    reply: Any = None
    end = time.monotonic() + GRACE_S  # before Python 3.12 the client may lose a cancellation
    while not reply and time.monotonic() < end:
        reply = await client.xread({f"nano:out:{entry_id}": "0"}, block=2000)
    if not reply:
        raise TimeoutError
    (entries,) = dict(reply).values()
    output = json.loads(entries[-1][1]["json"])
    if output.get("status") != "done":
        raise RuntimeError(f"{output.get('status')}: {output.get('error')}")


def _small(name: str) -> dict[str, Any]:
    return {name: 4, "temperature": 0, "ignore_eos": True}


async def stand_by(target: Target) -> dict[str, Any]:
    """Sends until standard input is closed; what both ways took."""
    closed = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    http, bus, constrained = Waits(), Waits(), Waits()
    running: set[asyncio.Task[None]] = set()
    pool = redis.asyncio.ConnectionPool(
        host="127.0.0.1",
        port=target.redis_port,
        decode_responses=True,
        protocol=2,
        max_connections=2000,
        socket_timeout=GRACE_S,
    )
    async with redis.asyncio.Redis(connection_pool=pool) as client:
        number = 0
        while not closed.done():
            number += 1
            works = [http.measure(lambda n=number: ask_over_http(target, n))]
            if target.redis_port:
                works.append(bus.measure(lambda n=number: ask_over_redis(client, n)))
            if number % _CONSTRAINED_EVERY == 0:
                works.append(constrained.measure(lambda n=number: ask_constrained(target, n)))
            running.update(map(asyncio.create_task, works))
            await asyncio.sleep(PERIOD_S)
        await asyncio.wait(running)
    ways = {"http": http, "redis": bus, "constrained": constrained}
    return {way: waits.summary() for way, waits in ways.items()}


class Bystander:
    """The process, from `with` to `stop`."""

    def __init__(self, target: Target) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(target)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> Bystander:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def leave(self) -> None:
        """Sends no more; `result` has what comes of the rest."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.stdin = None

    def is_done(self) -> bool:
        return self._process.poll() is not None

    def result(self) -> dict[str, Any]:
        output, _ = self._process.communicate(timeout=GRACE_S)
        found: dict[str, Any] = json.loads(output)
        return found


def bounds_broken(row: dict[str, Any]) -> list[str]:
    """The bounds that a row does not keep, as sentences."""
    found = []
    for way in ("http", "redis", "constrained"):
        waits = row[way]
        if waits["worst_s"] > WORST_S:
            found.append(f"a bystander waits {waits['worst_s']:.1f} s over {way}")
        if waits["lost"]:
            found.append(f"{waits['lost']} of {waits['sent']} lost over {way}: {waits['errors']}")
    if row["after_mb"] > row["before_mb"] + MEMORY_MB:
        found.append(f"{row['after_mb'] - row['before_mb']} MB more than before")
    if row["log_kb"] > LOG_KB:
        found.append(f"{row['log_kb']} kB more in the log")
    if not row["same_processes"]:
        found.append("processes ended")
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(stand_by(Target(*json.loads(sys.argv[1]))))))
