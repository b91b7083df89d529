"""Rounds: clients take turns, and the event loop goes on between them."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import pytest

from nano_inference.gateway.server import connections as rounds_module
from nano_inference.gateway.server.connections import MOST_IN_A_ROUND, Rounds


async def do_all(rounds: Rounds, done: list[str], number: int) -> int:
    """Run the event loop until so many are done; return its iterations."""
    turns = 0
    async with asyncio.timeout(10):
        while len(done) < number:
            await asyncio.sleep(0)
            turns += 1
    return turns


async def test_clients_take_turns() -> None:
    rounds = Rounds()
    done: list[str] = []
    for n in range(100):
        rounds.put(b"flood", partial(done.append, f"flood {n}"))
    for n in range(2):
        rounds.put(b"other", partial(done.append, f"other {n}"))
    await do_all(rounds, done, 102)
    assert done[:5] == ["flood 0", "other 0", "flood 1", "other 1", "flood 2"]
    assert done[5:] == [f"flood {n}" for n in range(3, 100)]


async def test_the_event_loop_goes_on_between_rounds() -> None:
    rounds = Rounds()
    done: list[str] = []
    for n in range(100):
        rounds.put(b"flood", partial(done.append, str(n)))
    assert await do_all(rounds, done, 100) >= 100 / MOST_IN_A_ROUND


async def test_a_crowd_of_one_client_pauses_until_another_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rounds_module, "CROWD", 10)
    monkeypatch.setattr(rounds_module, "CROWD_PAUSE_S", 3600)
    rounds = Rounds()
    done: list[str] = []
    for _ in range(20):
        rounds.put(b"flood", partial(done.append, "flood"))
    await do_all(rounds, done, 1)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(done) <= MOST_IN_A_ROUND
    rounds.put(b"other", partial(done.append, "other"))
    await do_all(rounds, done, len(done) + 2)
    assert "other" in done


async def test_a_crowd_goes_on_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_module, "CROWD", 10)
    rounds = Rounds()
    done: list[str] = []
    for n in range(50):
        rounds.put(b"flood", partial(done.append, str(n)))
    await do_all(rounds, done, 50)
    assert done == [str(n) for n in range(50)]


async def test_a_round_ends_early_when_its_work_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_module, "ROUND_S", 1e-9)
    rounds = Rounds()
    done: list[str] = []

    def work() -> None:
        done.append(str(time.monotonic_ns()))

    for _ in range(10):
        rounds.put(b"flood", work)
    assert await do_all(rounds, done, 10) >= 10


async def test_failing_work_does_not_stop_the_rounds() -> None:
    rounds = Rounds()
    done: list[str] = []
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))

    def fails() -> None:
        raise ValueError

    rounds.put(b"a", fails)
    rounds.put(b"b", partial(done.append, "b"))
    await do_all(rounds, done, 1)
    assert len(errors) == 1
