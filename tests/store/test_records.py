"""The records' commands: the same replies in memory and on Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from nano_inference.store.records import MemoryRecords, Records
from nano_inference.store.redis.client import Server
from nano_inference.store.redis.keys import parse_id
from nano_inference.store.redis.records import RedisRecords

from ..buses import Buses, kit

BUSES = ["memory", "redis", "cluster"]


@pytest.fixture
async def records(buses: Buses) -> AsyncIterator[Records]:
    if not buses.on_redis:
        yield MemoryRecords()
        return
    server = Server(buses.url)
    commands = RedisRecords(server)
    yield commands
    await commands.aclose(1.0)
    await server.aclose()


@pytest.fixture
def key(buses: Buses) -> bytes:
    return f"{{{buses.prefix}}}:a".encode()


async def test_a_string_is_replaced_and_deleted(records: Records, key: bytes) -> None:
    assert await records.run("GET", key) is None
    await records.run("SET", key, b"\x00one")
    await records.run("SET", key, "twö")
    assert await records.run("GET", key) == "twö".encode()
    commands = [("DEL", key), ("DEL", key), ("GET", key)]
    assert await records.retry_all("test", commands) == [1, 0, None]


async def test_the_first_of_several_sets_a_string(records: Records, key: bytes) -> None:
    def claim(value: str) -> tuple[Any, ...]:
        return ("SET", key, value, "NX", "GET", "EX", 60)

    assert await records.run_all([claim("one"), claim("two")]) == [None, b"one"]
    assert await records.run("GET", key) == b"one"
    # A plain value has no time to live.
    await records.run_all([("SET", key, "three"), ("EXPIRE", key, 1), ("SET", key, "four")])
    await asyncio.sleep(1.1)
    assert await records.run("GET", key) == b"four"


async def test_fields_are_merged_counted_and_removed(records: Records, key: bytes) -> None:
    assert await records.run("HGETALL", key) == {}
    assert await records.run("HGET", key, b"a") is None
    await records.run_all([("HSET", key, "a", b"1", b"b", "x"), ("HSET", key, b"c", 3)])
    await records.run_all([("HINCRBY", key, "c", 4), ("HINCRBY", key, 7, -2)])
    assert await records.run("HGETALL", key) == {b"a": b"1", b"b": b"x", b"c": b"7", b"7": b"-2"}
    assert await records.run("HMGET", key, "b", "none") == [b"x", None]
    assert await records.run("HDEL", key, "a", "none", b"b") == 2
    assert await records.run("HDEL", key, "c", "7") == 2
    assert await records.run("DEL", key) == 0, "a record without fields is none"


async def test_members_of_a_set_are_listed_up_to_a_score(records: Records, key: bytes) -> None:
    def listed(most: int, count: int) -> tuple[Any, ...]:
        return ("ZRANGE", key, "-inf", most, "BYSCORE", "LIMIT", 0, count)

    assert await records.run(*listed(9, 9)) == []
    await records.run("ZADD", key, "GT", 5, "b", 3, b"c", 7, "a")
    await records.run_all([("ZADD", key, "GT", 1, "c"), ("ZADD", key, "GT", 6, "b")])
    assert await records.run(*listed(6, 9)) == [b"c", b"b"]
    assert await records.run(*listed(9, 1)) == [b"c"]
    assert await records.run("ZREM", key, "c", "none") == 1
    assert await records.run(*listed(9, 9)) == [b"b", b"a"]


async def test_a_list_keeps_its_order(records: Records, key: bytes) -> None:
    assert await records.run("LRANGE", key, 0, -1) == []
    await records.run_all([("RPUSH", key, "b"), ("EXPIRE", key, 60), ("RPUSH", key, b"a")])
    assert await records.run("LRANGE", key, 0, -1) == [b"b", b"a"]


async def test_a_stream_is_read_since_a_time(records: Records, key: bytes) -> None:
    def add(oldest: int, value: str) -> tuple[Any, ...]:
        return ("XADD", key, "MINID", "~", oldest, "*", b"field", value)

    assert await records.run("XRANGE", key, 0, "+") == []
    first, second = await records.run_all([add(0, "one"), add(0, "two")])
    assert parse_id(first) < parse_id(second)
    one, two = (first, {b"field": b"one"}), (second, {b"field": b"two"})
    assert [*map(tuple, await records.run("XRANGE", key, 0, "+"))] == [one, two]
    assert abs(parse_id(first)[0] - await records.time_ms(key)) < 60_000
    later = parse_id(second)[0] + 1
    assert await records.run("XRANGE", key, later, "+") == []


async def test_a_record_expires_unless_it_is_extended(records: Records, key: bytes) -> None:
    short, long, kept = key + b"1", key + b"2", key + b"3"
    await records.run_all([("HSET", each, "a", "1") for each in (short, long, kept)])
    await records.run_all([("EXPIRE", each, 1) for each in (short, long)])
    await records.run_all([("EXPIRE", long, 60), ("EXPIRE", key, 60)])
    await records.run_all([("EXPIRE", short, 60, "NX"), ("EXPIRE", kept, 60, "NX")])
    await records.run("HSET", short, "b", "2")

    async def is_gone() -> bool:
        return await records.run("HGETALL", short) == {}

    await kit.eventually(is_gone, "the record expires")
    assert await records.run("HGETALL", long) == {b"a": b"1"}
    assert await records.run("HGETALL", kept) == {b"a": b"1"}
    await records.run("HSET", short, "a", "1")
    await records.run("EXPIRE", short, 60, "NX")
    assert await records.run("HGETALL", short) == {b"a": b"1"}, "its time has begun anew"


async def test_one_of_many_replaces_a_known_value(records: Records, key: bytes) -> None:
    async def replace(known: bytes, version: int) -> bool:
        fields = {b"version": b"%d" % version, b"body": b"of %d" % version}
        return await records.replace(key, b"version", known, fields)

    assert not await replace(b"1", 2)
    assert sum(await asyncio.gather(*(replace(b"", number) for number in range(8)))) == 1
    found = await records.run("HGETALL", key)
    assert found[b"body"] == b"of " + found[b"version"]
    assert await replace(found[b"version"], 9)
    assert (await records.run("HGETALL", key))[b"body"] == b"of 9"


async def test_a_transaction_changes_several_records(records: Records, key: bytes) -> None:
    other = key + b"2"
    await records.transact(key, [("HSET", key, "a", "1"), ("HSET", other, "a", "2")])
    await records.transact(key, [("HDEL", key, "a"), ("HSET", other, "a", "3")])
    assert await records.run_all([("HGETALL", key), ("HGETALL", other)]) == [{}, {b"a": b"3"}]


async def test_a_stream_that_is_not_there_is_empty(records: Records, key: bytes) -> None:
    assert await records.stream_ends([key, key + b"2"]) == [(0, b"0-0")] * 2
    assert await records.stream_ends([]) == []


async def test_the_clock_goes_on(records: Records, key: bytes) -> None:
    before = await records.time_ms(key)
    await asyncio.sleep(0.01)
    assert 5 <= await records.time_ms(key) - before < 60_000


async def test_memory_drops_expired_records(monkeypatch: pytest.MonkeyPatch) -> None:
    records, now_s = MemoryRecords(), 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    for number in range(100):
        await records.run_all([("HSET", b"%d" % number, "a", "1"), ("EXPIRE", b"%d" % number, 10)])
    for second in range(1, 30):
        now_s = float(second)
        await records.run("EXPIRE", b"0", 10)
    assert set(records._values) == set(records._until_s) == {b"0"}
    assert len(records._deadlines) == 1
    # A record that begins anew has no second deadline, and its own time to live.
    for ttl_s in (60, 5):
        await records.run_all([("DEL", b"0"), ("SET", b"0", "1"), ("EXPIRE", b"0", ttl_s)])
    assert len(records._deadlines) == 1
    now_s += 5
    assert await records.run("GET", b"0") is None
    now_s += 60
    await records.run("GET", b"other")
    assert records._deadlines == []


async def test_memory_refuses_commands_that_it_does_not_have() -> None:
    with pytest.raises(NotImplementedError, match="XADD"):
        await MemoryRecords().run("XADD", b"a", "*", "b", "c")


async def test_memory_trims_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    records, now_s = MemoryRecords(), 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    for second in range(100):
        now_s = float(second)
        trim = ("MINID", "~", max(0, second - 9) * 1000)
        await records.run("XADD", b"a", *trim, "*", "b", second)
    assert len(await records.run("XRANGE", b"a", 0, "+")) == 10
