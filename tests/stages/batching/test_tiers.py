"""KV tiers in batching: a block that is found holds the KV of its tokens, whatever happened."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from nano_inference.bus.control import TierCapacity, TiersChanged
from nano_inference.bus.messages import DEFAULT_SCOPE, CacheScope
from nano_inference.bus.steps import KVMove
from nano_inference.stages.batching import Allocation, KVCacheManager
from nano_inference.stages.batching.paged import PagedKVCache
from nano_inference.stages.batching.parts.kv_events import KVEventLog, KVEvents
from nano_inference.stages.batching.parts.tiers.eviction import POLICIES
from nano_inference.stages.batching.parts.tiers.part import Tiers
from nano_inference.stages.batching.parts.tiers.tiers import MOST_CHOSEN, KVTiers
from nano_inference.stages.batching.radix import RadixKVCache

from ...kv_router import Router
from ...soaking import in_soak
from .events import check_match, check_router, with_parts

SIZE = 4
CACHES = (PagedKVCache, RadixKVCache)
KV = tuple[object, ...]
"""Stands for the KV of a block: all that it depends on."""


def make_tiers(
    *,
    host: int = 8,
    disk: int = 0,
    policy: str = "lru",
    token_ns: int = 1000,
    events: KVEventLog | None = None,
) -> KVTiers:
    capacity = TierCapacity(
        host_slots=host,
        disk_blocks=disk,
        layout="layout",
        model="model",
        weight_version=0,
        incarnation="executor",
        load_ns=1,
        fetch_ns=10,
        token_ns=token_ns,
    )
    return KVTiers(capacity, SIZE, policy, events=events)


class Executor:
    """The executor's KV by block, slot and file."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks: list[KV] = [()] * num_blocks
        self.slots: dict[int, KV] = {}
        self.disk: dict[bytes, KV] = {}
        self.jobs: list[tuple[KVMove, KV]] = []

    def apply(self, moves: Sequence[KVMove]) -> None:
        for move in moves:
            match move.kind:
                case "store":
                    self.slots[move.slot] = self.blocks[move.block_id]
                    if move.write:
                        self.jobs.append((move, self.slots[move.slot]))
                case "write":
                    self.jobs.append((move, self.slots[move.slot]))
                case "load":
                    self.blocks[move.block_id] = self.slots[move.slot]
                case "fetch":
                    self.jobs.append((move, ()))
                case "drop":
                    self.disk.pop(move.name, None)

    def finish_job(self, *, fails: bool = False) -> TiersChanged:
        """The oldest write or fetch ends."""
        move, content = self.jobs.pop(0)
        if move.kind == "fetch":
            if fails or move.name not in self.disk:
                self.disk.pop(move.name, None)
                return TiersChanged(lost=(move.name,))
            self.slots[move.slot] = self.disk[move.name]
            return TiersChanged(fetched=(move.name,))
        if fails:
            return TiersChanged(lost=(move.name,))
        self.disk[move.name] = content
        return TiersChanged(stored=(move.name,))

    def reset(self) -> None:
        self.jobs = [job for job in self.jobs if job[0].kind != "fetch"]


class Replica:
    """A cache with tiers, and an executor that computes blocks and applies moves."""

    def __init__(self, cache: KVCacheManager) -> None:
        assert isinstance(cache.below, Tiers)
        self.cache, self.tiers = cache, cache.below.blocks
        self.executor = Executor(cache.num_blocks)
        self.running: list[Allocation] = []
        self.router = Router()

    def kv_of(self, allocation: Allocation, index: int) -> KV:
        tokens = tuple(allocation.token_ids[: (index + 1) * SIZE])
        return (self.cache.weight_version, allocation.scope, tokens)

    def run(self, token_ids: list[int], scope: CacheScope = DEFAULT_SCOPE) -> int:
        """Start a sequence, compute it, and return how many of its tokens were cached."""
        allocation = Allocation(token_ids, scope)
        start = self.cache.start(allocation, self.cache.match(allocation).num_needed)
        self.apply()
        for source, target in start.copies:
            self.executor.blocks[target] = self.executor.blocks[source]
        full = len(token_ids) // SIZE
        for index in range(start.cached_length // SIZE):
            found = self.executor.blocks[start.block_ids[index]]
            assert found == self.kv_of(allocation, index), "a block with the KV of other tokens"
        for index in range(start.cached_length // SIZE, full):
            self.executor.blocks[start.block_ids[index]] = self.kv_of(allocation, index)
        self.cache.commit(allocation, len(token_ids))
        self.running.append(allocation)
        self.check()
        return start.cached_length

    def end(self, number: int = 0) -> None:
        self.cache.release(self.running.pop(number))
        self.check()

    def apply(self) -> None:
        self.executor.apply(self.tiers.take_moves())

    def save(self) -> None:
        """Save blocks to disk, as while nothing else runs."""
        assert isinstance(self.cache.below, Tiers)
        self.cache.below.rest(1)

    def check(self) -> None:
        self.cache.check(self.running)
        if any(isinstance(each, KVEvents) for each in self.cache.followers):
            check_router(self.cache, self.router)


def replica_of(
    kind: type[PagedKVCache | RadixKVCache],
    tiers: KVTiers,
    blocks: int,
    events: KVEventLog | None = None,
) -> Replica:
    return Replica(with_parts(kind(blocks, SIZE), tiers, events))


def prompt(number: int, blocks: int = 3) -> list[int]:
    return [100 * number + position for position in range(blocks * SIZE + 1)]


@pytest.mark.parametrize("kind", CACHES)
def test_evicted_blocks_are_loaded_again(kind: type[PagedKVCache | RadixKVCache]) -> None:
    replica = replica_of(kind, make_tiers(), blocks=4)
    for number in (1, 2):
        replica.run(prompt(number))
        replica.end()
    assert replica.run(prompt(1)) == 3 * SIZE
    replica.end()
    assert replica.tiers.take_counts().loaded == 3


@pytest.mark.parametrize("kind", CACHES)
def test_kv_is_found_only_in_its_scope_and_version(
    kind: type[PagedKVCache | RadixKVCache],
) -> None:
    replica = replica_of(kind, make_tiers(), blocks=4)

    def rerun(scope: CacheScope = DEFAULT_SCOPE) -> int:
        cached = replica.run(prompt(1), scope)
        replica.end()
        replica.run(prompt(2))
        replica.end()
        return cached

    assert [rerun(), rerun()] == [0, 12]
    assert rerun(CacheScope(tenant="other")) == 0
    assert rerun(CacheScope(adapter="one", adapter_version=1)) == 0
    assert rerun(CacheScope(adapter="one", adapter_version=2)) == 0
    replica.cache.begin_weight_version(1)
    assert rerun() == 0
    replica.cache.flush()
    assert rerun() == 0


def test_loading_that_takes_longer_than_computing_is_left() -> None:
    replica = replica_of(PagedKVCache, make_tiers(token_ns=0), blocks=4)
    for number in (1, 2):
        replica.run(prompt(number))
        replica.end()
    assert replica.run(prompt(1)) == 0


@pytest.mark.parametrize("kind", CACHES)
def test_blocks_on_disk_are_found_once_they_are_whole(
    kind: type[PagedKVCache | RadixKVCache],
) -> None:
    """A sequence waits for its own blocks only, and starts with them."""
    replica = replica_of(kind, make_tiers(host=8, disk=100), blocks=4)
    for number in (1, 2, 3, 4, 5):
        replica.run(prompt(number))
        replica.end()
    allocation = Allocation(prompt(1))
    assert not replica.cache.below.fetch(allocation), "its blocks are not reported as written"
    while replica.executor.jobs:
        replica.tiers.changed(replica.executor.finish_job())
    assert replica.cache.below.fetch(allocation)
    assert not replica.cache.below.fetch(Allocation(prompt(6)))
    replica.apply()
    while replica.executor.jobs:
        assert replica.cache.below.fetch(allocation)
        replica.tiers.changed(replica.executor.finish_job())
    assert not replica.cache.below.fetch(allocation)
    assert replica.run(prompt(1)) == 12


def test_a_block_whose_write_failed_is_written_from_its_slot_when_it_is_evicted_again() -> None:
    replica = replica_of(PagedKVCache, make_tiers(host=8, disk=100), blocks=4)
    for number in (1, 2):
        replica.run(prompt(number))
        replica.end()
    while replica.executor.jobs:
        replica.tiers.changed(replica.executor.finish_job(fails=True))
    assert not replica.executor.disk
    for number in (1, 2, 1):
        replica.run(prompt(number))
        replica.end()
    while replica.executor.jobs:
        replica.tiers.changed(replica.executor.finish_job())
    assert len(replica.executor.disk) >= 5
    assert set(replica.executor.disk.values()) <= set(replica.executor.slots.values())


def test_a_failed_fetch_is_not_tried_again_by_the_same_sequence() -> None:
    replica = replica_of(PagedKVCache, make_tiers(host=8, disk=100), blocks=4)
    for number in (1, 2, 3, 4, 5):
        replica.run(prompt(number))
        replica.end()
    while replica.executor.jobs:
        replica.tiers.changed(replica.executor.finish_job())
    allocation = Allocation(prompt(1))
    assert replica.cache.below.fetch(allocation)
    replica.apply()
    while replica.executor.jobs:
        replica.tiers.changed(replica.executor.finish_job(fails=True))
    assert not replica.cache.below.fetch(allocation)
    assert replica.run(prompt(1)) == 0
    assert replica.tiers.take_counts().lost == 3


def test_disk_blocks_of_an_earlier_start_are_reported_whole() -> None:
    """Names are those of the weights as loaded, so another executor finds them."""
    first = replica_of(PagedKVCache, make_tiers(disk=100), blocks=4)
    for number in (1, 2):
        first.run(prompt(number))
        first.end()
    while first.executor.jobs:
        first.tiers.changed(first.executor.finish_job())
    second = replica_of(PagedKVCache, make_tiers(disk=100), blocks=4)
    second.executor.disk = first.executor.disk
    second.tiers.changed(TiersChanged(stored=tuple(first.executor.disk), whole=True))
    allocation = Allocation(prompt(1))
    assert second.cache.below.fetch(allocation)
    second.apply()
    while second.executor.jobs:
        second.tiers.changed(second.executor.finish_job())
    assert second.run(prompt(1)) == 12


def test_the_disk_stays_within_its_size() -> None:
    replica = replica_of(PagedKVCache, make_tiers(disk=4), blocks=4)
    for number in range(1, 9):
        replica.run(prompt(number))
        replica.end()
        while replica.executor.jobs:
            replica.tiers.changed(replica.executor.finish_job())
            assert len(replica.executor.disk) <= 4, "room is made before a block is written"
            replica.apply()
    assert len(replica.executor.disk) == 4
    replica.cache.flush()
    replica.apply()
    assert not replica.executor.disk


def audited_tiers(names: Sequence[bytes]) -> KVTiers:
    """Tiers with these blocks, of which one in `len(names)` loads is audited."""
    capacity = make_tiers(host=len(names)).capacity
    tiers = KVTiers(capacity, SIZE, "lru", len(names))
    for index, name in enumerate(names):
        tiers.store(name, index)
    return tiers


def test_each_of_a_few_blocks_is_audited_in_time() -> None:
    """Also if they are loaded in turn, as often as one is audited."""
    names = [bytes([index]) * 16 for index in range(8)]
    tiers = audited_tiers(names)
    audited = []
    for name in names * 200:
        if tiers.load(name, 0):
            audited.append(name)
            tiers.end_audit()
    assert {*audited} == {*names}
    assert len(audited) == pytest.approx(200, rel=0.2)


def test_blocks_are_chosen_until_one_is_audited() -> None:
    names = [bytes([index]) * 16 for index in range(8)]
    tiers = audited_tiers(names)
    while not tiers.load(names[0], 0):
        pass
    assert all(tiers.load(name, 0) for name in names * 100), "none of them was audited"
    for _ in range(MOST_CHOSEN):
        tiers.end_audit()
    chosen = []
    for name in names * 2:
        chosen.append(tiers.load(name, 0))
        if chosen[-1]:
            tiers.end_audit()
    assert {*chosen} == {True, False}


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("seed", [*range(8), *map(in_soak, range(8, 20))])
def test_random_lives_never_find_other_kv(
    kind: type[PagedKVCache | RadixKVCache], policy: str, seed: int
) -> None:
    """Evictions, flushes, new weights, lost plans, failed reads and writes in any order.

    A router that reads the events finds the same prefixes.
    """
    draw = random.Random(seed)
    disk, events = draw.choice([0, 5, 50]), KVEventLog(SIZE)
    tiers = make_tiers(host=draw.randint(2, 10), disk=disk, policy=policy, events=events)
    replica = replica_of(kind, tiers, 8, events)
    prompts = [prompt(draw.randint(1, 2), draw.randint(1, 4)) for _ in range(3)]
    prompts += [[*each[: draw.randint(1, 12)], *prompt(draw.randint(3, 5), 2)] for each in prompts]
    prompts = [each[: 5 * SIZE] for each in prompts]
    matched = 0
    for _ in range(150):
        event = draw.random()
        if event < 0.4 and len(replica.running) < 1:
            chosen = draw.choice(prompts)
            if not replica.cache.below.fetch(Allocation(chosen)) or draw.random() < 0.5:
                scope = CacheScope(tenant=draw.choice(["", "", "one"]))
                replica.run(chosen, scope)
        elif event < 0.7 and replica.running:
            replica.end(draw.randrange(len(replica.running)))
        elif event < 0.9 and replica.executor.jobs:
            fails = draw.random() < 0.2
            replica.tiers.changed(replica.executor.finish_job(fails=fails))
        elif event < 0.91:
            replica.save()
        elif event < 0.92:
            replica.cache.flush()
        elif event < 0.94:
            replica.cache.begin_weight_version(replica.cache.weight_version + 1)
        elif event < 0.96:
            # A plan is lost with what it stores; the executor begins a new epoch.
            replica.tiers.forget_plans(replica.tiers.take_moves())
            replica.executor.reset()
            replica.tiers.changed(TiersChanged(stored=tuple(replica.executor.disk), whole=True))
        replica.apply()
        replica.check()
        asked = CacheScope(tenant=draw.choice(["", "one"]))
        matched += check_match(replica.cache, replica.router, draw.choice(prompts), asked)
    assert matched
