"""Batches: every line answered once under kills; interactive requests beside one; its throughput.

    python benchmarks/batches.py --part kills [--lines 5000] [--kills 20] [--json FILE]
    python benchmarks/batches.py --part beside [--seconds 20] [--clients 4] [--turns 3]
    python benchmarks/batches.py --part throughput [--lines 1000] [--tokens 32] [--turns 3]

`kills`: a lane of five processes and two gateways over a Redis server with an append-only file.
While the batch runs, gateways, stages and the server are killed (SIGKILL) at equal distances of its
progress. Each line must have one answer, and lines with equal prompts equal texts. "begun" counts
the requests that gateways have published: those above the number of lines ran again.

`beside`: clients that send one short chat after another, in turns without and with a batch of the
same server. The gaps between their tokens are compared.

`throughput`: the time of a batch on `serve`, and of `generate` on the same prompts, in turns.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import redis.asyncio
from chaos_http import GatewayProcess
from chaos_rig import STAGES, Deployment, RedisServer, patiently, running_deployment, start_command
from harness import free_port, options, percentile, print_table, record, stop, wait_until_answered

PREFIX = "nano-benchmark-batches"
ENDS = ("completed", "failed", "expired", "cancelled")
PROMPTS = 97
"""Different prompts; lines with the same one must have the same text."""

LOOK_S = 0.2


def lines_of(count: int, tokens: int) -> list[str]:
    """Return the lines of a batch."""
    sampling = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    bodies = [
        {"model": "tiny", "prompt": f"{n % PROMPTS} + 25 =", **sampling} for n in range(count)
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
    folder: Path, gateways: int, settings: dict[str, object]
) -> AsyncIterator[tuple[RedisServer, Deployment, list[GatewayProcess]]]:
    """Run a server with an append-only file, a lane of five processes, and gateways."""
    server = RedisServer(folder / "redis", "always")
    await server.start()
    settings = {"bus.prefix": PREFIX, "engine.dtype": "bfloat16", **settings}
    processes: list[GatewayProcess] = []
    try:
        async with running_deployment(server.url, folder / "up.log", settings) as deployment:
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


async def kills(folder: Path, lines: int, number: int, tokens: int, seed: int) -> dict[str, Any]:
    """Run a batch under kills; return the figures, and what is wrong."""
    rng, killed = random.Random(seed), Counter[str]()
    settings = {"batches.segment_lines": max(5, lines // 50), "batches.lease_s": 5}
    async with (
        deployed(folder, 2, settings) as (server, deployment, gateways),
        httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_keepalive_connections=0)) as http,
        redis.asyncio.Redis(port=server.port) as plain,
    ):
        batch = Batch(http, [each.url for each in gateways])
        before = await published(plain)
        started = time.monotonic()
        await batch.begin(lines_of(lines, tokens))
        kinds = [*STAGES, "gateway", "gateway", "executor", "Redis"]
        for turn in range(number):
            await batch.until(lines * (turn + 1) // (number + 1))
            kind = kinds[turn] if turn < len(kinds) else rng.choice(kinds)
            killed[kind] += 1
            if kind == "Redis":
                server.kill()
                await server.start()
            elif kind == "gateway":
                gateway = rng.choice(gateways)
                gateway.kill()
                await gateway.start()
            else:
                await deployment.kill(kind, signal.SIGKILL)
        found = await batch.ended()
        seconds = time.monotonic() - started
        begun = await published(plain) - before
        answers = await batch.answers(found)
        survived = deployment.process.poll() is None
    ids = Counter(each["custom_id"] for each in answers)
    texts: dict[int, set[str]] = {}
    for each in answers:
        if (each["response"] or {}).get("status_code") == 200:
            prompt = int(each["custom_id"][1:]) % PROMPTS
            texts.setdefault(prompt, set()).add(each["response"]["body"]["choices"][0]["text"])
    errors = [each for each in answers if (each["response"] or {}).get("status_code") != 200]
    return {
        "status": found["status"],
        "lines": lines,
        "answers": len(answers),
        "lost": lines - len(ids),
        "twice": sum(count > 1 for count in ids.values()),
        "errors": len(errors),
        "first_errors": errors[:3],
        "different": sum(len(each) > 1 for each in texts.values()),
        "begun": begun,
        "killed": dict(killed),
        "seconds": seconds,
        "up_survived": survived,
    }


async def published(plain: Any) -> int:
    """Return how many requests were ever published."""
    info = await patiently(lambda: plain.xinfo_stream(f"{PREFIX}:requests"))
    return int(info["entries-added"])


# --- interactive requests beside a batch ----------------------------------------------------------


async def beside(
    folder: Path, turns: int, seconds: float, clients: int, tokens: int
) -> dict[str, dict[str, Any]]:
    """Return the gaps between tokens of interactive clients, without and with a batch."""
    rows: dict[str, dict[str, Any]] = {}
    gaps: dict[str, list[list[float]]] = {"alone": [], "beside a batch": []}
    done: list[int] = []
    async with (
        deployed(folder, 1, {}) as (_, _, gateways),
        httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=64)) as http,
    ):
        url = gateways[0].url
        batch = Batch(http, [url])
        await talk(http, url, clients, seconds / 4, tokens)
        for _ in range(turns):
            gaps["alone"].append(await talk(http, url, clients, seconds, tokens))
            await batch.begin(lines_of(50_000, 16))
            await batch.until(1)
            before = (await batch.look())["request_counts"]["completed"]
            gaps["beside a batch"].append(await talk(http, url, clients, seconds, tokens))
            done.append((await batch.look())["request_counts"]["completed"] - before)
            await batch.call("POST", f"/v1/batches/{batch.id}/cancel")
            await batch.ended()
    for name, found in gaps.items():
        for share, head in ((0.5, "p50_ms"), (0.99, "p99_ms")):
            values = [percentile(each, share) * 1000 for each in found]
            row = rows.setdefault(name, {"gaps": sum(map(len, found)), "each": {}})
            row[head], row["each"][head] = statistics.median(values), values
    rows["beside a batch"]["lines_meanwhile"] = statistics.median(done)
    return rows


async def talk(
    http: httpx.AsyncClient, url: str, clients: int, seconds: float, tokens: int
) -> list[float]:
    """Let clients chat one after another for so long; return the gaps between their tokens."""
    gaps: list[float] = []
    until = time.monotonic() + seconds

    async def one(number: int) -> None:
        turn = 0
        while time.monotonic() < until:
            turn += 1
            body = {"model": "tiny", "prompt": f"{number} {turn} cats", "stream": True}
            body |= {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
            async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
                lines = answer.aiter_lines()
                at = [time.perf_counter() async for each in lines if each.startswith("data: {")]
            gaps.extend(second - first for first, second in pairwise(at))
            await asyncio.sleep(0.05)

    await asyncio.gather(*map(one, range(clients)))
    return gaps


# --- throughput -----------------------------------------------------------------------------------


async def throughput(folder: Path, turns: int, lines: int, tokens: int) -> dict[str, Any]:
    """Return the seconds of a batch on `serve`, and of `generate` on its prompts."""
    from nano_inference import EngineConfig, InferenceEngine, SamplingParams

    bodies = [json.loads(each)["body"] for each in lines_of(lines, tokens)]
    prompts = [each["prompt"] for each in bodies]
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    seconds: dict[str, list[float]] = {"generate": [], "batch": []}
    port = free_port()
    settings = {"engine.dtype": "bfloat16"}
    arguments = [f"{name}={value}" for name, value in settings.items()]
    pairs = [part for each in arguments for part in ("--set", each)]
    serve = start_command(["serve", "--port", str(port), *pairs], folder / "serve.log")
    try:
        url = f"http://127.0.0.1:{port}"
        await asyncio.to_thread(wait_until_answered, f"{url}/health_generate", serve)
        async with httpx.AsyncClient(timeout=120) as http:
            with InferenceEngine(EngineConfig(dtype="bfloat16")) as engine:
                engine.generate(prompts[:64], sampling)
                for _ in range(turns):
                    batch = Batch(http, [url])
                    started = time.perf_counter()
                    await batch.begin(lines_of(lines, tokens))
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


def main() -> int:
    arguments = options(
        __doc__,
        part=("kills", ("kills", "beside", "throughput")),
        lines=1000,
        kills=20,
        tokens=16,
        seed=1,
        turns=3,
        seconds=20.0,
        clients=4,
    ).parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.part == "kills":
            sizes = (arguments.lines, arguments.kills, arguments.tokens, arguments.seed)
            found = asyncio.run(kills(folder, *sizes))
            print(json.dumps(found, indent=1))
            status = int(any(found[each] for each in ("lost", "twice", "errors", "different")))
        elif arguments.part == "beside":
            sizes_ = (arguments.turns, arguments.seconds, arguments.clients, arguments.tokens)
            found = asyncio.run(beside(folder, *sizes_))
            columns = {"p50, ms": "{p50_ms:.2f}", "p99, ms": "{p99_ms:.2f}", "gaps": "{gaps}"}
            print_table(columns | {"lines": "{lines_meanwhile:.0f}"}, found)
            status = 0
        else:
            found = asyncio.run(
                throughput(folder, arguments.turns, arguments.lines, arguments.tokens)
            )
            print(json.dumps(found, indent=1))
            status = 0
    record(arguments, load=load, load_at_end=os.getloadavg()[0], result=found)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
