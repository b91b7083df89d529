"""What tracing and metrics cost: the same load on pipelines that differ in nothing else.

The bundled model's steps are the shortest there are, and the batch is full, so this is the worst
case. Pipelines in memory, in this process; spans go over OTLP and HTTP to a receiver in another
one, and those of a pass are sent within it. Repetitions are interleaved, and each pass is compared
with that of the pipeline without telemetry in the same repetition.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import torch

from nano_inference import SamplingParams
from nano_inference.bus.messages import GenerateRequest
from nano_inference.config import Config, EngineConfig, TelemetryConfig
from nano_inference.pipeline.pipeline import Pipeline
from nano_inference.telemetry import setup_logging

OFF = "off"


class Receiver:
    """A process that takes spans."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("otlp_receiver.py"))]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    def endpoint(self, variant: str) -> str:
        return f"{self._url}/{quote(variant, safe='')}"

    def spans(self, variant: str) -> int:
        """How many have come."""
        with urllib.request.urlopen(self.endpoint(variant)) as reply:
            return int(reply.read())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def open_pipeline(
    stack: AsyncExitStack, engine: EngineConfig, endpoint: str, ratio: float | None, metrics: bool
) -> Pipeline:
    telemetry = TelemetryConfig(
        otlp_endpoint="" if ratio is None else endpoint,
        trace_ratio=1.0 if ratio is None else ratio,
        metrics_port=free_port() if metrics else 0,
    )
    config = Config(engine=engine, telemetry=telemetry)
    return await stack.enter_async_context(Pipeline(config))


class Pass(NamedTuple):
    """All requests, sent at once, from an empty prefix cache: wall time, and this process's own."""

    seconds: float
    cpu_s: float


async def one_pass(pipeline: Pipeline, arguments: argparse.Namespace, seed: int) -> Pass:
    await pipeline.client.flush_cache()
    rng = random.Random(seed)
    sampling = SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True)
    requests = [
        GenerateRequest(
            prompt_token_ids=tuple(rng.randrange(3, 250) for _ in range(rng.randrange(8, 64))),
            sampling=sampling,
            stream=False,
        )
        for _ in range(arguments.requests)
    ]
    gc.collect()
    start, cpu = time.perf_counter(), time.process_time()
    done = await asyncio.gather(*(pipeline.complete(request) for request in requests))
    # What is left to be encoded and sent counts as well.
    await asyncio.to_thread(pipeline.tracing.flush)
    found = Pass(time.perf_counter() - start, time.process_time() - cpu)
    assert all(completion.status == "done" for completion in done)
    return found


async def measure(arguments: argparse.Namespace) -> tuple[dict[str, list[Pass]], dict[str, int]]:
    engine = EngineConfig(max_batch_size=arguments.requests, cpu_threads=1)
    kinds: dict[str, tuple[float | None, bool]] = {
        OFF: (None, False),
        "traces, 1 %": (0.01, False),
        "traces, 10 %": (0.1, False),
        "traces, 100 %": (1.0, False),
        "metrics": (None, True),
        "traces, 10 %, and metrics": (0.1, True),
    }
    results: dict[str, list[Pass]] = {name: [] for name in kinds}
    async with AsyncExitStack() as stack:
        receiver = Receiver()
        stack.callback(receiver.close)
        pipelines = {
            name: await open_pipeline(stack, engine, receiver.endpoint(name), ratio, metrics)
            for name, (ratio, metrics) in kinds.items()
        }
        torch.set_num_threads(1)
        for repetition in range(arguments.repeat + 1):
            names = list(kinds)
            shift = repetition % len(names)
            for name in names[shift:] + names[:shift]:
                found = await one_pass(pipelines[name], arguments, repetition)
                if repetition:  # the first one warms up
                    results[name].append(found)
            print(f"repetition {repetition} of {arguments.repeat}", file=sys.stderr)
        return results, {name: receiver.spans(name) for name in kinds}


def summary(
    results: dict[str, list[Pass]], spans: dict[str, int], arguments: argparse.Namespace
) -> dict[str, dict[str, float]]:
    tokens = arguments.requests * arguments.tokens
    rows = {}
    for name, own in results.items():
        pairs = list(zip(own, results[OFF], strict=True))
        wall = [a.seconds / b.seconds for a, b in pairs]
        rows[name] = {
            "tokens_per_s": tokens / statistics.median(one.seconds for one in own),
            "x_off": statistics.median(wall),
            "x_off_least": min(wall),
            "x_off_most": max(wall),
            "cpu_x_off": statistics.median(a.cpu_s / b.cpu_s for a, b in pairs),
            "cpu_x_off_of_least": min(a.cpu_s for a, _ in pairs) / min(b.cpu_s for _, b in pairs),
            "spans_per_pass": spans[name] / (arguments.repeat + 1),
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=128, help="requests, all sent at once")
    parser.add_argument("--tokens", type=int, default=64, help="tokens for each of them")
    parser.add_argument("--repeat", type=int, default=8, help="repetitions, after a warm-up")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the numbers")
    arguments = parser.parse_args()
    setup_logging(TelemetryConfig(log_level="error"))
    results, spans = asyncio.run(measure(arguments))
    rows = summary(results, spans, arguments)
    print(f"{arguments.requests} requests of {arguments.tokens} tokens; {arguments.repeat} times")
    print(
        f"{'':28}{'tokens/s':>10}{'time x off':>12}{'[range]':>16}{'CPU x off':>11}"
        f"{'of least':>10}{'spans':>8}"
    )
    for name, row in rows.items():
        spread = f"[{row['x_off_least']:.3f}-{row['x_off_most']:.3f}]"
        print(
            f"{name:28}{row['tokens_per_s']:10.0f}{row['x_off']:12.3f}{spread:>16}"
            f"{row['cpu_x_off']:11.3f}{row['cpu_x_off_of_least']:10.3f}"
            f"{row['spans_per_pass']:8.0f}"
        )
    if arguments.json:
        content = {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "cores": os.cpu_count(),
            "requests": arguments.requests,
            "tokens": arguments.tokens,
            "repeat": arguments.repeat,
            "variants": rows,
            "seconds": {name: [one.seconds for one in own] for name, own in results.items()},
            "cpu_s": {name: [one.cpu_s for one in own] for name, own in results.items()},
        }
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
