"""A server that takes another's place may lack what that has confirmed: terminal messages too."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from nano_inference.bus import Bus
from nano_inference.bus.public import Output
from nano_inference.bus.redis import requests_stream as redis_requests

from ..buses import ids_of, kit, take
from ..servers import plain_client

BUSES = ["redis", "cluster"]


class Lossy:
    """A bus with a request `r`, on a server that loses data."""

    def __init__(self, buses: Any, bus: Bus, plain: Any) -> None:
        self.bus = bus
        self.plain = plain
        self.keys = buses.keys
        self.out = buses.keys.out("r")

    async def begin(self) -> str:
        """Publish the request, take and claim it; return its entry."""
        entry_id = await self.bus.requests.publish({"request_id": "r"})
        await self.take_again(entry_id)
        assert await self.bus.results.claim([("r", entry_id)]) == [None]
        return entry_id

    async def take_again(self, entry_id: str) -> None:
        assert ids_of(await take(self.bus, 1)) == [entry_id]

    async def deliver(self, *outputs: Output, epoch: int = 1) -> set[str]:
        return await self.bus.results.deliver([("r", outputs)], epoch)

    async def deliver_five(self) -> list[Any]:
        chunks = [kit.chunk("r", "1-1", i) for i in range(5)]
        await self.deliver(*chunks)
        return chunks

    async def end(self) -> set[str]:
        """The streams that are not ended."""
        return await self.deliver(kit.done("r", "1-1"))

    async def end_of(self, entry_id: str) -> None:
        assert await self.deliver(kit.done("r", entry_id)) == set()

    async def recover(self, epoch: int) -> list[Any]:
        (outputs,) = await self.bus.results.recover(["r"], epoch)
        return outputs

    async def remove(self, *ids: str) -> None:
        assert await self.plain.xdel(self.out, *ids) == len(ids)

    async def last_id(self) -> bytes:
        ((last_id, _),) = await self.plain.xrevrange(self.out, count=1)
        return bytes(last_id)

    async def lose_output(self) -> None:
        assert await self.plain.delete(self.out) == 1

    async def lose_copy(self, entry_id: str) -> None:
        """Lose the last entry of the results stream, with its mark."""
        assert await self.plain.delete(self.keys.told("r", entry_id)) == 1
        assert await self.plain.xtrim(self.keys.results, maxlen=0, approximate=False) == 1

    async def copies(self) -> int:
        return int(await self.plain.xlen(self.keys.results))

    async def acknowledged(self, entry_id: str, left: int = 0) -> None:
        """Acknowledge the entry, and wait until the stream holds that many."""
        await self.bus.requests.acknowledge(entry_id, "r")

        await kit.becomes(lambda: self.plain.xlen(self.keys.requests), left)

    async def unanswered(self, entry_id: str) -> None:
        """Acknowledge the entry, and take it again since its answer is missing."""
        await self.bus.requests.acknowledge(entry_id, "r")
        await self.take_again(entry_id)


@pytest.fixture
async def lossy(buses: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Lossy]:
    # Looks often whether an entry is to be taken again.
    monkeypatch.setattr(redis_requests, "TAKE_BLOCK_S", 0.1)
    bus = buses.open()
    assert await bus.requests.pending() == []
    async with plain_client(buses.url) as plain:
        yield Lossy(buses, bus, plain)


async def test_a_request_whose_end_was_lost_goes_on(lossy: Lossy) -> None:
    entry_id = await lossy.begin()
    first, last = kit.chunk("r", entry_id, 0), kit.done("r", entry_id)
    await lossy.deliver(first, last)
    await lossy.remove((await lossy.last_id()).decode())
    await lossy.lose_copy(entry_id)
    await lossy.unanswered(entry_id)
    assert await lossy.bus.results.claim([("r", entry_id)]) == [entry_id], "it was begun before"
    assert await lossy.recover(2) == [first]
    await lossy.deliver(last, epoch=2)
    assert await lossy.copies() == 1
    await lossy.acknowledged(entry_id)


async def test_an_answer_of_which_all_was_lost_is_given_again(lossy: Lossy) -> None:
    entry_id = await lossy.begin()
    await lossy.deliver(kit.done("r", entry_id))
    await lossy.lose_output()
    await lossy.lose_copy(entry_id)
    await lossy.unanswered(entry_id)


async def test_a_copy_that_was_lost_is_written_again(lossy: Lossy) -> None:
    entry_id = await lossy.begin()
    last = kit.done("r", entry_id)
    await lossy.deliver(last)
    await lossy.lose_copy(entry_id)
    await lossy.unanswered(entry_id)
    assert await lossy.recover(2) == [last]
    assert await lossy.copies() == 1
    await lossy.acknowledged(entry_id)


async def test_a_client_that_removes_its_read_outputs_does_no_harm(lossy: Lossy) -> None:
    entry_id = await lossy.begin()
    await lossy.deliver(kit.done("r", entry_id))
    await lossy.lose_output()
    await lossy.acknowledged(entry_id)


async def test_an_answer_under_the_entrys_id_is_an_answer(lossy: Lossy) -> None:
    """Its request's id is that of another one, which still runs."""
    await lossy.deliver(kit.chunk("r", await lossy.begin(), 0))
    entry_id = await lossy.bus.requests.publish({"request_id": "r"})
    await lossy.take_again(entry_id)
    refused = kit.failed("r", entry_id, "duplicate_request")
    await lossy.bus.results.deliver([(entry_id, [refused])], 1)
    await lossy.acknowledged(entry_id, left=1)


async def test_an_answer_that_is_never_kept_is_given_a_few_times_only(lossy: Lossy) -> None:
    entry_id = await lossy.begin()
    for _ in range(redis_requests.MOST_RETAKEN):
        await lossy.unanswered(entry_id)
    await lossy.acknowledged(entry_id)


async def test_an_answer_given_again_is_delivered_once(lossy: Lossy) -> None:
    """The new server has the copy, and lacks the original."""
    entry_id = await lossy.begin()
    await lossy.deliver(kit.done("r", entry_id))
    await lossy.lose_output()
    assert await lossy.recover(2) == []
    await lossy.deliver(kit.failed("r", entry_id, "other"), epoch=2)
    assert await lossy.copies() == 1


# --- outputs before the end -------------------------------------------------------------------


async def test_a_stream_with_a_gap_is_not_ended(lossy: Lossy) -> None:
    whole = [*await lossy.deliver_five(), kit.done("r", "1-1")]
    await lossy.remove("1-3")
    assert await lossy.end() == {"r"}
    assert await lossy.copies() == 0
    assert await lossy.recover(2) == []
    assert await lossy.deliver(*whole, epoch=2) == set()
    assert await lossy.recover(3) == whole


async def test_a_stream_that_lacks_its_last_outputs_is_not_ended(lossy: Lossy) -> None:
    chunks = await lossy.deliver_five()
    entries = await lossy.plain.xrange(lossy.out, count=2)
    await lossy.lose_output()
    for entry_id, fields in entries:
        await lossy.plain.xadd(lossy.out, fields, id=entry_id)
    assert await lossy.end() == {"r"}
    assert await lossy.recover(2) == chunks[:2]


async def test_a_stream_that_lacks_all_is_not_ended(lossy: Lossy) -> None:
    await lossy.deliver_five()
    await lossy.lose_output()
    assert await lossy.end() == {"r"}
    assert await lossy.recover(2) == []


@pytest.mark.parametrize("removed", [2, 5])
async def test_a_client_that_removes_its_read_outputs_gets_the_end(
    lossy: Lossy, removed: int
) -> None:
    await lossy.deliver_five()
    await lossy.remove(*(f"1-{number}" for number in range(1, removed + 1)))
    assert await lossy.end() == set()
    assert await lossy.last_id() == b"1-6"


# --- an id that is given twice ------------------------------------------------------------------


async def give_again(lossy: Lossy, entry_id: str, request_id: str) -> None:
    """Lose the requests stream, as in a failover; its next entry has the id of a lost one."""
    await lossy.plain.delete(lossy.keys.requests)
    body = msgspec.json.encode({"request_id": request_id, "prompt": "y"})
    assert await lossy.plain.xadd(lossy.keys.requests, {"json": body}, id=entry_id)


async def test_an_acknowledgement_leaves_another_entry_with_the_id(lossy: Lossy) -> None:
    entry_id = await lossy.begin()
    await give_again(lossy, entry_id, "other")
    (other,) = await take(lossy.bus, 1)
    assert (other.entry_id, other.request.request_id) == (entry_id, "other")
    await lossy.deliver(kit.done("r", entry_id))
    await lossy.acknowledged(entry_id, left=1)
    assert (await lossy.bus.requests.backlog()).pending == 1
    await lossy.bus.results.deliver([("other", [kit.done("other", entry_id)])])
    await lossy.bus.requests.acknowledge(entry_id, "other")
    await kit.becomes(lambda: lossy.plain.xlen(lossy.keys.requests), 0)


async def test_an_untaken_entry_with_the_id_of_an_answered_one_is_taken(lossy: Lossy) -> None:
    """It came before the acknowledgement."""
    entry_id = await lossy.begin()
    await lossy.deliver(kit.done("r", entry_id))
    await give_again(lossy, entry_id, "other")
    await lossy.bus.requests.acknowledge(entry_id, "r")
    (other,) = await take(lossy.bus, 1)
    assert other.request.request_id == "other"


async def test_a_lost_entry_stays_though_another_lane_has_one_with_its_id(
    lossy: Lossy, buses: Any
) -> None:
    entry_id = await lossy.begin()
    await lossy.plain.delete(lossy.keys.requests)
    second = buses.open(lane="b")
    assert await second.requests.pending() == []
    body = msgspec.json.encode({"request_id": "other", "prompt": "y"})
    await lossy.plain.xgroup_create(lossy.keys.requests, "admission", "0", mkstream=True)
    await lossy.plain.xadd(lossy.keys.requests, {"json": body}, id=entry_id)
    assert ids_of(await second.requests.take()) == [entry_id]
    lossy.bus.requests.mark_possibly_lost()
    assert await lossy.bus.requests.renew(30.0) == set()


async def test_the_end_of_another_request_with_the_entrys_id_is_no_output(lossy: Lossy) -> None:
    """A refused duplicate's end is in the stream of its entry."""
    entry_id = await lossy.begin()
    refused = kit.failed("r2", entry_id, "duplicate_request")
    await lossy.bus.results.deliver([(entry_id, [refused])])
    assert await lossy.bus.results.last("r", entry_id) is None
    await lossy.end_of(entry_id)
    outputs = await kit.collect(lossy.bus.results.follow("r", entry_id))
    assert outputs == [kit.done("r", entry_id)]


async def test_an_ended_queue_keeps_an_entry_that_came_under_an_ended_ones_id(
    lossy: Lossy, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry_id = await lossy.bus.requests.publish({"request_id": "r"})
    real = lossy.bus.results.recover

    async def recover(*arguments: Any) -> Any:
        await give_again(lossy, entry_id, "other")
        return await real(*arguments)

    monkeypatch.setattr(lossy.bus.results, "recover", recover)

    def answer(entry: Any) -> Any:
        return kit.failed(entry.request.request_id, entry.entry_id, "aborted")

    assert await lossy.bus.requests.end_all(answer, 2) == 1
    assert await lossy.plain.xlen(lossy.keys.requests) == 1
