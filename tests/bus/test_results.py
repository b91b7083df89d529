"""The contract of result streams: follow, tail, and that nothing ends twice."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from nano_inference.bus import Bus, MemoryBus
from nano_inference.bus.memory.results import (
    KEPT_FINISHED,
    KEPT_RECORD_TOKENS,
    KEPT_RECORDS,
    TAIL_CAPACITY,
)
from nano_inference.bus.public import Completion, CompletionSample, StageTime, Timings, Usage
from nano_inference.config import BusError
from nano_inference.pipeline.client import BusClient

from ..buses import SHARDED, STORES, kit
from ..errors import raises

BUSES = [*STORES, SHARDED]


async def publish(bus: Bus, request_id: str) -> str:
    return await bus.requests.publish({"request_id": request_id, "prompt": "x"})


async def test_follow_before_during_and_after_delivery(buses: Any) -> None:
    bus, client = buses.pair()
    entry = await publish(client, "r")
    early = asyncio.create_task(kit.collect(client.results.follow("r", entry)))
    await asyncio.sleep(0)
    outputs = [kit.chunk("r", entry, i) for i in range(5)] + [kit.done("r", entry)]
    await bus.results.deliver([("r", outputs[:2])])
    middle = asyncio.create_task(kit.collect(client.results.follow("r", entry)))
    await asyncio.sleep(0)
    await bus.results.deliver([("r", outputs[2:4]), ("r", outputs[4:])])
    assert await early == outputs
    assert await middle == outputs


async def test_every_field_arrives(bus: Bus) -> None:
    entry = await publish(bus, "r")
    done = Completion(
        request_id="r",
        entry_id=entry,
        model="tiny",
        status="done",
        samples=(
            CompletionSample(
                sample_index=0,
                text='é\n"\u2028',
                token_ids=(1, 2),
                logprobs=(-0.1, -1e-300),
                finish_reason="stop",
                weight_version=4,
            ),
        ),
        usage=Usage(prompt_tokens=1, cached_tokens=2, completion_tokens=3),
        timings=Timings(
            received_ns=1 << 62, stages=(StageTime(stage="admission", start_ns=1, end_ns=2),)
        ),
        trace_id="ab" * 16,
    )
    await bus.results.deliver([("r", [done])])
    assert await kit.collect(bus.results.follow("r", entry)) == [done]


async def test_follow_by_request_id_alone(buses: Any) -> None:
    bus, client = buses.pair()
    following = asyncio.create_task(kit.collect(client.results.follow("later", "")))
    await asyncio.sleep(0)
    entry = await publish(client, "later")
    await bus.results.deliver([("later", [kit.done("later", entry)])])
    assert await following == [kit.done("later", entry)]


async def test_request_without_id_goes_by_its_entry(bus: Bus) -> None:
    entry = await publish(bus, "")
    await bus.results.deliver([(entry, [kit.done(entry, entry)])])
    assert await kit.collect(bus.results.follow("", entry)) == [kit.done(entry, entry)]


async def test_duplicate_of_a_request_id(bus: Bus) -> None:
    first, second = await publish(bus, "r"), await publish(bus, "r")
    assert await bus.results.claim([("r", first), ("r", second)]) == [None, first]
    refused = kit.failed("r", second, "duplicate_request")
    following = [
        asyncio.create_task(kit.collect(bus.results.follow("r", entry)))
        for entry in (first, second)
    ]
    await asyncio.sleep(0)
    outputs = [kit.chunk("r", first, 0), kit.chunk("r", first, 1), kit.done("r", first)]
    await bus.results.deliver([("r", outputs[:1])])
    await bus.results.deliver([(second, [refused]), ("r", outputs[1:])])
    assert await following[0] == outputs
    assert await following[1] == [refused]


async def test_a_request_that_is_submitted_once_more_gets_the_outputs_of_the_first(
    buses: Any,
) -> None:
    bus, clients = buses.pair()
    published: list[str] = []

    class Client(BusClient):
        async def publish(self, *given: Any, **named: Any) -> str:
            published.append(await super().publish(*given, **named))
            return published[-1]

    first, second = (
        asyncio.create_task(kit.collect(Client(clients).submit_once({"request_id": "r"})))
        for _ in range(2)
    )
    while len(published) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    one, other = published
    assert await bus.results.claim([("r", one), ("r", other)]) == [None, one]
    outputs = [kit.chunk("r", one, 0), kit.done("r", one)]
    refused = kit.failed("r", other, "duplicate_request")
    await bus.results.deliver([(other, [refused]), ("r", outputs[:1])])
    await bus.results.deliver([("r", outputs[1:])])
    assert [await first, await second] == [outputs, outputs]
    with raises("invalid_request_id"):
        await Client(clients).complete_once({"prompt": "x"})


async def test_request_id_alone_means_the_first_of_two(bus: Bus) -> None:
    first, second = await publish(bus, "r"), await publish(bus, "r")
    following = asyncio.create_task(kit.collect(bus.results.follow("r", "")))
    await asyncio.sleep(0)
    await bus.results.deliver([(second, [kit.failed("r", second, "duplicate_request")])])
    await bus.results.deliver([("r", [kit.done("r", first)])])
    assert await following == [kit.done("r", first)]


async def test_nothing_comes_after_the_terminal_message(bus: Bus) -> None:
    entry = await publish(bus, "r")
    tail = await bus.results.tail()
    done, late = kit.done("r", entry), kit.failed("r", entry, "late")
    await bus.results.deliver([("r", [kit.chunk("r", entry, 0), done, late])])
    await bus.results.deliver([("r", [late]), ("r", [kit.chunk("r", entry, 1), late])])
    assert await kit.collect(bus.results.follow("r", entry)) == [kit.chunk("r", entry, 0), done]
    await bus.results.deliver([("r", [late])])
    other = await publish(bus, "other")
    await bus.results.deliver([("other", [kit.done("other", other)])])
    ended = [await anext(tail), await anext(tail)]
    await tail.aclose()
    assert ended == [done, kit.done("other", other)]


async def test_a_key_belongs_to_the_first_that_claims_it(buses: Any) -> None:
    bus = buses.open()
    other = buses.another(bus, lane="b")
    first, second, third = [await publish(bus, "r") for _ in range(3)]
    assert await bus.results.claim([]) == []
    assert await other.results.claim([("r", second), ("s", first)]) == [None, None]
    claims = [("r", first), ("r", second), ("r", third), ("s", first)]
    assert await bus.results.claim(claims) == [second, second, second, first]
    await bus.results.deliver([("r", [kit.chunk("r", second, 0)])])
    await bus.results.deliver([("r", [kit.done("r", second)])])
    assert await other.results.claim([("r", third)]) == [second], "its output is still stored"


async def test_a_request_without_id_reports_whether_it_was_begun(bus: Bus) -> None:
    entry = await publish(bus, "")
    assert await bus.results.claim([(entry, entry)]) == [None]
    await bus.results.deliver([(entry, [kit.chunk(entry, entry, 0)])])
    assert await bus.results.claim([(entry, entry)]) == [entry]


async def test_a_successor_finds_written_outputs_and_continues(buses: Any) -> None:
    bus = buses.open()
    keys = [f"r{i}" for i in range(300)]
    entries = [await publish(bus, key) for key in keys]
    chunks = [
        [kit.chunk(key, entry, i) for i in range(4)]
        for key, entry in zip(keys, entries, strict=True)
    ]
    await bus.results.deliver(
        [
            (key, some[: i % 3])
            for i, (key, some) in enumerate(zip(keys, chunks, strict=True))
            if i % 3
        ]
    )
    successor = await buses.reopen(bus)
    found = await successor.results.recover([*keys, "never"], 2)
    assert found == [*(some[: i % 3] for i, some in enumerate(chunks)), []]
    await successor.results.deliver(
        [
            (key, [*some[i % 3 :], kit.done(key, entry)])
            for i, (key, entry, some) in enumerate(zip(keys, entries, chunks, strict=True))
        ],
        2,
    )
    for key, entry, some in list(zip(keys, entries, chunks, strict=True))[:6]:
        assert await kit.collect(successor.results.follow(key, entry)) == [
            *some,
            kit.done(key, entry),
        ]


async def test_unknown_entry_is_an_error(bus: Bus) -> None:
    for entry_id in ("1-1", "nonsense"):
        with pytest.raises(BusError, check=lambda e: e.code == "unknown_request"):
            await anext(bus.results.follow("r", entry_id))


async def test_tail_begins_now_and_serves_everyone(buses: Any) -> None:
    bus, client = buses.pair()
    before = await publish(bus, "before")
    await bus.results.deliver([("before", [kit.done("before", before)])])
    tails = [await client.results.tail() for _ in range(2)]
    entries = {f"r{i}": await publish(bus, f"r{i}") for i in range(5)}
    expected = [kit.done(name, entry) for name, entry in entries.items()]
    await bus.results.deliver(
        [(done.request_id, [kit.chunk(done.request_id, done.entry_id, 0), done])
         for done in expected]
    )  # fmt: skip
    for tail in tails:
        assert [await anext(tail) for _ in expected] == expected
        await tail.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(tail)


async def test_many_follow_at_once(buses: Any) -> None:
    bus, client = buses.pair()
    number = 60 if buses.kind == "cluster" else 200  # there each costs several times as much
    entries = {f"r{i}": await publish(client, f"r{i}") for i in range(number)}
    following = {
        name: asyncio.create_task(kit.collect(client.results.follow(name, entry)))
        for name, entry in entries.items()
    }
    for step in range(5):
        await bus.results.deliver(
            [(name, [kit.chunk(name, entry, step)]) for name, entry in entries.items()]
        )
    await bus.results.deliver([(n, [kit.done(n, entry)]) for n, entry in entries.items()])
    for name, entry in entries.items():
        chunks = [kit.chunk(name, entry, step) for step in range(5)]
        assert await following[name] == [*chunks, kit.done(name, entry)]


async def test_the_newest_are_those_of_all_requests_in_order(buses: Any) -> None:
    bus = buses.open()
    assert await kit.collect(bus.results.newest(10)) == []
    entries = [await publish(bus, name) for name in "abc"]
    done = [kit.done(name, entry) for name, entry in zip("abc", entries, strict=True)]
    for number in (1, 0, 2):
        await bus.results.deliver([("abc"[number], [done[number]])])
    reader = buses.another(bus)
    assert await kit.collect(reader.results.newest(600)) == [done[1], done[0], done[2]]


async def test_a_follower_may_leave_and_another_come(bus: Bus) -> None:
    entry = await publish(bus, "r")
    outputs = [kit.chunk("r", entry, 0), kit.chunk("r", entry, 1), kit.done("r", entry)]
    await bus.results.deliver([("r", outputs[:2])])
    first = bus.results.follow("r", entry)
    assert await anext(first) == outputs[0]
    await first.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(first)
    await bus.results.deliver([("r", outputs[2:])])
    assert await kit.collect(bus.results.follow("r", entry)) == outputs


async def test_ended_requests_are_found_by_their_ids(buses: Any) -> None:
    bus, other = buses.pair()
    ends = {}
    for name in ("a", "call_0", "call_1", "call_x"):
        entry = await publish(bus, name)
        ends[name] = msgspec.structs.replace(kit.done(name, entry), trace_id=name * 2)
        await bus.results.deliver([(name, [kit.chunk(name, entry, 0), ends[name]])])
        assert await kit.collect(bus.results.follow(name, entry))
    running = await publish(bus, "running")
    await bus.results.deliver([("running", [kit.chunk("running", running, 0)])])
    find = other.results.recorded
    assert await find("a", search=False) == await find("a") == [ends["a"]]
    assert await find("call", search=False) == [ends["call_0"], ends["call_1"]]
    assert await find(ends["a"].entry_id) == await find("aa") == [ends["a"]]
    assert await find("running") == await find("nothing") == []


async def test_the_last_output_is_delivered_without_waiting(buses: Any) -> None:
    bus, other = buses.pair()
    assert await other.results.last("r", "") is None
    entry = await publish(bus, "r")
    assert await other.results.last("r", entry) is None
    for output in (kit.chunk("r", entry, 0), kit.chunk("r", entry, 1), kit.done("r", entry)):
        await bus.results.deliver([("r", [output])])
        for asked in (entry, ""):
            assert await other.results.last("r", asked) == output
    # One of a request without a name, or whose name was taken, is its entry's.
    second = await publish(bus, "r")
    await bus.results.deliver([(second, [kit.failed("r", second, "duplicate_request")])])
    assert await other.results.last("r", second) == kit.failed("r", second, "duplicate_request")
    assert await other.results.last("r", "") == output
    with pytest.raises(BusError, check=lambda e: e.code == "unknown_request"):
        await other.results.last("never", "0-99")


async def test_leaving_ends_a_wait(bus: Bus) -> None:
    entry = await publish(bus, "r")
    await bus.results.deliver([("r", [kit.chunk("r", entry, 0)])])
    stream = bus.results.follow("r", entry)
    tail = await bus.results.tail()
    await anext(stream)
    waits = [asyncio.ensure_future(anext(stream)), asyncio.ensure_future(anext(tail))]
    await asyncio.sleep(0)
    await stream.aclose()
    await tail.aclose()
    ended = await asyncio.gather(*waits, return_exceptions=True)
    assert [type(end) for end in ended] == [StopAsyncIteration, StopAsyncIteration]


async def test_cancelled_deliver_is_whole(bus: Bus) -> None:
    entry = await publish(bus, "r")
    delivering = asyncio.create_task(bus.results.deliver([("r", [kit.chunk("r", entry, 0)])]))
    await asyncio.sleep(0)
    delivering.cancel()
    await asyncio.gather(delivering, return_exceptions=True)
    await bus.results.deliver([("r", [kit.done("r", entry)])])
    expected = [kit.chunk("r", entry, 0), kit.done("r", entry)]
    assert await kit.collect(bus.results.follow("r", entry)) == expected


async def test_memory_drops_followed_outputs(memory_bus: MemoryBus) -> None:
    entry = await publish(memory_bus, "r")
    await memory_bus.results.deliver([("r", [kit.done("r", entry)])])
    assert await kit.collect(memory_bus.results.follow("r", entry))
    assert await memory_bus.results.claim([("r", "another")]) == [None]
    await memory_bus.results.deliver([("r", [kit.done("r", "another")])])
    assert await kit.collect(memory_bus.results.follow("r", "another"))
    with pytest.raises(BusError, match="can be followed once"):
        await anext(memory_bus.results.follow("r", entry))
    again = await publish(memory_bus, "r")
    await memory_bus.results.deliver([("r", [kit.done("r", again)])])
    assert await kit.collect(memory_bus.results.follow("r", again)) == [kit.done("r", again)]


async def test_memory_keeps_only_the_latest_unfollowed(memory_bus: MemoryBus) -> None:
    alive = await publish(memory_bus, "alive")
    entries = []
    for i in range(KEPT_FINISHED + 1):
        entries.append(await publish(memory_bus, f"r{i}"))
        await memory_bus.requests.acknowledge((await memory_bus.requests.take(2))[0].entry_id)
        await memory_bus.results.deliver([(f"r{i}", [kit.done(f"r{i}", entries[i])])])
    with pytest.raises(BusError, match="no longer kept"):
        await anext(memory_bus.results.follow("r0", entries[0]))
    assert len(await kit.collect(memory_bus.results.follow("r1", entries[1]))) == 1
    await memory_bus.results.deliver([("alive", [kit.done("alive", alive)])])
    assert len(await kit.collect(memory_bus.results.follow("alive", alive))) == 1


async def test_memory_has_the_newest_results_read_or_not(memory_bus: MemoryBus) -> None:
    for second in range(5):
        end = msgspec.structs.replace(
            kit.done(f"r{second}", f"e{second}"), timings=Timings(finished_ns=second * 10**9)
        )
        await memory_bus.results.deliver([(end.request_id, [end])])
    assert await kit.collect(memory_bus.results.follow("r3", "e3"))
    found = await kit.collect(memory_bus.results.newest(2))
    assert [each.entry_id for each in found] == ["e2", "e3", "e4"]


async def test_memory_keeps_the_latest_ends_within_a_number_of_tokens(
    memory_bus: MemoryBus,
) -> None:
    for name in ("a", "b", "c"):
        end = kit.done(name, name)
        end = msgspec.structs.replace(end, prompt_token_ids=(1,) * (KEPT_RECORD_TOKENS // 2 - 9))
        await memory_bus.results.deliver([(name, [end])])
    found = [await memory_bus.results.recorded(name) for name in ("a", "b", "c")]
    assert [len(each) for each in found] == [0, 1, 1]
    for number in range(KEPT_RECORDS):
        await memory_bus.results.deliver([(f"r{number}", [kit.done(f"r{number}", f"r{number}")])])
    assert await memory_bus.results.recorded("c") == []
    assert await memory_bus.results.recorded("r0")


async def test_memory_drops_the_oldest_for_a_slow_tail(memory_bus: MemoryBus) -> None:
    tail = await memory_bus.results.tail()
    for i in range(TAIL_CAPACITY + 5):
        await memory_bus.results.deliver([(f"r{i}", [kit.done(f"r{i}", f"e{i}")])])
    assert (await anext(tail)).request_id == "r5"
