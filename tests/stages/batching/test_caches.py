"""The contract of prefix caches, for both kinds of index."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.bus.messages import DEFAULT_SCOPE, CacheScope
from nano_inference.stages.batching import (
    KVCacheManager,
    Lease,
    OutOfBlocks,
    PagedKVCache,
    PrefixMatch,
    RadixKVCache,
    compute_block_hash,
)
from nano_inference.stages.batching.block_hash import NO_PREFIX, chain_root

from .index import check_index

MINE = CacheScope(salt="mine")
CACHES = (PagedKVCache, RadixKVCache)
MakeCache = Callable[[int, int], KVCacheManager]


@pytest.fixture(params=CACHES)
def make_cache(request: pytest.FixtureRequest) -> MakeCache:
    make: MakeCache = request.param
    return make


def started(cache: KVCacheManager, token_ids: list[int]) -> Lease:
    """A lease with blocks for all of its tokens."""
    lease = Lease(token_ids)
    cache.start(lease, cache.match(lease).num_needed)
    return lease


def computed(cache: KVCacheManager, token_ids: list[int]) -> Lease:
    """A lease with blocks, all of its tokens computed."""
    lease = started(cache, token_ids)
    cache.commit(lease, len(token_ids))
    return lease


def match(cache: KVCacheManager, token_ids: list[int]) -> PrefixMatch:
    return cache.match(Lease(token_ids))


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
        cache.start(Lease([]), 4)
    lease = started(cache, [1, 2, 3, 4])
    stale = Lease([1, 2, 3, 4, 5], block_ids=lease.block_ids)
    with pytest.raises(ValueError, match="without a block"):
        cache.commit(stale, 5)
    cache.release(lease)
    with pytest.raises(ValueError, match="freed twice"):
        cache.release(stale)
    with pytest.raises(ValueError, match="in a free block"):
        cache.commit(stale, 4)


def test_more_than_is_free_is_refused_and_takes_nothing(make_cache: MakeCache) -> None:
    cache = make_cache(3, 4)
    started(cache, [1])
    with pytest.raises(OutOfBlocks, match="3 blocks are needed and 2 are free"):
        cache.start(Lease(list(range(9))), 3)
    assert cache.num_free_blocks() == 2
    lease = started(cache, [7] * 8)
    with pytest.raises(OutOfBlocks, match="1 block is needed and 0 are free"):
        cache.extend(lease)


def test_free_blocks_of_a_prefix_count_as_needed(make_cache: MakeCache) -> None:
    """They are held from then on, so no fresh block can come from them."""
    cache = make_cache(3, 4)
    cache.release(computed(cache, list(range(8))))
    started(cache, [9])
    with pytest.raises(OutOfBlocks, match="3 blocks are needed and 2 are free"):
        cache.start(Lease(list(range(9))), 3)
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
    assert cache.match(again).num_cached == 63, "nor with a lease that has been matched before"
    assert match(cache, [0]).num_cached == 0


def test_the_source_is_held_until_the_first_commit(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4)
    cache.release(computed(cache, [1, 2, 3]))
    second = Lease([1, 2, 9])
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
    second = Lease([1, 2, 9])
    assert cache.match(second) == PrefixMatch(0, 1, cache.next_run(second))
    assert cache.start(second, 1).copies == ()


def twins(cache: KVCacheManager, begin: list[int]) -> list[Lease]:
    """Two leases that compute the same tokens side by side, and each a last token of its own.

    Blocks are of two tokens; both have as many as they need.
    """
    leases = [Lease([*begin, tail]) for tail in (6, 7)]
    for lease in leases:
        cache.start(lease, len(lease.token_ids) // 2)
    for lease in leases:
        cache.commit(lease, len(lease.token_ids))
    return leases


def test_held_blocks_behind_a_free_one_do_not_count_as_shared(make_cache: MakeCache) -> None:
    cache = make_cache(8, 2)
    leases = twins(cache, [1, 2, 3])
    cache.release(leases[0])
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
    mine = Lease(list(range(10)), MINE)
    cache.start(mine, 3)
    theirs = Lease(list(range(10)), CacheScope(salt="theirs"))
    assert cache.match(theirs).next_run != cache.next_run(mine)
    cache.commit(mine, 10)
    assert cache.match(theirs).num_cached == 0
    assert match(cache, list(range(10))).num_cached == 0
    assert cache.match(Lease(list(range(10)), MINE)).num_cached == 9


def test_a_lease_without_reuse_finds_nothing_and_is_found(make_cache: MakeCache) -> None:
    cache = make_cache(16, 4)
    computed(cache, list(range(6)))
    lease = Lease(list(range(10)))
    lease.may_reuse = False
    assert cache.match(lease).num_cached == 0
    assert cache.start(lease, cache.match(lease).num_needed).cached_length == 0
    cache.commit(lease, 10)
    assert match(cache, list(range(10))).num_cached == 9
    check_index(cache)


def test_siblings_name_the_same_next_run(make_cache: MakeCache) -> None:
    cache = make_cache(16, 4)
    first, sibling = Lease(list(range(10))), Lease(list(range(10)))
    cache.start(first, 3)
    for done in (0, 4, 5, 8, 9):
        if done:
            cache.commit(first, done)
        assert cache.match(sibling).next_run == (cache.next_run(first) if done < 9 else None)
    assert cache.match(Lease([9, *range(9)])).next_run != cache.next_run(first)


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
    leases = twins(cache, [1, 2, 3])
    cache.release(leases[0])
    cache.release(started(cache, [9] * 6))
    assert match(cache, [1, 2, 3, 7, 8]).num_cached == 0
    leases[1].token_ids = [1, 2, 3, 7, 8]
    cache.extend(leases[1])
    cache.commit(leases[1], 5)
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
        self.leases: list[Lease] = []
        # For each computed token what it was computed under.
        self.stamps: dict[Lease, list[tuple[CacheScope, int]]] = {}
        self.done: dict[Lease, int] = {}
        self.known: list[tuple[int, ...]] = []

    def arrive(self, lease: Lease) -> None:
        found = self.cache.match(lease)
        if found.num_needed > self.cache.num_free_blocks():
            return
        free = self.cache.num_free_blocks()
        allocation = self.cache.start(lease, found.num_needed)
        assert allocation.cached_length == found.num_cached < len(lease.token_ids)
        assert free - self.cache.num_free_blocks() <= found.num_needed
        for source, destination in allocation.copies:
            self.slots[destination] = list(self.slots[source])
        self.leases.append(lease)
        self.done[lease] = allocation.cached_length
        self.stamps[lease] = [(lease.scope, self.version)] * allocation.cached_length
        self.read(lease)

    def compute(self, lease: Lease, count: int) -> None:
        size = self.cache.block_size
        for position in range(
            self.done[lease], min(self.done[lease] + count, len(lease.token_ids))
        ):
            block_id = lease.block_ids[position // size]
            slots = list(self.slots[block_id])
            stamp = (lease.scope, self.version)
            slots[position % size] = (*stamp, tuple(lease.token_ids[: position + 1]))
            self.stamps[lease].append(stamp)
            self.slots[block_id] = slots
            self.done[lease] = position + 1
        self.cache.commit(lease, self.done[lease])
        if self.cache.next_run(lease) is not None and lease.scope == DEFAULT_SCOPE:
            self.known.append(tuple(lease.token_ids[: self.done[lease]]))

    def grow(self, lease: Lease, token_id: int) -> None:
        if len(lease.token_ids) == len(lease.block_ids) * self.cache.block_size:
            if not self.cache.num_free_blocks():
                return
            self.cache.extend(lease)
        lease.token_ids = [*lease.token_ids, token_id]

    def leave(self, lease: Lease) -> None:
        self.leases.remove(lease)
        self.cache.release(lease)

    def read(self, lease: Lease) -> None:
        """Check that all computed tokens are in place, and none is overwritten."""
        size = self.cache.block_size
        for position in range(self.done[lease]):
            slot = self.slots[lease.block_ids[position // size]][position % size]
            stamp = self.stamps[lease][position]
            assert slot == (*stamp, tuple(lease.token_ids[: position + 1]))

    def check(self) -> None:
        for lease in self.leases:
            self.read(lease)
        written = [
            block_id
            for lease in self.leases
            for block_id in lease.block_ids[self.done[lease] // self.cache.block_size :]
        ]
        assert len(written) == len(set(written)), "a block is in two owners' write sets"
        self.cache.check(self.leases)
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
            driver.arrive(Lease(list(arguments[0]), arguments[1]))
        elif name == "flush":
            driver.cache.flush()
            driver.known.clear()
        elif name == "update":
            driver.version += 1
            driver.cache.begin_weight_version(driver.version)
            driver.known.clear()
        elif driver.leases:
            lease = driver.leases[arguments[0] % len(driver.leases)]
            if name == "compute":
                driver.compute(lease, arguments[1])
            elif name == "grow":
                driver.grow(lease, arguments[1])
            else:
                driver.leave(lease)
            if name == "again":
                driver.arrive(lease)
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
    for lease in list(driver.leases):
        driver.leave(lease)
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
