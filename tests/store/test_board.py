"""The board of the stages, on every kind of store."""

from __future__ import annotations

from typing import Any

import msgspec
from redis.asyncio import Redis

from nano_inference.bus import Bus
from nano_inference.store.board import STALE_AFTER_S, StageReport, latest

from ..buses import STORES

BUSES = STORES


def report(stage: str = "batching", **fields: Any) -> StageReport:
    given = {"lane": "0", "incarnation": "a", "host": "h", "pid": 1, "epoch": 1, "state": "ready"}
    return StageReport(stage=stage, **{**given, **fields})


def without_age(reports: list[StageReport]) -> list[StageReport]:
    return [msgspec.structs.replace(each, age_s=0.0) for each in reports]


async def test_an_empty_board(bus: Bus) -> None:
    assert await bus.store.board.read() == []


async def test_reports_are_read_with_their_age(bus: Bus) -> None:
    told = [
        report("executor", load={"plans": 2, "share": 0.5, "device": "cpu"}),
        report("batching", state="waiting", reason="the executor is not ready", since_s=1.5),
    ]
    await bus.store.board.report(told)
    read = await bus.store.board.read()
    assert without_age(read) == sorted(told, key=lambda each: each.stage)
    assert all(0 <= each.age_s < STALE_AFTER_S for each in read)


async def test_the_last_word_counts(bus: Bus) -> None:
    await bus.store.board.report([report(state="starting", reason="it is loading", epoch=0)])
    await bus.store.board.report([report(incarnation="b", epoch=7)])
    (read,) = without_age(await bus.store.board.read())
    assert read == report(incarnation="b", epoch=7)


async def test_reports_of_a_removed_process_are_not_read(bus: Bus) -> None:
    await bus.store.board.report([report("batching"), report("executor")])
    await bus.store.board.report([report("batching", state="gone")])
    assert [each.stage for each in await bus.store.board.read()] == ["executor"]


async def test_processes_do_not_hide_each_other(redis_buses: Any) -> None:
    """A process and its successor, and another lane."""
    bus, other = redis_buses.open(), redis_buses.open()
    await bus.store.board.report([report(pid=1)])
    await other.store.board.report([report(pid=2), report(pid=2, lane="1")])
    found = [(each.lane, each.pid) for each in await bus.store.board.read()]
    assert found == [("0", 2), ("0", 1), ("1", 2)] or found == [("0", 1), ("0", 2), ("1", 2)]


async def test_reports_old_by_the_servers_clock_are_dropped(
    redis_buses: Any, foreign: Redis
) -> None:
    bus = redis_buses.open()
    key = f"{redis_buses.prefix}:stages"
    now_ms = int((await foreign.time())[0]) * 1000
    for pid, age_s in ((1, STALE_AFTER_S + 2), (2, 3)):
        body = msgspec.json.encode([report(pid=pid)])
        await foreign.xadd(key, {"json": body}, id=f"{now_ms - int(age_s * 1000)}-0")
    (read,) = await bus.store.board.read()
    assert read.pid == 2
    assert read.age_s >= 3 - 1, "to the second in which the test read the clock"


async def test_unreadable_reports_are_skipped(redis_buses: Any, foreign: Redis) -> None:
    bus = redis_buses.open()
    key = f"{redis_buses.prefix}:stages"
    for body in ("{oops", '[{"stage": 3}]'):
        await foreign.xadd(key, {"json": body})
    await bus.store.board.report([report()])
    assert without_age(await bus.store.board.read()) == [report()]
    assert await foreign.ttl(key) > 0, "it goes when nobody reports any more"


async def test_old_entries_are_removed(redis_buses: Any, foreign: Redis) -> None:
    bus = redis_buses.open()
    key = f"{redis_buses.prefix}:stages"
    for number in range(1, 301):
        await foreign.xadd(key, {"json": "[]"}, id=f"{number}-0")
    await bus.store.board.report([report()])
    await bus.store.board.report([report()])
    # Whole nodes of the stream only, of 100 entries.
    assert await foreign.xlen(key) <= 102


def test_a_report_from_the_future_is_new() -> None:
    """The server's clock was set back meanwhile."""
    (read,) = latest([(-5.0, report())])
    assert read.age_s == 0.0
