"""Batches: every line answered once under kills; interactive requests beside one; its throughput.

    python benchmarks/batches.py --part kills [--lines 5000] [--kills 20] [--apart 12] [--json FILE]
    python benchmarks/batches.py --part beside [--seconds 20] [--clients 4] [--in-flight 384]
    python benchmarks/batches.py --part throughput [--lines 1000] [--tokens 32] [--turns 3]
        [--model FOLDER]
    python benchmarks/batches.py --part large [--lines 1000000] [--seconds 20]

`kills`: a lane of five processes and two gateways over a Redis server with an append-only file.
While the batch runs, gateways, stages and the server are killed (SIGKILL) at equal distances of its
progress, at least `--apart` seconds from each other. Each line must have one answer, and lines with
equal prompts equal texts. The requests stream shows each request that a gateway publishes: "again"
are those of a line that had one before, and "repeated" those that were published twice, of which
the second is refused. "recomputed" are the tokens that the engine has computed more than once, and
"undelivered" those that it computed and no line got.

`beside`: clients that send one short chat after another, in turns without and with a batch of the
same server. The gaps between their tokens are compared.

`throughput`: the time of a batch on `serve`, and of `generate` on the same prompts, in turns.

`large`: OpenAI's client uploads a file of many short lines in parts, makes a batch of it, lets it
run for a while, lists and cancels it; the seconds of each and the gateway's most memory meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import httpx
import msgspec
import redis.asyncio
from chaos_http import GatewayProcess
from chaos_rig import STAGES, Deployment, RedisServer, patiently, running_deployment, start_command
from harness import (
    free_port,
    free_ports,
    memory_mb,
    options,
    percentile,
    print_table,
    record,
    stop,
    wait_until_answered,
)

PREFIX = "nano-benchmark-batches"
ENDS = ("completed", "failed", "expired", "cancelled")
PROMPTS = 97
"""Different prompts; lines with the same one must have the same text."""

LOOK_S = 0.2


def lines_of(count: int, tokens: int, model: str = "tiny") -> list[str]:
    """Return the lines of a batch."""
    sampling = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    bodies = [
        {"model": model, "prompt": f"{n % PROMPTS} + 25 =", "seed": n, **sampling}
        for n in range(count)
    ]
    return [
        json.dumps({"custom_id": f"c{n}", "method": "POST", "url": "/v1/completions", "body": body})
        for n, body in enumerate(bodies)
    ]


class Batch:
    """A batch at one of several gateways, whichever answers."""

    def __init__(self, http: httpx.AsyncClient, urls: list[str]) -> None:
        self._http, self._urls = http, urls
        self.id = ""

    async def call(self, method: str, path: str, **given: Any) -> httpx.Response:
        """Call a gateway until one answers with success."""
        while True:
            for url in self._urls:
                try:
                    answer = await self._http.request(method, f"{url}{path}", **given)
                    answer.raise_for_status()
                    return answer
                except httpx.HTTPError:
                    await asyncio.sleep(LOOK_S / 4)

    async def begin(self, lines: list[str]) -> None:
        form = {"data": {"purpose": "batch"}, "files": {"file": ("in", "\n".join(lines).encode())}}
        file_id = (await self.call("POST", "/v1/files", **form)).json()["id"]
        body = {"input_file_id": file_id, "endpoint": "/v1/completions"}
        self.id = (await self.call("POST", "/v1/batches", json=body)).json()["id"]

    async def look(self) -> dict[str, Any]:
        return dict((await self.call("GET", f"/v1/batches/{self.id}")).json())

    async def until(self, done: int, look_s: float = LOOK_S) -> dict[str, Any]:
        """Wait until so many lines have an answer, or the batch has ended."""
        while True:
            found = await self.look()
            if found["request_counts"]["completed"] >= done or found["status"] in ENDS:
                return found
            await asyncio.sleep(look_s)

    async def ended(self, look_s: float = LOOK_S) -> dict[str, Any]:
        while (found := await self.until(1 << 60, look_s))["status"] not in ENDS:
            pass
        return found

    async def answers(self, found: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the lines of the output and error files."""
        lines: list[dict[str, Any]] = []
        for file_id in filter(None, (found["output_file_id"], found["error_file_id"])):
            text = (await self.call("GET", f"/v1/files/{file_id}/content")).text
            lines += map(json.loads, text.splitlines())
        return lines


@asynccontextmanager
async def deployed(
    folder: Path, gateways: int, settings: dict[str, object], metrics_port: int = 0
) -> AsyncIterator[tuple[RedisServer, Deployment, list[GatewayProcess]]]:
    """Run a server with an append-only file, a lane of five processes, and gateways.

    Args:
        metrics_port: The first of the lane's ports of metrics; 0 for none.
    """
    server = RedisServer(folder / "redis", "always")
    await server.start()
    settings = {"bus.prefix": PREFIX, "engine.dtype": "bfloat16", **settings}
    processes: list[GatewayProcess] = []
    try:
        own = settings | {"telemetry.metrics_port": metrics_port}
        async with running_deployment(server.url, folder / "up.log", own) as deployment:
            for number in range(gateways):
                log = folder / f"gateway{number}.log"
                processes.append(GatewayProcess(server.url, log, settings))
                await processes[-1].start()
            body = {"model": "tiny", "prompt": "1", "max_tokens": 1}
            url = f"{processes[0].url}/v1/completions"
            await asyncio.to_thread(wait_until_answered, url, deployment.process, body)
            yield server, deployment, processes
            for each in processes:
                each.kill()
    finally:
        for each in processes:
            each.kill()
        server.kill()


# --- kills ---------------------------------------------------------------------------------------


class Published:
    """The requests that gateways publish, read while they pass.

    Attributes:
        ids: By line, the ids of its requests in order. A line's seed is its number.
        after: The last kill; "" before the first.
        again: By the kill before them, requests of lines that had another request before.
        repeated: Likewise, requests that were published before.
    """

    def __init__(self, plain: Any) -> None:
        self._plain = plain
        self.ids: dict[int, list[str]] = {}
        self.after = ""
        self.again, self.repeated = Counter[str](), Counter[str]()

    async def read(self) -> None:
        """Read the stream until cancelled."""
        at = {f"{PREFIX}:requests": b"0"}
        while True:
            for key, found in await patiently(lambda: self._plain.xread(at, 1000, 500)):
                at[key.decode()] = found[-1][0]
                for _, fields in found:
                    self._take(decoded(fields))

    def _take(self, request: Any) -> None:
        if (line := request["sampling"].get("seed")) is None:
            return
        if request["request_id"] in (ids := self.ids.setdefault(line, [])):
            self.repeated[self.after] += 1
        elif ids:
            self.again[self.after] += 1
        ids.append(request["request_id"])


def decoded(fields: dict[bytes, bytes]) -> Any:
    """Return the request of an entry."""
    if (packed := fields.get(b"msgpack")) is not None:
        return msgspec.msgpack.decode(packed)
    return msgspec.json.decode(fields[b"json"])


class LaneMetrics:
    """Counters of a lane's processes, summed over those that were killed.

    A process's counts since the last look before its death are lost.
    """

    NAMES: ClassVar = {
        "decoded": "nano_tokens_decoded_total",
        "prefilled": "nano_tokens_prefilled_total",
        "cached": "nano_tokens_cached_total",
        "recomputed": "nano_tokens_recomputed_total",
        "wasted": "nano_tokens_wasted_total",
        "replayed": "nano_requests_replayed_total",
    }

    def __init__(self, http: httpx.AsyncClient, first_port: int) -> None:
        self._http, self._ports = http, range(first_port, first_port + len(STAGES))
        self._ended = Counter[str]()
        self._last: dict[int, Counter[str]] = {}

    async def look(self) -> None:
        for port in self._ports:
            try:
                text = (await self._http.get(f"http://127.0.0.1:{port}/metrics")).text
            except httpx.HTTPError:
                continue
            found, before = Counter[str](), self._last.get(port, Counter())
            for name, exposed in self.NAMES.items():
                for value in re.findall(rf"^{exposed}(?:{{.*}})? (\S+)$", text, re.M):
                    found[name] += round(float(value))
            if any(found[name] < count for name, count in before.items()):
                self._ended += before
            self._last[port] = found

    @property
    def sums(self) -> dict[str, int]:
        """The sums up to the last look."""
        return {
            name: self._ended[name] + sum(each[name] for each in self._last.values())
            for name in self.NAMES
        }

    async def watch(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)


async def kills(
    folder: Path, lines: int, number: int, tokens: int, seed: int, apart_s: float
) -> dict[str, Any]:
    """Run a batch under kills; return the figures, and what is wrong."""
    rng, killed = random.Random(seed), Counter[str]()
    settings = {"batches.segment_lines": min(500, max(5, lines // 50)), "batches.lease_s": 5}
    port = free_ports(len(STAGES) + 1)
    async with (
        deployed(folder, 2, settings, port) as (server, deployment, gateways),
        httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_keepalive_connections=0)) as http,
        redis.asyncio.Redis(port=server.port) as plain,
        redis.asyncio.Redis(port=server.port) as tail,
    ):
        batch, published = Batch(http, [each.url for each in gateways]), Published(tail)
        metrics = LaneMetrics(http, port)
        watching = [asyncio.create_task(each) for each in (published.read(), metrics.watch())]
        before = await entries(plain)
        started = time.monotonic()
        await batch.begin(lines_of(lines, tokens))
        kinds: list[str] = []
        last_s = -apart_s
        for turn in range(number):
            await batch.until(lines * (turn + 1) // (number + 1))
            await asyncio.sleep(max(0.0, last_s + apart_s - time.monotonic()))
            if (await batch.look())["status"] in ENDS:
                break
            if not kinds:
                kinds = [*STAGES, "gateway", "gateway", "Redis"]
                rng.shuffle(kinds)
            kind = kinds.pop()
            killed[kind] += 1
            published.after = kind
            last_s = time.monotonic()
            print(f"{last_s - started:7.1f} s  {kind}", file=sys.stderr, flush=True)
            if kind == "Redis":
                server.kill()
                await server.start()
            elif kind == "gateway":
                gateway = rng.choice(gateways)
                gateway.kill()
                await gateway.start()
            else:
                await metrics.look()
                await deployment.kill(kind, signal.SIGKILL)
        found = await batch.ended()
        seconds = time.monotonic() - started
        added = await entries(plain) - before
        answers = await batch.answers(found)
        survived = deployment.process.poll() is None
        await asyncio.sleep(2.0)  # metrics of the last steps
        for each in watching:
            each.cancel()
    computed = metrics.sums
    counts, delivered = judged(answers, lines)
    return {
        "status": found["status"],
        "lines": lines,
        **counts,
        "killed": dict(killed),
        "spared": number - killed.total(),
        "published": added,
        "again": dict(published.again),
        "repeated": dict(published.repeated),
        "not_seen": added - sum(map(len, published.ids.values())),
        "replayed": computed["replayed"],
        "tokens": {**computed, **delivered},
        "seconds": seconds,
        "up_survived": survived,
    }


def judged(answers: list[dict[str, Any]], lines: int) -> tuple[dict[str, Any], Counter[str]]:
    """Return the numbers of a batch's answers and of what is wrong with them, and their tokens."""
    ids = Counter(each["custom_id"] for each in answers)
    texts: dict[int, set[str]] = {}
    delivered, errors = Counter[str](), []
    for each in answers:
        if (each["response"] or {}).get("status_code") != 200:
            errors.append(each)
            continue
        body = each["response"]["body"]
        prompt = int(each["custom_id"][1:]) % PROMPTS
        texts.setdefault(prompt, set()).add(body["choices"][0]["text"])
        usage = body["usage"]
        delivered.update({name: usage[f"{name}_tokens"] for name in ("prompt", "completion")})
    counts = {
        "answers": len(answers),
        "lost": lines - len(ids),
        "twice": sum(count > 1 for count in ids.values()),
        "errors": len(errors),
        "first_errors": errors[:3],
        "different": sum(len(each) > 1 for each in texts.values()),
    }
    return counts, delivered


async def entries(plain: Any) -> int:
    """Return how many requests were ever published."""
    info = await patiently(lambda: plain.xinfo_stream(f"{PREFIX}:requests"))
    return int(info["entries-added"])


# --- interactive requests beside a batch ----------------------------------------------------------


async def beside(
    folder: Path, turns: int, seconds: float, clients: int, tokens: int, in_flight: int
) -> dict[str, dict[str, Any]]:
    """Return the gaps between tokens of interactive clients, without and with a batch."""
    rows: dict[str, dict[str, Any]] = {}
    talks: dict[str, list[Talk]] = {"alone": [], "beside a batch": []}
    done: list[int] = []
    async with (
        deployed(folder, 1, {"batches.max_in_flight": in_flight}) as (_, _, gateways),
        httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=64)) as http,
    ):
        url = gateways[0].url
        batch = Batch(http, [url])
        await talk(http, url, clients, seconds / 4, tokens)
        for _ in range(turns):
            talks["alone"].append(await talk(http, url, clients, seconds, tokens))
            await batch.begin(lines_of(50_000, 16))
            await batch.until(1)
            before = (await batch.look())["request_counts"]["completed"]
            talks["beside a batch"].append(await talk(http, url, clients, seconds, tokens))
            done.append((await batch.look())["request_counts"]["completed"] - before)
            await batch.call("POST", f"/v1/batches/{batch.id}/cancel")
            await batch.ended()
    for name, found in talks.items():
        row = rows[name] = {"gaps": sum(len(each.gaps) for each in found), "each": {}}
        row["chats"] = sum(len(each.firsts) for each in found)
        for head, share, kind in (
            ("p50_ms", 0.5, "gaps"),
            ("p99_ms", 0.99, "gaps"),
            ("first_p50_ms", 0.5, "firsts"),
            ("first_p99_ms", 0.99, "firsts"),
        ):
            values = [percentile(getattr(each, kind), share) * 1000 for each in found]
            row[head], row["each"][head] = statistics.median(values), values
    rows["beside a batch"]["lines_meanwhile"] = statistics.median(done)
    return rows


class Talk(NamedTuple):
    """Seconds to the first tokens of chats, and between their tokens."""

    firsts: list[float]
    gaps: list[float]


async def talk(
    http: httpx.AsyncClient, url: str, clients: int, seconds: float, tokens: int
) -> Talk:
    """Let clients chat one after another for so long."""
    found = Talk([], [])
    until = time.monotonic() + seconds

    async def one(number: int) -> None:
        turn = 0
        while time.monotonic() < until:
            turn += 1
            body = {"model": "tiny", "prompt": f"{number} {turn} cats", "stream": True}
            body |= {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
            started = time.perf_counter()
            async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
                lines = answer.aiter_lines()
                at = [time.perf_counter() async for each in lines if each.startswith("data: {")]
            found.firsts.append(at[0] - started)
            found.gaps.extend(second - first for first, second in pairwise(at))
            await asyncio.sleep(0.05)

    await asyncio.gather(*map(one, range(clients)))
    return found


# --- throughput -----------------------------------------------------------------------------------


async def throughput(
    folder: Path, turns: int, lines: int, tokens: int, model: Path | None
) -> dict[str, Any]:
    """Return the seconds of a batch on `serve`, and of `generate` on its prompts."""
    from nano_inference import EngineConfig, InferenceEngine, SamplingParams

    calls = lines_of(lines, tokens, model.name if model else "tiny")
    bodies = [json.loads(each)["body"] for each in calls]
    prompts = [each["prompt"] for each in bodies]
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    seconds: dict[str, list[float]] = {"generate": [], "batch": []}
    port = free_port()
    config = {"dtype": "bfloat16"} | ({"model_path": str(model)} if model else {})
    pairs = [part for name in config for part in ("--set", f"engine.{name}={config[name]}")]
    serve = start_command(["serve", "--port", str(port), *pairs], folder / "serve.log")
    try:
        url = f"http://127.0.0.1:{port}"
        await asyncio.to_thread(wait_until_answered, f"{url}/health_generate", serve)
        async with httpx.AsyncClient(timeout=120) as http:
            with InferenceEngine(EngineConfig(**config)) as engine:
                engine.generate(prompts[:64], sampling)
                for _ in range(turns):
                    batch = Batch(http, [url])
                    started = time.perf_counter()
                    await batch.begin(calls)
                    found = await batch.ended(0.1)
                    seconds["batch"].append(time.perf_counter() - started)
                    assert found["request_counts"]["completed"] == lines, found
                    started = time.perf_counter()
                    await asyncio.to_thread(engine.generate, prompts, sampling)
                    seconds["generate"].append(time.perf_counter() - started)
    finally:
        stop(serve)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    return {"each": seconds, **medians, "share": medians["generate"] / medians["batch"]}


# --- a large file --------------------------------------------------------------------------------


async def large(folder: Path, lines: int, seconds: float) -> dict[str, dict[str, float]]:
    """Return the time and the gateway's peak memory of each call, and of the lines' run."""
    import openai

    line = '{"custom_id": "%d", "method": "POST", "url": "/v1/completions", "body": %s}\n'
    body = json.dumps({"model": "tiny", "prompt": "1 + 1 =", "max_tokens": 1})
    content = "".join(line % (n, body) for n in range(lines)).encode()
    rows: dict[str, dict[str, float]] = {}
    async with deployed(folder, 1, {}) as (server, _, gateways):
        pid = gateways[0].process.pid

        @contextmanager
        def measured(name: str) -> Iterator[None]:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
            started = time.perf_counter()
            yield
            peak = memory_mb(pid, "status", "VmHWM:")
            rows[name] = {"seconds": time.perf_counter() - started, "gateway_mb": peak}

        url = f"{gateways[0].url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=600) as client:
            with measured("nothing"):
                await asyncio.sleep(1)
            with measured("upload"):
                upload = await client.uploads.upload_file_chunked(
                    file=content,
                    filename="in.jsonl",
                    bytes=len(content),
                    mime_type="application/jsonl",
                    purpose="batch",
                )
            assert upload.file is not None
            with measured("check"):
                batch = await client.batches.create(
                    input_file_id=upload.file.id,
                    endpoint="/v1/completions",
                    completion_window="24h",
                )
                while batch.status == "validating":
                    await asyncio.sleep(LOOK_S / 4)
                    batch = await client.batches.retrieve(batch.id)
            with measured("run"):
                await asyncio.sleep(seconds)
            with measured("list"):
                (batch,) = (await client.batches.list()).data
                done = batch.request_counts
            assert done is not None
            assert (batch.status, done.total) == ("in_progress", lines)
            with measured("cancel"):
                while batch.status not in ENDS:
                    if batch.status == "in_progress":
                        batch = await client.batches.cancel(batch.id)
                    await asyncio.sleep(LOOK_S / 4)
                    batch = await client.batches.retrieve(batch.id)
            assert batch.output_file_id is not None
            with measured("results"):
                text = (await client.files.content(batch.output_file_id)).text
            found = [json.loads(each)["custom_id"] for each in text.splitlines()]
            assert len({*found}) == len(found) == batch.request_counts.completed
            rows["run"]["lines"] = done.completed
            rows["results"]["lines"] = len(found)
        async with redis.asyncio.Redis(port=server.port) as plain:
            rows["upload"]["redis_mb"] = (await plain.info("memory"))["used_memory_peak"] / 2**20
    return rows


def main() -> int:
    arguments = options(
        __doc__,
        part=("kills", ("kills", "beside", "throughput", "large")),
        lines=1000,
        kills=20,
        apart=12.0,
        tokens=16,
        seed=1,
        turns=3,
        seconds=20.0,
        clients=4,
        in_flight=384,
        model=(Path, "a model's folder, in place of the bundled model"),
    ).parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.part == "kills":
            sizes = (arguments.lines, arguments.kills, arguments.tokens, arguments.seed)
            found = asyncio.run(kills(folder, *sizes, arguments.apart))
            print(json.dumps(found, indent=1))
            wrong = ("lost", "twice", "errors", "different", "spared")
            status = int(any(found[each] for each in wrong) or not found["up_survived"])
        elif arguments.part == "beside":
            sizes_ = (arguments.turns, arguments.seconds, arguments.clients, arguments.tokens)
            found = asyncio.run(beside(folder, *sizes_, arguments.in_flight))
            columns = {"p50, ms": "{p50_ms:.2f}", "p99, ms": "{p99_ms:.2f}", "gaps": "{gaps}"}
            columns |= {"first p50": "{first_p50_ms:.0f}", "first p99": "{first_p99_ms:.0f}"}
            print_table(columns | {"lines": "{lines_meanwhile:.0f}"}, found)
            status = 0
        elif arguments.part == "large":
            found = asyncio.run(large(folder, arguments.lines, arguments.seconds))
            columns = {"s": "{seconds:.2f}", "gateway, MiB": "{gateway_mb:.0f}"}
            print_table(columns | {"Redis, MiB": "{redis_mb:.0f}", "lines": "{lines}"}, found)
            status = 0
        else:
            how = (arguments.turns, arguments.lines, arguments.tokens, arguments.model)
            found = asyncio.run(throughput(folder, *how))
            print(json.dumps(found, indent=1))
            status = 0
    record(arguments, load=load, load_at_end=os.getloadavg()[0], result=found)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
