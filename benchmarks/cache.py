"""What the prefix caches cost per block, and that it does not grow with what they hold.

    python benchmarks/cache.py [--sizes 1000,10000] [--warm] [--json FILE]

Fills each cache with sequences of random tokens behind a few common prefixes, up to the given
number of cached tokens, then measures with probes of the same kind. Times are microseconds per
block, the median over the probes:

    match       look up a prompt that is cached
    match miss  look up a prompt of which only the common prefix is cached, per block of that
    allocate    start a sequence whose prompt is cached, and release it again
    insert      commit a sequence's freshly computed blocks
    evict       take a block that is cached for something else

The ratio is to the smallest size of the same cache. Before each probe the processor's caches are
emptied, since otherwise they would hold a small cache and not a large one; `--warm` leaves that
out. The peer is a look-up and a deletion in a plain dict of as many entries.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path

from nano_inference.stages.batching import KVCacheManager, Lease, PagedKVCache, RadixKVCache

BLOCK_SIZE = 16
PREFIX_BLOCKS = 4
SEQUENCE_BLOCKS = 16
NUM_PREFIXES = 4
PROBES = 200
CPU_CACHE_BYTES = 64 << 20
"""More than the processor's caches hold."""

Times = dict[str, float]


class Cooler:
    """Empties the processor's caches by copying something large."""

    def __init__(self, warm: bool) -> None:
        self.memory = bytearray(0 if warm else CPU_CACHE_BYTES)
        self.copy = bytearray(len(self.memory))

    def __call__(self) -> None:
        self.copy[:] = self.memory


def sequence(rng: random.Random, prefixes: list[list[int]], index: int) -> list[int]:
    """A prompt of `SEQUENCE_BLOCKS` blocks: a common prefix, then tokens of its own."""
    own = (SEQUENCE_BLOCKS - PREFIX_BLOCKS) * BLOCK_SIZE
    return [*prefixes[index % len(prefixes)], *(rng.randrange(150_000) for _ in range(own))]


def timed(run: Callable[[], object]) -> float:
    """Microseconds."""
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6


def start(cache: KVCacheManager, lease: Lease) -> None:
    cache.start(lease, cache.match(lease).num_needed)


def measure(make_cache: type[KVCacheManager], num_tokens: int, cool: Cooler) -> Times:
    """Microseconds per block of each operation in a cache that holds `num_tokens`."""
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
        lease = Lease(filled[-1])
        start(cache, lease)
        cache.commit(lease, len(lease.token_ids))
        cache.release(lease)
    samples: dict[str, list[float]] = {}
    for index in range(PROBES):
        # Of those that went in last, since the first have been evicted by now.
        known = filled[-1 - rng.randrange(max(len(filled) // 3, 1))]
        new = sequence(rng, prefixes, index)
        cool()
        probe(cache, known, new, samples)
    return {name: statistics.median(times) for name, times in samples.items()}


def probe(
    cache: KVCacheManager, known: list[int], new: list[int], samples: dict[str, list[float]]
) -> None:
    """Measures each operation once, with leases that remember nothing."""

    def sample(name: str, run: Callable[[], object], num_blocks: int) -> None:
        samples.setdefault(name, []).append(timed(run) / num_blocks)

    # Equal numbers, but not the same objects, as in a new request.
    known = list(array("q", known))
    found = Lease([*known, 1])
    sample("match", lambda: cache.match(found), SEQUENCE_BLOCKS)
    again = Lease([*known, 1])

    def start_and_release() -> None:
        start(cache, again)
        cache.release(again)

    sample("allocate", start_and_release, SEQUENCE_BLOCKS + 1)
    missed = Lease(new)
    sample("match miss", lambda: cache.match(missed), PREFIX_BLOCKS)
    num_fresh = cache.match(missed).num_needed
    sample("evict", lambda: cache.start(missed, num_fresh), SEQUENCE_BLOCKS - PREFIX_BLOCKS)
    sample("insert", lambda: cache.commit(missed, len(new)), SEQUENCE_BLOCKS - PREFIX_BLOCKS)
    cache.release(missed)


def measure_dict(num_tokens: int, cool: Cooler) -> Times:
    """The peer: a dict with as many entries as the cache has blocks, in microseconds each."""
    rng = random.Random(5)
    keys = [rng.getrandbits(128) for _ in range(num_tokens // BLOCK_SIZE)]
    table = dict.fromkeys(keys, 0)
    look_up, delete = [], []
    for _ in range(PROBES):
        some = rng.sample(keys, SEQUENCE_BLOCKS)
        cool()
        look_up.append(timed(lambda some=some: [table[key] for key in some]) / SEQUENCE_BLOCKS)
        delete.append(timed(lambda some=some: [table.pop(key) for key in some]) / SEQUENCE_BLOCKS)
        table.update(dict.fromkeys(some, 0))
    return {"look-up": statistics.median(look_up), "delete": statistics.median(delete)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sizes", default="1000,10000,100000,1000000", help="cached tokens")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the numbers")
    parser.add_argument("--warm", action="store_true", help="leave the processor's caches alone")
    arguments = parser.parse_args()
    cool = Cooler(arguments.warm)
    sizes = [int(size) for size in arguments.sizes.split(",")]
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
    print(f"{'us/block':20}" + "".join(f"{size:>18,} tokens" for size in sizes))
    for name, by_size in results.items():
        for operation, base in by_size[sizes[0]].items():
            cells = (by_size[size][operation] for size in sizes)
            row = "".join(f"{value:15.3f}{value / base:9.2f}x" for value in cells)
            print(f"{name + ', ' + operation:20}{row}")
    if arguments.json:
        content = {"python": sys.version.split()[0], "us_per_block": results}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
