"""Cost of tracing and metrics: the same load on one pipeline, with telemetry on and off in turn.

The bundled model's steps are the shortest, and the batch is full, so this is the worst case. The
pipeline is in memory, in this process; spans go over OTLP and HTTP to a receiver in another
process, and a pass includes the sending of its spans. Each pass is compared with its two neighbours
without telemetry, since the machine's speed drifts by more than the effect.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import msgspec
import torch
from cores import random_requests
from harness import Worker, free_port, interval, options, print_table, progress, record

from nano_inference.config import Config, EngineConfig, TelemetryConfig
from nano_inference.pipeline.pipeline import Pipeline
from nano_inference.telemetry import Metrics, Tracing, setup_logging, setup_tracing


class Receiver(Worker):
    """A process that receives spans over OTLP."""

    def __init__(self) -> None:
        super().__init__(sys.executable, Path(__file__).with_name("otlp_receiver.py"))
        self._url = f"http://127.0.0.1:{self.answer()}"

    def endpoint(self, variant: str) -> str:
        return f"{self._url}/{quote(variant, safe='')}"

    def spans(self, variant: str) -> int:
        """Return the number of received spans."""
        with urllib.request.urlopen(self.endpoint(variant)) as reply:
            return int(reply.read())


class Telemetry:
    """A pipeline's telemetry, exchanged with each pass.

    Two pipelines differ by up to 2 % in speed, depending on their memory's addresses.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._tracing = pipeline.tracing
        # Stages have copies with different labels.
        self._metrics = [each for each in gc.get_objects() if isinstance(each, Metrics)]
        self._recording = [dict(vars(each)) for each in self._metrics]

    def become(self, tracing: Tracing, metrics: bool) -> None:
        vars(self._tracing).update(vars(tracing))
        for own, recording in zip(self._metrics, self._recording, strict=True):
            nothing = {**vars(Metrics()), "_always": recording["_always"]}
            vars(own).update(recording if metrics else nothing)


class Pass(NamedTuple):
    """All requests at once, from an empty prefix cache: wall time, and this process's CPU time."""

    seconds: float
    cpu_s: float


class Pair(NamedTuple):
    """A pass, and its neighbours without telemetry."""

    own: Pass
    before: Pass
    after: Pass

    def ratio(self, which: int) -> float:
        """Return the ratio of the wall times (0), or of the CPU times (1)."""
        return 2 * self.own[which] / (self.before[which] + self.after[which])


async def one_pass(pipeline: Pipeline, arguments: argparse.Namespace, seed: int) -> Pass:
    await pipeline.client.flush_cache()
    requests = random_requests(arguments.requests, arguments.tokens, (8, 63), seed)
    gc.collect()
    start, cpu = time.perf_counter(), time.process_time()
    done = await asyncio.gather(*(pipeline.complete(request) for request in requests))
    # Includes the encoding and sending of the remaining spans.
    await asyncio.to_thread(pipeline.tracing.flush)
    found = Pass(time.perf_counter() - start, time.process_time() - cpu)
    assert all(completion.status == "done" for completion in done)
    return found


async def measure(
    arguments: argparse.Namespace, receiver: Receiver
) -> tuple[dict[str, list[Pair]], dict[str, int]]:
    """Return the passes of each kind of telemetry, and the spans received."""
    engine = EngineConfig(max_batch_size=arguments.requests, cpu_threads=1)
    if arguments.model:
        engine = msgspec.structs.replace(engine, model_path=str(arguments.model))
    kinds: dict[str, tuple[float | None, bool]] = {
        "nothing": (None, False),
        "traces, 1 %": (0.01, False),
        "traces, 10 %": (0.1, False),
        "traces, 100 %": (1.0, False),
        "metrics": (None, True),
        "traces, 10 %, and metrics": (0.1, True),
    }
    results: dict[str, list[Pair]] = {name: [] for name in kinds}
    off = Tracing()
    tracings = {
        name: off
        if ratio is None
        else setup_tracing(
            TelemetryConfig(otlp_endpoint=receiver.endpoint(name), trace_ratio=ratio), "here"
        )
        for name, (ratio, _) in kinds.items()
    }
    config = Config(engine=engine, telemetry=TelemetryConfig(metrics_port=free_port()))
    try:
        async with Pipeline(config, tracing=Tracing()) as pipeline:
            telemetry = Telemetry(pipeline)
            torch.set_num_threads(1)

            async def run(name: str, seed: int) -> Pass:
                telemetry.become(tracings[name], kinds[name][1])
                return await one_pass(pipeline, arguments, seed)

            for repetition in range(arguments.repeat + 1):
                before = await run("nothing", repetition)
                for name in kinds:
                    own = await run(name, repetition)
                    after = await run("nothing", repetition)
                    if repetition:  # the first repetition warms up
                        results[name].append(Pair(own, before, after))
                    before = after
                progress(repetition, arguments.repeat)
        return results, {name: receiver.spans(name) for name in kinds}
    finally:
        for tracing in tracings.values():
            tracing.shutdown()


def summary(
    results: dict[str, list[Pair]], spans: dict[str, int], arguments: argparse.Namespace
) -> dict[str, dict[str, float]]:
    tokens = arguments.requests * arguments.tokens
    rows = {}
    for name, pairs in results.items():
        wall = [pair.ratio(0) for pair in pairs]
        least, most = interval(wall)
        rows[name] = {
            "tokens_per_s": tokens / statistics.median(pair.own.seconds for pair in pairs),
            "x_off": statistics.median(wall),
            "x_off_least": least,
            "x_off_most": most,
            "cpu_x_off": statistics.median(pair.ratio(1) for pair in pairs),
            "spans_per_pass": spans[name] / (arguments.repeat + 1),
        }
    return rows


def main() -> None:
    arguments = options(
        __doc__,
        requests=(128, "requests, all sent at once"),
        tokens=(64, "tokens for each of them"),
        model=(Path, "a model's folder; default: the bundled one"),
        repeat=(20, "repetitions, after a warm-up"),
    ).parse_args()
    setup_logging(TelemetryConfig(log_level="error"))
    with Receiver() as receiver:
        results, spans = asyncio.run(measure(arguments, receiver))
    rows = summary(results, spans, arguments)
    print(f"{arguments.requests} requests of {arguments.tokens} tokens; {arguments.repeat} times")
    columns = {
        "tokens/s": "{tokens_per_s:.0f}",
        "time x off": "{x_off:.3f}",
        "[95 %]": "[{x_off_least:.3f}-{x_off_most:.3f}]",
        "CPU x off": "{cpu_x_off:.3f}",
        "spans": "{spans_per_pass:.0f}",
    }
    print_table(columns, rows)
    passes = {name: [list(pair) for pair in pairs] for name, pairs in results.items()}
    record(arguments, variants=rows, passes=passes)


if __name__ == "__main__":
    main()
