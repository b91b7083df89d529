"""Time to the first token, and in all, by number of clients: the bare loop, and all that can stand
around it.

    python benchmarks/first_token.py [--clients 1,8,32,128] [--prompt 64] [--tokens 16]
        [--repeat 9] [--vllm PYTHON] [--json FILE]

So many clients send a prompt of their own at once, to the bundled model (T): to the bare loop of
the cores, to `Pipeline.submit`, over HTTP to a gateway in the same process, and over HTTP to `nano-
inference up --gateway` (five processes over Redis). `--vllm` names the interpreter of vLLM's
environment, whose server gets the same tokens. All stay in memory and take turns in rotating order,
from an empty prefix cache. A client's TTFT ends with the first event that carries text. `x bare` is
the time until the last client has its last token, over the bare loop's.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
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
from nano_inference.text.tokenizer import load_tokenizer
from pipeline import Load, bare, make_load, submit_all

BARE, SUBMIT, HTTP = "bare loop", "Pipeline.submit", "HTTP"
FIVE, VLLM = "HTTP, five processes", "vLLM's server"
SETTINGS = {"engine.max_batch_size": 128, "engine.max_tokens_per_batch": 2048}


class Passed(NamedTuple):
    """Seconds to each client's first token, and to the last client's last."""

    first_s: list[float]
    seconds: float


FirstTokens = Callable[[Load], Awaitable[list[float]]]
"""Sends a load, and returns each request's seconds to its first token."""

COLUMNS = {
    "TTFT ms p50": "{p50_ms:.1f}",
    "[least-most]": "[{least_ms:.1f}-{most_ms:.1f}]",
    "p99": "{p99_ms:.1f}",
    "more than bare": "{more_ms:+.1f}",
    "x bare": "{x_bare:.2f}",
}


async def post(client: Client, port: int, model: str, load: Load) -> list[float]:
    common = {"model": model, "max_tokens": load.tokens, "temperature": 0, "stream": True}
    bodies = [{"prompt": prompt, "ignore_eos": True} | common for prompt in load.prompts]
    found = await asyncio.to_thread(client.post, port, bodies)
    return [each["first_s"] for each in found["replies"]]


def prompts_of(clients: int, length: int, tokens: int, seed: int) -> Load:
    """Return so many prompts of one length, each with a different beginning and the same end, that
    text follows."""
    tokenizer = load_tokenizer(EngineConfig().model_folder)
    filler, end = tokenizer.encode("Ana has 12 + 30 cats. " * length), tokenizer.encode("5 + 2 = ")
    begun = (
        [*prompt, *filler][: length - len(end)] for prompt in make_load(clients, tokens, seed)[0]
    )
    return Load([[*prompt, *end] for prompt in begun], tokens)


@contextmanager
def server(command: list[str], port: int, log: Path, environment: dict[str, str]) -> Iterator[None]:
    """Run a server of `/v1/completions`, answered once before.

    Raises:
        SystemExit: It does not start; with the end of its log.
    """
    url = f"http://127.0.0.1:{port}/v1/completions"
    body = {"model": "tiny", "prompt": "1 + 1 =", "max_tokens": 2}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | environment
        )
    try:
        harness.wait_until_answered(url, process, body)
        yield
    except RuntimeError:
        raise SystemExit(f"{command[0]} did not start:\n{log.read_text()[-1500:]}") from None
    finally:
        harness.stop(process, 20)


def vllm_command(python: str, port: int) -> list[str]:
    folder = EngineConfig().model_folder
    fast = ["--no-enable-log-requests", "--disable-uvicorn-access-log", "--max-num-seqs", "128"]
    return [
        *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
        *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", "2048", *fast),
    ]


async def measure(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Return seconds to the first token by number of clients, way and repetition, and the states
    of the machine."""
    engine = EngineConfig(max_batch_size=128, max_tokens_per_batch=2048)
    config = Config(engine=engine, gateway=GatewayConfig(port=0))
    states: list[dict[str, float]] = []
    found: dict[str, Any] = {}

    async with Pipeline(config) as pipeline, Gateway(pipeline.client, config) as gateway:
        with ExitStack() as stack:
            client = stack.enter_context(Client())
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nano-")))

            async def submit(load: Load) -> list[float]:
                await pipeline.client.flush_cache()
                done = await submit_all(pipeline, load, stream=True)
                return [each.first_s or each.total_s for each in done]

            async def http(load: Load) -> list[float]:
                await pipeline.client.flush_cache()
                return await post(client, gateway.port, "tiny", load)

            run_bare = bare(config)

            async def bare_loop(load: Load) -> list[float]:
                return (await run_bare(load))[0]

            ways: dict[str, FirstTokens] = {BARE: bare_loop, SUBMIT: submit, HTTP: http}
            port, redis = harness.free_port(), harness.free_port()
            up = harness.engine_command("up", "--gateway", port, "--port", redis, settings=SETTINGS)
            stack.enter_context(server(up, port, scratch / "up.log", {}))
            ways[FIVE] = partial(five_processes, client, port)
            if arguments.vllm:
                port = harness.free_port()
                command = vllm_command(arguments.vllm, port)
                environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
                stack.enter_context(server(command, port, scratch / "vllm.log", environment))
                ways[VLLM] = partial(post, client, port, "tiny")

            gc.collect()
            gc.freeze()  # as `serve` does after loading the model
            for clients in arguments.clients:
                rows: dict[str, list[Passed]] = {way: [] for way in ways}
                for repetition in range(arguments.repeat + 1):
                    machine.note(states, os.cpu_count() or 1)
                    load = prompts_of(clients, arguments.prompt, arguments.tokens, repetition)
                    for way in harness.rotated(ways, repetition):
                        start = time.perf_counter()
                        firsts = await ways[way](load)
                        if repetition:
                            rows[way].append(Passed(firsts, time.perf_counter() - start))
                    harness.progress(repetition, arguments.repeat, f"{clients} clients, repetition")
                found[str(clients)] = rows
    return found, states


async def five_processes(client: Client, port: int, load: Load) -> list[float]:
    url = f"http://127.0.0.1:{port}/flush_cache"
    flush = urllib.request.Request(url, method="POST")
    await asyncio.to_thread(lambda: urllib.request.urlopen(flush, timeout=60).read())
    return await post(client, port, "tiny", load)


def summary(rows: dict[str, list[Passed]]) -> dict[str, dict[str, float]]:
    """Return figures by way, in ms those of the median client of each repetition and of all."""
    middles = {
        way: [1e3 * statistics.median(each.first_s) for each in own] for way, own in rows.items()
    }
    seconds = {way: [each.seconds for each in own] for way, own in rows.items()}
    return {
        way: {
            "p50_ms": statistics.median(middles[way]),
            "least_ms": min(middles[way]),
            "most_ms": max(middles[way]),
            "p99_ms": harness.percentile([1e3 * s for each in own for s in each.first_s], 0.99),
            "more_ms": statistics.median(
                ours - bare for ours, bare in zip(middles[way], middles[BARE], strict=True)
            ),
            "x_bare": harness.median_ratio(seconds[way], seconds[BARE]),
        }
        for way, own in rows.items()
    }


def main() -> None:
    parser = harness.options(
        __doc__,
        clients=[1, 8, 32, 128],
        prompt=(64, "tokens of a prompt"),
        tokens=(16, "made for each"),
        repeat=(9, "repetitions, after a warm-up"),
        vllm=(str, "the interpreter of an environment with vLLM"),
    )
    arguments = parser.parse_args()
    setup_logging(TelemetryConfig(log_level="error"))
    found, states = asyncio.run(measure(arguments))
    clients = {number: summary(rows) for number, rows in found.items()}
    for number, rows in clients.items():
        print(f"\n{number} clients at once")
        harness.print_table(COLUMNS, rows)
    harness.record(arguments, clients=clients, states=states)


if __name__ == "__main__":
    main()
