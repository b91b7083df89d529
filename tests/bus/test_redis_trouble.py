"""The bus on a server that dies, forgets, stalls, is full, or is cut off in mid-sentence."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from redis import exceptions
from redis.asyncio import Redis

from nano_inference.bus import Bus, open_bus
from nano_inference.bus.control import ServerRestarted
from nano_inference.bus.links import CREDITS
from nano_inference.bus.messages import Credit
from nano_inference.config import BusConfig, BusError
from nano_inference.store.redis.client import is_transient

from ..buses import ids_of, kit, take
from ..rig import load, mortal_server


class Place:
    """A server of our own, buses on it, and a plain client."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.prefix = f"test-{uuid.uuid4().hex[:8]}"
        self.plain = Redis(port=server.port, decode_responses=True, protocol=3)
        self._buses: list[Bus] = []

    def open(self, url: str = "", **settings: Any) -> Bus:
        config = BusConfig(url=url or self.server.url, prefix=self.prefix, **settings)
        self._buses.append(open_bus(config))
        return self._buses[-1]

    async def restart(self, *, lose: bool = False) -> None:
        self.server.kill()
        if lose:
            self.server.forget()
        await self.server.start()

    async def errors(self, code: str) -> int:
        stats = await self.plain.info("errorstats")
        return int(stats.get(f"errorstat_{code}", {"count": 0})["count"])

    async def until_refused(self, code: str, times: int) -> None:
        """Waits until the server has refused so many commands more."""
        before = await self.errors(code)
        while await self.errors(code) < before + times:  # noqa: ASYNC110  (it can't tell us)
            await asyncio.sleep(0.01)

    async def numbers(self, request_id: str) -> list[int]:
        entries = await self.plain.xrange(f"{self.prefix}:out:{request_id}")
        return [int(entry_id.partition("-")[2]) for entry_id, _ in entries]

    async def aclose(self) -> None:
        for bus in self._buses:
            await bus.aclose()
        await self.plain.aclose()


@pytest_asyncio.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    async with mortal_server(tmp_path / "data") as server:
        made = Place(server)
        yield made
        await made.aclose()


async def test_a_killed_server_with_its_log_loses_nothing(place: Place) -> None:
    bus = place.open()
    inbox = await bus.open_inbox("fairness")
    sender = bus.sender(CREDITS, "batching-1")
    ids = [await bus.requests.publish({"prompt": str(i)}) for i in range(10)]
    await bus.requests.pending()
    taken = ids_of(await take(bus, 10))
    await bus.results.deliver([("r", [kit.chunk("r", "e", i) for i in range(3)])], 7)
    await kit.send_all(sender, range(5))
    await sender.flush()
    waiting = asyncio.create_task(bus.requests.take())
    await place.restart()
    await kit.send_all(sender, range(5, 10))
    await bus.results.deliver([("r", [kit.chunk("r", "e", 3), kit.done("r", "e")])], 7)
    assert await kit.bodies(inbox, 10) == [Credit(i) for i in range(10)]
    assert await place.numbers("r") == [1, 2, 3, 4, 5]
    late = await bus.requests.publish({"prompt": "late"})
    assert ids_of(await waiting) == [late]
    assert taken == ids
    assert await bus.requests.renew(30) == set(), "all are still ours"


async def test_a_server_that_lost_all_is_used_again(place: Place) -> None:
    bus = place.open()
    inbox = await bus.open_inbox("admission")
    await bus.requests.pending()
    before = await bus.next_epoch()
    held = await bus.requests.publish({"prompt": "x"})
    assert ids_of(await take(bus, 1)) == [held]
    waiting = asyncio.create_task(take(bus, 1))
    await place.restart(lose=True)
    assert await kit.bodies(inbox, 1) == [ServerRestarted()]
    bus.requests.mark_possibly_lost()
    assert await bus.next_epoch() > before
    new = await bus.requests.publish({"prompt": "y"})
    assert ids_of(await waiting) == [new]
    for _ in range(2):
        assert await bus.requests.renew(30) == set(), "what the server forgot is still answered"
    await bus.requests.acknowledge(held)


async def test_a_broken_connection_is_no_restart(place: Place) -> None:
    bus = place.open()
    inbox = await bus.open_inbox("admission")
    await place.plain.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    await place.open().sender(CREDITS._replace(name="finished"), "streaming-1").send(Credit(1))
    assert await kit.bodies(inbox, 1) == [Credit(1)]


@pytest.mark.parametrize(
    ("setting", "code", "words"),
    [
        ("maxmemory", "OOM", "memory"),
        # As of a master that was cut off while another took its place.
        ("min-replicas-to-write", "NOREPLICAS", "replicas"),
    ],
)
async def test_a_server_that_refuses_writes_is_waited_for(
    place: Place, setting: str, code: str, words: str
) -> None:
    bus, other = place.open(), place.open()
    inbox = await bus.open_inbox("fairness")
    sender = bus.sender(CREDITS, "batching-1")
    chunks = [kit.chunk("r", "e", i) for i in range(3)]
    await bus.results.deliver([("r", chunks[:1])], 3)
    await place.plain.config_set("maxmemory-policy", "noeviction")
    await place.plain.config_set(setting, 1)
    await kit.send_all(sender, range(20))
    written = [("s", [*chunks, kit.done("s", "e")]), ("t", chunks[:1])]
    working = [
        asyncio.create_task(bus.results.recover(["r"], 4)),
        asyncio.create_task(other.results.deliver(written, 3)),
        asyncio.create_task(bus.next_epoch()),
        asyncio.create_task(sender.flush()),
    ]
    await place.until_refused(code, 12)
    with pytest.raises(BusError, match=words):  # a client is told at once
        await bus.requests.publish({"prompt": "x"})
    assert not any(task.done() for task in working)
    await place.plain.config_set(setting, 0)
    recovered, *_ = await asyncio.gather(*working)
    assert recovered == [chunks[:1]]
    assert await kit.bodies(inbox, 20) == [Credit(i) for i in range(20)]
    assert (await place.numbers("s"), await place.numbers("t")) == ([1, 2, 3, 4], [1])
    assert await bus.results.deliver([("r", [kit.done("r", "e")])], 3) == {"r"}, "it is fenced"


@pytest.mark.parametrize("passed", [1, 100, 5000])
async def test_a_reply_that_is_cut_off_is_read_again(place: Place, passed: int) -> None:
    proxy = load("chaos_rig").Proxy(place.server.port)
    await proxy.start()
    bus = place.open(proxy.url)
    inbox = await bus.open_inbox("fairness")
    far = place.open()
    sender = far.sender(CREDITS, "batching-1")
    ids = [await far.requests.publish({"prompt": "x" * 1000}) for _ in range(20)]
    await bus.requests.pending()
    proxy.replies_left = passed
    assert ids_of(await take(bus, 20)) == ids
    proxy.replies_left = passed
    await kit.send_all(sender, range(200))
    assert await kit.bodies(inbox, 200) == [Credit(i) for i in range(200)]
    await bus.aclose()
    await proxy.aclose()


@pytest.mark.parametrize(
    "error",
    [
        exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
        exceptions.ReadOnlyError("You can't write against a read only replica."),
        exceptions.ResponseError("MISCONF Errors writing to the AOF file"),
        exceptions.ResponseError(
            "Command # 1 (XADD s *) of pipeline caused error: ('MISCONF Errors writing',)"
        ),
        exceptions.BusyLoadingError("Valkey is loading the dataset in memory"),
    ],
)
def test_what_passes_by_itself(error: Exception) -> None:
    assert is_transient(error)
    assert not is_transient(exceptions.ResponseError("WRONGTYPE Operation against a key"))
