"""Cost of the prefix caches per block, by the number of cached tokens.

    python benchmarks/cache.py [--sizes 1000,10000] [--warm] [--json FILE]

Fills each cache with sequences of random tokens after a few common prefixes, up to the given number
of cached tokens, then measures with probes of the same kind. Times are microseconds per block, the
median over the probes:

    match       look up a prompt that is cached
    match miss  look up a prompt with only the common prefix cached, per block of the prefix
    allocate    start a sequence whose prompt is cached, and release it again
    insert      commit a sequence's newly computed blocks
    evict       reuse a cached block

The ratio is to the smallest size of the same cache. The processor's caches are emptied before each
probe, since they could hold a small cache and not a large one (not with `--warm`). The peer is a
look-up and a deletion in a plain dict of as many entries.
"""

from __future__ import annotations

import gc
import random
import statistics
from array import array
from collections.abc import Callable

from harness import options, print_table, record, timed

from nano_inference.stages.batching import Allocation, KVCacheManager
from nano_inference.stages.batching.paged import PagedKVCache
from nano_inference.stages.batching.radix import RadixKVCache

BLOCK_SIZE = 16
PREFIX_BLOCKS = 4
SEQUENCE_BLOCKS = 16
NUM_PREFIXES = 4
PROBES = 200
CPU_CACHE_BYTES = 64 << 20
"""More than the size of the processor's caches."""

Times = dict[str, float]


class Cooler:
    """Empties the processor's caches by a large copy."""

    def __init__(self, warm: bool) -> None:
        self.memory = bytearray(0 if warm else CPU_CACHE_BYTES)
        self.copy = bytearray(len(self.memory))

    def __call__(self) -> None:
        self.copy[:] = self.memory


def sequence(rng: random.Random, prefixes: list[list[int]], index: int) -> list[int]:
    """Return a prompt of `SEQUENCE_BLOCKS` blocks: a common prefix, then random tokens."""
    own = (SEQUENCE_BLOCKS - PREFIX_BLOCKS) * BLOCK_SIZE
    return [*prefixes[index % len(prefixes)], *(rng.randrange(150_000) for _ in range(own))]


def start(cache: KVCacheManager, allocation: Allocation) -> None:
    cache.start(allocation, cache.match(allocation).num_needed)


def measure(make_cache: type[KVCacheManager], num_tokens: int, cool: Cooler) -> Times:
    """Return microseconds per block of each operation in a cache of `num_tokens`."""
    rng = random.Random(5)
    prefixes = [
        [rng.randrange(150_000) for _ in range(PREFIX_BLOCKS * BLOCK_SIZE)]
        for _ in range(NUM_PREFIXES)
    ]
    num_blocks = num_tokens // BLOCK_SIZE
    cache = make_cache(num_blocks + SEQUENCE_BLOCKS, BLOCK_SIZE)
    filled: list[list[int]] = []
    while cache.num_free_blocks() and len(filled) * SEQUENCE_BLOCKS < 2 * num_blocks:
        filled.append(sequence(rng, prefixes, len(filled)))
        allocation = Allocation(filled[-1])
        start(cache, allocation)
        cache.commit(allocation, len(allocation.token_ids))
        cache.release(allocation)
    samples: dict[str, list[float]] = {}
    for index in range(PROBES):
        # One of the last, since the first are evicted by now.
        known = filled[-1 - rng.randrange(max(len(filled) // 3, 1))]
        new = sequence(rng, prefixes, index)
        cool()
        probe(cache, known, new, samples)
    return {name: statistics.median(times) for name, times in samples.items()}


def probe(
    cache: KVCacheManager, known: list[int], new: list[int], samples: dict[str, list[float]]
) -> None:
    """Measure each operation once, with new leases."""

    def sample(name: str, run: Callable[[], object], num_blocks: int) -> None:
        samples.setdefault(name, []).append(1e6 * timed(run) / num_blocks)

    # Equal numbers in new objects, as in a new request.
    known = list(array("q", known))
    found = Allocation([*known, 1])
    sample("match", lambda: cache.match(found), SEQUENCE_BLOCKS)
    again = Allocation([*known, 1])

    def start_and_release() -> None:
        start(cache, again)
        cache.release(again)

    sample("allocate", start_and_release, SEQUENCE_BLOCKS + 1)
    missed = Allocation(new)
    sample("match miss", lambda: cache.match(missed), PREFIX_BLOCKS)
    num_fresh = cache.match(missed).num_needed
    sample("evict", lambda: cache.start(missed, num_fresh), SEQUENCE_BLOCKS - PREFIX_BLOCKS)
    sample("insert", lambda: cache.commit(missed, len(new)), SEQUENCE_BLOCKS - PREFIX_BLOCKS)
    cache.release(missed)


def measure_dict(num_tokens: int, cool: Cooler) -> Times:
    """Return microseconds per entry of a dict with as many entries as the cache has blocks."""
    rng = random.Random(5)
    keys = [rng.getrandbits(128) for _ in range(num_tokens // BLOCK_SIZE)]
    table = dict.fromkeys(keys, 0)
    look_up, delete = [], []
    for _ in range(PROBES):
        some = rng.sample(keys, SEQUENCE_BLOCKS)
        cool()
        each_us = 1e6 / SEQUENCE_BLOCKS
        look_up.append(each_us * timed(lambda some=some: [table[key] for key in some]))
        delete.append(each_us * timed(lambda some=some: [table.pop(key) for key in some]))
        table.update(dict.fromkeys(some, 0))
    return {"look-up": statistics.median(look_up), "delete": statistics.median(delete)}


def main() -> None:
    arguments = options(
        __doc__,
        sizes=([1000, 10_000, 100_000, 1_000_000], "cached tokens"),
        warm=(False, "leave the processor's caches alone"),
    ).parse_args()
    cool, sizes = Cooler(arguments.warm), arguments.sizes
    peers: dict[str, Callable[[int], Times]] = {
        "paged": lambda size: measure(PagedKVCache, size, cool),
        "radix": lambda size: measure(RadixKVCache, size, cool),
        "dict": lambda size: measure_dict(size, cool),
    }
    results: dict[str, dict[int, Times]] = {}
    for name, run in peers.items():
        results[name] = {}
        for size in sizes:
            gc.collect()
            results[name][size] = run(size)
    columns = {f"{size:,} tokens": f"{{at_{size}:.3f}} {{x_{size}:.2f}}x" for size in sizes}
    rows: dict[str, Times] = {}
    for name, by_size in results.items():
        for operation, base in by_size[sizes[0]].items():
            row = rows[f"{name}, {operation}"] = {}
            for size in sizes:
                value = by_size[size][operation]
                row |= {f"at_{size}": value, f"x_{size}": value / base}
    print_table(columns, rows, "us/block")
    record(arguments, us_per_block=results)


if __name__ == "__main__":
    main()
