"""Result streams as only Redis has them: several writers, garbage, one reader for all."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from redis.asyncio import Redis

from nano_inference.bus.codec import encode_output
from nano_inference.bus.redis import readers as redis_readers
from nano_inference.bus.redis import results as redis_results
from nano_inference.config import BusError

from ..buses import ids_of, kit


async def test_a_recovered_stream_takes_nothing_of_an_older_epoch(
    redis_buses: Any, foreign: Redis
) -> None:
    """The old writer was only thought dead; what it still has to say must not come between."""
    old, new = redis_buses.open(), redis_buses.open()
    entries = [await old.requests.publish({"request_id": key}) for key in "ab"]
    chunks = {
        key: [kit.chunk(key, entry, i) for i in range(4)]
        for key, entry in zip("ab", entries, strict=True)
    }
    following = [
        asyncio.create_task(kit.collect(old.results.follow(key, entry)))
        for key, entry in zip("ab", entries, strict=True)
    ]
    await old.results.deliver([("a", chunks["a"][:2])], 3)
    assert await new.results.recover(["a", "b"], 5) == [chunks["a"][:2], []]
    await old.results.deliver([("a", chunks["a"][2:]), ("b", chunks["b"])], 3)
    await old.results.deliver([("b", [kit.failed("b", entries[1], "late")])], 3)
    assert await new.results.recover(["a", "b"], 5) == [chunks["a"][:2], []], "may be repeated"
    for key, entry in zip("ab", entries, strict=True):
        rest = chunks[key][2 if key == "a" else 0 :]
        await new.results.deliver([(key, [*rest, kit.done(key, entry)])], 5)
    for key, entry, read in zip("ab", entries, following, strict=True):
        assert await read == [*chunks[key], kit.done(key, entry)]
    ids = [entry_id for entry_id, _ in await foreign.xrange(f"{redis_buses.prefix}:out:a")]
    assert ids == ["3-1", "3-2", "5-3", "5-4", "5-5"], "no number is missing, whoever wrote"


async def test_repeated_delivery_is_written_once(redis_buses: Any, foreign: Redis) -> None:
    entry = "1-1"
    outputs = [kit.chunk("r", entry, 0), kit.chunk("r", entry, 1), kit.done("r", entry)]
    await redis_buses.open().results.deliver([("r", outputs[:2])])
    await redis_buses.open().results.deliver([("r", outputs)])  # its reply was lost, so to say
    out = await foreign.xrange(f"{redis_buses.prefix}:out:r")
    kinds = [json.loads(fields["json"])["type"] for _, fields in out]
    assert kinds == ["chunk", "chunk", "completion"]


async def test_garbage_in_a_result_stream_ends_the_follower(
    redis_buses: Any, foreign: Redis
) -> None:
    bus = redis_buses.open()
    await foreign.xadd(f"{redis_buses.prefix}:out:r", {"json": "{"}, id="1-0")
    with pytest.raises(BusError, check=lambda e: e.code == "malformed_output"):
        await kit.collect(bus.results.follow("r", ""))
    tail = await bus.results.tail()
    await foreign.xadd(f"{redis_buses.prefix}:results", {"json": "{"})
    await bus.results.deliver([("s", [kit.done("s", "1-1")])])
    assert (await anext(tail)).request_id == "s"


async def test_follower_that_comes_during_a_read_misses_nothing(
    redis_buses: Any, monkeypatch: Any
) -> None:
    async def no_interrupt(reader: Any) -> None:
        reader._waking = None

    monkeypatch.setattr(redis_readers.StreamReader, "_interrupt", no_interrupt)
    bus = redis_buses.open()
    entry = await bus.requests.publish({"request_id": "r"})
    outputs = [kit.chunk("r", entry, 0), kit.chunk("r", entry, 1), kit.done("r", entry)]
    await bus.results.deliver([("r", outputs[:1])])
    early = bus.results.follow("r", entry)
    read = [await anext(early)]
    late = asyncio.create_task(kit.collect(bus.results.follow("r", entry)))
    await kit.settled(lambda: int(late.done()))  # its stream is being read, from behind the first
    await bus.results.deliver([("r", outputs[1:])])
    assert await late == outputs
    assert read + await kit.collect(early) == outputs


async def test_new_follower_does_not_wait_for_the_blocking_read(
    redis_buses: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(redis_readers, "FOLLOW_BLOCK_S", 10 * kit.LIMIT_S)
    bus = redis_buses.open()
    tail = await bus.results.tail()
    waiting = asyncio.ensure_future(anext(bus.results.follow("other", "")))
    await kit.settled(lambda: int(waiting.done()))
    entry = await bus.requests.publish({"request_id": "r"})
    await bus.results.deliver([("r", [kit.chunk("r", entry, 0)])])
    assert await anext(bus.results.follow("r", entry)) == kit.chunk("r", entry, 0)
    waiting.cancel()
    await tail.aclose()


async def test_the_newest_are_told_by_the_time_at_which_they_were_written(
    redis_buses: Any, foreign: Redis
) -> None:
    """More than are read at once; something that nobody can read stands between."""
    key = f"{redis_buses.prefix}:results"
    count = 2 * redis_results.KEYS_PER_FLUSH + 1
    await foreign.xadd(key, {"json": encode_output(kit.done("old", "1-0"))}, "4999-7")
    async with foreign.pipeline() as pipeline:
        for number in range(count):
            payload = {"json": encode_output(kit.done("r", f"{number}-0"))}
            pipeline.xadd(key, payload, f"{5000 + number}-0")
        await pipeline.execute()
    await foreign.xadd(key, {"json": "{oops"}, f"{5000 + count}-0")
    bus = redis_buses.open()
    found = await kit.collect(bus.results.newest(count / 1e3))
    assert ids_of(found) == [f"{number}-0" for number in range(count)]


async def test_what_a_request_leaves_expires(redis_buses: Any, foreign: Redis) -> None:
    """Its outputs, the mark of its end, and the claim of its id."""
    bus = redis_buses.open()
    assert await bus.results.claim([("r", "1-1")]) == [None]
    await bus.results.deliver([("r", [kit.chunk("r", "1-1", 0), kit.done("r", "1-1")])])
    keys = redis_buses.keys
    for key in (keys.out("r"), keys.own("r"), keys.told("r", "1-1")):
        assert await foreign.ttl(key) > 0, key
