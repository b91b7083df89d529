"""What HTTP costs over `Pipeline.submit`, on the bundled model (T) and on Qwen2.5-0.5B's shape (S).

    python benchmarks/gateway.py [--shapes T,S] [--requests N] [--tokens N] [--repeat K]
        [--folder DIR] [--json FILE]

One pipeline in memory with a gateway in the same process, as `nano-inference serve` has them. The
same load, all requests at once, goes through each way once per repetition, in rotating order, from
an empty prefix cache. Whoever calls `submit` is in that process as well; the HTTP client is another
one, which shares the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import machine
import torch
from sse_client import Client

from nano_inference import SamplingParams
from nano_inference.bus.public import Completion, CompletionChunk, GenerateRequest
from nano_inference.config import Config, EngineConfig, GatewayConfig, TelemetryConfig
from nano_inference.gateway.gateway import Gateway
from nano_inference.pipeline.pipeline import Pipeline
from nano_inference.telemetry import setup_logging
from pipeline import Load, make_load

SUBMIT, HTTP = "Pipeline.submit", "HTTP"
STREAMED = ", streaming"
WAYS = [SUBMIT, HTTP, SUBMIT + STREAMED, HTTP + STREAMED]


class Size(NamedTuple):
    """Requests of a pass, and the tokens that each gets."""

    requests: int
    tokens: int


SIZES = {"T": Size(128, 64), "S": Size(16, 64)}


class Pass(NamedTuple):
    """A load, once through.

    Attributes:
        seconds: From the first request to the last answer.
        cpu_s: CPU time of the process that has pipeline and gateway.
        client_cpu_s: Of the HTTP client.
        first_s: Of each request, to the first text at its client; streaming alone shows it.
        total_s: Of each request, to its end.
        texts: Of each request.
    """

    seconds: float
    cpu_s: float
    client_cpu_s: float
    first_s: list[float]
    total_s: list[float]
    texts: list[str]


Run = Callable[[Load], Awaitable[Pass]]


def by_submit(pipeline: Pipeline, *, stream: bool) -> Run:
    """All requests at once, each followed by a task of its own."""

    async def one(prompt: list[int], tokens: int) -> tuple[float | None, float, str]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        request = GenerateRequest(prompt_token_ids=tuple(prompt), sampling=params, stream=stream)
        start, first = time.perf_counter(), None
        async for output in pipeline.submit(request):
            if isinstance(output, CompletionChunk):
                if first is None and output.text:
                    first = time.perf_counter() - start
            elif output.status != "done":
                raise RuntimeError(f"a request failed: {output.error}")
            else:
                return first, time.perf_counter() - start, _text(output)
        raise RuntimeError("the output ended without a completion")

    async def run(load: Load) -> Pass:
        start, cpu = time.perf_counter(), time.process_time()
        done = await asyncio.gather(*(one(prompt, load.tokens) for prompt in load.prompts))
        seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
        firsts = [first for first, _, _ in done if first is not None]
        totals, texts = [each[1] for each in done], [each[2] for each in done]
        return Pass(seconds, cpu_s, 0.0, firsts, totals, texts)

    return run


def _text(completion: Completion) -> str:
    return completion.samples[0].text


def over_http(client: Client, port: int, *, stream: bool) -> Run:
    """The same from another process, on a connection each."""

    async def run(load: Load) -> Pass:
        common = {"max_tokens": load.tokens, "temperature": 0, "ignore_eos": True}
        bodies = [{"prompt": prompt, "stream": stream} | common for prompt in load.prompts]
        cpu = time.process_time()
        found = await asyncio.to_thread(client.post, port, bodies)
        cpu_s = time.process_time() - cpu
        replies = found["replies"]
        return Pass(
            found["seconds"],
            cpu_s,
            found["cpu_s"],
            [each["first_s"] for each in replies if each["first_s"] is not None],
            [each["total_s"] for each in replies],
            [each["text"] for each in replies],
        )

    return run


async def measure(
    shape: str, size: Size, model: Path | None, repeat: int
) -> tuple[dict[str, list[Pass]], list[dict[str, float]]]:
    """All passes by way, without the first round, and the machine's states."""
    engine = EngineConfig(
        model_path=str(model or EngineConfig().model_path),
        max_batch_size=size.requests,
        max_tokens_per_batch=max(2048, size.requests),
    )
    config = Config(engine=engine, gateway=GatewayConfig(port=0))
    passes: dict[str, list[Pass]] = {way: [] for way in WAYS}
    states = []
    with Client() as client:
        async with Pipeline(config) as pipeline, Gateway(pipeline.client, config) as gateway:
            runs = {
                SUBMIT: by_submit(pipeline, stream=False),
                HTTP: over_http(client, gateway.port, stream=False),
                SUBMIT + STREAMED: by_submit(pipeline, stream=True),
                HTTP + STREAMED: over_http(client, gateway.port, stream=True),
            }
            gc.collect()
            gc.freeze()  # as `serve` does once the model is there
            for repetition in range(repeat + 1):
                warming = repetition == 0
                load = make_load(size.requests, 8 if warming else size.tokens, seed=repetition)
                if state := machine.measure(os.cpu_count() or 1):
                    states.append(asdict(state))
                turn = repetition % len(WAYS)
                for way in WAYS[turn:] + WAYS[:turn]:
                    await pipeline.client.flush_cache()
                    gc.collect()
                    done = await runs[way](load)
                    if not warming:
                        passes[way].append(done)
                print(f"{shape}: repetition {repetition} of {repeat}", file=sys.stderr)
    return passes, states


def summary(passes: dict[str, list[Pass]], size: Size) -> dict[str, dict[str, float]]:
    """Numbers by way. Ratios are medians of those within each repetition, to `submit` of the same
    kind."""
    rows = {}
    for way, own in passes.items():
        base = passes[SUBMIT + STREAMED if way.endswith(STREAMED) else SUBMIT]
        seconds = [each.seconds for each in own]
        row = {
            "seconds": statistics.median(seconds),
            "seconds_least": min(seconds),
            "seconds_most": max(seconds),
            "tokens_per_s": size.requests * size.tokens / statistics.median(seconds),
            "x_submit": statistics.median(
                a.seconds / b.seconds for a, b in zip(own, base, strict=True)
            ),
            "cpu_s": statistics.median(each.cpu_s for each in own),
            "client_cpu_s": statistics.median(each.client_cpu_s for each in own),
            "request_ms_p50": statistics.median(1e3 * s for each in own for s in each.total_s),
            "same_texts": statistics.mean(
                mine == theirs
                for a, b in zip(own, base, strict=True)
                for mine, theirs in zip(a.texts, b.texts, strict=True)
            ),
        }
        firsts = sorted(1e3 * first for each in own for first in each.first_s)
        if firsts:
            row["ttft_ms_p50"] = statistics.median(firsts)
            row["ttft_ms_p99"] = firsts[int(0.99 * (len(firsts) - 1))]
            row["ttft_x_submit"] = statistics.median(
                statistics.median(a.first_s) / statistics.median(b.first_s)
                for a, b in zip(own, base, strict=True)
            )
        rows[way] = row
    return rows


def print_table(shape: str, size: Size, rows: dict[str, dict[str, float]]) -> None:
    print(f"\nShape {shape}: {size.requests} requests of {size.tokens} tokens")
    print(
        f"{'':28}{'seconds [range]':>22}{'tokens/s':>10}{'x submit':>10}{'TTFT ms p50':>13}"
        f"{'p99':>7}{'x submit':>10}{'request p50':>13}{'CPU s':>8}{'client':>8}{'same':>7}"
    )
    for way, row in rows.items():
        spread = f"{row['seconds']:.2f} [{row['seconds_least']:.2f}-{row['seconds_most']:.2f}]"
        ttft = f"{'-':>13}{'-':>7}{'-':>10}"
        if "ttft_ms_p50" in row:
            ttft = f"{row['ttft_ms_p50']:13.0f}{row['ttft_ms_p99']:7.0f}"
            ttft += f"{row['ttft_x_submit']:10.3f}"
        print(
            f"{way:28}{spread:>22}{row['tokens_per_s']:10.0f}{row['x_submit']:10.3f}{ttft}"
            f"{row['request_ms_p50']:13.0f}{row['cpu_s']:8.2f}{row['client_cpu_s']:8.2f}"
            f"{row['same_texts']:7.1%}"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shapes", default="T,S")
    parser.add_argument("--requests", type=int, help="all sent at once; else 128 for T, 16 for S")
    parser.add_argument("--tokens", type=int, help="for each of them; else 64")
    parser.add_argument("--repeat", type=int, default=5, help="repetitions, after a warm-up")
    parser.add_argument("--folder", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the numbers")
    arguments = parser.parse_args()
    arguments.shapes = arguments.shapes.split(",")
    if unknown := set(arguments.shapes) - SIZES.keys():
        parser.error(f"{', '.join(sorted(unknown))}: the shapes are {', '.join(SIZES)}")
    return arguments


def main() -> None:
    arguments = parse()
    setup_logging(TelemetryConfig(log_level="error"))
    content: dict[str, Any] = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "device": f"{os.cpu_count()} CPU cores",
        "repeat": arguments.repeat,
        "shapes": {},
    }
    for shape in arguments.shapes:
        size = Size(
            arguments.requests or SIZES[shape].requests, arguments.tokens or SIZES[shape].tokens
        )
        model = None if shape == "T" else made_model(arguments.folder, shape)
        passes, states = asyncio.run(measure(shape, size, model, arguments.repeat))
        rows = summary(passes, size)
        print_table(shape, size, rows)
        content["shapes"][shape] = {
            **size._asdict(),
            "ways": rows,
            "seconds": {way: [each.seconds for each in own] for way, own in passes.items()},
            "states": states,
        }
    if arguments.json:
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def made_model(folder: Path, shape: str) -> Path:
    """A model of random weights, which is made where it is not there yet."""
    target = folder.absolute() / shape
    if not (target / "config.json").is_file():
        from random_models import write_model

        target.mkdir(parents=True, exist_ok=True)
        write_model(target, shape)
    return target


if __name__ == "__main__":
    main()
