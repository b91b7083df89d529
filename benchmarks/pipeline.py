"""The pipeline compared with the bare loop of the same cores, on the bundled model.

    python benchmarks/pipeline.py [--requests N] [--tokens N] [--repeat K] [--json FILE]
        [--model FOLDER] [--variants NAME ...]

The same load goes through each variant once per repetition, in rotating order, always with an
empty prefix cache. The model's steps are short, which makes this the worst case for overheads.
All variants of the bundled model, with the bare loop and the peer, run torch on one thread, as the
executor stage does for a small model; another model gets all threads. The peer is Transformers'
`generate` on the padded batch.

CPU time is that of this process and its descendants (stages, server), so it is comparable where
other programs share the cores and wall time is not. Linux only, for that reason.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import statistics
import time
import uuid
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import harness
import torch
from chaos_rig import running_deployment
from cores import Followed, follow
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from timed_engine import TimedEngine
from transformers import AutoModelForCausalLM, PreTrainedModel

from nano_inference import SamplingParams
from nano_inference.bus.public import GenerateRequest
from nano_inference.config import BusConfig, Config, EngineConfig, TelemetryConfig
from nano_inference.pipeline.client import BusClient
from nano_inference.pipeline.pipeline import Pipeline
from nano_inference.telemetry import Tracing, setup_logging, setup_tracing
from nano_inference.text.tokenizer import load_tokenizer

BARE, MEMORY, PEER = "bare loop", "memory", "Transformers, padded batch"
TRACED, REDIS, FIVE = "memory, traced", "Redis, one process", "Redis, five processes"
VARIANTS = [PEER, TRACED, *(f"{n}{c}" for n in (MEMORY, REDIS, FIVE) for c in ("", ", chunks"))]
COLUMNS = {
    "seconds [least-most]": "{seconds:.2f} [{seconds_least:.2f}-{seconds_most:.2f}]",
    "tokens/s": "{tokens_per_s:.0f}",
    "x bare": "{x_bare:.2f}",
    "x memory": "{x_memory:.2f}",
    "CPU s": "{cpu_s:.2f}",
    "CPU x bare": "{cpu_x_bare:.2f}",
    "TTFT ms p50": "{ttft_ms_p50:.0f}",
    "p99": "{ttft_ms_p99:.0f}",
    "same": "{same_as_bare:.1%}",
}


class Load(NamedTuple):
    """Prompts as token ids, and the tokens to generate for each."""

    prompts: list[list[int]]
    tokens: int


class Pass(NamedTuple):
    """A load, measured.

    Attributes:
        seconds: Wall time.
        cpu_s: CPU time of all our processes.
        ttft_s: By request, to the first text at its client.
        outputs: By request, for comparison.
        total_s: By request, to its end.
        client_cpu_s: CPU time of a client in another process.
    """

    seconds: float
    cpu_s: float
    ttft_s: list[float]
    outputs: list[Any]
    total_s: list[float]
    client_cpu_s: float = 0.0


Result = tuple[list[float], list[Any]]
"""Times to the first token, and tokens, by request."""

Run = Callable[[Load], Awaitable[Result]]
Measured = Callable[[Load], Awaitable[Pass]]


def make_load(requests: int, tokens: int, seed: int) -> Load:
    """Return texts of 8 to 256 tokens, log-uniform, each with a different beginning.

    They are tokens of the bundled model, which the other models of these benchmarks also have.
    """
    rng = random.Random(seed)
    tokenizer = load_tokenizer(EngineConfig().model_folder)
    names = ("Ana", "Ben", "Carla", "Emma", "Hugo", "Iris", "Leo", "Nora")
    prompts = []
    for _ in range(requests):
        length = int(8 * 2 ** rng.uniform(0, 5))
        text = f"{rng.randrange(10**9)}: "
        ids: list[int] = []
        while len(ids) < length:
            text += f"{rng.choice(names)} has {rng.randrange(100)} + {rng.randrange(100)} cats. "
            ids = tokenizer.encode(text)
        prompts.append(list(ids[:length]))
    return Load(prompts, tokens)


# --- the bare loop and the peer -----------------------------------------------------------------


def bare(config: Config) -> Run:
    """Use `InferenceEngine.generate`: the stages' cores in a loop, with no actor and no bus."""
    engine = TimedEngine(config.engine)

    async def run(load: Load) -> Result:
        engine.flush_cache()
        engine.completions.clear()
        params = SamplingParams(temperature=0, max_tokens=load.tokens, ignore_eos=True)
        start_ns = time.time_ns()
        samples = engine.generate(load.prompts, params)
        done = engine.completions.values()
        ttft = [(each.timings.first_token_ns - start_ns) / 1e9 for each in done]
        return ttft, [sample.completion_tokens for sample in samples]

    return run


def peer(config: Config) -> Run:
    """Use Transformers' `generate` on all prompts at once, padded on the left."""
    folder = config.engine.model_folder
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    model.eval()

    async def run(load: Load) -> Result:
        steps: list[float] = []

        def note(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            steps.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        start = time.perf_counter()
        longest = max(map(len, load.prompts))
        ids = torch.tensor([[3] * (longest - len(p)) + p for p in load.prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in load.prompts])
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=load.tokens,
                eos_token_id=None,
                stopping_criteria=[note],
            )
        outputs = [tuple(row) for row in output[:, longest:].tolist()]
        return [steps[0] - start] * len(load.prompts), outputs

    return run


# --- the pipelines ------------------------------------------------------------------------------


async def submit_all(client: Any, load: Load, stream: bool) -> list[Followed]:
    """Submit all requests at once, and follow each in its own task."""
    params = SamplingParams(temperature=0, max_tokens=load.tokens, ignore_eos=True)
    requests = [
        GenerateRequest(prompt_token_ids=tuple(prompt), sampling=params, stream=stream)
        for prompt in load.prompts
    ]
    return await asyncio.gather(*(follow(client, request) for request in requests))


def through(client: BusClient, *, stream: bool) -> Run:
    """Use a pipeline; its time to first token without chunks is the streaming stage's."""

    async def run(load: Load) -> Result:
        done = await submit_all(client, load, stream)
        ttft = [
            (each.completion.timings.first_token_ns - each.start_ns) / 1e9
            if each.first_s is None
            else each.first_s
            for each in done
        ]
        return ttft, [each.completion.samples[0].token_ids for each in done]

    return run


class Sink(SpanExporter):
    """Encodes spans as for an OTLP endpoint, and drops the bytes."""

    def __init__(self) -> None:
        self.spans = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        encode_spans(spans).SerializeToString()
        self.spans += len(spans)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing to close."""


@asynccontextmanager
async def five_processes(config: Config) -> AsyncIterator[BusClient]:
    """Run `nano-inference up`; yield a client once a request has been answered."""
    names = ("max_batch_size", "model_path", "cpu_threads", "kv_cache_bytes")
    settings = {f"engine.{name}": getattr(config.engine, name) for name in names}
    settings |= {"bus.prefix": config.bus.prefix, "telemetry.log_level": "error"}
    async with (
        running_deployment(config.bus.url, Path(os.devnull), settings),
        BusClient.connect(config.bus) as client,
    ):
        async with asyncio.timeout(120):
            await client.complete({"prompt": "1 + 1 =", "sampling": {"max_tokens": 1}})
        yield client


async def open_variants(
    stack: AsyncExitStack, engine: EngineConfig, url: str, sink: Sink, chosen: list[str]
) -> dict[str, Measured]:
    """Start the chosen variants; a variant uses no CPU while others are measured."""

    def on_redis() -> Config:
        bus = BusConfig(url=url, links="redis", prefix=f"nano-benchmark-{uuid.uuid4().hex[:8]}")
        return Config(engine=engine, bus=bus)

    async def pipeline(config: Config, tracing: Tracing | None = None) -> BusClient:
        return (await stack.enter_async_context(Pipeline(config, tracing=tracing))).client

    in_memory = Config(engine=engine)
    variants = {BARE: partial(timed, bare(in_memory), None)}
    if PEER in chosen:
        variants[PEER] = partial(timed, peer(in_memory), None)
    if TRACED in chosen:
        # Short, so that a pass includes the encoding of its spans.
        os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "100"
        tracing = setup_tracing(TelemetryConfig(), "benchmark", sink)
        stack.callback(tracing.shutdown)
        client = await pipeline(in_memory, tracing)
        variants[TRACED] = partial(timed, through(client, stream=False), client)
    for name in (MEMORY, REDIS, FIVE):
        streamed = {name: False, f"{name}, chunks": True}
        if not streamed.keys() & {*chosen}:
            continue
        if name == FIVE:
            client = await stack.enter_async_context(five_processes(on_redis()))
        else:
            client = await pipeline(in_memory if name == MEMORY else on_redis())
        for variant, stream in streamed.items():
            if variant in chosen:
                variants[variant] = partial(timed, through(client, stream=stream), client)
    return variants


# --- measuring ----------------------------------------------------------------------------------


async def timed(run: Run, client: BusClient | None, load: Load) -> Pass:
    """Run one load from an empty prefix cache, that of the client's pipeline."""
    if client is not None:
        await client.flush_cache()
    gc.collect()
    cpu, start = harness.cpu_s(*harness.descendants(os.getpid())), time.perf_counter()
    done = await run(load)
    seconds = time.perf_counter() - start
    return Pass(seconds, harness.cpu_s(*harness.descendants(os.getpid())) - cpu, *done, [])


async def in_turns(
    variants: Mapping[str, Measured],
    requests: int,
    tokens: int,
    repeat: int,
    before: Callable[[], object] = lambda: None,
) -> dict[str, list[Pass]]:
    """Run a load per repetition through each variant, in rotating order, after a warm-up.

    Args:
        before: Called before each repetition.
    """
    passes: dict[str, list[Pass]] = {name: [] for name in variants}
    for repetition in range(repeat + 1):
        before()
        load = make_load(requests, tokens if repetition else min(8, tokens), seed=repetition)
        for name in harness.rotated(variants, repetition):
            done = await variants[name](load)
            if repetition:
                passes[name].append(done)
        harness.progress(repetition, repeat)
    return passes


async def measure(arguments: Namespace, url: str) -> tuple[dict[str, list[Pass]], int]:
    """Return each variant's passes, and the number of spans that a traced pass exported."""
    threads = 1 if arguments.model is None else torch.get_num_threads()
    engine = EngineConfig(
        model_path=arguments.model or EngineConfig().model_path,
        max_batch_size=arguments.requests,
        max_tokens_per_batch=max(2048, arguments.requests),
        cpu_threads=threads,
    )
    sink = Sink()
    async with AsyncExitStack() as stack:
        variants = await open_variants(stack, engine, url, sink, arguments.variants)
        torch.set_num_threads(threads)
        size = (arguments.requests, arguments.tokens, arguments.repeat)
        passes = await in_turns(variants, *size)
    return passes, round(sink.spans / (arguments.repeat + 1))


# --- reporting ----------------------------------------------------------------------------------


def seconds_of(own: Sequence[Pass]) -> list[float]:
    return [each.seconds for each in own]


def row_of(own: Sequence[Pass], tokens: int) -> dict[str, float]:
    """Return the medians of passes in which all requests together got this many tokens."""
    seconds = seconds_of(own)
    middle = statistics.median(seconds)
    return {
        "seconds": middle,
        "seconds_least": min(seconds),
        "seconds_most": max(seconds),
        "tokens_per_s": tokens / middle,
        "cpu_s": statistics.median(each.cpu_s for each in own),
    }


def share_of_equal(own: Sequence[Pass], base: Sequence[Pass]) -> float:
    """Return the share of requests with exactly the same output as in the base."""
    return statistics.mean(
        mine == theirs
        for a, b in zip(own, base, strict=True)
        for mine, theirs in zip(a.outputs, b.outputs, strict=True)
    )


def summary(passes: dict[str, list[Pass]], tokens: int) -> dict[str, dict[str, float]]:
    """Return figures by variant; ratios are medians of the ratios within each repetition."""
    rows = {}
    base = passes[BARE]
    for name, own in passes.items():
        ttft_ms = [1e3 * value for each in own for value in each.ttft_s]
        rows[name] = row_of(own, tokens) | {
            "x_bare": harness.median_ratio(seconds_of(own), seconds_of(base)),
            "x_memory": harness.median_ratio(seconds_of(own), seconds_of(passes[MEMORY]))
            if MEMORY in passes
            else 0.0,
            "cpu_x_bare": harness.median_ratio((a.cpu_s for a in own), (b.cpu_s for b in base)),
            "ttft_ms_p50": harness.percentile(ttft_ms, 0.5),
            "ttft_ms_p99": harness.percentile(ttft_ms, 0.99),
            "same_as_bare": share_of_equal(own, base),
        }
    return rows


def main() -> None:
    parser = harness.options(
        __doc__,
        requests=(128, "requests, all sent at once"),
        tokens=(64, "tokens for each of them"),
        repeat=(4, "repetitions, after a warm-up"),
        model=(str, "a model's folder; default: the bundled one"),
        url=(str, "a Redis server; default: an embedded one"),
    )
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=VARIANTS)
    arguments = parser.parse_args()
    setup_logging(TelemetryConfig(log_level="error"))
    with harness.redis_server(arguments.url) as url:
        passes, spans = asyncio.run(measure(arguments, url))
    rows = summary(passes, arguments.requests * arguments.tokens)
    print(f"{arguments.requests} requests of {arguments.tokens} tokens;")
    print(f"medians of {arguments.repeat} repetitions; {spans} spans exported per traced pass")
    harness.print_table(COLUMNS, rows)
    seconds = {name: seconds_of(own) for name, own in passes.items()}
    harness.record(arguments, variants=rows, seconds=seconds)


if __name__ == "__main__":
    main()
