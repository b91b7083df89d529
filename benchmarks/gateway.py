"""HTTP compared with `Pipeline.submit`, on the bundled model (T) and on shape S.

    python benchmarks/gateway.py [--shapes T,S] [--requests N] [--tokens N] [--repeat K]
        [--folder DIR] [--json FILE]

One pipeline in memory with a gateway in the same process, as in `nano-inference serve`. The same
load, all requests at once, goes through each way once per repetition, in rotating order, from an
empty prefix cache. The caller of `submit` is in that process too; the HTTP client is a separate
process, which shares the cores.
"""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import harness
import machine
from sse_client import Client

from nano_inference.config import Config, EngineConfig, GatewayConfig, TelemetryConfig
from nano_inference.gateway.gateway import Gateway
from nano_inference.pipeline.pipeline import Pipeline
from nano_inference.telemetry import setup_logging
from pipeline import Load, Pass, in_turns, row_of, seconds_of, share_of_equal, submit_all

SUBMIT, HTTP = "Pipeline.submit", "HTTP"
STREAMED = ", streaming"
WAYS = {SUBMIT: False, HTTP: False, SUBMIT + STREAMED: True, HTTP + STREAMED: True}
"""By way, whether it streams."""

COLUMNS = {
    "seconds [least-most]": "{seconds:.2f} [{seconds_least:.2f}-{seconds_most:.2f}]",
    "tokens/s": "{tokens_per_s:.0f}",
    "x submit": "{x_submit:.3f}",
    "TTFT ms p50": "{ttft_ms_p50:.0f}",
    "p99": "{ttft_ms_p99:.0f}",
    "TTFT x submit": "{ttft_x_submit:.3f}",
    "request p50": "{request_ms_p50:.0f}",
    "CPU s": "{cpu_s:.2f}",
    "client": "{client_cpu_s:.2f}",
    "same": "{same_texts:.1%}",
}


class Size(NamedTuple):
    """Requests of a pass, and tokens of each."""

    requests: int
    tokens: int


SIZES = {"T": Size(128, 64), "S": Size(16, 64)}


async def one_pass(
    pipeline: Pipeline, client: Client, port: int, http: bool, stream: bool, load: Load
) -> Pass:
    """Run a load from an empty prefix cache; `cpu_s` is that of pipeline and gateway."""
    await pipeline.client.flush_cache()
    gc.collect()
    if http:
        common = {"max_tokens": load.tokens, "temperature": 0, "ignore_eos": True}
        bodies = [{"prompt": prompt, "stream": stream} | common for prompt in load.prompts]
        cpu = time.process_time()
        found = await asyncio.to_thread(client.post, port, bodies)
        cpu_s = time.process_time() - cpu
        replies = found["replies"]
    else:
        start, cpu = time.perf_counter(), time.process_time()
        done = await submit_all(pipeline, load, stream)
        cpu_s = time.process_time() - cpu
        found = {"seconds": time.perf_counter() - start, "cpu_s": 0.0}
        replies = [each._asdict() | {"text": each.completion.samples[0].text} for each in done]
    first_s = [each["first_s"] for each in replies if each["first_s"] is not None]
    texts, total_s = [each["text"] for each in replies], [each["total_s"] for each in replies]
    return Pass(found["seconds"], cpu_s, first_s, texts, total_s, found["cpu_s"])


async def measure(
    size: Size, model: Path | None, repeat: int
) -> tuple[dict[str, list[Pass]], list[dict[str, float]]]:
    """Return all passes by way, and the machine's state before each repetition."""
    engine = EngineConfig(
        model_path=str(model or EngineConfig().model_path),
        max_batch_size=size.requests,
        max_tokens_per_batch=max(2048, size.requests),
    )
    config = Config(engine=engine, gateway=GatewayConfig(port=0))
    states: list[dict[str, float]] = []
    note = partial(machine.note, states, os.cpu_count() or 1)

    with Client() as client:
        async with Pipeline(config) as pipeline, Gateway(pipeline.client, config) as gateway:
            gc.collect()
            gc.freeze()  # as `serve` does after loading the model
            ways = {
                way: partial(one_pass, pipeline, client, gateway.port, HTTP in way, stream)
                for way, stream in WAYS.items()
            }
            passes = await in_turns(ways, *size, repeat, note)
    return passes, states


def summary(passes: dict[str, list[Pass]], size: Size) -> dict[str, dict[str, float]]:
    """Return figures by way. Ratios are medians of those within each repetition, to `submit` with
    or without streaming as the way itself."""
    rows = {}
    for way, own in passes.items():
        base = passes[SUBMIT + STREAMED if WAYS[way] else SUBMIT]
        row = rows[way] = row_of(own, size.requests * size.tokens) | {
            "x_submit": harness.median_ratio(seconds_of(own), seconds_of(base)),
            "client_cpu_s": statistics.median(each.client_cpu_s for each in own),
            "request_ms_p50": statistics.median(1e3 * s for each in own for s in each.total_s),
            "same_texts": share_of_equal(own, base),
        }
        if firsts := [1e3 * first for each in own for first in each.ttft_s]:
            row["ttft_ms_p50"] = statistics.median(firsts)
            row["ttft_ms_p99"] = harness.percentile(firsts, 0.99)
            middles = ([statistics.median(each.ttft_s) for each in some] for some in (own, base))
            row["ttft_x_submit"] = harness.median_ratio(*middles)
    return rows


def main() -> None:
    parser = harness.options(
        __doc__,
        shapes=["T", "S"],
        requests=(int, "all sent at once; default: 128 for T, 16 for S"),
        tokens=(int, "for each of them; default: 64"),
        repeat=(5, "repetitions, after a warm-up"),
        folder=Path("build/benchmarks"),
    )
    arguments = parser.parse_args()
    harness.refuse_unknown(parser, arguments.shapes, SIZES)
    setup_logging(TelemetryConfig(log_level="error"))
    shapes: dict[str, Any] = {}
    for shape in arguments.shapes:
        size = Size(
            arguments.requests or SIZES[shape].requests, arguments.tokens or SIZES[shape].tokens
        )
        model = None if shape == "T" else harness.model_folder(arguments.folder, shape)
        passes, states = asyncio.run(measure(size, model, arguments.repeat))
        rows = summary(passes, size)
        print(f"\nShape {shape}: {size.requests} requests of {size.tokens} tokens")
        harness.print_table(COLUMNS, rows)
        shapes[shape] = {
            **size._asdict(),
            "ways": rows,
            "seconds": {way: seconds_of(own) for way, own in passes.items()},
            "states": states,
        }
    harness.record(arguments, shapes=shapes)


if __name__ == "__main__":
    main()
