"""Shards of the requests stream: where tenants are, and what a change of their number keeps."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from typing import Any
from unittest.mock import AsyncMock

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot

from nano_inference.bus import Bus, MemoryBus
from nano_inference.bus.redis import requests as redis_requests
from nano_inference.bus.redis.layout import LayoutRecord
from nano_inference.bus.redis.leases import Leases
from nano_inference.bus.shards import READERS, Layout, homes_of, shard_of
from nano_inference.config import BusConfig, BusError, Config, ConfigError, ModelConfig
from nano_inference.store.redis.keys import Keys, entry_name, split_entry

from ..buses import ids_of, kit, take

NAMES = [f"tenant-{i}" for i in range(2000)]


# --- where a tenant is ------------------------------------------------------------------------


@pytest.mark.parametrize(("few", "many"), [(1, 2), (3, 4), (4, 7), (16, 17)])
def test_a_change_moves_the_least_number_of_tenants(few: int, many: int) -> None:
    moved = [name for name in NAMES if shard_of(name, few) != shard_of(name, many)]
    assert {shard_of(name, many) for name in moved} == set(range(few, many)), "only to added ones"
    assert len(moved) / len(NAMES) == pytest.approx(1 - few / many, abs=0.05)
    loads = Counter(shard_of(name, many) for name in NAMES)
    assert max(loads.values()) < 1.5 * len(NAMES) / many


@pytest.mark.parametrize(("shards", "lanes"), [(4, 1), (4, 8), (16, 40), (64, 1000)])
def test_few_lanes_wait_at_each_shard_and_each_lane_somewhere(shards: int, lanes: int) -> None:
    homes = [homes_of(f"lane-{i}", shards, lanes) for i in range(lanes)]
    readers = Counter(home for each in homes for home in each)
    assert all(homes)
    assert set(readers) == set(range(shards)), "no shard without a reader"
    assert max(readers.values()) <= 4 * max(READERS, lanes / shards)


def test_only_tenants_on_their_new_shard_have_moved_there() -> None:
    layout = Layout().changed(4, 1, {3: "9-0"})
    assert layout.is_announced
    assert list(layout.left()) == [0]
    here = shard_of("a", 4)
    assert layout.moved_to("a", here) == (here != 0)
    assert not layout.moved_to("a", (here + 1) % 4), "another program put it there"
    ended = layout.known_to_all({0: "5-1"}).settled()
    assert not ended.moving
    back = ended.changed(2, 4, {})
    assert list(back.left()) == [2, 3]
    assert (back.streams, back.changes, back.starts, back.ends) == (4, 2, {3: "9-0"}, {})


def test_entry_ids_have_their_shard() -> None:
    for shard in (0, 1, 63):
        assert split_entry(entry_name("17-0", shard)) == ("17-0", shard)
    assert entry_name("17-0", 0) == "17-0", "as the server gives it"
    for odd in ("", "nonsense", "a-b-c", "1-2-²", "1-2-99999999999"):
        assert split_entry(odd)[0] == odd


def test_the_number_is_checked() -> None:
    for shards in (0, 65):
        with pytest.raises(ConfigError, match=r"bus\.shards"):
            BusConfig(shards=shards)
    model = ModelConfig(id="a", path="a")
    with pytest.raises(ConfigError, match=r"bus\.shards.*several models"):
        Config(bus=BusConfig(url="redis://x", shards=2), models=(model,))


# --- one deployment ---------------------------------------------------------------------------


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayoutRecord, "fresh_s", 0.02)
    monkeypatch.setattr(LayoutRecord, "late_s", 0.04)
    monkeypatch.setattr(redis_requests, "POLL_S", 0.01)
    monkeypatch.setattr(redis_requests, "LOOK_S", 0.02)


async def settled(bus: Bus, shards: int) -> None:
    await kit.becomes(lambda: settled_at(bus), shards)


async def settled_at(bus: Bus) -> int:
    layout = await bus.requests.shards()
    return 0 if layout.moving else layout.shards


async def lane(buses: Any, name: str, **settings: Any) -> Bus:
    bus: Bus = buses.open(lane=name, **settings)
    assert await bus.requests.pending() == []
    return bus


async def test_memory_has_one_shard(memory_bus: MemoryBus) -> None:
    assert (await memory_bus.requests.shards()).shards == 1
    with pytest.raises(BusError, match=r"Redis URL") as refused:
        await memory_bus.requests.set_shards(2)
    assert refused.value.code == "shards_in_memory"


async def test_plain_programs_are_served_from_the_one_stream(
    redis_buses: Any, foreign: Redis, fast: None
) -> None:
    """They publish by XADD to `{prefix}:requests`, and read `{prefix}:results`."""
    bus, keys = await lane(redis_buses, "a", shards=4), redis_buses.keys
    plain = [
        await foreign.xadd(keys.requests, {"json": json.dumps({"prompt": "x", "tenant": name})})
        for name in NAMES[:8]
    ]
    assert ids_of(await take(bus, 8)) == plain, "all, in order, under the ids that they know"
    await bus.results.deliver([(plain[0], [kit.done("", plain[0])])])
    assert await foreign.xlen(keys.results) == 1
    await bus.requests.acknowledge(plain[0])
    await kit.becomes(lambda: foreign.xlen(keys.requests), 7)


async def test_numbers_are_of_all_shards(redis_buses: Any, foreign: Redis, fast: None) -> None:
    bus = await lane(redis_buses, "a", shards=3)
    await redis_buses.open().requests.shards()
    ids = [await bus.requests.publish({"prompt": "x", "tenant": name}) for name in NAMES[:30]]
    await take(bus, 30)
    assert len(set(ids)) == 30
    ids += [await bus.requests.publish({"prompt": "x", "tenant": name}) for name in NAMES[:30]]
    lengths = await bus.requests.shard_lengths()
    assert (sum(lengths), len(lengths), min(lengths) > 0) == (60, 3, True)
    assert await bus.requests.count_queue(25) == 35
    found = await bus.requests.backlog()
    assert (found.waiting + found.pending, found.queue_length) == (60, 35)
    assert await foreign.get(b"{%s}:queue_length" % redis_buses.keys.requests) == "35", "for KEDA"
    client = redis_buses.open()
    tail = await client.results.tail()
    await bus.results.deliver([(each, [kit.done("", each)]) for each in ids[:30]])
    assert sorted([(await anext(tail)).entry_id for _ in range(30)]) == sorted(ids[:30])
    assert len([each async for each in client.results.newest(60)]) == 30


async def test_many_lanes_share_one_sum_of_the_queue(
    redis_buses: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nano_inference.bus.redis.leases.FEW_LANES", 2)
    lanes = [redis_buses.open(lane=name) for name in "abcd"]
    await lanes[0].requests.publish({"prompt": "x"})
    assert [await bus.requests.count_queue(0) for bus in lanes[:3]] == [1, 1, 1]
    await lanes[0].requests.publish({"prompt": "x"})
    assert await lanes[3].requests.count_queue(0) == 1, "of the last second"


class Load:
    """Publishes for tenants, and takes on several lanes.

    Attributes:
        begun: For each lane and tenant, the numbers of its requests in the order of `take`.
    """

    def __init__(self, clients: list[Bus], lanes: list[Bus], tenants: list[str]) -> None:
        self._clients, self._lanes = clients, lanes
        self._room = {name: asyncio.Semaphore(8) for name in tenants}
        self.published = Counter[str]()
        self.begun: dict[tuple[int, str], list[int]] = defaultdict(list)
        self.ids: list[str] = []
        self.where: dict[tuple[str, int], str] = {}
        self.ends = False

    async def publish_forever(self, tenant: str) -> None:
        """One request after the other is confirmed, each by another client."""
        while not self.ends:
            number = self.published[tenant]
            await self._room[tenant].acquire()
            client = self._clients[number % len(self._clients)]
            await client.requests.publish({"prompt": str(number), "tenant": tenant})
            self.published[tenant] += 1

    async def take_forever(self, number: int) -> None:
        while True:
            for entry in await self._lanes[number].requests.take(16):
                request: Any = entry.request
                self.begun[number, request.tenant].append(int(request.prompt))
                self._room[request.tenant].release()
                self.ids.append(entry.entry_id)
                self.where[request.tenant, int(request.prompt)] = entry.entry_id

    def check(self) -> None:
        for (number, tenant), numbers in self.begun.items():
            wrong = [i for i in range(1, len(numbers)) if numbers[i] < numbers[i - 1]]
            where = [self.where[tenant, each] for i in wrong for each in numbers[i - 3 : i + 3]]
            assert not wrong, f"{tenant} is out of order on lane {number}: {where[:9]}"
        every = Counter[str]()
        for (_, tenant), numbers in self.begun.items():
            every[tenant] += len(numbers)
        assert every == self.published, "none is lost"
        assert len(self.ids) == len(set(self.ids)), "none is doubled"


@pytest.mark.soak
@pytest.mark.parametrize("num_lanes", [1, 2])
async def test_the_number_changes_under_load(
    redis_buses: Any, fast: None, num_lanes: int, soak: bool
) -> None:
    clients = [redis_buses.open() for _ in range(2)]
    lanes = [await lane(redis_buses, f"lane-{i}") for i in range(num_lanes)]
    load = Load(clients, lanes, NAMES[:12])
    takers = [asyncio.create_task(load.take_forever(i)) for i in range(num_lanes)]
    publishers = [asyncio.create_task(load.publish_forever(name)) for name in NAMES[:12]]
    for shards in (4, 2, 3, 1, 5) * 4 if soak else (4, 2):
        await clients[0].requests.set_shards(shards)
        await settled(clients[1], shards)
    load.ends = True
    await asyncio.gather(*publishers)
    await kit.becomes(lambda: asyncio.sleep(0, len(load.ids)), sum(load.published.values()))
    for taker in takers:
        taker.cancel()
    await asyncio.gather(*takers, return_exceptions=True)
    load.check()
    assert len({split_entry(each)[1] for each in load.ids}) == (5 if soak else 4)


async def test_a_moved_tenant_waits_until_its_old_shard_is_drained(
    redis_buses: Any, fast: None
) -> None:
    client, bus = redis_buses.open(), await lane(redis_buses, "a")
    moving = next(name for name in NAMES if shard_of(name, 2) == 1)
    old = [await client.requests.publish({"prompt": "x", "tenant": moving}) for _ in range(3)]
    await bus.requests.set_shards(2)
    client = redis_buses.open()  # knows the new number at once
    new = await client.requests.publish({"prompt": "x", "tenant": moving})
    assert split_entry(new)[1] == 1
    assert ids_of(await take(bus, 4)) == [*old, new]
    with pytest.raises(ConfigError, match=r"bus\.shards is 0"):
        await client.requests.set_shards(0)


async def test_a_moving_tenant_is_not_published_until_all_publishers_know(
    redis_buses: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one that does not know could publish on the old shard after it."""
    monkeypatch.setattr(LayoutRecord, "late_s", 1000.0)
    client = redis_buses.open()
    await client.requests.record.begin(2)
    moving, staying = (next(n for n in NAMES if shard_of(n, 2) == shard) for shard in (1, 0))
    first = asyncio.create_task(client.requests.publish({"prompt": "x", "tenant": moving}))
    await client.requests.publish({"prompt": "x", "tenant": staying})
    for _ in range(20):  # many round trips later
        await client.requests.shards()
    assert not first.done()
    monkeypatch.setattr(LayoutRecord, "late_s", 0.0)
    assert split_entry(await first)[1] == 1


async def test_a_late_publisher_is_confirmed_when_its_entry_is_taken(
    redis_buses: Any, fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was held up between reading the number of shards and writing."""
    bus, client, other = await lane(redis_buses, "a"), redis_buses.open(), redis_buses.open()
    moving = next(name for name in NAMES if shard_of(name, 2) == 1)
    published = client.requests.streams[0].publish
    holding, changed = asyncio.Event(), asyncio.Event()

    async def held_up(*args: Any, **named: Any) -> str:
        holding.set()
        await changed.wait()
        return str(await published(*args, **named))

    monkeypatch.setattr(client.requests.streams[0], "publish", held_up)
    late = asyncio.create_task(client.requests.publish({"prompt": "late", "tenant": moving}))
    await holding.wait()
    taking = asyncio.create_task(bus.requests.take())
    await bus.requests.set_shards(2)
    await settled(other, 2)
    taking.cancel()
    monkeypatch.setattr(Leases, "is_taken", taken := AsyncMock(return_value=False))
    changed.set()
    await kit.eventually(lambda: asyncio.sleep(0, taken.await_count > 0), "it looks for its entry")
    assert not late.done()
    taken.return_value = True
    assert split_entry(await late)[1] == 0, "on the old shard"


async def test_a_lost_record_is_written_again(redis_buses: Any, foreign: Redis, fast: None) -> None:
    bus, client = await lane(redis_buses, "a", shards=3), redis_buses.open()
    taking = asyncio.create_task(take(bus, 2))
    await settled(client, 3)
    await foreign.delete(redis_buses.keys.shards)
    # By a publisher that has read the number just before.
    key = redis_buses.keys.of_shard(2).requests
    ids = [entry_name(await foreign.xadd(key, {"json": "{}"}), 2)]
    await settled(client, 3)
    ids.append(await client.requests.publish({"prompt": "x"}))
    assert sorted(ids_of(await taking)) == sorted(ids)


async def test_two_changes_at_once_are_refused(redis_buses: Any) -> None:
    first, second = redis_buses.pair()
    await first.requests.set_shards(3)
    with pytest.raises(BusError, match="from 1 to 3") as refused:
        await second.requests.set_shards(2)
    assert refused.value.code == "shards_moving"


async def test_a_tail_follows_added_shards(redis_buses: Any, fast: None) -> None:
    bus, client = await lane(redis_buses, "a"), redis_buses.open()
    tail = await client.results.tail()
    taking = asyncio.create_task(bus.requests.take())
    await client.requests.set_shards(4)
    await settled(client, 4)
    taking.cancel()
    end = kit.done("r", "5-0-3")
    await bus.results.deliver([("r", [end])])
    assert (await anext(tail)).entry_id == "5-0-3"
    await tail.aclose()


def test_shards_live_on_several_nodes() -> None:
    """By their hash slots, of which two may be the same with another prefix."""
    shards = [Keys("nano").of_shard(shard) for shard in range(4)]
    for keys in shards:
        family = (keys.requests, keys.lanes, keys.begun)
        assert len({key_slot(key) for key in family}) == 1
        assert key_slot(keys.results) == key_slot(keys.told("r", f"5-0-{keys.shard}"))
    assert len({key_slot(keys.requests) for keys in shards}) == 4
    assert len({key_slot(keys.results) for keys in shards}) == 4
