"""The entrance of a deployment of several models: requests move to their models, once and in order.

On a single server and on a cluster, by hand (`RequestRouting`) and with the router that calls it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from nano_inference.bus import Bus, Malformed
from nano_inference.bus.public import ErrorInfo
from nano_inference.bus.redis.routing import BLOCK_S
from nano_inference.config import BusError, ChannelClosed, ModelConfig
from nano_inference.store.registry import ModelRecord

from ..buses import ids_of, kit, take
from ..errors import raises
from ..servers import plain_client

BUSES = ("redis", "cluster")


answer = partial(kit.refusal, code="unknown_model")


async def put(bus: Bus, *models: str, takes: bool = True) -> None:
    for model in models:
        spec = ModelConfig(id=model, path="/nowhere")
        state: Any = "ready" if takes else "unloaded"
        await bus.store.models.put(ModelRecord(spec=spec, state=state, takes_requests=takes))


async def of_model(buses: Any, model: str) -> Bus:
    """The bus of a lane of the model."""
    bus: Bus = buses.open(model=model)
    assert await bus.requests.pending() == []
    return bus


async def deployed(buses: Any, *models: str) -> list[Bus]:
    """Open a bus of a deployment, and one of a lane of each model."""
    bus = buses.open()
    await put(bus, *models)
    return [bus, *[await of_model(buses, model) for model in models]]


@pytest_asyncio.fixture
async def foreign(buses: Any) -> AsyncIterator[Any]:
    """A client of another program."""
    client = plain_client(buses.url)
    yield client
    await client.aclose()


async def test_requests_reach_their_models_by_the_ids_that_they_had_in_order(buses: Any) -> None:
    bus, a, b = await deployed(buses, "a", "b")
    wanted = ["a", "b", "b", "a", "b"]
    ids = [await bus.requests.publish({"prompt": str(i), "model": m}) for i, m in enumerate(wanted)]
    waiting = await bus.routing.unrouted()
    assert [(each.entry_id, each.model) for each in waiting] == list(zip(ids, wanted, strict=True))
    assert await bus.routing.move([(each.entry_id, each.model) for each in waiting]) == []
    for lane, name in ((a, "a"), (b, "b")):
        entries = await take(lane, wanted.count(name))
        told = [(each.entry_id, each.request.prompt) for each in entries]  # type: ignore[union-attr]
        assert told == [(ids[i], str(i)) for i, model in enumerate(wanted) if model == name]
    assert (await bus.requests.backlog()).waiting == 0


async def test_a_trace_and_any_encoding_move_along(buses: Any, foreign: Any) -> None:
    bus, lane = await deployed(buses, "a")
    packed = msgspec.msgpack.encode({"prompt": "x", "model": "b"})
    trace = f"00-{'ab' * 16}-{'cd' * 8}-01"
    fields = {"msgpack": packed, "traceparent": trace, "tracestate": "k=v", "model": "a"}
    entry_id = (await foreign.xadd(f"{buses.prefix}:requests", fields)).decode()
    (waiting,) = await bus.routing.unrouted()
    assert (waiting.entry_id, waiting.model) == (entry_id, "a"), "the field wins over the request"
    await bus.routing.move([(entry_id, "a")])
    (entry,) = await take(lane, 1)
    assert (entry.traceparent, entry.tracestate) == (trace, "k=v")
    assert entry.request.prompt == "x"  # type: ignore[union-attr]


async def test_an_unreadable_entry_names_no_model(buses: Any, foreign: Any) -> None:
    bus, lane = await deployed(buses, "a")
    for fields in ({"json": "{"}, {"text": "x"}, {"json": '{"model": 7}'}, {"msgpack": b"\xc1"}):
        await foreign.xadd(f"{buses.prefix}:requests", fields)
    waiting = await bus.routing.unrouted()
    assert [each.model for each in waiting] == [""] * 4
    await bus.routing.move([(each.entry_id, "a") for each in waiting])
    assert all(isinstance(each.request, Malformed) for each in await take(lane, 4))


async def test_two_routers_at_once_move_each_entry_once(buses: Any) -> None:
    bus, a, b = await deployed(buses, "a", "b")
    other = buses.open()
    names = ["a", "b"] * 30
    ids = [await bus.requests.publish({"prompt": "x", "model": name}) for name in names]
    first, second = await asyncio.gather(bus.routing.unrouted(), other.routing.unrouted())
    assert first == second, "both see them"
    places = [(each.entry_id, each.model) for each in first]
    assert await asyncio.gather(bus.routing.move(places), other.routing.move(places)) == [[], []]
    assert ids_of(await take(a, 30)) == ids[::2]
    assert ids_of(await take(b, 30)) == ids[1::2]
    for lane in (a, b):
        assert (await lane.requests.backlog())[:2] == (0, 30), "nothing came twice"


async def test_a_closed_model_takes_nothing_from_the_requests_stream(buses: Any) -> None:
    bus = buses.open()
    await put(bus, "a")
    await put(bus, "b", takes=False)
    lane = await of_model(buses, "a")
    ids = [await bus.requests.publish({"prompt": "x", "model": model}) for model in "abab"]
    places = list(zip(ids, "abab", strict=True))
    closed = [(ids[1], "model_not_loaded"), (ids[3], "model_not_loaded")]
    assert await bus.routing.move(places) == closed
    assert ids_of(await take(lane, 2)) == [ids[0], ids[2]]
    assert ids_of(await bus.routing.unrouted()) == [ids[1], ids[3]]
    await put(bus, "b")
    assert await bus.routing.move(places) == [], "open again, and the others are not there any more"
    assert len(await take(await of_model(buses, "b"), 2)) == 2


async def test_a_request_that_can_not_come_in_its_order_keeps_no_other(
    buses: Any, foreign: Any
) -> None:
    """Somebody has written to the stream of a model himself."""
    bus, _, lane = await deployed(buses, "a", "b")
    ids = [await bus.requests.publish({"prompt": "x", "model": model}) for model in "ab"]
    later = f"{2**43}-0"
    await foreign.xadd(f"{{{buses.prefix}:requests}}:of:a", {"json": "{}"}, id=later)
    left = await bus.routing.move(list(zip(ids, "ab", strict=True)))
    assert left == [(ids[0], "not_routed")]
    assert ids_of(await take(lane, 1)) == [ids[1]]
    assert ids_of(await bus.routing.unrouted()) == [ids[0]]


async def test_an_entrys_model_reaches_its_lane(buses: Any) -> None:
    bus = buses.open(model="a")
    await put(bus, "a")
    await bus.requests.publish({"prompt": "x", "model": "mine"})
    (entry,) = await take(await of_model(buses, "a"), 1)
    assert (entry.model, entry.request.model) == ("a", "mine")  # type: ignore[union-attr]


async def test_a_dead_letter_says_of_which_model_it_is(buses: Any) -> None:
    bus, lane = await deployed(buses, "a")
    await bus.routing.move([(await bus.requests.publish({"prompt": "x", "model": "m"}), "a")])
    (entry,) = await take(lane, 1)
    await lane.requests.add_dead_letter(
        entry, ErrorInfo(code="lane_failed", message="it failed"), 3
    )
    (letter,) = await bus.requests.dead_letters()
    assert (letter.model, letter.request.model) == ("a", "m")


@pytest.mark.parametrize("end", ["closed", "removed"])
async def test_publishing_to_a_closed_model_fails_at_once(buses: Any, end: str) -> None:
    bus = buses.open()
    await put(bus, "a")
    await put(bus, "b", takes=end == "removed")
    if end == "removed":
        await bus.store.models.remove("b")
    lane = buses.open(model="b")
    with raises("model_not_loaded", "'b' takes no requests: it is", BusError):
        await lane.requests.publish({"prompt": "x"})
    assert (await lane.requests.backlog()).waiting == 0
    assert (await bus.requests.backlog()).waiting == 0
    await put(bus, "b")
    assert await lane.requests.publish({"prompt": "x"})


async def test_a_model_is_closed_before_or_after_a_request_and_never_between(buses: Any) -> None:
    """All that were told to be published are on the stream, and no other."""
    bus, lane = await deployed(buses, "a")
    clients = [buses.open(model="a") for _ in range(4)]
    published: list[str] = []
    refused: list[str] = []

    enough = asyncio.Event()

    async def publish(client: Bus) -> None:
        while not refused:
            try:
                published.append(await client.requests.publish({"prompt": "x"}))
            except BusError as error:
                refused.append(error.code)
            if len(published) >= 20:
                enough.set()

    async def close() -> None:
        await enough.wait()
        await put(bus, "a", takes=False)

    await asyncio.gather(close(), *map(publish, clients))
    assert set(refused) == {"model_not_loaded"}
    entries = await take(lane, len(published))
    assert ids_of(entries) == sorted(published, key=lambda each: tuple(map(int, each.split("-"))))
    assert (await lane.requests.backlog()).waiting == 0


async def test_routed_requests_keep_their_order_on_the_requests_stream(buses: Any) -> None:
    bus, lane, _ = await deployed(buses, "a", "b")
    client = buses.open(model="a")
    direct = await client.requests.publish({"prompt": "0", "model": "a"})
    assert (await bus.requests.backlog()).waiting == 0, "nobody waited, so it is there at once"
    waits = await bus.requests.publish({"prompt": "1", "model": "b"})
    behind = await client.requests.publish({"prompt": "2", "model": "b"})
    places = [(each.entry_id, each.model) for each in await bus.routing.unrouted()]
    assert places == [(waits, "b"), (behind, "a")], "it is for the model of the client"
    assert await bus.routing.move(places) == []
    after = await client.requests.publish({"prompt": "3"})
    entries = await take(lane, 3)
    assert ids_of(entries) == [direct, behind, after]
    assert [each.request.prompt for each in entries] == ["0", "2", "3"]  # type: ignore[union-attr]


async def test_a_refused_request_gets_one_answer_and_leaves_the_requests_stream(buses: Any) -> None:
    bus = buses.open()
    await put(bus, "a")
    ended = await bus.results.tail()
    named = await bus.requests.publish({"prompt": "x", "model": "c", "request_id": "r"})
    nameless = await bus.requests.publish({"prompt": "x", "model": "c"})
    stays = await bus.requests.publish({"prompt": "x", "model": "a"})
    epoch = await bus.next_epoch()
    other = buses.open()
    await asyncio.gather(
        bus.routing.refuse([named, nameless], answer, epoch),
        other.routing.refuse([named, nameless], answer, await other.next_epoch()),
    )
    assert ids_of(await bus.routing.unrouted()) == [stays]
    for request_id, entry_id in (("r", named), (nameless, nameless)):
        (told,) = await kit.collect(bus.results.follow(request_id, entry_id))
        assert (told.status, told.error.code) == ("error", "unknown_model")
    first, second = await anext(ended), await anext(ended)
    assert {first.entry_id, second.entry_id} == {named, nameless}
    await bus.results.deliver([("last", [kit.done("last", "9-9")])])
    assert (await anext(ended)).request_id == "last", "nobody's answer came twice"
    await ended.aclose()


async def test_another_router_finishes_a_refusal_after_a_death_before_the_answer(
    buses: Any,
) -> None:
    bus = buses.open()
    await put(bus, "a")
    entry_id = await bus.requests.publish({"prompt": "x", "model": "c", "request_id": "r"})
    assert await bus.results.claim([("r", entry_id)]) == [None]
    await bus.routing.refuse([entry_id], answer, await bus.next_epoch())
    assert (await bus.requests.backlog()).waiting == 0
    assert await kit.collect(bus.results.follow("r", entry_id)) == [
        kit.failed("r", entry_id, "unknown_model")
    ]


async def test_an_entry_of_very_many_fields_keeps_no_other(buses: Any, foreign: Any) -> None:
    """More than Lua can hand on."""
    bus = buses.open()
    await put(bus, "a")
    many = {"json": '{"prompt": "x"}'} | {f"f{number}": "" for number in range(5000)}
    first = (await foreign.xadd(f"{buses.prefix}:requests", many)).decode()
    second = await bus.requests.publish({"prompt": "x", "model": "a"})
    unmoved = await bus.routing.move([(first, "a"), (second, "a")])
    assert unmoved == [(first, "malformed")]
    (entry,) = await take(await of_model(buses, "a"), 1)
    assert entry.entry_id == second
    await bus.routing.refuse([first], answer, await bus.next_epoch())
    assert (await bus.requests.backlog()).waiting == 0


async def test_a_refused_request_with_the_id_of_another_leaves_that_ones_answer(buses: Any) -> None:
    bus = buses.open()
    await put(bus, "a")
    owner = "1-1"
    assert await bus.results.claim([("r", owner)]) == [None]
    entry_id = await bus.requests.publish({"prompt": "x", "model": "c", "request_id": "r"})
    await bus.routing.refuse([entry_id], answer, await bus.next_epoch())
    assert (await bus.requests.backlog()).waiting == 0
    (told,) = await kit.collect(bus.results.follow(entry_id, entry_id))
    assert told.error.code == "unknown_model"
    await bus.results.deliver([("r", [kit.done("r", owner)])], await bus.next_epoch())
    assert await kit.collect(bus.results.follow("r", owner)) == [kit.done("r", owner)]


async def test_another_router_finishes_a_refusal_after_a_death_before_the_removal(
    buses: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry is still there, its answer too: a second router removes the one and keeps the
    other as it is."""
    bus, other = buses.open(), buses.open()
    await put(bus, "a")
    entry_id = await bus.requests.publish({"prompt": "x", "model": "c", "request_id": "r"})

    real = bus.results.answer

    async def answers_and_dies(*arguments: Any) -> None:
        await real(*arguments)
        raise asyncio.CancelledError

    with monkeypatch.context() as patched, pytest.raises(asyncio.CancelledError):
        patched.setattr(bus.results, "answer", answers_and_dies)
        await bus.routing.refuse([entry_id], answer, await bus.next_epoch())
    (waiting,) = await other.routing.unrouted()
    assert waiting.entry_id == entry_id
    assert len(await kit.collect(bus.results.follow("r", entry_id))) == 1
    await other.routing.refuse([entry_id], answer, await other.next_epoch())
    assert (await bus.requests.backlog()).waiting == 0
    assert len(await kit.collect(bus.results.follow("r", entry_id))) == 1


async def test_waiting_for_the_requests_stream_ends_with_the_bus(buses: Any) -> None:
    bus = buses.open()
    waiting = asyncio.create_task(bus.routing.unrouted())
    await asyncio.sleep(0)
    await bus.aclose()
    async with asyncio.timeout(BLOCK_S - 0.5):
        with pytest.raises(ChannelClosed):
            await waiting


async def test_a_cancelled_wait_leaves_the_requests_stream_unchanged(buses: Any) -> None:
    bus = buses.open()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await bus.routing.unrouted()
    entry_id = await bus.requests.publish({"prompt": "x", "model": "a"})
    assert ids_of(await bus.routing.unrouted()) == [entry_id]


async def test_models_share_no_lanes_board_or_weights(buses: Any) -> None:
    a, b = buses.open(model="a"), buses.open(model="b")
    await a.requests.renew(1000.0)
    for bus in (a, b):
        assert await bus.lanes() == ["0"], "each has one, and they are two"
    first = buses.open(model="a", lane="1")
    await first.requests.renew(1000.0)
    assert await a.lanes() == ["0", "1"]
    assert await b.lanes() == ["0"]
    assert await buses.open().lanes() == ["0"]
