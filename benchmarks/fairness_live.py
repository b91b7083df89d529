"""A quiet tenant beside a noisy one on the real pipeline, with the bundled model over Redis.

    python benchmarks/fairness_live.py [--noisy 600] [--quiet 12] [--http] [--url URL] [--json FILE]

The noisy tenant sends all its requests at once; until they are done, the quiet one sends one
request after another. Once under one tenant name, which is first come, first served; once under
two; and once more with time slices and preemption. All streams are compared, token for token, with
undisturbed ones; for these the quiet tenant first runs alone. TTFT is to the first chunk at the
client. --http goes over a gateway, with a key per tenant.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx2
from cores import follow
from harness import options, percentile, print_table, redis_server, write

from nano_inference import Gateway, Pipeline
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
"""Sends a request; returns milliseconds to the first chunk, and the tokens."""


def over_the_bus(pipeline: Pipeline) -> Ask:
    async def ask(body: dict[str, Any]) -> tuple[float, tuple[int, ...]]:
        done = await follow(pipeline, body)
        return (done.first_s or 0) * 1000, done.completion.samples[0].token_ids

    return ask


@asynccontextmanager
async def over_http(pipeline: Pipeline, config: Config, tenants: set[str]) -> AsyncIterator[Ask]:
    """Use a gateway, with a key per tenant."""
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


COLUMNS = {
    "requests": "{requests}",
    "TTFT of quiet, ms, p50": "{p50:.1f}",
    "p99": "{p99:.1f}",
    "max": "{max:.1f}",
    "all done, s": "{wall_s:.2f}",
    "same tokens": "{same}",
}


def main() -> None:
    arguments = options(
        __doc__,
        noisy=600,
        quiet=(20, "different requests"),
        http=(False, "over a gateway, with a key for each"),
        url=str,
    ).parse_args()
    sizes, http, two = (arguments.noisy, arguments.quiet), arguments.http, ("quiet", "noisy")
    slices = {"max_timeslice_tokens": 8, "enable_preemption": True}
    with redis_server(arguments.url) as url:
        runs = {
            "alone": asyncio.run(run(url, 0, arguments.quiet, two, http)),
            "FCFS": asyncio.run(run(url, *sizes, ("all", "all"), http)),
            "by tenant": asyncio.run(run(url, *sizes, two, http)),
            "with slices": asyncio.run(run(url, *sizes, two, http, **slices)),
        }
    wanted = runs["alone"]["tokens"]
    results, rows = {}, {}
    for name, found in runs.items():
        ttft_ms = found["ttft_ms"]
        same = found["tokens"] == [wanted[i % len(wanted)] for i in range(len(ttft_ms))]
        same &= name == "alone" or found["others"] == runs["FCFS"]["others"]
        results[name] = {"ttft_ms": ttft_ms, "wall_s": found["wall_s"], "same": same}
        shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
        times = {label: percentile(ttft_ms, share) for label, share in shares.items()}
        rows[name] = {**results[name], **times, "requests": len(ttft_ms)}
    print_table(COLUMNS, rows)
    write(arguments.json, results)


if __name__ == "__main__":
    main()
