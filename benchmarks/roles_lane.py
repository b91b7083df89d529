"""A lane of two replicas as processes of `nano-inference up`, for `roles.py`."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import statistics
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from chaos_rig import RedisServer, running_deployment
from harness import free_ports, percentile

from nano_inference import BusClient, GenerateRequest, SamplingParams
from nano_inference.bus.public import CompletionChunk
from nano_inference.config import BusConfig
from nano_inference.telemetry.trace_file import Span, read_spans

SPLIT = "[prefill,decode]"
PREFIX = "nano-benchmark-roles"
LIMIT_S = 240.0
_PORTS = 12

# --- the lane -------------------------------------------------------------------------------------


@dataclass
class Lane:
    """A running lane.

    Attributes:
        client: Connected to it.
        spans: File of its spans; empty without traces.
        port: First port of its metrics; 0 for none.
    """

    client: BusClient
    spans: Path
    port: int

    def metric(self, name: str) -> float:
        """Return the sum of a counter over all processes, in Prometheus's spelling."""
        total = 0.0
        for port in range(self.port, self.port + _PORTS):
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer,
            ):
                found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", answer.read().decode(), re.M)
                total += sum(map(float, found))
        return total


@contextlib.asynccontextmanager
async def running_lane(
    folder: Path, model: Path, roles: str, *, traced: bool = False, **settings: Any
) -> AsyncIterator[Lane]:
    """Run two replicas over Redis; `roles` is empty if each does both."""
    server = RedisServer(folder / "redis", "none")
    await server.start()
    port = free_ports(_PORTS) if traced else 0
    spans = folder / f"spans-{uuid.uuid4().hex[:6]}.json"
    chosen: dict[str, object] = {
        "bus.prefix": PREFIX,
        "pipeline.replicas": 2,
        "engine.model_path": model,
        "engine.dtype": "float32",
        "engine.cpu_threads": 1,
        "engine.max_model_len": 4096,
        "telemetry.log_level": "warning",
        **settings,
    }
    if roles:
        chosen["pipeline.roles"] = roles
    if traced:
        chosen |= {"telemetry.metrics_port": port, "telemetry.trace_file": spans}
    try:
        async with running_deployment(server.url, folder / "up.log", chosen) as deployment:
            bus = BusConfig(url=server.url, prefix=PREFIX)
            async with BusClient.connect(bus) as client:
                lane = Lane(client, spans, port)
                warm_up = asyncio.create_task(_warm_up(lane))
                while not warm_up.done() and deployment.process.poll() is None:
                    await asyncio.wait({warm_up}, timeout=0.5)
                if not warm_up.done():
                    warm_up.cancel()
                    raise RuntimeError(f"up ended: {(folder / 'up.log').read_text()[-2000:]}")
                warm_up.result()
                yield lane
    finally:
        server.kill()


async def _warm_up(lane: Lane) -> None:
    """Wait for the lane, whose second replica may come later than its first."""
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*(read(lane, prompt(64, -number), 4) for number in range(1, 9)))
        await asyncio.sleep(3.0)
        await asyncio.gather(*(read(lane, prompt(512, -number), 4) for number in range(10, 18)))


@dataclass
class Read:
    """When the tokens of a stream came, on the clock of `time.perf_counter`."""

    sent: float
    at: list[float] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        return self.at[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.at)]


def prompt(length: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(300, 4000) for _ in range(length))


async def read(
    lane: Lane, token_ids: tuple[int, ...], tokens: int, ended: asyncio.Event | None = None
) -> Read:
    """Stream a request to its end; or until `ended`, and cancel it."""
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    request = GenerateRequest(prompt_token_ids=token_ids, sampling=sampling, stream=True)
    found = Read(time.perf_counter())
    async with contextlib.aclosing(lane.client.submit(request)) as outputs:
        async for output in outputs:
            if isinstance(output, CompletionChunk):
                found.at += [time.perf_counter()] * len(output.token_ids)
            elif output.status not in ("done", "cancelled"):
                raise RuntimeError(f"a request failed: {output.error}")
            if ended is not None and ended.is_set():
                await lane.client.cancel(output.request_id)
                break
    return found


# --- handover -------------------------------------------------------------------------------------

STEPS = ("to batching", "until planned", "to executor", "second step")
"""From the end of the first step to the end of the second one."""

TRANSFER = "nano_kv_transfer_duration_seconds"


async def handovers(
    folder: Path, model: Path, lengths: list[int], repeat: int
) -> dict[str, dict[str, float]]:
    """Return medians in milliseconds, by length of the prompt."""
    # With blocks of 32 tokens, those of 2,048 tokens come in one transfer for each of two steps, so
    # that durations add up.
    settings = {"engine.block_size": 32}
    rows = {}
    async with running_lane(folder, model, SPLIT, traced=True, **settings) as lane:
        for length in lengths:
            found = []
            await read(lane, prompt(length, -length), 8)
            seconds, number = lane.metric(f"{TRANSFER}_sum"), lane.metric(f"{TRANSFER}_count")
            since_ns = time.time_ns()
            for turn in range(repeat):
                found.append(await read(lane, prompt(length, length * 100 + turn), 32))
                await asyncio.sleep(0.2)
            await asyncio.sleep(1.5)
            seconds = lane.metric(f"{TRANSFER}_sum") - seconds
            number = lane.metric(f"{TRANSFER}_count") - number
            row = {
                "first_ms": _ms(each.first_s for each in found),
                "gap_ms": _ms(each.gaps[0] for each in found),
                "decode_ms": _ms(statistics.median(each.gaps[1:]) for each in found),
                "transfer_ms": 1e3 * seconds / repeat,
                "transfers": number / repeat,
            }
            row["over_ms"] = row["gap_ms"] - row["decode_ms"]
            rows[f"{length:,} tokens"] = row | _parts(lane.spans, since_ns)
    return rows


def _ms(seconds: Iterator[float]) -> float:
    return 1e3 * statistics.median(seconds)


def _parts(path: Path, since_ns: int) -> dict[str, float]:
    """Return the medians of `STEPS`, in milliseconds, of the requests since then."""
    traces: dict[str, dict[str, list[Span]]] = {}
    for span in read_spans(path):
        if span.start_ns >= since_ns:
            traces.setdefault(span.trace_id, {}).setdefault(span.name, []).append(span)
    times: dict[str, list[float]] = {name: [] for name in STEPS}
    for spans in traces.values():
        if not spans.get("batching.handover") or len(spans.get("prefill", ())) < 2:
            continue
        for each in spans.values():
            each.sort(key=lambda span: span.start_ns)
        first, second = spans["prefill"][0], spans["prefill"][-1]
        came, waited = spans["batching.handover"][0], spans["batching"][-1]
        marks = [first.end_ns, came.end_ns, waited.end_ns, second.start_ns, second.end_ns]
        for name, (start, end) in zip(STEPS, pairwise(marks), strict=True):
            times[name].append((end - start) / 1e6)
    return {name: statistics.median(each) for name, each in times.items() if each}


# --- interference ---------------------------------------------------------------------------------


async def interference(
    folder: Path,
    model: Path,
    roles: str,
    *,
    streams: int,
    length: int,
    every_s: float,
    arrivals: int,
) -> dict[str, Any]:
    """Return the gaps between tokens of running streams, without and with long prompts, in
    seconds."""
    tokens = 3500
    async with running_lane(folder, model, roles) as lane:
        ended = asyncio.Event()
        running = [
            asyncio.create_task(read(lane, prompt(32, number), tokens, ended))
            for number in range(streams)
        ]
        await asyncio.sleep(4.0)
        began = time.perf_counter()
        sent = []
        for number in range(arrivals):
            await asyncio.sleep(every_s)
            token_ids = prompt(length, 1000 + number)
            sent.append(asyncio.create_task(read(lane, token_ids, 16)))
        others = await asyncio.gather(*sent)
        over = time.perf_counter()
        ended.set()
        found = await asyncio.gather(*running)
    calm, beside = [], []
    for each in found:
        if len(each.at) == tokens:
            raise RuntimeError("a stream ended too early")
        for gap, at in zip(each.gaps, each.at[1:], strict=True):
            if began - 2.5 <= at <= began + every_s:
                calm.append(gap)
            elif began + every_s < at <= over:
                beside.append(gap)
    return {
        "calm": calm,
        "beside": beside,
        "first_s": [each.first_s for each in others],
        "tokens_per_s": len(beside) / (over - began - every_s),
    }


def shares(gaps: list[float]) -> dict[str, float]:
    """Return percentiles in milliseconds."""
    return {f"p{int(100 * share)}": 1e3 * percentile(gaps, share) for share in (0.5, 0.99)} | {
        "most": 1e3 * max(gaps)
    }
