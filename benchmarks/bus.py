"""Cost of a hop over the bus, in memory and on Redis.

    python benchmarks/bus.py [--url redis://...] [--json FILE]

Without a URL it starts an embedded server. Times are microseconds per message, the best of several
rounds: `one way` is a sender that doesn't wait for answers, `ping-pong` half of a round trip. The
peer is `asyncio.Queue`, measured in the same run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from harness import options, print_table, record, redis_server

from nano_inference.bus import Bus, open_bus
from nano_inference.bus.codec import decode_envelope, encode_envelope
from nano_inference.bus.envelope import Envelope
from nano_inference.bus.links import CREDITS, HALTS
from nano_inference.bus.messages import Credit
from nano_inference.bus.steps import StepResult
from nano_inference.config import BusConfig

ROUNDS = 5


async def best_us(run: Callable[[], Awaitable[None]], messages: int) -> float:
    """Return microseconds per message in the fastest of `ROUNDS` rounds."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        await run()
        times.append(time.perf_counter() - start)
    return min(times) / messages * 1e6


async def beside(echo: Coroutine[Any, Any, None], measuring: Awaitable[float]) -> float:
    """Measure while the echo runs."""
    echoing = asyncio.create_task(echo)
    try:
        return await measuring
    finally:
        echoing.cancel()


async def one_way(bus: Bus, batch: int, messages: int) -> float:
    """Send in batches, flushed one by one, to a concurrent receiver."""
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
    """Send batches to an echo; return microseconds per message and direction."""
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

    return await beside(echo(), best_us(run, 2 * rounds * batch))


async def peer_queue(messages: int) -> float:
    """Do the same with one message over `asyncio.Queue`."""
    there: asyncio.Queue[Credit] = asyncio.Queue()
    back: asyncio.Queue[Credit] = asyncio.Queue()

    async def echo() -> None:
        while True:
            back.put_nowait(await there.get())

    async def run() -> None:
        for number in range(messages // 2):
            there.put_nowait(Credit(number))
            await back.get()

    return await beside(echo(), best_us(run, messages))


async def codec(rows: int) -> float:
    """Encode and decode a step that sampled one token for each of `rows` sequences."""
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
    """Return the times by row of the table."""
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
    arguments = options(__doc__, url=(str, "a Redis server; default: an embedded one")).parse_args()
    with redis_server(arguments.url) as url:
        times = asyncio.run(measure(url))
    peer = times["asyncio.Queue, ping-pong"]
    rows = {name: {"us": value, "x": value / peer} for name, value in times.items()}
    print_table({"us/message": "{us:.2f}", "x Queue": "{x:.1f}"}, rows)
    record(arguments, us_per_message=times)


if __name__ == "__main__":
    main()
