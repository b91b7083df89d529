"""The contract of the requests queue: publish, take, pending, acknowledge, and odd input."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from functools import partial
from typing import Any

from msgspec.structs import replace

from nano_inference.bus import Bus, Malformed, MemoryBus, RequestEntry
from nano_inference.bus.public import ChatMessage, ErrorInfo, GenerateRequest
from nano_inference.config import BusConfig, SamplingParams

from ..buses import SHARDED, STORES, ids_of, kit, take

BUSES = [*STORES, SHARDED]

FULL = GenerateRequest(
    request_id="r-1",
    messages=(ChatMessage(role="user", content="hé"),),
    prompt_token_ids=(1, 2),
    model="tiny",
    n=2,
    sampling=SamplingParams(
        temperature=0.5, max_tokens=3, stop_token_ids=frozenset({5}), seed=-9, stop=("a",)
    ),
    stream=False,
    priority=-2,
    tenant="t",
    budget_ns=10**10,
)


async def only(bus: Bus) -> Any:
    return (await take(bus, 1))[0].request


async def test_struct_arrives_equal_with_its_trace(bus: Bus) -> None:
    assert await bus.requests.pending() == []
    entry_id = await bus.requests.publish(FULL, traceparent="00-ab-01", tracestate="k=v")
    (entry,) = await take(bus, 1)
    assert entry.waited_ns >= 0
    held = {"waited_ns": entry.waited_ns, "queued_ns": entry.waited_ns, "digest": entry.digest}
    wanted = RequestEntry(entry_id, FULL, "00-ab-01", "k=v", **held)
    assert entry == wanted


async def test_dict_and_json_are_requests_too(bus: Bus) -> None:
    writings: tuple[Any, ...] = (
        {"prompt": "x", "n": 2, "sampling": {"temperature": 0}},
        {"type": "generate", "prompt": "x", "n": 2, "sampling": SamplingParams(temperature=0)},
        b'{"prompt":"x","n":2,"sampling":{"temperature":0}}',
        b' {"type":"generate","sampling":{"temperature":0.0},"prompt":"x","n":2}\n',
    )
    wanted = GenerateRequest(prompt="x", n=2, sampling=SamplingParams(temperature=0.0))
    for written in writings:
        await bus.requests.publish(written)
        assert await only(bus) == wanted, written


async def test_entries_come_in_order_and_once(bus: Bus) -> None:
    ids = [await bus.requests.publish(GenerateRequest(prompt=str(i))) for i in range(50)]
    entries = [*await take(bus, 7), *await take(bus, 43)]
    assert ids_of(entries) == ids
    assert [entry.request.prompt for entry in entries] == [str(i) for i in range(50)]
    assert len(set(ids)) == 50


async def test_take_is_bounded_by_max_items(bus: Bus) -> None:
    for i in range(5):
        await bus.requests.publish(GenerateRequest(prompt=str(i)))
    assert len(await bus.requests.take(2)) <= 2


async def test_pending_has_the_unacknowledged_entries(buses: Any) -> None:
    bus = buses.open()
    ids = [await bus.requests.publish(GenerateRequest(prompt=str(i))) for i in range(4)]
    await take(bus, 3)
    await bus.requests.acknowledge(ids[1])
    bus = await buses.reopen(bus)
    pending = await bus.requests.pending()
    assert ids_of(pending) == [ids[0], ids[2]]
    assert [entry.request.prompt for entry in pending] == ["0", "2"]
    assert ids_of(await take(bus, 1)) == [ids[3]]
    for entry_id in (ids[0], ids[2], ids[3]):
        await bus.requests.acknowledge(entry_id)
    bus = await buses.reopen(bus)
    assert await bus.requests.pending() == []


async def test_pending_after_a_restart_of_the_stage_only(bus: Bus) -> None:
    ids = [await bus.requests.publish(GenerateRequest(prompt=str(i))) for i in range(3)]
    await take(bus, 2)
    waiting = asyncio.create_task(bus.requests.take())  # the stage dies while it waits
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    pending = await bus.requests.pending()
    ready = [] if len(pending) == 3 else await take(bus, 1)
    assert [entry.entry_id for entry in [*pending, *ready]] == ids


async def test_cancelled_take_loses_and_repeats_nothing(bus: Bus) -> None:
    taken: list[str] = []
    published: list[str] = []
    for i in range(40):
        taking = asyncio.create_task(bus.requests.take())
        await asyncio.sleep(0)
        published.append(await bus.requests.publish(GenerateRequest(prompt=str(i))))
        for _ in range(i % 4):
            await asyncio.sleep(0)
        taking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            taken += ids_of(await taking)
    taken += ids_of(await take(bus, 40 - len(taken)))
    assert taken == published


async def test_acknowledging_the_unknown_does_nothing(bus: Bus) -> None:
    for entry_id in ("0-99", "", "nonsense", "9" * 40 + "-1"):
        await bus.requests.acknowledge(entry_id)
    await bus.requests.publish(GenerateRequest(prompt="x"))
    assert (await only(bus)).prompt == "x"


async def test_not_a_number_gets_through(bus: Bus) -> None:
    for request in (
        GenerateRequest(prompt="x", sampling=replace(SamplingParams(), temperature=math.nan)),
        {"prompt": "x", "sampling": {"temperature": math.nan}},
    ):
        await bus.requests.publish(request)
        assert math.isnan((await only(bus)).sampling.temperature)


BAD: list[tuple[Any, str, str, str]] = [
    (b"", "", "malformed", "JSON"),
    (b"{", "", "malformed", "JSON"),
    (b'{"prompt":"x"} trailing', "", "malformed", "JSON"),
    (b'{"prompt":"\xff"}', "", "malformed", "UTF-8"),
    ('{"request_id":"r"}'.encode("utf-16"), "", "malformed", "JSON"),
    (b'{"prompt":"\\ud800"}', "", "malformed", "JSON"),
    (b'{"prompt":NaN}', "", "malformed", "JSON"),
    (b"[" * 8000, "", "malformed", "nested too deeply"),
    (b'{"request_id":"r","x":' + b"[" * 3000 + b"]" * 3000 + b"}", "", "malformed", "nested"),
    (b'{"request_id":"r","n":1.5}', "r", "invalid_request", "n is "),
    (b'{"request_id":"r","n":"1"}', "r", "invalid_request", "n is "),
    (b'{"request_id":7}', "", "invalid_request", "request_id"),
    (b'{"request_id":"r","promt":"x"}', "r", "invalid_request", "promt"),
    (b'{"request_id":"r","type":"chunk"}', "r", "invalid_request", "type"),
    (b'{"request_id":"r","sampling":{"temp":1}}', "r", "invalid_request", "sampling"),
    (b'{"n":1' + b"0" * 30 + b',"request_id":"r"}', "r", "invalid_request", "n is "),
    (b'{"n":-1' + b"0" * 30 + b"}", "", "invalid_request", "n is "),
    (b'{"n":1' + b"0" * 5000 + b"}", "", "malformed", "JSON"),
    (
        b'{"prompt_token_ids":[1,99999999999999999999],"request_id":"r"}',
        "r",
        "invalid_request",
        "prompt_token_ids",
    ),
    (b'{"sampling":{"seed":18446744073709551615}}', "", "invalid_request", "sampling.seed"),
    (b'["r"]', "", "invalid_request", "object"),
    (b"null", "", "invalid_request", "object"),
    (b'{"prompt":"' + b"x" * 9000 + b'"}', "", "request_too_large", "8192"),
    ({"request_id": "r", "prompt": "x" * 9000}, "r", "request_too_large", "8192"),
    ({"request_id": "r", "n": 2.0}, "r", "invalid_request", "n is "),
    ({"request_id": "r", "n": 10**40}, "r", "invalid_request", ""),
    ({"request_id": "r", "prompt": object()}, "r", "invalid_request", "plain data"),
    ({"request_id": "r", "prompt": "\ud800"}, "r", "invalid_request", "Unicode"),
    ({"request_id": "\ud800"}, "", "invalid_request", "Unicode"),
    ({"request_id": "r", "prompt_token_ids": [1, True]}, "r", "invalid_request", "[1]"),
    (GenerateRequest(request_id="r", n="3"), "r", "invalid_request", "n is "),  # type: ignore[arg-type]
    (
        GenerateRequest(request_id="r", sampling=replace(SamplingParams(), stop=5)),
        "r",
        "invalid_request",
        "sampling.stop",
    ),
]


async def test_bad_request_becomes_malformed(buses: Any) -> None:
    """Each between two good ones, which it leaves alone."""
    bus = buses.open(max_request_bytes=8192)
    for written, request_id, code, says in BAD:
        entry_id = await bus.requests.publish(written)
        await bus.requests.publish(GenerateRequest(prompt="next"))
        bad, good = await take(bus, 2)
        assert bad.entry_id == entry_id
        assert isinstance(bad.request, Malformed), written
        assert bad.request.code == code, (written, bad.request.message)
        if code == "request_too_large":  # known only where the object itself was at hand
            assert bad.request.request_id in {request_id, ""}
        else:
            assert bad.request.request_id == request_id, written
        assert says in bad.request.message
        assert good.request == GenerateRequest(prompt="next")


async def test_endless_nesting_ends(bus: Bus) -> None:
    endless: list[Any] = []
    endless.append(endless)
    await bus.requests.publish({"request_id": "r", "prompt": endless})
    request = await only(bus)
    assert isinstance(request, Malformed)
    assert (request.request_id, request.code) == ("r", "invalid_request")


async def test_odd_request_ids_do_no_harm(bus: Bus) -> None:
    for request_id in ("a b", "a\nb", "x" * 10_000, "é:{}*\0", "0-1"):
        entry_id = await bus.requests.publish(GenerateRequest(request_id=request_id, prompt="x"))
        assert (await only(bus)).request_id == request_id
        outputs = [kit.chunk(request_id, entry_id, 0), kit.done(request_id, entry_id)]
        assert await bus.results.claim([(request_id, entry_id)]) == [None]
        await bus.results.deliver([(request_id, outputs)])
        assert await bus.results.claim([(request_id, "another")]) == [entry_id]
        assert await kit.collect(bus.results.follow(request_id, entry_id)) == outputs


async def test_publish_waits_in_memory_without_a_reader() -> None:
    bus = MemoryBus(BusConfig(link_capacity=3))
    ids: list[str] = []

    async def publish() -> None:
        for i in range(10):
            ids.append(await bus.requests.publish({"prompt": str(i)}))

    publishing = asyncio.create_task(publish())
    assert await kit.settled(lambda: len(ids)) == 3
    entries = await take(bus, 10)
    await publishing
    assert ids_of(entries) == ids
    assert ids[:2] == ["0-1", "0-2"]


async def test_the_time_in_the_queue_counts_for_those_with_a_budget(bus: Bus) -> None:
    await bus.requests.publish(GenerateRequest(prompt="x", budget_ns=10**9))
    await bus.requests.publish(GenerateRequest(prompt="x"))
    await asyncio.sleep(0.05)
    limited, unlimited = await take(bus, 2)
    assert 20_000_000 < limited.waited_ns < 10**11
    assert unlimited.waited_ns == 0
    assert 20_000_000 < unlimited.queued_ns < 10**11
    still, never = await bus.requests.pending()
    assert still.waited_ns >= limited.waited_ns
    assert never.waited_ns == 0


async def test_dead_letters_are_kept_until_they_are_dropped(buses: Any) -> None:
    bus = buses.open()
    entry_id = await bus.requests.publish(FULL, traceparent="00-ab-01", tracestate="k=v")
    (entry,) = await take(bus, 1)
    error = ErrorInfo(code="lane_failed", message="three times")
    assert await bus.requests.dead_letters() == []
    await bus.requests.add_dead_letter(entry, error, 3)
    (letter,) = await buses.another(bus).requests.dead_letters()
    told = (letter.entry_id, letter.request, letter.error, letter.deaths)
    assert told == (entry_id, FULL, error, 3)
    assert (letter.traceparent, letter.tracestate) == ("00-ab-01", "k=v")
    assert abs(letter.died_ns - time.time_ns()) < 60 * 10**9
    assert not await bus.requests.drop_dead_letter("1-1")
    assert await bus.requests.drop_dead_letter(letter.letter_id)
    assert await bus.requests.dead_letters() == []


async def test_backlog_lists_waiting_taken_and_orphaned_requests(bus: Bus) -> None:
    assert await bus.requests.pending() == []
    assert await bus.requests.backlog() == (0, 0, 0, 0)
    for number in range(3):
        await bus.requests.publish({"prompt": str(number)})
    assert await bus.requests.backlog() == (3, 0, 0, 3)
    (entry,) = await take(bus, 1)
    more = (0, 3, 0, 3)  # it may fetch more than asked
    assert await bus.requests.backlog() in ((2, 1, 0, 3), more)
    await bus.requests.add_dead_letter(entry, ErrorInfo(code="lane_failed", message=""), 3)
    assert (await bus.requests.backlog()).dead == 1


async def test_the_queue_is_as_long_as_requests_wait_to_begin(bus: Bus) -> None:
    assert await bus.requests.pending() == []
    for number in range(5):
        await bus.requests.publish({"prompt": str(number)})
    entries = await take(bus, 3)
    assert await bus.requests.count_queue(None) == 5, "taken ones wait as well"
    assert await bus.requests.count_queue(2) == 3
    assert await bus.requests.count_queue(None) == 3, "who does not know changes nothing"
    assert (await bus.requests.backlog()).queue_length == 3
    for entry in entries[:2]:
        await bus.requests.acknowledge(entry.entry_id)
    while await bus.requests.count_queue(0) != 3:  # noqa: ASYNC110  (Redis is told in batches)
        await asyncio.sleep(0.01)
    assert await bus.requests.count_queue(40) == 0, "it may have begun since; never below 0"


async def test_all_are_ended_whether_they_were_taken_or_not(bus: Bus) -> None:
    """Each once: what one has begun stands before its end, and what has ended is left as it is."""
    names = ("begun", "done", "waiting")
    await bus.requests.pending()
    ids = {name: await bus.requests.publish({"request_id": name}) for name in names[:2]}
    await take(bus, 2)
    await bus.results.claim(list(ids.items()))
    begun = kit.chunk("begun", ids["begun"], 0)
    epoch = await bus.next_epoch()
    done = kit.done("done", ids["done"])
    await bus.results.deliver([("begun", [begun]), ("done", [done])], epoch)
    ids["waiting"] = await bus.requests.publish({"request_id": "waiting"})
    nameless = await bus.requests.publish({"prompt": "a"})

    answer = partial(kit.refusal, code="gone")
    assert await bus.requests.end_all(answer, await bus.next_epoch()) == 4
    backlog = await bus.requests.backlog()
    assert (backlog.waiting, backlog.pending) == (0, 0)
    # A lane that was only thought gone writes nothing after it.
    await bus.results.deliver([("begun", [kit.chunk("begun", ids["begun"], 1)])], epoch)
    outputs = {name: await kit.collect(bus.results.follow(name, ids[name])) for name in names}
    assert outputs["begun"] == [begun, kit.failed("begun", ids["begun"], "gone")]
    assert outputs["done"] == [done]
    assert outputs["waiting"] == [kit.failed("waiting", ids["waiting"], "gone")]
    assert len(await kit.collect(bus.results.follow(nameless, nameless))) == 1
    assert await bus.requests.end_all(answer, await bus.next_epoch()) == 0
