"""Several lanes on one requests queue: who has an entry, for how long, and what is too much."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from redis.asyncio import Redis

from nano_inference.bus import Bus, RequestEntry
from nano_inference.bus.redis import leases
from nano_inference.config import BusConfig, ConfigError, LaneReplaced

from ..buses import STORES, ids_of, kit, take

BUSES = STORES

LONG_S = 1000.0
AT_ONCE_S = 0.001


async def lane(buses: Any, name: str) -> Bus:
    bus: Bus = buses.open(lane=name)
    assert await bus.requests.pending() == []
    return bus


async def take_over(bus: Bus, most: int = 100) -> list[RequestEntry]:
    await asyncio.sleep(0.005)  # leases end by the server's clock, in milliseconds
    return await bus.requests.take_over(AT_ONCE_S, most)


# --- on every bus -----------------------------------------------------------------------------


async def test_a_renewed_lease_stays(bus: Bus) -> None:
    assert await bus.requests.renew(LONG_S) == set()
    entry_id = await bus.requests.publish({"prompt": "x"})
    await take(bus, 1)
    assert await bus.requests.renew(LONG_S) == set()
    assert await bus.requests.take_over(LONG_S, 100) == []
    assert ids_of(await bus.requests.pending()) == [entry_id]


async def test_nothing_is_shed_below_the_bound(bus: Bus) -> None:
    for i in range(5):
        await bus.requests.publish({"prompt": str(i)})
    assert await bus.requests.shed(5, kit.overloaded, 1) == 0
    assert len(await take(bus, 5)) == 5
    assert await bus.requests.shed(1, kit.overloaded, 1) == 0


async def test_one_lane_lives(bus: Bus) -> None:
    assert await bus.lanes() == ["0"]


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a\n", "x" * 65])
def test_a_lane_has_a_short_name(name: str) -> None:
    with pytest.raises(ConfigError, match=r"bus\.lane"):
        BusConfig(lane=name)


# --- leases -----------------------------------------------------------------------------------


async def test_two_lanes_share_the_queue(redis_buses: Any) -> None:
    first, second = await lane(redis_buses, "a"), await lane(redis_buses, "b")
    published = [await first.requests.publish({"prompt": str(i)}) for i in range(40)]
    taken = ids_of([*await take(first, 10), *await take(second, 30)])
    assert taken == published


async def test_entries_of_a_dead_lane_are_taken_over_once(redis_buses: Any, foreign: Redis) -> None:
    dead, second, third = [await lane(redis_buses, name) for name in "abc"]
    published = [await dead.requests.publish({"prompt": str(i)}) for i in range(6)]
    await take(dead, 6)
    await foreign.xdel(redis_buses.keys.requests, published[1])
    assert await second.requests.take_over(LONG_S, 100) == []
    over = await take_over(second, 3)
    assert ids_of(over) == [published[0], published[2]], "what was deleted is dropped"
    assert over[1].request.prompt == "2"
    await second.requests.renew(LONG_S)
    rest = await take_over(third)
    assert set(published[3:]) <= set(ids_of(rest))
    assert await second.requests.renew(LONG_S) == set(ids_of(rest)) & set(ids_of(over))


async def test_renewed_entries_are_not_taken_over(redis_buses: Any, foreign: Redis) -> None:
    first, second = await lane(redis_buses, "a"), await lane(redis_buses, "b")
    entry_id = await first.requests.publish({"prompt": "x"})
    await take(first, 1)
    # As if it had been taken so long ago.
    stream, group = redis_buses.keys.requests, "admission"
    (held,) = await foreign.xpending_range(stream, group, "-", "+", 1)
    idle_ms = int(2000 * LONG_S)
    await foreign.xclaim(stream, group, held["consumer"], 0, [entry_id], idle_ms, justid=True)
    await first.requests.renew(LONG_S)
    assert await second.requests.take_over(LONG_S, 100) == []


async def test_a_returning_lane_gets_the_ids_of_its_lost_entries(
    redis_buses: Any, foreign: Redis
) -> None:
    paused, other = await lane(redis_buses, "a"), await lane(redis_buses, "b")
    published = [await paused.requests.publish({"prompt": str(i)}) for i in range(3)]
    await take(paused, 3)
    assert ids_of(await take_over(other)) == published
    # What it believed to be its own is not deleted under the other lane's hands.
    await paused.requests.acknowledge(published[0])
    assert await paused.requests.renew(LONG_S) >= set(published[1:])
    assert await paused.requests.renew(LONG_S) == set(), "told once"
    await paused.requests.acknowledge(published[1])
    assert await paused.requests.pending() == []
    assert await other.requests.renew(LONG_S) == set()
    assert await foreign.xlen(redis_buses.keys.requests) == 3
    for entry_id in published:
        await other.requests.acknowledge(entry_id)

    await kit.becomes(lambda: foreign.xlen(redis_buses.keys.requests), 0)


async def test_entries_fetched_and_lost_before_they_were_taken(redis_buses: Any) -> None:
    """They wait in the paused process, which must not hand them out any more."""
    paused, other = await lane(redis_buses, "a"), await lane(redis_buses, "b")
    published = [await paused.requests.publish({"prompt": str(i)}) for i in range(5)]
    await take(paused, 5)
    paused = redis_buses.open(lane="a")  # its successor drains all five, and is asked for one
    await paused.requests.streams[0].leases.enlist()  # type: ignore[attr-defined]
    (first,) = await paused.requests.take(1)
    assert ids_of(await take_over(other)) == published
    assert await paused.requests.renew(LONG_S) == set(published)
    last = await paused.requests.publish({"prompt": "last"})
    assert ids_of(await take(paused, 1)) == [last]
    assert first.entry_id == published[0]


async def test_a_lost_consumer_group_loses_no_entries(redis_buses: Any, foreign: Redis) -> None:
    bus = await lane(redis_buses, "a")
    entry_id = await bus.requests.publish({"prompt": "x"})
    await take(bus, 1)
    await foreign.execute_command("XGROUP", "DESTROY", redis_buses.keys.requests, "admission")
    assert await bus.requests.renew(LONG_S) == set()
    assert await bus.requests.take_over(AT_ONCE_S, 100) == []
    await foreign.execute_command("XGROUP", "CREATE", redis_buses.keys.requests, "admission", "0")
    assert await bus.requests.renew(LONG_S) == set(), "nobody has it, and it is still there"
    await foreign.xdel(redis_buses.keys.requests, entry_id)
    await foreign.delete(redis_buses.keys.lanes)
    assert await bus.requests.renew(LONG_S) == set(), "the server has lost its data"
    assert await bus.requests.renew(LONG_S) == {entry_id}, "another lane has answered it"


# --- the registry of lanes --------------------------------------------------------------------


async def test_lanes_are_known_while_they_renew(redis_buses: Any) -> None:
    client = redis_buses.open(lane="mine")
    assert await client.lanes() == ["mine"], "nobody is known, so it is the configured one"
    first, second = await lane(redis_buses, "b"), await lane(redis_buses, "a")
    await first.requests.renew(LONG_S)
    await second.requests.renew(AT_ONCE_S)

    await kit.becomes(lambda: client.lanes(), ["b"])
    await second.requests.renew(LONG_S)
    assert await client.lanes() == ["a", "b"]


async def test_a_lane_that_is_dead_for_an_hour_leaves_the_registry(
    redis_buses: Any, foreign: Redis
) -> None:
    bus = await lane(redis_buses, "a")
    key = redis_buses.keys.lanes
    seconds, _ = await foreign.time()
    for name, dead_s in (("old", 3700), ("late", 3500)):
        await foreign.hset(key, name, f"{(seconds - dead_s) * 1000} 1-x")
    await bus.requests.renew(LONG_S)
    assert sorted(await foreign.hkeys(key)) == ["a", "late"]


async def test_a_second_process_replaces_the_first(redis_buses: Any) -> None:
    older = await lane(redis_buses, "a")
    entry_id = await older.requests.publish({"prompt": "x"})
    await take(older, 1)
    newer = redis_buses.open(lane="a")
    assert ids_of(await newer.requests.pending()) == [entry_id]
    for _ in range(2):
        with pytest.raises(LaneReplaced, match=r"bus\.lane"):
            await older.requests.renew(LONG_S)
    with pytest.raises(LaneReplaced):
        await older.requests.pending()
    assert await newer.requests.renew(LONG_S) == set()


async def test_a_process_that_stands_still_during_its_start_takes_no_lane(redis_buses: Any) -> None:
    """From one that started later, and holds the lane already."""
    older, newer = redis_buses.open(lane="a"), redis_buses.open(lane="a")
    await older.open_inbox("executor")
    await newer.open_inbox("executor")
    await newer.requests.pending()
    with pytest.raises(LaneReplaced, match=r"bus\.lane"):
        await older.requests.pending()
    assert await newer.requests.renew(LONG_S) == set()


async def test_an_older_record_makes_no_predecessor_the_keeper(
    redis_buses: Any, foreign: Redis
) -> None:
    """The server restarted without its last second."""
    older = await lane(redis_buses, "a")
    key = redis_buses.keys.lanes
    record = await foreign.hget(key, "a")
    newer = await lane(redis_buses, "a")
    await foreign.hset(key, "a", record)
    assert await newer.requests.renew(LONG_S) == set()
    with pytest.raises(LaneReplaced):
        await older.requests.renew(LONG_S)


# --- too much ---------------------------------------------------------------------------------


async def test_the_newest_are_refused_and_the_oldest_kept(redis_buses: Any, foreign: Redis) -> None:
    first, second = await lane(redis_buses, "a"), await lane(redis_buses, "b")
    client = redis_buses.open()
    old = [await client.requests.publish({"prompt": str(i)}) for i in range(4)]
    await take(first, 2)  # these count no longer
    new = [await client.requests.publish({"request_id": f"r{i}"}) for i in range(6)]
    tail = await client.results.tail()
    sheds = [
        bus.requests.shed(3, kit.overloaded, epoch) for epoch, bus in ((7, first), (8, second))
    ]
    assert sum(await asyncio.gather(*sheds)) == 5, "two lanes refuse none twice"
    assert await foreign.xlen(redis_buses.keys.requests) == 5
    refused = []
    for i, entry_id in list(enumerate(new))[1:]:
        (completion,) = await kit.collect(client.results.follow(f"r{i}", entry_id))
        assert completion.error.code == "overloaded"
        assert completion.error.retry_after_s == 2.0
        assert 0 < await foreign.ttl(f"{redis_buses.prefix}:out:r{i}") <= 3600
        refused.append(entry_id)
    told = [(await anext(tail)).entry_id for _ in refused]
    assert sorted(told) == sorted(refused)
    assert ids_of(await take(second, 3)) == [*old[2:], new[0]]


async def test_a_refused_duplicate_is_answered_under_its_entry(redis_buses: Any) -> None:
    bus = await lane(redis_buses, "a")
    first = await bus.requests.publish({"request_id": "r", "prompt": "x"})
    await take(bus, 1)
    assert await bus.results.claim([("r", first)]) == [None]
    kept = await bus.requests.publish({"prompt": "x"})
    again = await bus.requests.publish({"request_id": "r", "prompt": "x"})
    assert await bus.requests.shed(1, kit.overloaded, 1) == 1
    (refused,) = await kit.collect(bus.results.follow("r", again))
    assert (refused.request_id, refused.entry_id) == ("r", again)
    await bus.results.deliver([("r", [kit.done("r", first)])])
    assert await kit.collect(bus.results.follow("r", first)) == [kit.done("r", first)]
    assert ids_of(await take(bus, 1)) == [kept]


async def test_an_entry_taken_meanwhile_is_not_refused(
    redis_buses: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus, other = await lane(redis_buses, "a"), await lane(redis_buses, "b")
    ids = [await bus.requests.publish({"request_id": f"r{i}"}) for i in range(3)]
    own = bus.requests.streams[0].leases  # type: ignore[attr-defined]
    before = await own.excess(1)
    assert (before[0], len(before[1])) == (3, 2)
    await take(other, 3)
    await other.results.claim([(f"r{i}", entry_id) for i, entry_id in enumerate(ids)])

    async def outdated(max_queued: int) -> Any:
        return before

    monkeypatch.setattr(own, "excess", outdated)
    assert await bus.requests.shed(1, kit.overloaded, 1) == 0
    for i, entry_id in enumerate(ids):
        await other.results.deliver([(f"r{i}", [kit.done(f"r{i}", entry_id)])])
        assert await kit.collect(bus.results.follow(f"r{i}", entry_id)) == [
            kit.done(f"r{i}", entry_id)
        ]


async def test_the_hint_is_on_the_wire(redis_buses: Any, foreign: Redis) -> None:
    bus = await lane(redis_buses, "a")
    for i in range(3):
        await bus.requests.publish({"request_id": f"r{i}"})
    await bus.requests.take(1)
    assert await bus.requests.shed(1, kit.overloaded, 5) == 1
    ((entry_id, fields),) = await foreign.xrange(f"{redis_buses.prefix}:out:r2")
    assert entry_id == "5-1"
    assert json.loads(fields["json"])["error"] == {
        "code": "overloaded",
        "message": "2 wait",
        "retry_after_s": 2.0,
    }
    await bus.results.deliver([("s", [kit.failed("s", "1-1", "x")])])
    ((_, fields),) = await foreign.xrange(f"{redis_buses.prefix}:out:s")
    assert "retry_after_s" not in json.loads(fields["json"])["error"]


# --- how many wait --------------------------------------------------------------------------------


async def test_the_queue_length_is_that_of_all_lanes_that_live(
    redis_buses: Any, foreign: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await lane(redis_buses, "a"), await lane(redis_buses, "b")
    for number in range(8):
        await first.requests.publish({"prompt": str(number)})
    await take(first, 4)
    await take(second, 2)
    assert await first.requests.count_queue(3) == 5
    assert await second.requests.count_queue(1) == 4
    monkeypatch.setattr(leases, "REPORT_LIFETIME_MS", 1)
    await first.requests.count_queue(3)
    monkeypatch.undo()
    while await second.requests.count_queue(1) != 7:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert await foreign.hkeys(redis_buses.keys.begun) == ["b"]


async def test_the_queue_length_is_right_where_the_lag_of_the_stream_is_not(
    redis_buses: Any, foreign: Redis
) -> None:
    bus, keys = await lane(redis_buses, "a"), redis_buses.keys
    published = [await bus.requests.publish({"prompt": str(i)}) for i in range(6)]
    await take(bus, 4)
    assert await bus.requests.count_queue(1) == 5
    await foreign.xdel(keys.requests, published[-1])
    await bus.requests.publish({"prompt": "last"})
    (group,) = await foreign.xinfo_groups(keys.requests)
    assert group["lag"] in (None, 0), "what a scaler would take for the length of the queue"
    assert await bus.requests.count_queue(1) == 5
    assert await foreign.get(keys.queue_length) == "5"
    assert 0 < await foreign.pttl(keys.queue_length) <= leases.REPORT_LIFETIME_MS


async def test_where_no_lane_lives_the_whole_stream_waits(redis_buses: Any, foreign: Redis) -> None:
    bus, keys = await lane(redis_buses, "a"), redis_buses.keys
    for number in range(3):
        await bus.requests.publish({"prompt": str(number)})
    await bus.requests.count_queue(1)
    await foreign.delete(keys.queue_length)  # as after its time
    assert (await bus.requests.backlog()).queue_length == 3
