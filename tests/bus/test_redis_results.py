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


async def test_new_writer_goes_on_behind_the_old_one(redis_buses: Any, foreign: Redis) -> None:
    old, new = redis_buses.open(), redis_buses.open()
    entry = await old.requests.publish({"request_id": "r"})
    chunks = [kit.chunk("r", entry, i) for i in range(6)]
    await old.results.deliver([("r", chunks[:2])])
    await new.results.deliver([("r", chunks[2:3])])
    await old.results.deliver([("r", chunks[3:5])])
    await new.results.deliver([("r", [chunks[5], kit.done("r", entry)])])
    await old.results.deliver([("r", [kit.failed("r", entry, "late")])])
    expected = [*chunks, kit.done("r", entry)]
    assert await kit.collect(new.results.follow("r", entry)) == expected
    out = await foreign.xrange(f"{redis_buses.prefix}:out:r")
    assert [entry_id for entry_id, _ in out] == [f"1-{i}" for i in range(1, 8)]
    assert await foreign.xlen(f"{redis_buses.prefix}:results") == 1


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


async def test_the_shared_stream_has_what_a_dead_writer_did_not_put_there(
    redis_buses: Any, foreign: Redis
) -> None:
    """It ended between the terminal message and the copy of it for everybody."""
    successor = redis_buses.open()
    shared = f"{redis_buses.prefix}:results"
    await successor.results.claim([("r", "1-1")])
    written = {"json": encode_output(kit.done("r", "1-1"))}
    await foreign.xadd(f"{redis_buses.prefix}:out:r", written, id="1-1")
    for _ in range(2):
        assert await successor.results.recover(["r"], 2) == [[kit.done("r", "1-1")]]
        assert await foreign.xlen(shared) == 1
    assert await foreign.ttl(redis_buses.keys.own("r")) > 0, "the id is free again later"


async def test_a_chunk_behind_missing_ones_waits_for_the_stream_to_be_written_anew(
    redis_buses: Any, foreign: Redis
) -> None:
    """A server restarted without its last entries takes one more from the epoch before."""
    bus = redis_buses.open()
    entry = await bus.requests.publish({"request_id": "r"})
    out = f"{redis_buses.prefix}:out:r"
    chunks = [kit.chunk("r", entry, i) for i in range(4)]
    last = kit.done("r", entry)
    for entry_id, output in (
        *(("5-1", chunks[0]), ("5-2", chunks[1]), ("5-4", chunks[3])),
        *(("6-1", chunks[2]), ("6-2", chunks[3]), ("6-3", last)),
    ):
        await foreign.xadd(out, {"json": encode_output(output)}, id=entry_id)
    assert await kit.collect(bus.results.follow("r", entry)) == [*chunks, last]


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


async def test_a_begun_request_that_the_server_has_lost_is_not_followed_for_ever(
    redis_buses: Any, foreign: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a failover: the entry is lost, and the lane that has written since has died."""
    monkeypatch.setattr("nano_inference.bus.redis.follow.IDLE_CHECK_S", 0.01)
    bus = redis_buses.open()
    entry = await bus.requests.publish({"request_id": "r"})
    await bus.results.deliver([("r", [kit.chunk("r", entry, 0)])])
    follow = bus.results.follow("r", entry)
    await anext(follow)
    following = asyncio.create_task(anext(follow))
    await foreign.xdel(redis_buses.keys.requests, entry)
    with pytest.raises(
        BusError, match="send it again", check=lambda e: e.code == "unknown_request"
    ):
        await following


async def test_what_a_request_leaves_expires(redis_buses: Any, foreign: Redis) -> None:
    """Its outputs, the mark of its end, and the claim of its id."""
    bus = redis_buses.open()
    assert await bus.results.claim([("r", "1-1")]) == [None]
    await bus.results.deliver([("r", [kit.chunk("r", "1-1", 0), kit.done("r", "1-1")])])
    keys = redis_buses.keys
    for key in (keys.out("r"), keys.own("r"), keys.told("r", "1-1")):
        assert await foreign.ttl(key) > 0, key
