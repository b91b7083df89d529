"""Blocks read from another executor's host slots: one contract for all transports."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest

from nano_inference.config import ModelError
from nano_inference.stages.executor.runner.tiers.transports import slots as slots_module
from nano_inference.stages.executor.runner.tiers.transports import tcp
from nano_inference.stages.executor.runner.tiers.transports.peers import Peers
from nano_inference.stages.executor.runner.tiers.transports.slots import (
    AttachedSlots,
    BlockSource,
    SharedSlots,
    SlotAddress,
    WantedBlock,
)
from nano_inference.stages.executor.runner.tiers.transports.tcp import BlockServer, TcpSlots

from ....programs import Program

SIZE, SECRET = 70_000, "a secret"
NAMES = [bytes([number]) * 16 for number in range(1, 9)]


def filled(number: int = 8) -> SharedSlots:
    """Slots with random bytes, each offered under its name."""
    slots = SharedSlots(number, SIZE)
    slots.bytes[:] = np.random.default_rng(0).integers(0, 256, slots.bytes.shape, np.uint8)
    for slot in range(number):
        slots.offer(slot, NAMES[slot])
    return slots


@contextmanager
def over_tcp(slots: SharedSlots, secret: str = SECRET) -> Iterator[SlotAddress]:
    with closing(BlockServer(slots, "127.0.0.1:0", SECRET)) as server:
        yield msgspec.structs.replace(slots.address, host="", tcp=server.address)


@pytest.fixture
def slots() -> Iterator[SharedSlots]:
    with closing(filled()) as slots:
        yield slots


@pytest.fixture(params=["process", "memory", "tcp"])
def source(slots: SharedSlots, request: pytest.FixtureRequest) -> Iterator[BlockSource]:
    if request.param == "process":
        yield slots.reader()
    elif request.param == "memory":
        yield AttachedSlots(slots.address)
    else:
        with over_tcp(slots) as address, closing(TcpSlots(address, SECRET)) as source:
            yield source


def wanted(slot: int, name: bytes | None = None) -> WantedBlock:
    return WantedBlock(slot, NAMES[slot] if name is None else name, np.empty(SIZE, np.uint8))


# --- every transport ---------------------------------------------------------------------------


def test_offered_blocks_are_read_bit_for_bit(slots: SharedSlots, source: BlockSource) -> None:
    blocks = [wanted(slot) for slot in (3, 0, 7)]
    assert source.read(blocks) == [True] * 3
    for block in blocks:
        assert np.array_equal(block.into, slots.bytes[block.slot])
    assert source.read([]) == []


def test_a_block_that_is_not_offered_is_missed_alone(
    slots: SharedSlots, source: BlockSource
) -> None:
    slots.withdraw(1)
    slots.bytes[2, -1] ^= 1  # one bit, after the offer
    slots.withdraw(4)
    slots.bytes[4] = 0
    slots.offer(4, NAMES[0])  # the slot was given to another block
    blocks = [wanted(slot) for slot in (0, 1, 2, 3, 4)]
    blocks += [wanted(5, NAMES[6]), WantedBlock(8, NAMES[0], blocks[0].into.copy())]
    blocks += [WantedBlock(2**63, NAMES[0], blocks[0].into.copy()), wanted(6)]
    assert source.read(blocks) == [True, False, False, True, False, False, False, False, True]


def test_a_slot_may_be_offered_again(slots: SharedSlots, source: BlockSource) -> None:
    slots.withdraw(0)
    slots.bytes[0] = 7
    slots.offer(0, NAMES[5])
    block = wanted(0, NAMES[5])
    assert source.read([block]) == [True]
    assert set(block.into) == {7}


def test_the_last_step_is_read(slots: SharedSlots, source: BlockSource) -> None:
    assert source.step() == 0
    slots.set_step(1 << 40)
    assert source.step() == 1 << 40


def test_blocks_of_another_size_are_an_error(slots: SharedSlots, source: BlockSource) -> None:
    with pytest.raises(OSError, match="another size"):
        source.read([wanted(0)._replace(into=np.empty(SIZE // 2, np.uint8))])


def test_nothing_is_read_once_the_owner_has_closed(slots: SharedSlots, source: BlockSource) -> None:
    slots.close()
    assert source.read([wanted(0)]) == [False]


def test_a_block_that_is_overwritten_while_it_is_read_is_missed(
    slots: SharedSlots, source: BlockSource
) -> None:
    stop = threading.Event()

    def overwrite() -> None:
        value = 0
        while not stop.is_set():
            slots.withdraw(0)
            value = (value + 1) % 256
            slots.bytes[0] = value
            slots.offer(0, NAMES[0])

    thread = threading.Thread(target=overwrite)
    thread.start()
    try:
        for _ in range(300):
            block = wanted(0)
            if source.read([block])[0]:
                assert len(set(block.into)) == 1, "a block of two writes was taken for whole"
    finally:
        stop.set()
        thread.join()


# --- shared memory -----------------------------------------------------------------------------

OWNER = """
import sys, time
from nano_inference.stages.executor.runner.tiers.transports.slots import SharedSlots
slots = SharedSlots(2, 70_000)
slots.bytes[0] = 9
slots.offer(0, b"n" * 16)
print(slots.address.encode(), flush=True)
time.sleep(600)
"""


@contextmanager
def other_process(folder: Path) -> Iterator[tuple[Program, SlotAddress]]:
    (folder / "owner.py").write_text(OWNER)
    with Program(folder / "owner.py") as process:
        yield process, SlotAddress.decode(process.output.readline())


def test_memory_of_another_process_is_read_and_ends_with_it(tmp_path: Path) -> None:
    with other_process(tmp_path) as (process, address):
        peers = Peers()
        block = WantedBlock(0, b"n" * 16, np.empty(SIZE, np.uint8))
        whole, transfer = peers.read(address.encode(), [block])
        assert whole == [True]
        assert set(block.into) == {9}
        assert (transfer.transport, transfer.num_bytes) == ("memory", SIZE)
        process.send_signal(signal.SIGKILL)
        process.wait()
        # What is mapped stays whole; nothing new can be mapped.
        assert peers.read(address.encode(), [block])[0] == [True]
        peers.close()
        whole, transfer = peers.read(address.encode(), [block])
        assert whole == [False]
        assert transfer.error


def test_memory_of_another_incarnation_is_refused(slots: SharedSlots) -> None:
    other = msgspec.structs.replace(slots.address, incarnation="0" * 32)
    with pytest.raises(OSError, match="another executor"):
        AttachedSlots(other)


def test_a_file_that_could_shrink_is_refused(slots: SharedSlots) -> None:
    descriptor = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 1 << 16)
    try:
        with pytest.raises(OSError, match="not the memory of an executor"):
            AttachedSlots(msgspec.structs.replace(slots.address, descriptor=descriptor))
    finally:
        os.close(descriptor)


# --- TCP ---------------------------------------------------------------------------------------


def test_a_wrong_secret_reads_nothing(slots: SharedSlots) -> None:
    with over_tcp(slots) as address:
        with pytest.raises(ConnectionError, match="has ended"):
            TcpSlots(address, "a guess")
        with closing(TcpSlots(address, SECRET)) as source:
            assert source.read([wanted(0)]) == [True]


def test_a_server_without_the_secret_is_refused(slots: SharedSlots) -> None:
    """One that accepts any client, and sends its proof back."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(bytes(32))
                connection.sendall(connection.recv(64)[32:])

        thread = threading.Thread(target=pretend)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(OSError, match="kv_secret"):
            TcpSlots(msgspec.structs.replace(slots.address, tcp=address), SECRET)
        thread.join()


def test_the_listener_needs_a_secret_and_an_address(slots: SharedSlots) -> None:
    with pytest.raises(ModelError, match="kv_secret"):
        BlockServer(slots, "127.0.0.1:0", "")
    for listen in ("127.0.0.1", "localhost:port", "127.0.0.1:70000", ":7070"):
        with pytest.raises(ModelError, match="host:port"):
            BlockServer(slots, listen, SECRET)
    for listen in ("0.0.0.0:7070", "[::]:7070"):
        with pytest.raises(ModelError, match="other hosts can't connect"):
            BlockServer(slots, listen, SECRET)
    with pytest.raises(ModelError, match="can't be listened on"):
        BlockServer(slots, "192.0.2.1:0", SECRET)


@pytest.mark.parametrize("data", [b"", b"x", b"GET / HTTP/1.1\r\n\r\n", bytes(4096)])
def test_bytes_that_prove_nothing_end_their_connection_only(
    slots: SharedSlots, data: bytes
) -> None:
    with over_tcp(slots) as address, closing(TcpSlots(address, SECRET)) as source:
        with socket.create_connection(tcp.split_address(address.tcp)) as other:
            other.settimeout(30)
            received = other.recv(32, socket.MSG_WAITALL)
            other.sendall(data)
            # The server may have ended the connection before it has read all of it.
            with suppress(OSError):
                other.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                received += other.recv(4096)
            assert len(received) == 32  # the nonce, and nothing else
        assert source.read([wanted(0)]) == [True]


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="the system has another name")
def test_a_reader_whose_host_vanished_is_dropped_within_a_minute(slots: SharedSlots) -> None:
    with closing(BlockServer(slots, "127.0.0.1:0", SECRET)) as server:
        address = msgspec.structs.replace(slots.address, host="", tcp=server.address)
        with closing(TcpSlots(address, SECRET)) as source:
            assert source.read([wanted(0)]) == [True]
            (connection,) = server._server._connections
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
            idle, every, most = (
                connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names
            )
    assert idle + every * most <= 60


def test_a_request_for_too_many_blocks_is_refused(slots: SharedSlots) -> None:
    with over_tcp(slots) as address, closing(TcpSlots(address, SECRET)) as source:
        source._connection.sendall(struct.pack("<I", tcp.MOST_BLOCKS + 1))
        source._connection.settimeout(30)
        assert source._connection.recv(1) == b""


def test_more_blocks_than_one_request_takes_are_read(
    slots: SharedSlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "MOST_BLOCKS", 3)
    with over_tcp(slots) as address, closing(TcpSlots(address, SECRET)) as source:
        assert source.read([wanted(slot) for slot in range(8)]) == [True] * 8


@contextmanager
def behind(address: SlotAddress, most_bytes: int, *, then_cut: bool) -> Iterator[SlotAddress]:
    """A proxy that passes so many bytes to the reader, and then ends or hangs."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pump(reader: socket.socket, server: socket.socket) -> None:
            left = most_bytes
            while left and (data := server.recv(min(left, 65536))):
                reader.sendall(data)
                left -= len(data)
            if not then_cut:
                ended.wait(60)

        def serve() -> None:
            reader, _ = listener.accept()
            server = socket.create_connection(tcp.split_address(address.tcp))
            with reader, server:
                thread = threading.Thread(target=pump, args=(reader, server))
                thread.start()
                while not ended.is_set():
                    reader.settimeout(0.1)
                    try:
                        if not (data := reader.recv(65536)):
                            break
                        server.sendall(data)
                    except OSError:
                        if not thread.is_alive():
                            break
                ended.set()
                thread.join()

        thread = threading.Thread(target=serve)
        thread.start()
        proxy = f"127.0.0.1:{listener.getsockname()[1]}"
        try:
            yield msgspec.structs.replace(address, tcp=proxy)
        finally:
            ended.set()
            thread.join()


@pytest.mark.parametrize("then_cut", [True, False])
@pytest.mark.parametrize("most_bytes", [10, 64, 70, 80, 80 + SIZE // 2, 80 + SIZE + 5])
def test_a_connection_that_ends_or_hangs_is_an_error_in_time(
    slots: SharedSlots, monkeypatch: pytest.MonkeyPatch, most_bytes: int, then_cut: bool
) -> None:
    monkeypatch.setattr(tcp, "TIMEOUT_S", 0.1)
    with over_tcp(slots) as address, behind(address, most_bytes, then_cut=then_cut) as bad:
        peers = Peers(SECRET)
        monkeypatch.setattr(slots_module, "_HERE", {})
        whole, transfer = peers.read(bad.encode(), [wanted(0), wanted(1)])
        peers.close()
    assert whole == [False, False]
    assert transfer.error


# --- the way -----------------------------------------------------------------------------------


def test_the_shortest_way_is_taken(slots: SharedSlots, monkeypatch: pytest.MonkeyPatch) -> None:
    def transport(address: SlotAddress) -> tuple[list[bool], str]:
        peers = Peers(SECRET)
        whole, transfer = peers.read(address.encode(), [wanted(0)])
        peers.close()
        return whole, transfer.transport

    with over_tcp(slots) as elsewhere:
        both = msgspec.structs.replace(elsewhere, host=slots.address.host)
        assert transport(both) == ([True], "process")
        monkeypatch.setattr(slots_module, "_HERE", {})
        assert transport(both) == ([True], "memory")
        assert transport(elsewhere) == ([True], "tcp")
        assert transport(msgspec.structs.replace(elsewhere, tcp="")) == ([False], "")


@pytest.mark.parametrize("address", ["", "{}", "[]", "[1]", '["x","",0,-1,"nowhere"]'])
def test_a_bad_address_costs_the_blocks_alone(address: str) -> None:
    whole, transfer = Peers().read(address, [wanted(0)])
    assert whole == [False]
    assert transfer.error


def test_readers_leave_no_descriptors(slots: SharedSlots) -> None:
    with over_tcp(slots) as address:
        shared = msgspec.structs.replace(address, tcp="", host=slots.address.host)
        before = os.listdir("/proc/self/fd")
        for _ in range(20):
            peers = Peers(SECRET)
            for each in (address, shared):
                assert peers.read(each.encode(), [wanted(0)])[0] == [True]
            peers.close()
        with closing(TcpSlots(address, SECRET)) as last:
            last.read([wanted(0)])  # the server has ended the connections before
        assert len(os.listdir("/proc/self/fd")) <= len(before) + 3
