"""KV events: what a router learns of a cache, beside the random lives of the other tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nano_inference.bus.control import AuditedBlock, TiersChanged
from nano_inference.bus.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from nano_inference.bus.messages import CacheScope
from nano_inference.stages.batching import Allocation
from nano_inference.stages.batching.paged import PagedKVCache
from nano_inference.stages.batching.parts.kv_events import KVEventLog, KVEvents, wire_hash
from nano_inference.stages.batching.radix import RadixKVCache
from nano_inference.store.loaded_adapter import LoadedAdapter

from ...kv_router import PLAIN, Root, Router
from .events import check_match, log_of, pass_on, with_parts
from .replica import CACHE_TYPES, CacheType, FakeReplica
from .test_tiers import CACHES, SIZE, Replica, make_tiers, prompt, replica_of

Kind = type[PagedKVCache | RadixKVCache]


def replica_with_events(kind: Kind, *, blocks: int = 4, host: int = 8, disk: int = 0) -> Replica:
    events = KVEventLog(SIZE)
    return replica_of(kind, make_tiers(host=host, disk=disk, events=events), blocks, events)


def compute(replica: Replica, token_ids: list[int]) -> None:
    """Compute like `Replica.run`, without checks."""
    allocation = Allocation(token_ids)
    replica.cache.start(allocation, replica.cache.match(allocation).num_needed)
    replica.apply()
    replica.cache.commit(allocation, len(token_ids))
    replica.cache.release(allocation)


def media(replica: Replica, token_ids: list[int], root: Root = PLAIN) -> list[set[str]]:
    return replica.router.find(token_ids, SIZE, root)


@pytest.mark.parametrize("kind", CACHES)
def test_a_prompt_is_one_event_and_a_continuation_names_its_parent(kind: Kind) -> None:
    replica = replica_with_events(kind, blocks=16)
    events = log_of(replica.cache)
    replica.router, seen = Router(), []
    for tokens in (prompt(1, 2), prompt(1, 4)):
        allocation = Allocation(tokens)
        replica.cache.start(allocation, replica.cache.match(allocation).num_needed)
        assert all(isinstance(each, AllBlocksCleared) for each in events.take()), "not computed"
        replica.cache.commit(allocation, len(tokens))
        seen += events.take()
    first, second = seen
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (first.parent_block_hash, second.parent_block_hash) == (None, first.block_hashes[1])
    assert [*first.token_ids, *second.token_ids] == prompt(1, 4)[:-1]
    assert (first.block_size, first.medium, first.lora_name) == (SIZE, "GPU", None)
    assert first.extra_keys is None
    assert len({*first.block_hashes, *second.block_hashes}) == 4


@pytest.mark.parametrize("kind", CACHES)
def test_a_block_below_the_device_is_stored_before_it_is_removed_above(kind: Kind) -> None:
    """So a router that forgets the tokens of blocks that are nowhere still knows them."""
    replica = replica_with_events(kind, disk=100)
    replica.router = Router(forgets=True)
    for number in (1, 2):
        replica.run(prompt(number))
        replica.end()
    assert media(replica, prompt(1)) == [{"CPU"}] * 3
    assert media(replica, prompt(2)) == [{"GPU"}] * 3
    while replica.executor.jobs:
        replica.tiers.changed(replica.executor.finish_job())
    replica.check()
    assert media(replica, prompt(1)) == [{"CPU", "DISK"}] * 3
    for number in (3, 4, 5):
        replica.run(prompt(number))
        replica.end()
    assert media(replica, prompt(1)) == [{"DISK"}] * 3
    assert check_match(replica.cache, replica.router, prompt(5), CacheScope()) == 3


@pytest.mark.parametrize("kind", CACHES)
def test_scopes_are_kept_apart(kind: Kind) -> None:
    replica = replica_with_events(kind, blocks=32)
    scopes = {
        CacheScope(): Root(),
        CacheScope(salt="s"): Root("", ("s",)),
        CacheScope(tenant="t"): Root("", ("t", "")),
        CacheScope(tenant="default", salt="d"): Root("", ("d",)),
        CacheScope(tenant="t", salt="s"): Root("", ("t", "s")),
        CacheScope(adapter="a", adapter_version=1): Root("a"),
        CacheScope(salt="s", adapter="a", adapter_version=1): Root("a", ("s",)),
    }
    for scope, root in scopes.items():
        assert media(replica, prompt(1), root) == []
        assert replica.run(prompt(1), scope) == 0
        replica.end()
        assert media(replica, prompt(1), root) == [{"GPU"}] * 3
        # A continuation has the keys of its parent.
        replica.run(prompt(1, 5), scope)
        replica.end()
        assert media(replica, prompt(1, 5), root) == [{"GPU"}] * 5


@pytest.mark.parametrize("kind", CACHES)
def test_flush_and_new_weights_clear_everything(kind: Kind) -> None:
    replica = replica_with_events(kind, disk=100)
    for number, forget in enumerate(
        (replica.cache.flush, lambda: replica.cache.begin_weight_version(1)), 2
    ):
        for each in (1, 2):
            replica.run(prompt(each))
            replica.end()
        while replica.executor.jobs:
            replica.tiers.changed(replica.executor.finish_job())
        replica.check()
        assert replica.router.cleared == number - 1
        forget()
        pass_on(replica.cache, replica.router)
        assert replica.router.cleared == number
        assert not any(replica.router.where.values())
        replica.apply()


@pytest.mark.parametrize("kind", CACHES)
def test_lost_device_memory_removes_blocks_of_the_device_only(kind: Kind) -> None:
    replica = replica_with_events(kind)
    for number in (1, 2):
        replica.run(prompt(number))
        replica.end()
    replica.cache.forget_device()
    replica.check()
    assert media(replica, prompt(1)) == [{"CPU"}] * 3
    assert media(replica, prompt(2)) == [set()] * 3
    assert replica.router.cleared == 1


@pytest.mark.parametrize("kind", CACHES)
def test_blocks_that_a_lost_plan_would_have_stored_are_removed(kind: Kind) -> None:
    replica = replica_with_events(kind)
    replica.run(prompt(1))
    replica.end()
    replica.cache.start(allocation := Allocation(prompt(2)), 4)
    pass_on(replica.cache, replica.router)
    assert media(replica, prompt(1)) == [{"CPU"}] * 3
    replica.tiers.forget_plans(replica.tiers.take_moves())
    replica.cache.release(allocation)
    replica.check()
    assert media(replica, prompt(1)) == [set()] * 3


@pytest.mark.parametrize("kind", CACHES)
def test_another_version_of_an_adapter_removes_the_blocks_of_the_one_before(kind: Kind) -> None:
    """Tokens and adapter are the same, so a router would find them."""
    replica = replica_with_events(kind, blocks=4, host=20, disk=100)
    scope, root = CacheScope(adapter="a", adapter_version=1), Root("a")
    replica.run(prompt(1))
    replica.end()
    for number in (2, 3):
        replica.run(prompt(number), scope)
        replica.end()
    assert media(replica, prompt(2), root) == [{"CPU"}] * 3
    assert media(replica, prompt(3), root) == [{"GPU"}] * 3
    replica.cache.retire_adapter("a")
    pass_on(replica.cache, replica.router)
    for number in (2, 3):
        assert media(replica, prompt(number), root) == [set()] * 3
    assert media(replica, prompt(1)) == [{"CPU"}] * 3, "others stay"
    # What is being written is deleted, and what is evicted is not stored.
    compute(replica, prompt(4))
    while replica.executor.jobs:
        replica.tiers.changed(replica.executor.finish_job())
    replica.apply()
    pass_on(replica.cache, replica.router)
    assert media(replica, prompt(1)) == [{"CPU", "DISK"}] * 3
    assert media(replica, prompt(4)) == [{"GPU"}] * 3, "in the places of the removed ones"
    assert len(replica.router.where["DISK"]) == len(replica.executor.disk) == 3
    assert replica.router.where["CPU"] == replica.router.where["DISK"]


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_the_core_retires_adapters_that_are_replaced_removed_or_changed_by_a_failure(
    cache_type: CacheType,
) -> None:
    changes: dict[str, Callable[[FakeReplica], object]] = {
        "replaced": lambda replica: replica.change_adapter("a", 2, "keep"),
        "removed": lambda replica: replica.change_adapter("a", 0, "keep"),
        "other version": lambda replica: replica.set_adapters([LoadedAdapter("a", 3, 8)]),
        "gone": lambda replica: replica.set_adapters([]),
    }
    for change in changes.values():
        replica = FakeReplica(kv_events=True, cache_type=cache_type)
        replica.change_adapter("a", 1, "keep")
        replica.add(list(range(9)), 0, adapter="a")
        replica.add(list(range(9)), 1)
        replica.run()
        replica.check()
        assert replica.router.find(range(9), 4, Root("a")) == [{"GPU"}] * 2
        change(replica)
        pass_on(replica.core.cache, replica.router)
        assert replica.router.find(range(9), 4, Root("a")) == [set()] * 2
        assert replica.router.find(range(9), 4) == [{"GPU"}] * 2


def test_tiers_that_are_off_or_too_slow_are_not_announced() -> None:
    events = KVEventLog(SIZE)
    slow = Replica(with_parts(PagedKVCache(4, SIZE), make_tiers(token_ns=0, events=events), events))
    replica = replica_with_events(PagedKVCache, disk=100)
    for each in (slow, replica):
        for number in (1, 2):
            compute(each, prompt(number))
        pass_on(each.cache, each.router)
    assert not slow.router.where.get("CPU")
    assert len(replica.router.where["CPU"]) == 3
    differs = AuditedBlock(b"name", "one", "other")
    replica.tiers.changed(TiersChanged(audited=(differs,)))
    pass_on(replica.cache, replica.router)
    assert not replica.router.where["CPU"]
    replica.tiers.changed(replica.executor.finish_job())
    pass_on(replica.cache, replica.router)
    assert not replica.router.where.get("DISK")


def test_changes_of_one_medium_are_one_event() -> None:
    events = KVEventLog(SIZE)
    names = [bytes([number] * 16) for number in range(4)]
    hashes = tuple(map(wire_hash, names))
    events.store((0, 1, 2, 3), names, None, range(4 * SIZE), CacheScope())
    events.take()
    for number in (0, 1):
        events.store_below("CPU", names[number])
    for number in (0, 1):
        events.remove(number)
        events.remove(number)
    events.store_below("DISK", names[2])
    events.remove_below("DISK", names[3])
    events.remove_below("CPU", names[0])
    stored = BlockStored(hashes[:2], None, (), 0, None, "CPU", None)
    on_disk = BlockStored(hashes[2:3], None, (), 0, None, "DISK", None)
    removed = (BlockRemoved(hashes[:2], "GPU"), on_disk, BlockRemoved(hashes[:1], "CPU"))
    assert events.take() == (stored, *removed)
    assert events.take() == ()


def test_without_the_setting_no_block_has_a_name() -> None:
    replica = FakeReplica()
    replica.add(list(range(9)), 0)
    replica.run()
    assert replica.core.find(KVEvents) is None
    assert not any(replica.core.cache._names)
