"""KV tiers: hit rates of the eviction policies, bandwidth, and first tokens from disk.

    python benchmarks/kv_tiers.py [--parts policies,bandwidth,snapshots,ttft,audit] [--shape S]
        [--dtype auto] [--json FILE]
    python benchmarks/kv_tiers.py --parts conversations [--conversations 200] [--threads 2]
        [--python openvino=PATH] [--python llamacpp=PATH] [--folder DIR]

`bandwidth` takes turns of each way and of a plain one, and compares them within each turn: shares
and their quartiles say something on a busy machine, too, and shares by processor time still more.

`policies` runs the caches and tiers on traces of prompts, without a model, and counts tokens that
need no computing. `bandwidth` moves blocks of the shape's size, beside a copy in memory and plain
writes and reads of one file of the same bytes, into memory that was used before: from the system's
page cache, as after a restart, and from the disk, as after a reboot.
`snapshots` is the time to start from, store, load, write and read one snapshot of the recurrent
state of Qwen3.5-0.8B's shape, without its weights.
`ttft` is the time to the first token of a prompt of 2,048 tokens that is computed, and of one whose
blocks a new engine finds on disk, also in both ways.
`audit` is the self-audit's share of the time, and how often damaged blocks are loaded until one is
found. `conversations` are 200 of four turns in random order, whose KV is many times the device
cache: first tokens and total time without tiers, with host memory and with disk, beside OpenVINO
GenAI and llama-server (kv_conversations.py).
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import kv_conversations
import torch
from harness import options, paired, print_table, record, refuse_unknown
from random_models import write_model

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.bus.control import ReplicaCapacity, TierCapacity
from nano_inference.bus.parts.tiers import moves_of
from nano_inference.bus.steps import AUDIT_SEQ_ID, KVMove, StepPlan, StepResult
from nano_inference.stages.batching import Allocation, BatchingCore
from nano_inference.stages.batching.parts.tiers.eviction import POLICIES
from nano_inference.stages.batching.parts.tiers.part import Tiers
from nano_inference.stages.batching.parts.tiers.tiers import KVTiers, TierCounts
from nano_inference.stages.executor import KVCache, LoadedModel
from nano_inference.stages.executor.runner.loaded_model import Dtypes, LayerSpec
from nano_inference.stages.executor.runner.state.kinds import StateTensor
from nano_inference.stages.executor.runner.system_memory import zeros
from nano_inference.stages.executor.runner.tiers.tiers import BlockTiers

PARTS = ("policies", "bandwidth", "snapshots", "ttft", "audit", "conversations")
BLOCK = 16
PROMPT = 2048
BLOCKS = 256
REPEATS = 15
TTFT_REPEATS = 3
AUDIT_EVERY = 1000
AUDIT_TRIALS = 50
AUDITS = 5

Trace = Iterator[list[int]]
Kind = Literal["store", "load", "fetch", "drop"]

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
    below = TierCapacity(host, 0, "", "", 0, "", load_ns=1, fetch_ns=1, token_ns=1)
    parts = (below,) if host else ()
    config = EngineConfig(cache_type="paged", kv_eviction=policy)  # type: ignore[arg-type]
    core = BatchingCore(config, ReplicaCapacity(device, BLOCK, 1 << 20, 9, "none", parts=parts))
    cache, tiers = core.cache, core.part(Tiers)
    found = total = 0
    for prompt in trace:
        allocation = Allocation(prompt)
        found += cache.start(allocation, cache.match(allocation).num_needed).cached_length
        total += len(prompt)
        if tiers is not None:
            tiers.blocks.take_moves()
        cache.commit(allocation, len(prompt))
        cache.release(allocation)
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


def uncache(*paths: Path) -> None:
    """Let the next reads of files come from the disk."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_bandwidth(folder: Path, disk: Path) -> dict[str, dict[str, float]]:
    """Return GB/s of each way, and its share of the plain way to move as many bytes: medians and
    quartiles of rounds."""
    with engine(folder, disk) as made:
        assert made._tiers is not None
        tiers = made._tiers.blocks
        count = min(BLOCKS, tiers.capacity.host_slots)
        size = tiers.slots.memory.shape[1] * count
        names = [index.to_bytes(16, "little") for index in range(count)]
        copied, target = (zeros((size,), torch.uint8, torch.device("cpu")) for _ in range(2))
        target.fill_(1)
        data, memory = copied.fill_(1).numpy().data, target.numpy().data
        plain = disk / "plain"

        def moves(kind: Kind, *, write: bool = False) -> None:
            tiers.apply([KVMove(kind, name, i, i, write) for i, name in enumerate(names)])

        def write_blocks() -> None:
            moves("store", write=True)
            tiers.on_disk()

        def fetch() -> None:
            moves("fetch")
            done = 0
            while done < count:
                tiers.wait(1.0)
                changes = tiers.take_changes()
                done += len(changes.fetched) if changes is not None else 0

        def write_plain() -> None:
            with plain.open("wb", buffering=0) as file:
                file.write(data)

        def read_plain() -> None:
            with plain.open("rb", buffering=0) as file:
                file.readinto(memory)

        def forget_blocks() -> None:
            moves("drop")
            tiers.on_disk()
            tiers.take_changes()

        def forget_plain() -> None:
            plain.unlink(missing_ok=True)

        def to_disk() -> None:
            uncache(plain, *disk.rglob("blocks"))

        def between() -> None:
            tiers.take_changes()

        def rewrite() -> None:
            forget_blocks()
            forget_plain()

        # Name, the way, the plain way to move as many bytes, and what comes before either.
        ways: list[tuple[str, Callable[[], object], Callable[[], object], Callable[[], object]]] = [
            ("store", lambda: moves("store"), lambda: target.copy_(copied), between),
            ("load", lambda: moves("load"), lambda: target.copy_(copied), between),
            ("store and write blocks", write_blocks, write_plain, rewrite),
            ("read blocks", fetch, read_plain, between),
            ("read blocks from disk", fetch, read_plain, to_disk),
        ]
        rows = {}
        for name, way, plain_way, before in ways:
            if name == "read blocks":
                write_blocks()
                write_plain()
                tiers.take_changes()
            times = paired(way, plain_way, REPEATS, before)
            quartiles = statistics.quantiles(times["share"], n=4)
            rows[name] = {
                "rate": size / statistics.median(times["seconds"]) / 1e9,
                "share": quartiles[1],
                "low": quartiles[0],
                "high": quartiles[2],
                "cpu_share": statistics.median(times["cpu_share"]),
            }
    columns = {
        "GB/s": "{rate:.2f}",
        "of plain": "{share:.0%}",
        "quarter": "{low:.0%}",
        "three": "{high:.0%}",
        "by CPU time": "{cpu_share:.0%}",
    }
    title = f"{size >> 20} MiB in {count} blocks, load {os.getloadavg()[0]:.1f}"
    print_table(columns, rows, title)
    return rows


# --- snapshots ------------------------------------------------------------------------------------


class GatedDeltaState:
    """The state of a layer of Qwen3.5-0.8B: a window of three tokens, and a matrix of 16 heads."""

    def tensors(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        return StateTensor((3, 6144), dtype), StateTensor((16, 128, 128), torch.float32)


def measure_snapshots(disk: Path) -> dict[str, dict[str, float]]:
    """Return the milliseconds of each way of one snapshot: medians and quartiles."""
    config: Any = None
    model = LoadedModel(
        torch.nn.Linear(1, 1),
        config,
        torch.device("cpu"),
        Dtypes.of(torch.bfloat16),
        PROMPT,
        16,
        (LayerSpec(2, 256, 256, None),) * 6,
        other_states=(GatedDeltaState(),) * 18,
    )
    cache = KVCache(model, 256, BLOCK, num_slots=4, num_snapshots=8)
    for tensor in cache.in_slots:
        tensor.fill_(1)
    settings = EngineConfig(kv_host_bytes=1 << 28, kv_disk_path=str(disk))
    tiers = BlockTiers(settings, model, cache, 0, 0)
    name = bytes(16)

    def move(kind: Kind, *, write: bool = False) -> None:
        tiers.apply([KVMove(kind, name, 0, 1, write, state=True)])

    def fetch() -> None:
        tiers.apply([KVMove("fetch", name, 1, state=True)])
        while (changes := tiers.take_changes()) is None or changes.states is None:
            tiers.wait(1.0)

    def write() -> None:
        move("store", write=True)
        tiers.on_disk()

    ways: dict[str, Callable[[], object]] = {
        "start from: copy in the device's memory": lambda: cache.copy_slots([(0, 5)]),
        "store: to host memory": lambda: move("store"),
        "load: from host memory": lambda: move("load"),
        "store and write to disk": write,
        "read from the page cache": fetch,
    }
    rows: dict[str, dict[str, float]] = {}
    for title, way in ways.items():
        times = []
        for _ in range(REPEATS):
            tiers.take_changes()
            started = time.perf_counter()
            way()
            times.append(1000 * (time.perf_counter() - started))
        low, median, high = statistics.quantiles(times, n=4)
        rows[title] = {"ms": median, "low": low, "high": high}
    tiers.close()
    size = sum(tensor[0].nbytes for tensor in cache.in_slots)
    columns = {"ms": "{ms:.1f}", "quartiles": "{low:.1f} to {high:.1f}"}
    print_table(columns, rows, f"one snapshot of {size / 1e6:.1f} MB")
    return rows


# --- first tokens ---------------------------------------------------------------------------------


def measure_ttft(folder: Path, disk: Path, dtype: str) -> dict[str, dict[str, float]]:
    """Return seconds to the first token, medians, and that the tokens are equal."""
    rng = random.Random(3)
    first = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    prompts = [tokens(rng, PROMPT) for _ in range(TTFT_REPEATS)]
    seconds: dict[str, list[float]] = {}
    found: dict[str, list[tuple[int, ...]]] = {}
    for name in ("computed", "from the page cache", "from the disk"):
        seconds[name], found[name] = [], []
        settings: dict[str, Any] = {"dtype": dtype, "max_model_len": PROMPT + BLOCK}
        with engine(folder, disk, kv_cache_bytes=1 << 29, **settings) as made:
            made.generate([tokens(rng, BLOCK)], first)
            for prompt in prompts:
                if name == "from the disk":
                    uncache(*disk.rglob("blocks"))
                started = time.perf_counter()
                (sample,) = made.generate([prompt], first)
                seconds[name].append(time.perf_counter() - started)
                found[name].append(sample.completion_tokens)
            tiers = made._batching.part(Tiers).blocks
            assert tiers is not None
            assert name == "computed" or tiers.take_counts().loaded > PROMPT // BLOCK
    assert all(each == found["computed"] for each in found.values()), "the tokens differ"
    rows = {name: {"s": statistics.median(values)} for name, values in seconds.items()}
    for row in rows.values():
        row["times"] = rows["computed"]["s"] / row["s"]
    title = f"first token, {PROMPT} tokens, {dtype}"
    print_table({"s": "{s:.3f}", "times": "{times:.1f}"}, rows, title)
    return rows


# --- self-audit -----------------------------------------------------------------------------------


def damaged_loads(share: float) -> float:
    """Return the mean number of loads of damaged blocks until an audit meets one of them."""
    capacity = TierCapacity(16, 0, "", "", 0, "", load_ns=1, fetch_ns=0, token_ns=1)
    tiers, rng, name = KVTiers(capacity, BLOCK, "lru", AUDIT_EVERY), random.Random(1), bytes(16)
    tiers.store(name, 0)
    counts = []
    for _ in range(AUDIT_TRIALS):
        count, is_found = 0, False
        while not is_found:
            is_damaged = rng.random() < share
            count += is_damaged
            if tiers.load(name, 0):
                tiers.end_audit()
                is_found = is_damaged
        counts.append(count)
        tiers.take_moves()
    return statistics.mean(counts)


def measure_audit() -> dict[str, dict[str, float]]:
    """Return the audit's share of the time, of the bundled model in deterministic mode, and the
    loads until a difference is found, by simulation."""
    rng = random.Random(4)
    prompts = [[rng.randrange(40, 120) for _ in range(120)] for _ in range(16)]
    config = EngineConfig(
        model_path="tiny",
        deterministic=True,
        max_model_len=128,
        max_batch_size=4,
        kv_cache_bytes=1 << 20,
        kv_host_bytes=1 << 24,
        kv_audit_every=AUDIT_EVERY,
        cpu_threads=1,
    )
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    audit_s, counts = 0.0, TierCounts()
    with InferenceEngine(config) as made:
        execute = made._executor.execute

        def timed_execute(plan: StepPlan) -> StepResult:
            nonlocal audit_s
            started = time.perf_counter()
            result = execute(plan)
            if AUDIT_SEQ_ID in plan.seq_ids or "compare" in {
                each.kind for each in moves_of(plan.parts)
            }:
                audit_s += time.perf_counter() - started
            return result

        made._executor.execute = timed_execute  # type: ignore[method-assign]
        made.generate(prompts, params)
        started = time.perf_counter()
        while counts.audited < AUDITS:
            made.generate(prompts, params)
            tiers = made._batching.part(Tiers).blocks
            assert tiers is not None
            for name, number in asdict(tiers.take_counts()).items():
                setattr(counts, name, getattr(counts, name) + number)
        total_s = time.perf_counter() - started
    assert not counts.different
    rows = {
        "audits": {"value": counts.audited},
        "blocks loaded": {"value": counts.loaded},
        "share of the time, %": {"value": 100 * audit_s / total_s},
    }
    for share in (1, 0.1, 0.01):
        title = f"damaged blocks loaded until found, {share:.0%} damaged"
        rows[title] = {"value": damaged_loads(share)}
    print_table({"": "{value:,.2f}"}, rows, f"self-audit of one in {AUDIT_EVERY} loaded blocks")
    return rows


def main() -> None:
    parser = options(
        __doc__,
        parts=(list(PARTS), "some of these"),
        shape="S",
        dtype="auto",
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
        if "snapshots" in arguments.parts:
            results["snapshots"] = measure_snapshots(disk)
        if "ttft" in arguments.parts:
            results["ttft"] = measure_ttft(folder, disk, arguments.dtype)
    if "audit" in arguments.parts:
        results["audit"] = measure_audit()
    if "conversations" in arguments.parts:
        pythons = dict(choice.split("=", 1) for choice in arguments.python)
        size = (arguments.conversations, arguments.threads, pythons)
        results["conversations"], results["missing"] = kv_conversations.compare(
            arguments.folder, *size
        )
    del arguments.python  # paths of this machine
    record(arguments, **results)


if __name__ == "__main__":
    main()
