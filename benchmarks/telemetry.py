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
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import torch
from cores import random_requests
from harness import Worker, free_port, interval, options, paired, print_table, progress, record

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


KINDS: dict[str, tuple[float | None, bool]] = {
    "nothing": (None, False),
    "traces, 1 %": (0.01, False),
    "traces, 10 %": (0.1, False),
    "traces, 100 %": (1.0, False),
    "metrics": (None, True),
    "traces, 10 %, and metrics": (0.1, True),
}
"""By name, the share of recorded traces, and whether there are metrics."""


async def one_pass(pipeline: Pipeline, arguments: argparse.Namespace) -> None:
    """Send all requests at once, from an empty prefix cache."""
    await pipeline.client.flush_cache()
    requests = random_requests(arguments.requests, arguments.tokens, (8, 63), 1)
    done = await asyncio.gather(*(pipeline.complete(request) for request in requests))
    # Includes the encoding and sending of the remaining spans.
    await asyncio.to_thread(pipeline.tracing.flush)
    assert all(completion.status == "done" for completion in done)


def measure(arguments: argparse.Namespace, receiver: Receiver) -> dict[str, dict[str, Any]]:
    """Return the rates, ratios and received spans of each kind of telemetry."""
    engine = EngineConfig(max_batch_size=arguments.requests, cpu_threads=1)
    if arguments.model:
        engine = msgspec.structs.replace(engine, model_path=str(arguments.model))
    config = Config(engine=engine, telemetry=TelemetryConfig(metrics_port=free_port()))
    off, rows = Tracing(), {}
    with asyncio.Runner() as runner:
        pipeline = Pipeline(config, tracing=Tracing())
        runner.run(pipeline.__aenter__())
        telemetry = Telemetry(pipeline)
        torch.set_num_threads(1)

        def run(tracing: Tracing, metrics: bool = False) -> None:
            telemetry.become(tracing, metrics)
            runner.run(one_pass(pipeline, arguments))

        for number, (name, (ratio, metrics)) in enumerate(KINDS.items(), 1):
            to = TelemetryConfig(otlp_endpoint=receiver.endpoint(name), trace_ratio=ratio or 0.0)
            tracing = off if ratio is None else setup_tracing(to, "here")
            own, plain = partial(run, tracing, metrics), partial(run, off)
            found = paired(own, plain, arguments.repeat, gc.collect)
            tracing.shutdown()
            rows[name] = row_of(found, receiver.spans(name), arguments)
            progress(number, len(KINDS), "kind")
        runner.run(pipeline.__aexit__(None, None, None))
    return rows


def row_of(
    found: dict[str, list[float]], spans: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    wall, cpu = ([1 / share for share in found[each]] for each in ("share", "cpu_share"))
    least, most = interval(wall)
    tokens = arguments.requests * arguments.tokens
    return {
        "tokens_per_s": tokens / statistics.median(found["seconds"]),
        "x_off": statistics.median(wall),
        "x_off_least": least,
        "x_off_most": most,
        "cpu_x_off": statistics.median(cpu),
        "spans_per_pass": spans / (arguments.repeat + 1),
        **found,
    }


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
        rows = measure(arguments, receiver)
    print(f"{arguments.requests} requests of {arguments.tokens} tokens; {arguments.repeat} times")
    columns = {
        "tokens/s": "{tokens_per_s:.0f}",
        "time x off": "{x_off:.3f}",
        "[95 %]": "[{x_off_least:.3f}-{x_off_most:.3f}]",
        "CPU x off": "{cpu_x_off:.3f}",
        "spans": "{spans_per_pass:.0f}",
    }
    print_table(columns, rows)
    record(arguments, variants=rows)


if __name__ == "__main__":
    main()
