"""Rounds: clients take turns, and the event loop goes on between them."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import cast

import pytest

from nano_inference.gateway.server import connections as rounds_module
from nano_inference.gateway.server.connections import MOST_IN_A_ROUND, GatheringTransport, Rounds


class Played(Rounds):
    """Rounds that note the names of the pieces of work in the order in which they are done."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []

    def add(self, client: bytes, *names: str) -> None:
        for name in names:
            self.put(client, partial(self.done.append, name))

    async def do_all(self, number: int) -> int:
        """Run the event loop until so many are done; return its iterations."""
        turns = 0
        async with asyncio.timeout(10):
            while len(self.done) < number:
                await asyncio.sleep(0)
                turns += 1
        return turns


class Sent:
    """A transport that notes what is sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    def close(self) -> None:
        self.sent.append(b"closed")


async def test_what_one_turn_writes_is_sent_together() -> None:
    sent = Sent()
    transport = GatheringTransport(cast(asyncio.Transport, sent))
    transport.write(b"head ")
    transport.write(b"event")
    assert not sent.sent
    await asyncio.sleep(0)
    assert sent.sent == [b"head event"]
    transport.write(b"end")
    transport.close()
    await asyncio.sleep(0)
    assert sent.sent[1:] == [b"end", b"closed"]
    transport.write(bytes(100_000))
    assert len(sent.sent[-1]) == 100_000, "a large part waits for nothing"


@pytest.fixture
def rounds() -> Played:
    return Played()


def flood(number: int) -> list[str]:
    return [f"flood {n}" for n in range(number)]


async def test_clients_take_turns(rounds: Played) -> None:
    rounds.add(b"flood", *flood(100))
    rounds.add(b"other", "other 0", "other 1")
    await rounds.do_all(102)
    assert rounds.done[:5] == ["flood 0", "other 0", "flood 1", "other 1", "flood 2"]
    assert rounds.done[5:] == flood(100)[3:]


async def test_the_event_loop_goes_on_between_rounds(rounds: Played) -> None:
    rounds.add(b"flood", *flood(100))
    assert await rounds.do_all(100) >= 100 / MOST_IN_A_ROUND


async def test_a_crowd_of_one_client_pauses_until_another_comes(
    rounds: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds_module, "CROWD", 10)
    monkeypatch.setattr(rounds_module, "CROWD_PAUSE_S", 3600)
    rounds.add(b"flood", *flood(20))
    await rounds.do_all(1)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(rounds.done) <= MOST_IN_A_ROUND
    rounds.add(b"other", "other")
    await rounds.do_all(len(rounds.done) + 2)
    assert "other" in rounds.done


async def test_a_crowd_goes_on_by_itself(rounds: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_module, "CROWD", 10)
    rounds.add(b"flood", *flood(50))
    await rounds.do_all(50)
    assert rounds.done == flood(50)


async def test_a_round_ends_early_when_its_work_takes_long(
    rounds: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds_module, "ROUND_S", 1e-9)
    rounds.add(b"flood", *flood(10))
    assert await rounds.do_all(10) >= 10


async def test_failing_work_does_not_stop_the_rounds(rounds: Played) -> None:
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))

    def fails() -> None:
        raise ValueError

    rounds.put(b"a", fails)
    rounds.add(b"b", "b")
    await rounds.do_all(1)
    assert len(errors) == 1
