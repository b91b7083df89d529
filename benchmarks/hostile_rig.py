"""Parts of hostile.py: the attacked pipeline, its memory, the bystanders, the bounds."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from statistics import median
from typing import IO, Any, Literal, NamedTuple

import harness
import redis
import redis.asyncio
from PIL import Image

from nano_inference.store.redis.embedded import EmbeddedPassword

PERIOD_S = 0.1
"""Time between a bystander's requests over HTTP, and between those over Redis."""

_CONSTRAINED_EVERY = 5
"""Requests over HTTP per request with a new regular expression."""

GRACE_S = 60.0
"""Time after which a bystander's request counts as lost."""

START_LIMIT_S = 90.0

_FULL_BATCH = 256
"""Requests at once: two full batches on a CPU."""

WORST_S = 1.0
"""Longest wait of a bystander."""

MEMORY_MB = 100.0
"""Largest growth of the processes' memory from before to after an attack."""

LOG_KB = 1024
"""Largest growth of the log during an attack."""


class Surroundings(NamedTuple):
    """The settings and processes with which a pipeline is started.

    Attributes:
        descriptors: The limit of open files of all processes.
        grpc: Whether it also speaks gRPC.
        log: Destination of its log: a file, a full disk, or a pipe without a reader or unread.
        serve: Start `serve`, one process without Redis, instead of `up --gateway`.
        images: Serve a model that takes images, and scales the shorter side to a fixed length.
    """

    descriptors: int | None = None
    grpc: bool = False
    log: Literal["file", "full", "closed", "unread"] = "file"
    serve: bool = False
    images: bool = False


class Target(NamedTuple):
    """Addresses of the attacked pipeline on 127.0.0.1; without Redis its port is 0."""

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
        target: Its addresses.
        surroundings: The settings of its start.
        pids: Process ids by role, right after the start.
        start_mb: Memory of our processes after two full batches.
    """

    def __init__(
        self,
        folder: Path,
        surroundings: Surroundings | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        folder.mkdir(parents=True)
        self.surroundings = surroundings = surroundings or Surroundings()
        redis_port = 0 if surroundings.serve else harness.free_port()
        self.target = Target(harness.free_port(), redis_port, str(folder), harness.free_port())
        self.log = folder / "up.log"
        self.log.touch()
        self.pids: dict[str, int] = {}
        self.start_mb = 0.0
        if surroundings.serve:
            arguments = ["serve", "--port", self.target.http_port]
        else:
            arguments = ["up", "--gateway", self.target.http_port, "--port", redis_port]
        if surroundings.grpc:
            arguments += ["--grpc-port", self.target.grpc_port]
        settings = {"pipeline.drain_timeout_s": 2, **(settings or {})}
        if surroundings.images:
            settings["engine.model_path"] = _vision_folder(folder / "vision")
        command = harness.engine_command(*arguments, settings=settings)
        if (most := surroundings.descriptors) is not None:
            command = ["/bin/sh", "-c", f'ulimit -n {most}; exec "$@"', "sh", *command]
        # Temporary files of killed processes are deleted with our folder.
        environment = os.environ | {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
        self._unread: int | None = None
        with self._output() as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, start_new_session=True
            )

    def _output(self) -> IO[bytes]:
        """Open the destination of the log."""
        kind = self.surroundings.log
        if kind in ("file", "full"):
            return open(self.log if kind == "file" else "/dev/full", "ab")
        reading, writing = os.pipe()
        if kind == "unread":
            self._unread = reading
        else:
            os.close(reading)
        return open(writing, "ab")

    def wait(self) -> None:
        """Wait until it answers, and use its memory once.

        Raises:
            RuntimeError: It has ended, or does not answer in time.
        """
        body = {"text": "1 + 1 =", "sampling_params": {"max_new_tokens": 1}}
        try:
            harness.wait_until_answered(
                f"{self.target.url}/generate", self._process, body, START_LIMIT_S
            )
        except RuntimeError:
            raise RuntimeError(f"`up` did not start:\n{self.log.read_text()[-2000:]}") from None
        self.pids = self.processes()
        asyncio.run(_use(self.target))
        if self.surroundings.images:
            asyncio.run(_use_images(self.target))
        self.start_mb = self.memory_mb()

    def processes(self) -> dict[str, int]:
        """Return the process id of each role that has a process now."""
        found: dict[str, int] = {}
        for pid in self._tree():
            # A role's own forks, as those that render chat templates, have its command line.
            found.setdefault(_role(harness.command_line(pid)), pid)
        found.pop("", None)
        return found

    def memory_mb(self) -> float:
        """Return the proportional set size of our processes, which counts shared memory once.

        Without the server, which keeps the results of all clients for `bus.results_ttl_s`.
        """
        return sum(map(harness.pss_mb, self._tree())) - self.server_mb()

    def server_mb(self) -> float:
        """Return the embedded server's memory."""
        return harness.pss_mb(self.pids["server"]) if "server" in self.pids else 0.0

    def memory_by_role_mb(self) -> dict[str, int]:
        return {role: round(harness.pss_mb(pid)) for role, pid in self.processes().items()}

    def is_idle(self) -> bool:
        """Return whether Redis holds no request; always true without Redis."""
        if not (port := self.target.redis_port):
            return True
        password = EmbeddedPassword(port)
        try:
            with redis.Redis(port=port, socket_timeout=5, credential_provider=password) as client:
                return client.xlen("nano:requests") == 0
        except redis.RedisError:
            return False

    def stop(self) -> None:
        """End all processes, whatever their state."""
        # If `up` has ended, some of its processes may be left.
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
        return harness.descendants(self._process.pid) if self._process.poll() is None else []


async def _use(target: Target) -> None:
    """Fill the batch, then nearly all blocks of the KV cache, so that memory used for the first
    time doesn't count as an attack's."""
    everyday = {"text": "1 + 1 =", "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}}
    await asyncio.gather(*(generate(target, everyday, "everyday") for _ in range(_FULL_BATCH)))
    prompts = [[5 + number % 16, 5 + number // 16] * 200 for number in range(_FULL_BATCH)]
    one_token = {"max_new_tokens": 1}
    bodies = [{"input_ids": prompt, "sampling_params": one_token} for prompt in prompts]
    await asyncio.gather(*(generate(target, body, "everyday") for body in bodies))


def _vision_folder(folder: Path) -> Path:
    """Copy the bundled vision model, with the resizing of LLaVA 1.5."""
    shutil.copytree(Path(__file__).parent.parent / "models" / "tiny-vision", folder)
    file = folder / "processor_config.json"
    settings = json.loads(file.read_text())
    (side,) = {*settings["image_processor"]["size"].values()}
    settings["image_processor"] |= {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": side},
        "crop_size": {"height": side, "width": side},
        "do_center_crop": True,
    }
    file.write_text(json.dumps(settings))
    return folder


def small_image(shade: int, side: int = 64) -> bytes:
    """Return an image of one shade."""
    file = io.BytesIO()
    Image.new("RGB", (side, side), (shade, 0, 0)).save(file, "PNG")
    return file.getvalue()


def image_chat(files: list[bytes], *, counts: bool = False) -> dict[str, Any]:
    """Return the body of a chat about images, or for Anthropic's counting of tokens."""
    parts: list[dict[str, Any]] = []
    for file in files:
        data = base64.b64encode(file).decode()
        if counts:
            source = {"type": "base64", "media_type": "image/png", "data": data}
            parts.append({"type": "image", "source": source})
        else:
            parts.append({"type": "image_url", "image_url": {"url": f"data:;base64,{data}"}})
    parts.append({"type": "text", "text": "What do you see?"})
    body = {"model": "", "messages": [{"role": "user", "content": parts}]}
    return body if counts else body | {"max_tokens": 4}


async def _use_images(target: Target) -> None:
    """Start all processes that decode images, with images of several tenants at once."""
    for path, counts in (("/v1/chat/completions", False), ("/v1/messages/count_tokens", True)):
        bodies = [image_chat([small_image(n, 2500)], counts=counts) for n in range(12)]
        await asyncio.gather(
            *(generate(target, body, f"user {n % 6}", path) for n, body in enumerate(bodies))
        )


def _role(arguments: list[str]) -> str:
    if not arguments or "nano_inference.cli.fork_server" in arguments:
        return ""  # the fork server names the stages too
    if "--stages" in arguments:
        return arguments[arguments.index("--stages") + 1]
    for role in ("gateway", "up", "serve"):
        if role in arguments:
            return role
    return "server" if "valkey" in arguments[0] else ""


def _is_ours(pid: int, folder: str) -> bool:
    """Return whether a process id still belongs to a process with our temporary folder."""
    with contextlib.suppress(OSError):
        return f"TMPDIR={folder}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    return False


# --- bystanders, in their own process -------------------------------------------------------------


class Waits:
    """Times of requests, in seconds."""

    def __init__(self) -> None:
        self._answered: list[float] = []
        self._lost: list[float] = []
        self._errors: set[str] = set()

    async def measure(self, attempt: Callable[[], Awaitable[None]]) -> None:
        start, times = time.monotonic(), self._answered
        try:
            async with asyncio.timeout(GRACE_S):
                await attempt()
        except Exception as error:  # noqa: BLE001  (any failure is a lost request)
            times = self._lost
            self._errors.add(f"{type(error).__name__} {error}"[:100])
        times.append(time.monotonic() - start)

    def summary(self) -> dict[str, Any]:
        times = (*self._answered, *self._lost)
        return {
            "sent": len(times),
            "worst_s": round(max(times, default=0.0), 3),
            "median_s": round(median(self._answered), 3) if self._answered else None,
            "lost": len(self._lost),
            "errors": sorted(self._errors)[:3],
        }


async def ask_over_http(target: Target, number: int, constrained: bool = False) -> None:
    """Send a small request on a new connection, if wanted with a new constraint to compile."""
    sampling = _small("max_new_tokens")
    if constrained:
        del sampling["ignore_eos"]
        sampling["regex"] = f"[0-9]{{1,9}}(x{number})?"
    body = {"text": f"{number % 90} + 25 =", "sampling_params": sampling}
    status = await generate(target, body, "bystander")
    if status != "200":
        raise RuntimeError(f"status {status or 'none: the connection was closed'}")


async def generate(
    target: Target, body: dict[str, Any], tenant: str, path: str = "/generate"
) -> str:
    """Send a body; return the status. Written by hand, so that it costs little CPU."""
    content = json.dumps(body).encode()
    request = harness.http_post(path, content, f"X-Tenant: {tenant}", "Connection: close")
    reader, writer = await asyncio.open_connection("127.0.0.1", target.http_port)
    try:
        writer.write(request)
        answer = await reader.read()
    finally:
        writer.close()
    return answer[9:12].decode()


async def ask_over_redis(client: redis.asyncio.Redis, number: int) -> None:
    """Send a small request over the bus."""
    request = {
        "prompt": f"{number % 90} + 25 =",
        "tenant": "bystander",
        "stream": False,
        "sampling": _small("max_tokens"),
    }
    entry_id = await client.xadd("nano:requests", {"json": json.dumps(request)})
    reply: Any = None
    end = time.monotonic() + GRACE_S  # before Python 3.12 redis-py may lose a cancellation
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
    """Send until standard input is closed; return the waits by kind of request."""
    closed = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    http, bus, constrained = Waits(), Waits(), Waits()
    running: set[asyncio.Task[None]] = set()
    pool = redis.asyncio.ConnectionPool(
        host="127.0.0.1",
        port=target.redis_port,
        credential_provider=EmbeddedPassword(target.redis_port),
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
                works.append(constrained.measure(lambda n=number: ask_over_http(target, n, True)))
            running.update(map(asyncio.create_task, works))
            await asyncio.sleep(PERIOD_S)
        await asyncio.wait(running)
    ways = {"http": http, "redis": bus, "constrained": constrained}
    return {way: waits.summary() for way, waits in ways.items()}


class Bystander(harness.Worker):
    """The bystanders' process."""

    def __init__(self, target: Target) -> None:
        super().__init__(sys.executable, __file__, json.dumps(target))

    def leave(self) -> None:
        """Send no more requests; `answer` waits for those in flight."""
        self.process.stdin.close()
        self.process.stdin = None


def bounds_broken(row: dict[str, Any]) -> list[str]:
    """Return a sentence for each broken bound."""
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
