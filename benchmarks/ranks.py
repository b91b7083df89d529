"""Time per all-reduce between ranks, in shared memory and over gloo's sockets; and per step; and
the memory of ranks.

    python benchmarks/ranks.py [--parts all-reduce,steps,memory] [--ranks 2,4] [--rows 1,16,512]
        [--width 896] [--turns 9] [--operations 100] [--shape S] [--dtype bfloat16] [--tokens 16]
        [--json FILE]

`steps` measures a decode step and a prompt of 512 tokens on a model with random weights, on one
process with one and with two threads, and on two ranks with one thread each, with and without the
same bits for any number of ranks; all engines are loaded at once and take turns. `all-reduce`: each
rank is a process with one thread. The ways take turns, in rotating order, on the same group of
processes: ours in shared memory, and gloo's all-reduce, whose order of additions depends on the
number of ranks. Time is that of rank 0 over a run of operations, the same run on each rank.
`memory` loads a model of 6.0 GB in bfloat16 on 1, 2, 4 and 2 x 2 ranks, one after the other.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch
from harness import (
    median_ratio,
    model_folder,
    options,
    print_table,
    record,
    refuse_unknown,
    rotated,
)
from random_models import write_zeros_model
from workloads import qwen2

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.stages.executor.facts import report_ranks
from nano_inference.stages.executor.runner.ranks.commands import Reply
from nano_inference.stages.executor.runner.ranks.group import RankGroup
from nano_inference.stages.executor.runner.ranks.shared_memory import SharedMemoryGroup

FORK = multiprocessing.get_context("fork")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WARM_UP = 5
SPAWN = multiprocessing.get_context("spawn")
PARTS = ("all-reduce", "steps", "memory")
SIX_GB = qwen2(2048, 10_448, 36, (16, 4), 151_936)
LAYOUTS = {"1 process": (1, 1), "2 ranks": (2, 1), "4 ranks": (4, 1), "2 stages of 2": (2, 2)}
"""Layouts for the part `memory`: tensor_parallel and pipeline_parallel."""

Times = dict[str, dict[str, list[float]]]


def ways_of(shared: SharedMemoryGroup, folder: Path) -> Mapping[str, Callable[[torch.Tensor], Any]]:
    """Return the ways to add tensors over ranks."""

    store = torch.distributed.FileStore(str(folder / "gloo"), shared.size)
    options: Any = torch.distributed.ProcessGroupGloo._Options()
    options._devices = [torch.distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    gloo = torch.distributed.ProcessGroupGloo(store, shared.rank, shared.size, options)
    return {
        "ours": shared.all_reduce,
        "gloo": lambda tensor: gloo.allreduce([tensor]).wait(),
    }


def take_turns(
    shared: SharedMemoryGroup,
    folder: Path,
    shapes: Sequence[Sequence[int]],
    turns: int,
    number: int,
) -> Times:
    """Return microseconds per operation by shape and way, of each turn."""
    torch.set_num_threads(1)
    ways = ways_of(shared, folder)
    found: Times = {}
    for turn in range(turns):
        for words, dtype in DTYPES.items():
            for shape in shapes:
                row = found.setdefault(f"[{', '.join(map(str, shape))}] {words}", {})
                for way in rotated(ways, turn):
                    tensor = torch.zeros(*shape, dtype=dtype)  # gloo adds in place
                    for _ in range(WARM_UP):
                        ways[way](tensor)
                    started = time.perf_counter()
                    for _ in range(number):
                        ways[way](tensor)
                    took_s = time.perf_counter() - started
                    row.setdefault(way, []).append(took_s / number * 1e6)
    return found


def follow(descriptor: int, rank: int, *arguments: Any) -> None:
    take_turns(SharedMemoryGroup.attach(descriptor, rank), *arguments)


def lead(connection: Connection, size: int, *arguments: Any) -> None:
    """Run rank 0, and the others as children."""
    shared = SharedMemoryGroup.create(size)
    for rank in range(1, size):
        run = (shared.descriptor, rank, *arguments)
        FORK.Process(target=follow, args=run, daemon=True).start()
    connection.send(take_turns(shared, *arguments))


def measure(size: int, shapes: Sequence[Sequence[int]], turns: int, number: int) -> Times:
    """Return the times of a group of so many ranks.

    Raises:
        EOFError: A rank has failed.
    """
    ours, theirs = FORK.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        run = (theirs, size, Path(folder), shapes, turns, number)
        process = FORK.Process(target=lead, args=run)
        process.start()
        theirs.close()
        try:
            return ours.recv()
        finally:
            process.join()


# --- steps ----------------------------------------------------------------------------------------

Seconds = dict[str, dict[str, list[float]]]


def engines_of(arguments: Any, folder: Path) -> dict[str, tuple[int, EngineConfig]]:
    """Return threads and settings of each engine, by name."""
    config = EngineConfig(
        model_path=str(model_folder(folder, arguments.shape)),
        dtype=arguments.dtype,
        max_model_len=1024,
    )
    exact = msgspec.structs.replace(config, deterministic=True, rank_invariant=True)
    return {
        "1 process, 1 thread": (1, config),
        "1 process, 2 threads": (2, config),
        "1 process, 2 threads, same bits": (2, exact),
        "2 ranks": (1, msgspec.structs.replace(config, tensor_parallel=2)),
        "2 ranks, same bits": (1, msgspec.structs.replace(exact, tensor_parallel=2)),
        # One plan at a time, so that one stage waits for the other.
        "2 stages": (1, msgspec.structs.replace(config, pipeline_parallel=2)),
        "2 stages of 2 ranks, same bits": (
            1,
            msgspec.structs.replace(exact, pipeline_parallel=2, tensor_parallel=2),
        ),
    }


def steps(arguments: Any) -> Seconds:
    """Return seconds per step of each engine and kind of step, of each turn; and per all-reduce."""
    found: Seconds = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines = {}
        for name, (threads, config) in engines_of(arguments, folder).items():
            torch.set_num_threads(threads)
            engines[name] = threads, stack.enter_context(InferenceEngine(config))
        for turn in range(-1, arguments.turns):  # the first is a warm-up
            for name in rotated(engines, turn):
                threads, engine = engines[name]
                torch.set_num_threads(threads)
                row = found.setdefault(name, {}) if turn >= 0 else {}
                for kind, seconds in _time(engine, arguments.tokens, turn).items():
                    row.setdefault(kind, []).append(seconds)
    return found


def _time(engine: InferenceEngine, tokens: int, turn: int) -> dict[str, float]:
    sizes = {"decode, 1 sequence": (1, 8, tokens), "decode, 16 sequences": (16, 8, tokens)}
    sizes["prompt of 512 tokens"] = (1, 512, 1)
    found = {}
    ranks = engine._executor.ranks
    for number, (kind, (rows, length, most)) in enumerate(sizes.items()):
        # New prompts, since those before are cached.
        prompts = [
            [7 + (turn * 31 + row * 13 + number + place) % 900 for place in range(length)]
            for row in range(rows)
        ]
        sampling = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
        reduced = _Reduced(ranks.groups.stage) if ranks is not None else None
        started = time.perf_counter()
        engine.generate(prompts, sampling)
        found[kind] = (time.perf_counter() - started) / most
        if reduced is not None:
            found[f"{kind}, exchanged"] = reduced.stop() / most
    return found


class _Reduced:
    """Counts the seconds within exchanges of a group, which include waiting for other ranks."""

    def __init__(self, group: RankGroup) -> None:
        self._group, self._seconds = group, 0.0
        for name in ("all_reduce", "all_gather"):
            setattr(group, name, self._timed(getattr(group, name)))

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def timed(tensor: torch.Tensor) -> Any:
            started = time.perf_counter()
            try:
                return original(tensor)
            finally:
                self._seconds += time.perf_counter() - started

        return timed

    def stop(self) -> float:
        for name in ("all_reduce", "all_gather"):
            delattr(self._group, name)
        return self._seconds


def print_steps(found: Seconds) -> None:
    kinds = [kind for row in found.values() for kind in row]
    columns = {
        f"{kind}, ms": f"{{k{index}:.1f}}" for index, kind in enumerate(dict.fromkeys(kinds))
    }
    rows = {
        name: {
            f"k{index}": statistics.median(row.get(kind, [0.0])) * 1e3
            for index, kind in enumerate(dict.fromkeys(kinds))
        }
        for name, row in found.items()
    }
    print_table(columns, rows, "engine")


# --- memory ---------------------------------------------------------------------------------------

Memory = dict[str, float]


def memory() -> dict[str, list[Memory]]:
    """Return GB of each rank, by layout."""
    found: dict[str, list[Memory]] = {}
    with tempfile.TemporaryDirectory() as folder:
        print(f"{write_zeros_model(Path(folder), SIX_GB) / 1e9:.3f} GB of weights")
        for name, layout in LAYOUTS.items():
            ours, theirs = SPAWN.Pipe()
            process = SPAWN.Process(target=load, args=(theirs, folder, *layout))
            process.start()
            theirs.close()
            try:
                found[name] = ours.recv()
            finally:
                process.join()
            columns = {f"{kind}, GB": f"{{{kind}:.2f}}" for kind in found[name][0]}
            rows = {f"rank {rank}": each for rank, each in enumerate(found[name])}
            print_table(columns, rows, name)
    return found


def load(connection: Connection, folder: str, tensor_parallel: int, pipeline_parallel: int) -> None:
    """Load a model, and send the memory of its ranks."""
    config = EngineConfig(
        model_path=folder,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        max_model_len=512,
        kv_cache_bytes=40 << 20,
        deterministic=False,  # else minutes of checks at load, which give their memory back
        cpu_threads=1,
        speculation="off",
    )
    with InferenceEngine(config) as engine:
        core = engine._executor
        reports = report_ranks(core) or [core.runner.report()]
        pids = [os.getpid(), *(core.ranks.pids if core.ranks is not None else ())]
        connection.send([memory_of(*each) for each in zip(pids, reports, strict=True)])


def memory_of(pid: int, report: Reply) -> Memory:
    """Return GB of a rank: RSS counts pages that processes share in each of them, PSS each one's
    part."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {words[0]: int(words[1]) * 1024e-9 for words in map(str.split, lines)}
    found = {"weights": report.weights * 1e-9, "KV": report.kv * 1e-9}
    found |= {"PSS": sizes["Pss:"], "RSS": sizes["Rss:"]}
    return found | {"peak RSS": report.resident * 1e-9}


def main() -> None:
    parser = options(
        __doc__,
        parts=[*PARTS],
        ranks=[2, 4],
        rows=[1, 16, 512],
        width=(896, "of a row; of Qwen2.5-0.5B"),
        turns=9,
        operations=(100, "per turn"),
        shape=("S", "of the model, see workloads.py"),
        dtype=("bfloat16", "of the model"),
        tokens=(16, "per sequence and turn"),
    )
    arguments = parser.parse_args()
    refuse_unknown(parser, arguments.parts, PARTS)
    figures: dict[str, Any] = {}
    if "steps" in arguments.parts:
        figures["step_s"] = steps(arguments)
        print_steps(figures["step_s"])
    if "all-reduce" in arguments.parts:
        figures["all_reduce_us"] = all_reduce(arguments)
    if "memory" in arguments.parts:
        figures["memory_gb"] = memory()
    record(arguments, **figures)


def all_reduce(arguments: Any) -> dict[str, Times]:
    """Measure all-reduces, and print a table."""
    shapes = [(rows, arguments.width) for rows in arguments.rows]
    found = {
        str(size): measure(size, shapes, arguments.turns, arguments.operations)
        for size in arguments.ranks
    }
    for size, rows in found.items():
        table = {}
        for shape, times in rows.items():
            table[shape] = {way: statistics.median(each) for way, each in times.items()}
            table[shape]["x_gloo"] = median_ratio(times["gloo"], times["ours"])
        columns = {
            "ours, us": "{ours:.0f}",
            "gloo, us": "{gloo:.0f}",
            "x ours": "{x_gloo:.1f}",
        }
        print_table(columns, table, f"{size} ranks")
    return found


if __name__ == "__main__":
    main()
