"""What tracing and metrics cost: the same load on one pipeline, with telemetry on and off in turn.

The bundled model's steps are the shortest there are, and the batch is full, so this is the worst
case. The pipeline is in memory, in this process; spans go over OTLP and HTTP to a receiver in
another one, and those of a pass are sent within it. A pass is compared with those without telemetry
right before and right behind it, since the speed of a machine drifts by more than is looked for.
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
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import msgspec
import torch

from nano_inference import SamplingParams
from nano_inference.bus.public import GenerateRequest
from nano_inference.config import Config, EngineConfig, TelemetryConfig
from nano_inference.pipeline.pipeline import Pipeline
from nano_inference.telemetry import Metrics, Tracing, setup_logging, setup_tracing


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


class Telemetry:
    """That of a pipeline, which is another one with each pass.

    Two pipelines differ by up to two hundredths in speed, depending on where their memory lies.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._tracing = pipeline.tracing
        # Stages have copies, each with labels of its own.
        self._metrics = [each for each in gc.get_objects() if isinstance(each, Metrics)]
        self._recording = [dict(vars(each)) for each in self._metrics]

    def be(self, tracing: Tracing, metrics: bool) -> None:
        vars(self._tracing).update(vars(tracing))
        for own, recording in zip(self._metrics, self._recording, strict=True):
            nothing = {**vars(Metrics()), "_always": recording["_always"]}
            vars(own).update(recording if metrics else nothing)


class Pass(NamedTuple):
    """All requests, sent at once, from an empty prefix cache: wall time, and this process's own."""

    seconds: float
    cpu_s: float


class Pair(NamedTuple):
    """A pass, and those without telemetry before and behind it."""

    own: Pass
    before: Pass
    after: Pass

    def ratio(self, which: int) -> float:
        """Of the wall times (0), or of the CPU times (1)."""
        return 2 * self.own[which] / (self.before[which] + self.after[which])


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


async def measure(
    arguments: argparse.Namespace,
) -> tuple[dict[str, list[Pair]], dict[str, int]]:
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
    receiver = Receiver()
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

            async def run(name: str | None, seed: int) -> Pass:
                if name is None:
                    telemetry.be(off, metrics=False)
                else:
                    telemetry.be(tracings[name], kinds[name][1])
                return await one_pass(pipeline, arguments, seed)

            for repetition in range(arguments.repeat + 1):
                before = await run(None, repetition)
                for name in kinds:
                    own = await run(name, repetition)
                    after = await run(None, repetition)
                    if repetition:  # the first one warms up
                        results[name].append(Pair(own, before, after))
                    before = after
                print(f"repetition {repetition} of {arguments.repeat}", file=sys.stderr)
        return results, {name: receiver.spans(name) for name in kinds}
    finally:
        for tracing in tracings.values():
            tracing.shutdown()
        receiver.close()


def interval(values: list[float]) -> tuple[float, float]:
    """Where the median lies, in 95 of 100 samples like this one (bootstrap)."""
    rng = random.Random(1)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[-51]


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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=128, help="requests, all sent at once")
    parser.add_argument("--tokens", type=int, default=64, help="tokens for each of them")
    parser.add_argument("--model", type=Path, help="folder of a model; the bundled one without")
    parser.add_argument("--repeat", type=int, default=20, help="repetitions, after a warm-up")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the numbers")
    arguments = parser.parse_args()
    setup_logging(TelemetryConfig(log_level="error"))
    results, spans = asyncio.run(measure(arguments))
    rows = summary(results, spans, arguments)
    print(f"{arguments.requests} requests of {arguments.tokens} tokens; {arguments.repeat} times")
    print(f"{'':28}{'tokens/s':>10}{'time x off':>12}{'[95 %]':>16}{'CPU x off':>11}{'spans':>8}")
    for name, row in rows.items():
        spread = f"[{row['x_off_least']:.3f}-{row['x_off_most']:.3f}]"
        print(
            f"{name:28}{row['tokens_per_s']:10.0f}{row['x_off']:12.3f}{spread:>16}"
            f"{row['cpu_x_off']:11.3f}{row['spans_per_pass']:8.0f}"
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
            "passes": {name: [list(pair) for pair in pairs] for name, pairs in results.items()},
        }
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
