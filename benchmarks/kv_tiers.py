"""KV tiers: hit rates of the eviction policies, bandwidth, and first tokens from disk.

    python benchmarks/kv_tiers.py [--parts policies,bandwidth,ttft] [--shape S] [--json FILE]
    python benchmarks/kv_tiers.py --parts conversations [--conversations 200] [--threads 2]
        [--python openvino=PATH] [--python llamacpp=PATH] [--folder DIR]

`policies` runs the caches and tiers on traces of prompts, without a model, and counts tokens that
need no computing. `bandwidth` moves blocks of the shape's size, beside a copy in memory and plain
reads and writes of a file of the same bytes (from the system's page cache, as after a restart).
`ttft` is the time to the first token of a prompt of 2,048 tokens that is computed, and of one whose
blocks are read from disk by a new engine. `conversations` are 200 of four turns in random order,
whose KV is many times the device cache: first tokens and total time without tiers, with host memory
and with disk, beside OpenVINO GenAI and llama-server (kv_conversations.py).
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kv_conversations
import numpy as np
from harness import options, print_table, record, refuse_unknown, timed
from random_models import write_model

from nano_inference import EngineConfig, InferenceEngine, PagedKVCache, SamplingParams
from nano_inference.bus.control import TierCapacity
from nano_inference.bus.messages import KVMove
from nano_inference.stages.batching import Lease
from nano_inference.stages.batching.eviction import POLICIES
from nano_inference.stages.batching.tiers import KVTiers

PARTS = ("policies", "bandwidth", "ttft", "conversations")
BLOCK = 16
PROMPT = 2048
REPEATS = 5

Trace = Iterator[list[int]]

# --- policies -------------------------------------------------------------------------------------


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(150_000) for _ in range(count)]


def conversations(rng: random.Random) -> Trace:
    """200 conversations of six turns, in random order: each prompt continues an earlier one."""
    system = tokens(rng, 20 * BLOCK)
    texts = [[*system, *tokens(rng, 12 * BLOCK)] for _ in range(200)]
    turns = [index for index in range(200) for _ in range(6)]
    rng.shuffle(turns)
    for index in turns:
        texts[index] += tokens(rng, 8 * BLOCK)
        yield list(texts[index])


def popular_documents(rng: random.Random) -> Trace:
    """Questions about 300 documents, the n-th asked 1/n as often as the first."""
    documents = [tokens(rng, 32 * BLOCK) for _ in range(300)]
    weights = [1 / rank for rank in range(1, 301)]
    for document in rng.choices(documents, weights, k=1500):
        yield [*document, *tokens(rng, 2 * BLOCK)]


def scans_between(rng: random.Random) -> Trace:
    """Popular documents, and in between long prompts that never come again."""
    for prompt in popular_documents(rng):
        yield prompt
        if rng.random() < 0.3:
            yield tokens(rng, 128 * BLOCK)


TRACES = {
    "conversations": conversations,
    "popular documents": popular_documents,
    "documents and scans": scans_between,
}


def hit_rate(trace: Trace, policy: str, device: int, host: int) -> float:
    """Return the share of prompt tokens that need no computing."""
    tiers = None
    if host:
        capacity = TierCapacity(host, 0, "", "", 0, "", load_ns=1, fetch_ns=1, token_ns=1)
        tiers = KVTiers(capacity, BLOCK, policy)
    cache = PagedKVCache(device, BLOCK, tiers)
    found = total = 0
    for prompt in trace:
        lease = Lease(prompt)
        found += cache.start(lease, cache.match(lease).num_needed).cached_length
        total += len(prompt)
        if tiers is not None:
            tiers.take_moves()
        cache.commit(lease, len(prompt))
        cache.release(lease)
    return found / total


def compare_policies() -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, float]] = {}
    for name, trace in TRACES.items():
        row = rows[name] = {"none": hit_rate(trace(random.Random(1)), "lru", 512, 0)}
        for policy, host in itertools.product(POLICIES, (1024, 4096)):
            row[f"{policy}_{host}"] = hit_rate(trace(random.Random(1)), policy, 512, host)
    columns = {"no tier": "{none:.3f}"}
    columns |= {
        f"{policy} {host}": f"{{{policy}_{host}:.3f}}"
        for host, policy in itertools.product((1024, 4096), POLICIES)
    }
    print_table(columns, rows, "tokens found, 512 blocks on the device")
    return rows


# --- bandwidth ------------------------------------------------------------------------------------


def engine(folder: Path, disk: Path, **settings: Any) -> InferenceEngine:
    config = {"kv_cache_bytes": 1 << 28, "max_model_len": 4096} | settings
    return InferenceEngine(EngineConfig(model_path=str(folder), kv_disk_path=str(disk), **config))


def measure_bandwidth(folder: Path, disk: Path) -> dict[str, dict[str, float]]:
    """Return GB/s of each way, medians, beside plain ways to move as many bytes."""
    with engine(folder, disk) as made:
        tiers = made._executor.tiers
        assert tiers is not None
        count = min(128, tiers.capacity.host_slots)
        size = tiers.slots.memory.shape[1] * count
        names = [index.to_bytes(16, "little") for index in range(count)]
        copied = np.ones(size, np.uint8)
        target = np.ones(size, np.uint8)
        plain = disk / "plain"

        def store(write: bool) -> None:
            tiers.apply([KVMove("store", name, i, i, write) for i, name in enumerate(names)])

        def load() -> None:
            tiers.apply([KVMove("load", name, i, i) for i, name in enumerate(names)])

        def write_and_wait() -> None:
            store(write=True)
            tiers.on_disk()

        def fetch() -> None:
            tiers.apply([KVMove("fetch", name, i) for i, name in enumerate(names)])
            done = 0
            while done < count:
                tiers.wait(1.0)
                changes = tiers.take_changes()
                done += len(changes.fetched) if changes is not None else 0

        ways = {
            "copy in memory": lambda: np.copyto(target, copied),
            "store": lambda: store(write=False),
            "load": load,
            "write a file": lambda: plain.write_bytes(copied.data),
            "write blocks": write_and_wait,
            "read a file": lambda: np.fromfile(plain, np.uint8),
            "read blocks": fetch,
        }
        rows = {}
        for name, way in ways.items():
            way()
            tiers.take_changes()
            seconds = statistics.median(timed(way) for _ in range(REPEATS))
            rows[name] = {"rate": size / seconds / 1e9}
            tiers.take_changes()
    print_table({"GB/s": "{rate:.2f}"}, rows, f"{size >> 20} MiB in {count} blocks")
    return rows


# --- first tokens ---------------------------------------------------------------------------------


def measure_ttft(folder: Path, disk: Path) -> dict[str, dict[str, float]]:
    """Return seconds to the first token, medians, and that the tokens are equal."""
    rng = random.Random(3)
    first = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    prompts = [tokens(rng, PROMPT) for _ in range(REPEATS)]
    others = [tokens(rng, PROMPT) for _ in range(2)]
    seconds: dict[str, list[float]] = {"computed": [], "from disk": []}
    found: dict[str, list[tuple[int, ...]]] = {"computed": [], "from disk": []}
    # Room for one prompt only, so that each evicts the one before.
    small = {"kv_cache_bytes": 40 << 20, "max_model_len": PROMPT + 16, "max_batch_size": 1}
    for name in seconds:
        with engine(folder, disk, **small) as made:
            made.generate(others[:1], first)
            for prompt in prompts:
                started = time.perf_counter()
                (sample,) = made.generate([prompt], first)
                seconds[name].append(time.perf_counter() - started)
                found[name].append(sample.completion_tokens)
            made.generate(others, first)
            tiers = made._executor.tiers
            assert tiers is not None
            tiers.on_disk()
    assert found["computed"] == found["from disk"], "the tokens differ"
    rows = {name: {"s": statistics.median(values)} for name, values in seconds.items()}
    for row in rows.values():
        row["times"] = rows["computed"]["s"] / row["s"]
    print_table({"s": "{s:.3f}", "times": "{times:.1f}"}, rows, f"first token, {PROMPT} tokens")
    return rows


def main() -> None:
    parser = options(
        __doc__,
        parts=(list(PARTS), "some of these"),
        shape="S",
        conversations=200,
        threads=os.cpu_count() or 1,
        folder=Path("build/benchmarks"),
    )
    parser.add_argument("--python", action="append", default=[], metavar="PEER=PATH")
    arguments = parser.parse_args()
    refuse_unknown(parser, arguments.parts, PARTS)
    results: dict[str, Any] = {}
    if "policies" in arguments.parts:
        results["policies"] = compare_policies()
    with tempfile.TemporaryDirectory() as temporary:
        folder, disk = Path(temporary, "model"), Path(temporary, "kv")
        if {"bandwidth", "ttft"} & {*arguments.parts}:
            write_model(folder, arguments.shape)
        if "bandwidth" in arguments.parts:
            results["bandwidth"] = measure_bandwidth(folder, disk)
        if "ttft" in arguments.parts:
            results["ttft"] = measure_ttft(folder, disk)
    if "conversations" in arguments.parts:
        pythons = dict(choice.split("=", 1) for choice in arguments.python)
        size = (arguments.conversations, arguments.threads, pythons)
        results["conversations"], results["missing"] = kv_conversations.compare(
            arguments.folder, *size
        )
    record(arguments, **results)


if __name__ == "__main__":
    main()
