"""The contract of prefix caches, for both kinds of index."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.bus.messages import DEFAULT_SCOPE, CacheScope
from nano_inference.stages.batching import (
    Allocation,
    KVCacheManager,
    OutOfBlocks,
    PrefixMatch,
    compute_block_hash,
)
from nano_inference.stages.batching.block_hash import NO_PREFIX, chain_root
from nano_inference.stages.batching.paged import PagedKVCache
from nano_inference.stages.batching.radix import RadixKVCache

from .index import check_index

MINE = CacheScope(salt="mine")
CACHES = (PagedKVCache, RadixKVCache)
MakeCache = Callable[[int, int], KVCacheManager]


@pytest.fixture(params=CACHES)
def make_cache(request: pytest.FixtureRequest) -> MakeCache:
    make: MakeCache = request.param
    return make


def started(cache: KVCacheManager, token_ids: list[int]) -> Allocation:
    """A allocation with blocks for all of its tokens."""
    allocation = Allocation(token_ids)
    cache.start(allocation, cache.match(allocation).num_needed)
    return allocation


def computed(cache: KVCacheManager, token_ids: list[int]) -> Allocation:
    """A allocation with blocks, all of its tokens computed."""
    allocation = started(cache, token_ids)
    cache.commit(allocation, len(token_ids))
    return allocation


def match(cache: KVCacheManager, token_ids: list[int]) -> PrefixMatch:
    return cache.match(Allocation(token_ids))


# --- blocks ----------------------------------------------------------------------------------


def test_computed_tokens_are_found_and_whole_blocks_shared(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4)
    first = started(cache, list(range(10)))
    assert match(cache, list(range(10))).num_cached == 0, "nothing is computed yet"
    cache.commit(first, 10)
    second = started(cache, [*range(8), 50, 51])
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] not in first.block_ids
    assert cache.num_free_blocks() == 8 - 3 - 1


def test_released_blocks_are_free_and_still_found(make_cache: MakeCache) -> None:
    cache = make_cache(4, 4)
    first = computed(cache, list(range(9)))
    block_ids = first.block_ids
    cache.release(first)
    assert cache.num_free_blocks() == 4
    assert started(cache, list(range(9))).block_ids[:2] == block_ids[:2]


def test_misuse_is_refused(make_cache: MakeCache) -> None:
    cache = make_cache(4, 4)
    for sizes in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match="at least one"):
            make_cache(*sizes)
    with pytest.raises(ValueError, match="at least one token"):
        cache.start(Allocation([]), 4)
    allocation = started(cache, [1, 2, 3, 4])
    stale = Allocation([1, 2, 3, 4, 5], block_ids=allocation.block_ids)
    with pytest.raises(ValueError, match="without a block"):
        cache.commit(stale, 5)
    cache.release(allocation)
    with pytest.raises(ValueError, match="freed twice"):
        cache.release(stale)
    with pytest.raises(ValueError, match="in a free block"):
        cache.commit(stale, 4)


def test_more_than_is_free_is_refused_and_takes_nothing(make_cache: MakeCache) -> None:
    cache = make_cache(3, 4)
    started(cache, [1])
    with pytest.raises(OutOfBlocks, match="3 blocks are needed and 2 are free"):
        cache.start(Allocation(list(range(9))), 3)
    assert cache.num_free_blocks() == 2
    allocation = started(cache, [7] * 8)
    with pytest.raises(OutOfBlocks, match="1 block is needed and 0 are free"):
        cache.extend(allocation)


def test_free_blocks_of_a_prefix_count_as_needed(make_cache: MakeCache) -> None:
    """They are held from then on, so no fresh block can come from them."""
    cache = make_cache(3, 4)
    cache.release(computed(cache, list(range(8))))
    started(cache, [9])
    with pytest.raises(OutOfBlocks, match="3 blocks are needed and 2 are free"):
        cache.start(Allocation(list(range(9))), 3)
    assert cache.num_free_blocks() == 2
    assert cache.num_cached_blocks() == 2, "what is refused takes nothing"


# --- matches ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_a_full_hit_leaves_one_token(make_cache: MakeCache, size: int) -> None:
    cache = make_cache(64, size)
    computed(cache, list(range(32)))
    assert match(cache, list(range(32))).num_cached == 31
    assert match(cache, list(range(40))).num_cached == 32
    again = computed(cache, list(range(64)))
    cache.release(again)
    assert cache.match(again).num_cached == 63, "nor with a allocation that has been matched before"
    assert match(cache, [0]).num_cached == 0


def test_the_source_is_held_until_the_first_commit(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4)
    cache.release(computed(cache, [1, 2, 3]))
    second = Allocation([1, 2, 9])
    assert cache.match(second).num_needed == 2, "the source is free, so holding it takes it"
    cache.start(second, 2)
    assert cache.num_free_blocks() == 6
    assert cache.num_reclaimable(second) == 2
    cache.commit(second, 3)
    assert cache.num_free_blocks() == 7
    cache.check([second])


def test_no_copy_without_room_for_its_source(make_cache: MakeCache) -> None:
    cache = make_cache(1, 4)
    cache.release(computed(cache, [1, 2, 3]))
    second = Allocation([1, 2, 9])
    assert cache.match(second) == PrefixMatch(0, 1, cache.next_run(second))
    assert cache.start(second, 1).copies == ()


def twins(cache: KVCacheManager, begin: list[int]) -> list[Allocation]:
    """Two allocations that compute the same tokens side by side, and each a last token of its own.

    Blocks are of two tokens; both have as many as they need.
    """
    allocations = [Allocation([*begin, tail]) for tail in (6, 7)]
    for allocation in allocations:
        cache.start(allocation, len(allocation.token_ids) // 2)
    for allocation in allocations:
        cache.commit(allocation, len(allocation.token_ids))
    return allocations


def test_held_blocks_after_a_free_one_do_not_count_as_shared(make_cache: MakeCache) -> None:
    cache = make_cache(8, 2)
    allocations = twins(cache, [1, 2, 3])
    cache.release(allocations[0])
    # The first block is the released one, which another start may take; the second is held.
    assert match(cache, [1, 2, 3, 7, 8]) == PrefixMatch(4, 3, None)


def test_kv_from_before_a_flush_is_never_shared(make_cache: MakeCache) -> None:
    cache = make_cache(8, 2)
    old = computed(cache, [1, 2])
    cache.flush()
    old.token_ids = [1, 2, 3, 4]
    cache.extend(old)
    cache.commit(old, 4)
    assert cache.num_cached_blocks() == 0
    computed(cache, [1, 2])
    assert match(cache, [1, 2, 3, 4, 5]).num_cached == 2
    assert cache.next_run(old) is None


def test_other_scopes_find_nothing_and_name_another_next_run(make_cache: MakeCache) -> None:
    cache = make_cache(16, 4)
    mine = Allocation(list(range(10)), MINE)
    cache.start(mine, 3)
    theirs = Allocation(list(range(10)), CacheScope(salt="theirs"))
    assert cache.match(theirs).next_run != cache.next_run(mine)
    cache.commit(mine, 10)
    assert cache.match(theirs).num_cached == 0
    assert match(cache, list(range(10))).num_cached == 0
    assert cache.match(Allocation(list(range(10)), MINE)).num_cached == 9


def test_a_lease_without_reuse_finds_nothing_and_is_found(make_cache: MakeCache) -> None:
    cache = make_cache(16, 4)
    computed(cache, list(range(6)))
    allocation = Allocation(list(range(10)))
    allocation.max_reuse = 0
    assert cache.match(allocation).num_cached == 0
    assert cache.start(allocation, cache.match(allocation).num_needed).cached_length == 0
    cache.commit(allocation, 10)
    assert match(cache, list(range(10))).num_cached == 9
    check_index(cache)


@pytest.mark.parametrize(("most", "cached"), [(3, 3), (4, 4), (6, 6), (9, 9), (30, 11)])
def test_a_limited_allocation_takes_no_more_and_is_found(
    make_cache: MakeCache, most: int, cached: int
) -> None:
    cache = make_cache(16, 4)
    computed(cache, list(range(12)))
    allocation = Allocation(list(range(12)), max_reuse=most)
    found = cache.match(allocation)
    assert found.num_cached == cached
    assert cache.start(allocation, found.num_needed).cached_length == cached
    cache.commit(allocation, 12)
    assert match(cache, list(range(12))).num_cached == 11
    check_index(cache)


def test_siblings_name_the_same_next_run(make_cache: MakeCache) -> None:
    cache = make_cache(16, 4)
    first, sibling = Allocation(list(range(10))), Allocation(list(range(10)))
    cache.start(first, 3)
    for done in (0, 4, 5, 8, 9):
        if done:
            cache.commit(first, done)
        assert cache.match(sibling).next_run == (cache.next_run(first) if done < 9 else None)
    assert cache.match(Allocation([9, *range(9)])).next_run != cache.next_run(first)


# --- eviction --------------------------------------------------------------------------------


def test_least_recently_freed_goes_first_and_leaves_before_roots(make_cache: MakeCache) -> None:
    cache = make_cache(6, 2)
    for start in (10, 20, 30):
        cache.release(computed(cache, [start, start + 1, start + 2, start + 3]))
    cache.release(computed(cache, [10, 11, 12, 13, 14]))
    assert match(cache, [20, 21, 22, 23, 24]).num_cached == 2, "its end was taken"
    assert match(cache, [10, 11, 12, 13, 15]).num_cached == 4
    assert match(cache, [30, 31, 32, 33, 34]).num_cached == 4


def test_blocks_outside_the_index_are_evicted_first(make_cache: MakeCache) -> None:
    cache = make_cache(4, 2)
    cache.release(computed(cache, [1, 2]))
    cache.release(started(cache, [5, 5, 5]))
    started(cache, [7] * 6)
    assert match(cache, [1, 2, 3]).num_cached == 2


# --- of one cache only -----------------------------------------------------------------------


def test_radix_finds_the_longest_of_many_continuations() -> None:
    cache = RadixKVCache(64, 8)
    for tail in range(20):
        computed(cache, [1, 2, 3, tail, tail + 1, 100 + tail])
    for tail in range(20):
        assert match(cache, [1, 2, 3, tail, tail + 1, 0]).num_cached == 5
    check_index(cache)


def test_radix_puts_an_own_block_in_the_place_of_an_evicted_twin() -> None:
    cache = RadixKVCache(5, 2)
    allocations = twins(cache, [1, 2, 3])
    cache.release(allocations[0])
    cache.release(started(cache, [9] * 6))
    assert match(cache, [1, 2, 3, 7, 8]).num_cached == 0
    allocations[1].token_ids = [1, 2, 3, 7, 8]
    cache.extend(allocations[1])
    cache.commit(allocations[1], 5)
    assert match(cache, [1, 2, 3, 7, 8, 9]).num_cached == 5


def test_a_block_hash_covers_its_tokens_and_all_before() -> None:
    assert compute_block_hash((300, 1)) == compute_block_hash([300, 1])
    assert compute_block_hash((300, 1)) != compute_block_hash((44, 1)), "300 is 44 modulo 256"
    assert compute_block_hash((1, 2), 5) != compute_block_hash((1, 2))
    with pytest.raises(ValueError, match="at least one token"):
        compute_block_hash(())


def test_the_chain_begins_with_version_and_scope() -> None:
    scopes = [
        DEFAULT_SCOPE,
        CacheScope("1"),
        CacheScope("", "1"),
        CacheScope("", "", "1"),
        CacheScope("", "", "1", 1),
        CacheScope("1", "\0a"),
        CacheScope("1\0", "a"),
        CacheScope("", "\ud800"),
    ]
    roots = [chain_root(version, scope) for version in (0, 1, 11) for scope in scopes]
    names = {compute_block_hash((1, 2), root) for root in roots}
    assert len(names) == len(roots)
    assert chain_root(0, DEFAULT_SCOPE) == NO_PREFIX


# --- random traces ---------------------------------------------------------------------------


class Driver:
    """Drives a cache with records in place of KV.

    A slot holds (scope, weight version, tokens) it was computed from.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        self.cache = cache
        self.version = 0
        self.slots: list[list[tuple]] = [[()] * cache.block_size] * cache.num_blocks
        self.allocations: list[Allocation] = []
        # For each computed token what it was computed under.
        self.stamps: dict[Allocation, list[tuple[CacheScope, int]]] = {}
        self.done: dict[Allocation, int] = {}
        self.known: list[tuple[int, ...]] = []

    def arrive(self, allocation: Allocation) -> None:
        found = self.cache.match(allocation)
        if found.num_needed > self.cache.num_free_blocks():
            return
        free = self.cache.num_free_blocks()
        start = self.cache.start(allocation, found.num_needed)
        assert start.cached_length == found.num_cached < len(allocation.token_ids)
        assert free - self.cache.num_free_blocks() <= found.num_needed
        for source, destination in start.copies:
            self.slots[destination] = list(self.slots[source])
        self.allocations.append(allocation)
        self.done[allocation] = start.cached_length
        self.stamps[allocation] = [(allocation.scope, self.version)] * start.cached_length
        self.read(allocation)

    def compute(self, allocation: Allocation, count: int) -> None:
        size = self.cache.block_size
        for position in range(
            self.done[allocation], min(self.done[allocation] + count, len(allocation.token_ids))
        ):
            block_id = allocation.block_ids[position // size]
            slots = list(self.slots[block_id])
            stamp = (allocation.scope, self.version)
            slots[position % size] = (*stamp, tuple(allocation.token_ids[: position + 1]))
            self.stamps[allocation].append(stamp)
            self.slots[block_id] = slots
            self.done[allocation] = position + 1
        self.cache.commit(allocation, self.done[allocation])
        if self.cache.next_run(allocation) is not None and allocation.scope == DEFAULT_SCOPE:
            self.known.append(tuple(allocation.token_ids[: self.done[allocation]]))

    def grow(self, allocation: Allocation, token_id: int) -> None:
        if len(allocation.token_ids) == len(allocation.block_ids) * self.cache.block_size:
            if not self.cache.num_free_blocks():
                return
            self.cache.extend(allocation)
        allocation.token_ids = [*allocation.token_ids, token_id]

    def leave(self, allocation: Allocation) -> None:
        self.allocations.remove(allocation)
        self.cache.release(allocation)

    def read(self, allocation: Allocation) -> None:
        """Check that all computed tokens are in place, and none is overwritten."""
        size = self.cache.block_size
        for position in range(self.done[allocation]):
            slot = self.slots[allocation.block_ids[position // size]][position % size]
            stamp = self.stamps[allocation][position]
            assert slot == (*stamp, tuple(allocation.token_ids[: position + 1]))

    def check(self) -> None:
        for allocation in self.allocations:
            self.read(allocation)
        written = [
            block_id
            for allocation in self.allocations
            for block_id in allocation.block_ids[self.done[allocation] // self.cache.block_size :]
        ]
        assert len(written) == len(set(written)), "a block is in two owners' write sets"
        self.cache.check(self.allocations)
        check_index(self.cache)


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=14)
operations = st.one_of(
    st.tuples(st.just("arrive"), prompts, st.sampled_from([DEFAULT_SCOPE, DEFAULT_SCOPE, MINE])),
    st.tuples(st.just("compute"), st.integers(0, 9), st.integers(1, 9)),
    st.tuples(st.just("grow"), st.integers(0, 9), st.integers(0, 2)),
    st.tuples(st.just("leave"), st.integers(0, 9)),
    st.tuples(st.just("again"), st.integers(0, 9)),
    st.tuples(st.just("flush")),
    st.tuples(st.just("update")),
)


def play(driver: Driver, trace: list[tuple]) -> None:
    for name, *arguments in trace:
        if name == "arrive":
            driver.arrive(Allocation(list(arguments[0]), arguments[1]))
        elif name == "flush":
            driver.cache.flush()
            driver.known.clear()
        elif name == "update":
            driver.version += 1
            driver.cache.begin_weight_version(driver.version)
            driver.known.clear()
        elif driver.allocations:
            allocation = driver.allocations[arguments[0] % len(driver.allocations)]
            if name == "compute":
                driver.compute(allocation, arguments[1])
            elif name == "grow":
                driver.grow(allocation, arguments[1])
            else:
                driver.leave(allocation)
            if name == "again":
                driver.arrive(allocation)
        driver.check()


@pytest.mark.soak
@given(
    st.sampled_from(CACHES),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 14),
    st.lists(operations, max_size=40),
)
def test_random_traces_conserve_blocks_and_contents(
    make_cache: MakeCache, size: int, num_blocks: int, trace: list[tuple]
) -> None:
    driver = Driver(make_cache(num_blocks, size))
    play(driver, trace)
    for allocation in list(driver.allocations):
        driver.leave(allocation)
    driver.check()
    assert driver.cache.num_free_blocks() == num_blocks


@pytest.mark.soak
@given(
    st.sampled_from(CACHES), st.sampled_from([1, 2, 4]), st.lists(operations, max_size=30), prompts
)
def test_without_eviction_the_longest_computed_prefix_is_found(
    make_cache: MakeCache, size: int, trace: list[tuple], prompt: list[int]
) -> None:
    driver = Driver(make_cache(1000, size))
    play(driver, trace)
    longest = 0
    for known in driver.known:
        same = [one == other for one, other in zip(known, prompt[:-1], strict=False)]
        longest = max(longest, [*same, False].index(False))
    num_cached = match(driver.cache, prompt).num_cached
    if make_cache is RadixKVCache:
        assert num_cached == longest
    else:
        assert longest // size * size <= num_cached <= longest
