"""How long recovery takes, and what it costs that requests and results are durable.

    python benchmarks/durability.py [--repeat K] [--json FILE]

First table: the executor of `nano-inference up` is killed with so many requests in flight; the
times until a token comes again, and until every request has got another one. The new process is a
fork with all imports done; the time of these is printed beside it.

Second table: one process, the same load with everything in memory, and with requests and results
on a Redis server of our own that keeps no log, writes it every second, or before each reply.
Variants take turns within each repetition; the columns are medians. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from chaos import SETTINGS, versions
from chaos_rig import Entry, Load, RedisServer, make_requests, running_house

from nano_inference import BusClient, Pipeline
from nano_inference.bus.public import CompletionChunk
from nano_inference.config import load_config

IN_FLIGHT = (1, 16, 128)
REQUESTS, TOKENS = 96, 48


# --- recovery -----------------------------------------------------------------------------------


async def recovery(folder: Path, repeat: int) -> list[dict[str, float]]:
    """One row for each number of requests in flight."""
    server = RedisServer(folder / "data")
    async with AsyncExitStack() as stack:
        await server.start()
        stack.callback(server.kill)
        house = await stack.enter_async_context(
            running_house(server.url, folder / "up.log", SETTINGS)
        )
        rows = []
        for number in IN_FLIGHT:
            times = [await kill_once(server, house, number) for _ in range(repeat)]
            first = statistics.median(each[0] for each in times)
            rows.append(
                {
                    "in_flight": number,
                    "first_token_s": round(first, 3),
                    "every_request_s": round(statistics.median(each[1] for each in times), 3),
                }
            )
    return rows


async def kill_once(server: RedisServer, house: Any, number: int) -> tuple[float, float]:
    """Seconds from the executor's death to the first new token, and to one for each request."""
    requests = make_requests(number, seed=number)
    for request in requests:
        request |= {"n": 1, "stream": True}
        request["sampling"] = {"temperature": 0, "max_tokens": 300, "ignore_eos": True}
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

    load.watch(saw)
    running = asyncio.create_task(load.run())
    await all_begun.wait()
    epoch = await load.epoch()
    house.kill("executor")
    killed_at = time.monotonic()
    hit.set()
    await all_again.wait()
    await running
    return min(again.values()) - killed_at, max(again.values()) - killed_at


def start_s() -> float:
    """What a process takes that only imports what an executor needs."""
    start = time.monotonic()
    subprocess.run(
        [sys.executable, "-c", "import nano_inference.stages.executor.stage"], check=True
    )
    return time.monotonic() - start


# --- the cost of durability ---------------------------------------------------------------------


async def one_pass(client: Any) -> tuple[float, float]:
    """Tokens per second, and the median time to the first token in milliseconds."""

    async def one(request: dict[str, Any]) -> float:
        start, first = time.monotonic(), 0.0
        async for output in client.submit(request):
            if isinstance(output, CompletionChunk):
                first = first or time.monotonic() - start
        return first

    requests = make_requests(REQUESTS, seed=3)
    for request in requests:
        request |= {"n": 1, "stream": True}
        request["sampling"] = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    start = time.monotonic()
    first = await asyncio.gather(*map(one, requests))
    seconds = time.monotonic() - start
    await client.flush_cache()
    return REQUESTS * TOKENS / seconds, statistics.median(first) * 1000


async def cost(folder: Path, repeat: int) -> list[dict[str, Any]]:
    """One row for each way to keep requests and results."""
    async with AsyncExitStack() as stack:
        clients: dict[str, Any] = {}
        memory = await stack.enter_async_context(
            Pipeline(load_config(env={}, overrides={"engine.dtype": "float32"}))
        )
        clients["memory"] = memory.client
        for fsync in ("none", "everysec", "always"):
            server = RedisServer(folder / fsync, fsync)
            await server.start()
            stack.callback(server.kill)
            overrides = {"engine.dtype": "float32", "bus.url": server.url}
            config = load_config(env={}, overrides=overrides)
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
    """All that goes into the JSON file."""
    return {
        "recovery": await recovery(folder / "recovery", repeat),
        "import_s": round(min(start_s() for _ in range(3)), 2),
        "cost": await cost(folder / "cost", repeat),
        "versions": versions(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("recovery", "cost"):
            (Path(folder) / name).mkdir()
        result = asyncio.run(measure(Path(folder), arguments.repeat))
    print(f"{'in flight':>10}{'first token, s':>16}{'every request, s':>18}")
    for row in result["recovery"]:
        print(f"{row['in_flight']:10}{row['first_token_s']:16.2f}{row['every_request_s']:18.2f}")
    print(f"(an executor's imports took {result['import_s']:.2f} s, before and beside that)\n")
    memory = result["cost"][0]
    print(f"{'requests and results':24}{'tokens/s':>10}{'x memory':>10}{'TTFT p50, ms':>14}")
    for row in result["cost"]:
        ratio = row["tokens_per_s"] / memory["tokens_per_s"]
        print(f"{row['ends']:24}{row['tokens_per_s']:10}{ratio:10.2f}{row['ttft_p50_ms']:14.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
