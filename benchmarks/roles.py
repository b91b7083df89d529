"""Roles: how fast KV passes between replicas, and what long prompts do to running streams.

    python benchmarks/roles.py [--parts bandwidth,handover,interference,devices] [--json FILE]

`bandwidth` reads blocks of another process through shared memory and over TCP, beside copies from
private memory in large pages and in pages of 4 KiB, and the same bytes over a plain connection of
the loopback interface. Shared memory has pages of 4 KiB, unless the system gives it large ones
(/sys/kernel/mm/transparent_hugepage/shmem_enabled). `handover` is the time
from the first token of a sequence to its second one, on an idle lane of two replicas, beside a
decode step and the transfer itself. `interference` measures the time between two tokens of
running streams while prompts of 2,048 tokens arrive, on a lane whose two replicas do both, and on
one with roles. `devices` does the same in virtual time, for devices of which one step takes a fixed
time and a time per token.
"""

from __future__ import annotations

import mmap
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection

import msgspec
import numpy as np
from harness import options, print_table, record, refuse_unknown

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
REPEATS = 7
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


def _rate(work: Callable[[], None], num_bytes: int) -> float:
    """Return GB/s, the median of the repetitions behind a first one."""
    seconds = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return num_bytes / statistics.median(seconds[1:]) / 1e9


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
                num_bytes = into.nbytes
                row = {
                    "copy_large": _rate(lambda: copy(huge), num_bytes),  # noqa: B023
                    "copy": _rate(lambda: copy(small), num_bytes),  # noqa: B023
                    "memory": _rate(lambda: read(memory), num_bytes),
                    "loopback": _rate(receive, num_bytes),
                    "tcp": _rate(lambda: read(tcp), num_bytes),
                }
        row["memory_share"] = row["memory"] / row["copy"]
        row["tcp_share"] = row["tcp"] / row["loopback"]
        rows[f"{size >> 10} KiB"] = row
    return rows


def main() -> None:
    parser = options(__doc__, parts=[*PARTS])
    arguments = parser.parse_args()
    refuse_unknown(parser, arguments.parts, PARTS)
    found = {}
    if "bandwidth" in arguments.parts:
        found["bandwidth"] = bandwidth()
        columns = {
            "copy, large": "{copy_large:.2f}",
            "copy, 4 KiB": "{copy:.2f}",
            "shared memory": "{memory:.2f}",
            "share": "{memory_share:.2f}",
            "loopback": "{loopback:.2f}",
            "TCP": "{tcp:.2f}",
            "share ": "{tcp_share:.2f}",
        }
        print_table(columns, found["bandwidth"], "GB/s")
    record(arguments, **found)


if __name__ == "__main__":
    main()
