"""Roles: how fast KV passes between replicas, and what long prompts do to running streams.

    python benchmarks/roles.py [--parts bandwidth,handover,interference,devices] [--shape M]
        [--repeat 9] [--every 5] [--arrivals 8] [--json FILE]

`bandwidth` reads blocks of another process through shared memory and over TCP, beside copies from
private memory in large pages and in pages of 4 KiB, and the same bytes over a plain connection of
the loopback interface. Shared memory has pages of 4 KiB, unless the system gives it large ones
(/sys/kernel/mm/transparent_hugepage/shmem_enabled). `handover` is the time
from the first token of a sequence to its second one, on an idle lane of two replicas, beside a
decode step and the transfer itself. `interference` measures the time between two tokens of
running streams while prompts of 2,048 tokens arrive, on a lane whose two replicas do both, and on
one with roles, in turn: each replica computes with one thread. `devices` does the same in virtual
time, by the cores of fairness and batching, for devices of which one step takes a fixed time and a
time per token. Its figures are assumptions.

Both parts with processes run `nano-inference up` over Redis in float32, on a model with random
weights in the given shape.
"""

from __future__ import annotations

import asyncio
import mmap
import multiprocessing
import os
import socket
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import roles_lane
import roles_model
from harness import (
    model_folder,
    options,
    paired,
    print_table,
    progress,
    record,
    refuse_unknown,
    rotated,
)
from workloads import SHAPES

from nano_inference.stages.executor.runner.tiers.transports.slots import (
    AttachedSlots,
    BlockSource,
    Bytes,
    SharedSlots,
    SlotAddress,
    WantedBlock,
)
from nano_inference.stages.executor.runner.tiers.transports.tcp import BlockServer, TcpSlots

PARTS = ("bandwidth", "handover", "interference", "devices")
REPEATS = 15
NUM_BLOCKS = 128
SIZES = (64 << 10, 192 << 10, 1 << 20)
SECRET = "benchmark"

# --- bandwidth ------------------------------------------------------------------------------------


def _names() -> list[bytes]:
    return [number.to_bytes(16, "little") for number in range(NUM_BLOCKS)]


def _own(size: int, answer: Connection) -> None:
    """A process whose blocks are read, and that also sends them over a plain connection."""
    slots = SharedSlots(NUM_BLOCKS, size)
    slots.bytes[:] = np.random.default_rng(0).integers(0, 256, slots.bytes.shape, np.uint8)
    for slot, name in enumerate(_names()):
        slots.offer(slot, name)
    server = BlockServer(slots, "127.0.0.1:0", SECRET)
    with closing(server), socket.create_server(("127.0.0.1", 0)) as plain:
        address = msgspec.structs.replace(slots.address, tcp=server.address)
        answer.send((address.encode(), plain.getsockname()[1]))
        connection, _ = plain.accept()
        with connection:
            while connection.recv(1):
                for slot in range(NUM_BLOCKS):
                    connection.sendall(slots.bytes[slot].data)
    slots.close()


@contextmanager
def _other_process(size: int) -> Iterator[tuple[SlotAddress, socket.socket]]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_own, args=(size, theirs))
    process.start()
    try:
        text, port = ours.recv()
        with socket.create_connection(("127.0.0.1", port)) as plain:
            yield SlotAddress.decode(text), plain
    finally:
        process.join(10)
        process.kill()


def _rates(name: str, ours: Callable[[], None], plain: Callable[[], None]) -> dict[str, float]:
    """Return seconds of `ours`, and its share of the plain way's speed, medians of paired rounds
    with the quartiles of the share."""
    times = paired(ours, plain, REPEATS)
    low, share, high = statistics.quantiles(times["share"], n=4)
    seconds = statistics.median(times["seconds"])
    shares = {f"{name}_share": share, f"{name}_low": low, f"{name}_high": high}
    return {f"{name}_s": seconds, **shares}


def _memory(size: int, advice: int) -> Bytes:
    memory = mmap.mmap(-1, NUM_BLOCKS * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(advice)
    array = np.frombuffer(memory, np.uint8).reshape(NUM_BLOCKS, size)
    array[:] = 1
    return array


def bandwidth() -> dict[str, dict[str, float]]:
    rows = {}
    for size in SIZES:
        into: Bytes = np.ones((NUM_BLOCKS, size), np.uint8)
        huge, small = (
            _memory(size, advice) for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_NOHUGEPAGE)
        )
        wanted = [WantedBlock(slot, name, into[slot]) for slot, name in enumerate(_names())]

        def copy(source: Bytes) -> None:
            for slot in range(NUM_BLOCKS):
                np.copyto(into[slot], source[slot])  # noqa: B023

        def read(source: BlockSource) -> None:
            assert all(source.read(wanted))  # noqa: B023

        with _other_process(size) as (address, plain), closing(AttachedSlots(address)) as memory:

            def receive() -> None:
                plain.sendall(b"x")
                view = memoryview(into).cast("B")  # noqa: B023
                while view:
                    view = view[plain.recv_into(view) :]

            with closing(TcpSlots(address, SECRET)) as tcp:
                row = {
                    **_rates("large", lambda: copy(small), lambda: copy(huge)),  # noqa: B023
                    **_rates("memory", lambda: read(memory), lambda: copy(small)),  # noqa: B023
                    **_rates("tcp", lambda: read(tcp), receive),
                }
        row["copy"] = into.nbytes / row["large_s"] / 1e9
        row["copy_large"] = row["copy"] / row["large_share"]
        row["memory"] = into.nbytes / row["memory_s"] / 1e9
        row["tcp"] = into.nbytes / row["tcp_s"] / 1e9
        row["loopback"] = row["tcp"] / row["tcp_share"]
        rows[f"{size >> 10} KiB"] = row
    return rows


# --- lanes of processes ---------------------------------------------------------------------------

LENGTHS = [2048, 2040]
"""Lengths of the prompts that are handed over. Of the second one the last block is not full."""

STREAMS, LONG = 8, 2048
WAYS = {"unified": "", "roles": roles_lane.SPLIT}


def handover(model: Path, repeat: int) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(roles_lane.handovers(Path(folder), model, LENGTHS, repeat))
    columns = {
        "first token": "{first_ms:.0f}",
        "to the second": "{gap_ms:.1f}",
        "decode step": "{decode_ms:.1f}",
        "rest": "{over_ms:.1f}",
        "all transfers": "{transfer_ms:.1f}",
    }
    print_table(columns, rows, "ms")
    print_table({name: f"{{{name}:.1f}}" for name in roles_lane.STEPS}, rows, "ms")
    return rows


def interference(model: Path, turns: int, every_s: float, arrivals: int) -> dict[str, Any]:
    """Return the figures of all turns together, and the medians of each turn."""
    load = {"streams": STREAMS, "length": LONG, "every_s": every_s, "arrivals": arrivals}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    for turn in range(turns):
        progress(turn + 1, turns, "turn")
        for name in rotated(WAYS, turn):
            with tempfile.TemporaryDirectory() as folder:
                run = roles_lane.interference(Path(folder), model, WAYS[name], **load)
                found[name].append(asyncio.run(run))
    rows = {}
    for name, each in found.items():
        calm, beside, first = (
            [value for turn in each for value in turn[part]]
            for part in ("calm", "beside", "first_s")
        )
        rows[name] = {
            **{f"calm_{share}": value for share, value in roles_lane.shares(calm).items()},
            **roles_lane.shares(beside),
            "first_s": statistics.median(first),
            "tokens_per_s": statistics.median(turn["tokens_per_s"] for turn in each),
            "p99_by_turn": [roles_lane.shares(turn["beside"])["p99"] for turn in each],
        }
    columns = {
        "alone p50": "{calm_p50:.1f}",
        "alone p99": "{calm_p99:.1f}",
        "p50": "{p50:.1f}",
        "p99": "{p99:.1f}",
        "most": "{most:.0f}",
        "first token, s": "{first_s:.2f}",
        "tokens/s": "{tokens_per_s:.0f}",
    }
    print_table(columns, rows, f"between tokens of {STREAMS} streams, ms")
    return rows


# --- devices --------------------------------------------------------------------------------------


def devices() -> dict[str, dict[str, float]]:
    device = roles_model.Device()
    load: dict[str, Any] = {"streams": STREAMS, "length": LONG, "every_s": 0.25, "seconds": 60.0}
    rows = {
        "unified, 2,048 tokens a step": roles_model.interference(device, (), 2048, **load),
        "unified, 512 tokens a step": roles_model.interference(device, (), 512, **load),
        "roles": roles_model.interference(device, ("prefill", "decode"), 2048, **load),
    }
    columns = {
        "p50": "{itl_p50:.1f}",
        "p99": "{itl_p99:.1f}",
        "most": "{itl_most:.1f}",
        "first token p50": "{first_p50:.0f}",
        "p99 ": "{first_p99:.0f}",
        "tokens/s": "{tokens_per_s:.0f}",
    }
    print_table(columns, rows, f"between tokens of {STREAMS} streams, virtual ms")
    return rows


def main() -> None:
    parser = options(
        __doc__,
        parts=[*PARTS],
        shape=("M", SHAPES),
        folder=Path("build/benchmarks"),
        repeat=(9, "handovers of each length"),
        turns=(2, "of each way under interference"),
        every=(5.0, "seconds between two long prompts"),
        arrivals=(8, "long prompts in a turn"),
    )
    arguments = parser.parse_args()
    refuse_unknown(parser, arguments.parts, PARTS)
    found: dict[str, Any] = {"load_average": os.getloadavg()}
    if "bandwidth" in arguments.parts:
        found["bandwidth"] = bandwidth()
        columns = {
            "copy, large": "{copy_large:.2f}",
            "copy, 4 KiB": "{copy:.2f}",
            "shared memory": "{memory:.2f}",
            "share": "{memory_share:.2f}",
            "quartiles": "{memory_low:.2f} to {memory_high:.2f}",
            "loopback": "{loopback:.2f}",
            "TCP": "{tcp:.2f}",
            "share ": "{tcp_share:.2f}",
            "quartiles ": "{tcp_low:.2f} to {tcp_high:.2f}",
        }
        print_table(columns, found["bandwidth"], "GB/s")
    if {"handover", "interference"} & {*arguments.parts}:
        model = model_folder(arguments.folder, arguments.shape)
        if "handover" in arguments.parts:
            found["handover"] = handover(model, arguments.repeat)
        if "interference" in arguments.parts:
            load = (arguments.turns, arguments.every, arguments.arrivals)
            found["interference"] = interference(model, *load)
    if "devices" in arguments.parts:
        found["devices"] = devices()
    record(arguments, **found)


if __name__ == "__main__":
    main()
