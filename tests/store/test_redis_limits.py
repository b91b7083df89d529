"""Limits on a server that dies and forgets, and of gateways that are killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from nano_inference.bus import Bus, open_bus
from nano_inference.config import BusConfig, BusError
from nano_inference.store import shares
from nano_inference.store.limits import Limit
from nano_inference.store.redis import limits as redis_limits

from ..buses import Buses, kit
from ..rig import load, mortal_server
from ..servers import until
from ..soaking import in_soak
from .test_limits import fits, left, reserve

REQUESTS = Limit("key", 100, 3600)
HELD = Limit("key", 3)


async def granted(gateways: list[Bus], limit: Limit, wishes: int) -> int:
    """Return the number of granted reservations of 1, of so many sent to all gateways."""

    async def ask(index: int) -> bool:
        try:
            return await fits(gateways[index % len(gateways)], (limit, 1))
        except BusError:
            return False  # closed

    return sum(await asyncio.gather(*(ask(index) for index in range(wishes))))


@pytest_asyncio.fixture(params=[in_soak("always"), "none"])
async def mortal(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """A server that finds all that it knew when it is started again, and one that finds nothing."""
    async with mortal_server(tmp_path / "data", request.param) as server:
        yield server


@pytest_asyncio.fixture
async def gateways(mortal: Any) -> AsyncIterator[list[Bus]]:
    made = [open_bus(BusConfig(url=mortal.url)) for _ in range(2)]
    yield made
    for each in made:
        await each.aclose()


async def test_a_restart_in_the_middle_grants_no_more(mortal: Any, gateways: list[Bus]) -> None:
    """Two gateways, one limit of 100, 1,000 sent to both, and the server is killed in between."""
    before = await granted(gateways, REQUESTS, 60)
    assert before == 60
    asking = asyncio.create_task(granted(gateways, REQUESTS, 400))
    await reserve(gateways[0], (REQUESTS, 0))
    mortal.kill()
    during = await asking
    await mortal.start()
    after = await granted(gateways, REQUESTS, 540)
    assert before + during + after == 100


async def test_a_restarted_server_gets_reserved_and_held_amounts(
    mortal: Any, gateways: list[Bus]
) -> None:
    first, second = gateways
    tokens = Limit("tokens", 1000, 3600)
    took = await reserve(first, (tokens, 400), (HELD, 1))
    other = await reserve(second, (tokens, 300), (HELD, 2))
    mortal.kill()
    first.store.limits.commit(took, [100, 0])
    await mortal.start()
    # Each has told what it had, before anything was granted: 400 are taken, and 2 held.
    full = await reserve(first, (tokens, 601))
    assert (full.granted, full.rooms[0].left) == (False, 600)
    assert await fits(first, (tokens, 500), (HELD, 1))
    assert not await fits(first, (HELD, 1))
    second.store.limits.commit(other, [0, 0])

    await kit.eventually(lambda: fits(first, (tokens, 400), (HELD, 2)), "the second's share")


async def test_amounts_that_the_server_lost_last_are_sent_again(tmp_path: Path) -> None:
    """The server writes its log once a second."""
    async with mortal_server(tmp_path / "data") as server:
        bus = open_bus(BusConfig(url=server.url))
        log = next((tmp_path / "data").glob("appendonlydir/*.incr.aof"))
        assert await granted([bus], REQUESTS, 70) == 70
        size = log.stat().st_size
        server.kill()
        server.forget(size // 2)
        await server.start()
        assert await granted([bus], REQUESTS, 100) == 30
        await bus.aclose()


@pytest.mark.soak(only=True)
async def test_a_replica_that_takes_over_grants_no_more(tmp_path: Path) -> None:
    """It has not had all that its master granted, while both gateways ask. (`make soak` has it with
    sentinels.)"""
    async with (
        mortal_server(tmp_path / "a") as old,
        mortal_server(tmp_path / "b") as new,
        AsyncExitStack() as stack,
    ):
        proxy = load("chaos_rig").Proxy(old.port)
        await proxy.start()
        stack.push_async_callback(proxy.aclose)
        gateways = [open_bus(BusConfig(url=proxy.url)) for _ in range(2)]
        for each in gateways:
            stack.push_async_callback(each.aclose)
        replica = await stack.enter_async_context(Redis(port=new.port))

        async def is_linked() -> bool:
            return (await replica.info("replication"))["master_link_status"] == "up"

        await replica.execute_command("REPLICAOF", "127.0.0.1", str(old.port))
        await until(is_linked, "replication")
        first, second = gateways
        before = await granted(gateways, REQUESTS, 60)
        # From now on it has nothing more.
        await replica.execute_command("REPLICAOF", "NO", "ONE")
        assert (await reserve(first, (HELD, 2))).granted
        before += await granted(gateways, REQUESTS, 20)
        asking = asyncio.create_task(granted(gateways, REQUESTS, 30))
        await asyncio.sleep(0)
        proxy.lead_to(new.port)
        old.kill()
        during = await asking
        after = await granted(gateways, REQUESTS, 40)
        assert before + during + after == 100
        assert not await fits(second, (HELD, 2))
        assert await fits(second, (HELD, 1))


async def test_a_lost_reply_counts_nothing_twice(
    redis_buses: Buses, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus: Any = redis_buses.open()
    other = redis_buses.open()
    tokens = Limit("tokens", 1000, 3600)
    took = await reserve(bus, (tokens, 600), (HELD, 1))
    own = bus.store.limits._commands.redis
    transact, lost = redis_limits.transact, 0

    async def and_lose(*args: Any) -> list[Any]:
        nonlocal lost
        replies = await transact(*args)
        if args[0] is own and lost < 2 and any(command[0] == "HSET" for command in args[2]):
            lost += 1
            raise ConnectionResetError
        return replies

    monkeypatch.setattr(redis_limits, "transact", and_lose)
    with pytest.raises(BusError):
        await reserve(bus, (tokens, 300), (HELD, 1))
    bus.store.limits.commit(took, [100, 0])

    async def is_settled() -> bool:
        full = await reserve(other, (tokens, 901), (HELD, 3))
        return lost == 2 and [room.left for room in full.rooms] == [900, 3]

    await kit.eventually(is_settled, "what is left of both")


async def test_a_cancelled_reservation_holds_nothing(redis_buses: Buses) -> None:
    bus = redis_buses.open()
    tokens = Limit("tokens", 100, 3600)
    assert await fits(bus, (tokens, 0))
    for _ in range(20):
        leaving = asyncio.create_task(reserve(bus, (tokens, 50), (HELD, 3)))
        for _ in range(3):
            await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving

    async def all_there() -> bool:
        took = await reserve(bus, (tokens, 100), (HELD, 3))
        bus.store.limits.commit(took, [100, 0]) if took.granted else None
        return took.granted

    await kit.eventually(all_there, "what those had taken who left")


async def test_removed_keys_are_written_again(redis_buses: Buses, foreign: Any) -> None:
    """The server is short of memory and evicts keys with a time to live."""
    bus, other = redis_buses.open(), redis_buses.open()
    assert await fits(bus, (REQUESTS, 100))
    await foreign.delete(redis_buses.keys.limit("key", 3600))
    assert not await fits(bus, (REQUESTS, 1))

    await kit.becomes(lambda: left(other, (REQUESTS, 0)), [0])


async def test_the_field_of_a_dead_gateway_goes(
    redis_buses: Buses, foreign: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_limits, "HELD_S", 1.0)
    monkeypatch.setattr(shares, "FORGOTTEN_MS", 0)
    dead, bus = redis_buses.open(), redis_buses.open()
    assert await fits(dead, (HELD, 1))
    assert await fits(bus, (HELD, 1))
    await dead.aclose()  # in the middle of its call
    key = redis_buses.keys.limit("key", 0)
    assert await foreign.hlen(key) == 2

    async def is_gone() -> bool:
        await reserve(bus, (HELD, 0))
        return await foreign.hlen(key) == 1

    await kit.eventually(is_gone, "the end of its field")
    assert await left(bus, (HELD, 0)) == [2]
