"""Blocks of several other executors that come to host slots, some of them slowly or never."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count

import msgspec
import pytest
import torch

from nano_inference.bus.control import TiersChanged
from nano_inference.bus.steps import KVMove
from nano_inference.config import EngineConfig
from nano_inference.stages.executor import KVCache
from nano_inference.stages.executor.runner.tiers import peer_fetches
from nano_inference.stages.executor.runner.tiers.tiers import BlockTiers
from nano_inference.stages.executor.runner.tiers.transports import slots as slots_module
from nano_inference.stages.executor.runner.tiers.transports import tcp
from nano_inference.stages.executor.runner.tiers.transports.slots import (
    SharedSlots,
    SlotAddress,
    SlotMemory,
)

from .test_tiers import block_of, make_model, same

SECRET = "a secret"
NAMES = [bytes([number]) * 16 for number in range(1, 9)]


@contextmanager
def executor(listen: str = "") -> Iterator[BlockTiers]:
    """One whose blocks are random, and whose slots others may read."""
    model = make_model()
    cache = KVCache(model, 10, 4)
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_(torch.randn(tensor.shape))
    config = EngineConfig(kv_listen=listen, kv_secret=SECRET)
    with closing(BlockTiers(config, model, cache, 0, 1000, shares=True)) as tiers:
        yield tiers


@contextmanager
def hanging(part: bytes = b"", every_s: float = 0.0) -> Iterator[tuple[str, list[socket.socket]]]:
    """A server that never proves itself; it sends this part again and again.

    Yields:
        Its address, and the connections so far.
    """
    ended, accepted = threading.Event(), list[socket.socket]()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)

        def serve() -> None:
            while not ended.is_set():
                try:
                    accepted.append(listener.accept()[0])
                except TimeoutError:
                    continue
                connection = accepted[-1]
                try:
                    while part and not ended.wait(every_s):
                        connection.sendall(part)
                except OSError:
                    continue

        thread = threading.Thread(target=serve)
        thread.start()
        tcp_address = f"127.0.0.1:{listener.getsockname()[1]}"
        try:
            yield SlotAddress("0" * 32, tcp=tcp_address).encode(), accepted
        finally:
            ended.set()
            thread.join()
            for connection in accepted:
                connection.close()


def fetch(source: str, slot: int, number: int, other: int, step: int = 0) -> KVMove:
    name = NAMES[number]
    there = {"other": other, "source": source, "source_name": name, "step": step}
    return KVMove("fetch", name, slot, **there)  # type: ignore[arg-type]


def reports(tiers: BlockTiers) -> Iterator[TiersChanged]:
    for _ in range(60):
        tiers.wait(1.0)
        if (changes := tiers.take_changes()) is not None:
            yield changes
    raise AssertionError("nothing happened")


def test_an_executor_that_hangs_delays_no_block_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_fetches, "MOST_AT_ONCE", 1)
    monkeypatch.setattr(tcp, "TIMEOUT_S", 60.0)
    with executor("127.0.0.1:0") as giver, executor() as taker, hanging() as (hangs, _):
        giver.offer([KVMove("offer", NAMES[0], 0, 3)], 1)
        address = SlotAddress.decode(giver.capacity.address)
        far = msgspec.structs.replace(address, host="").encode()
        monkeypatch.setattr(slots_module, "_HERE", {})
        taker.apply([fetch(hangs, slot, 1 + slot, 0) for slot in range(4)])
        taker.apply([fetch(far, 7, 0, 0)])
        assert next(reports(taker)) == TiersChanged(fetched=(NAMES[0],))
        taker.apply([KVMove("load", NAMES[0], 7, 1)])
        assert same(block_of(taker, 1), block_of(giver, 3))
        taker.reset()


@pytest.mark.parametrize("way", ["process", "tcp"])
def test_a_fetch_waits_for_the_step_that_offers_its_block(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    with executor("127.0.0.1:0") as giver, executor() as taker:
        address = SlotAddress.decode(giver.capacity.address)
        if way == "tcp":
            address = msgspec.structs.replace(address, host="")
            monkeypatch.setattr(slots_module, "_HERE", {})
        asked: list[int] = []
        step_of = SharedSlots.step

        def step(self: SharedSlots) -> int:
            asked.append(found := step_of(self))
            return found

        monkeypatch.setattr(SlotMemory, "step", step)
        taker.apply([fetch(address.encode(), 7, 0, 0, step=2)])
        giver.offer([KVMove("offer", NAMES[1], 1, 4)], 1)
        while asked[-2:] != [1, 1]:
            taker.wait(0.01)
        assert taker.take_changes() is None
        giver.offer([KVMove("offer", NAMES[0], 0, 3)], 2)
        assert next(reports(taker)) == TiersChanged(fetched=(NAMES[0],))


def test_blocks_of_an_earlier_step_come_while_a_later_one_runs() -> None:
    """Also if they are asked for together."""
    with executor() as giver, executor() as taker:
        address = giver.capacity.address
        taker.apply([fetch(address, 6, 0, 0, step=1), fetch(address, 7, 1, 1, step=2)])
        for step, name in ((1, NAMES[0]), (2, NAMES[1])):
            giver.offer([KVMove("offer", name, step - 1, 3)], step)
            assert next(reports(taker)) == TiersChanged(fetched=(name,))


def test_a_reset_ends_the_wait_for_a_step() -> None:
    with executor() as giver, executor() as taker:
        taker.apply([fetch(giver.capacity.address, 7, 0, 0, step=2)])
        taker.reset()
        taker.apply([KVMove("store", NAMES[1], 7, 3)])  # nobody holds the slot
        giver.offer([KVMove("offer", NAMES[0], 0, 3)], 2)
        giver.reset()
        taker.apply([fetch(giver.capacity.address, 6, 0, 0, step=1)])
        giver.offer([KVMove("offer", NAMES[0], 0, 3)], 1)
        assert next(reports(taker)) == TiersChanged(fetched=(NAMES[0],)), "of the new epoch"


@pytest.mark.parametrize("part", [b"", b"x"])
def test_all_reads_from_an_executor_that_hangs_end_with_the_first(
    monkeypatch: pytest.MonkeyPatch, part: bytes
) -> None:
    """Also if it sends a byte now and then."""
    monkeypatch.setattr(peer_fetches, "MOST_AT_ONCE", 1)
    monkeypatch.setattr(tcp, "TIMEOUT_S", 0.5)
    with executor() as taker, hanging(part, 0.1) as (hangs, connections):
        taker.apply([fetch(hangs, slot, slot, 0) for slot in range(8)])
        lost: set[bytes] = set()
        for changes in reports(taker):
            lost |= set(changes.lost)
            if len(lost) == 8:
                break
        assert len(connections) == 1
        transfers = taker.take_transfers()
        assert len(transfers) == 8
        assert all(transfer.error for transfer in transfers)


def test_an_executor_that_has_failed_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "TIMEOUT_S", 0.2)
    clock = count(1.0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    with executor() as taker, hanging() as (hangs, connections):
        for number in (1, 2):
            taker.apply([fetch(hangs, 0, 0, 0)])
            assert next(reports(taker)).lost == (NAMES[0],)
            assert len(connections) == number


def test_a_reset_ends_the_reads_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its threads: an executor that comes back has another address."""
    monkeypatch.setattr(tcp, "TIMEOUT_S", 0.5)
    before = threading.active_count()
    with executor() as taker:
        for _ in range(5):
            with hanging() as (hangs, _):
                taker.apply([fetch(hangs, slot, slot, 0) for slot in range(4)])
                taker.reset()
        taker.apply([KVMove("store", NAMES[0], 0, 2), KVMove("load", NAMES[0], 0, 1)])
        assert same(block_of(taker, 1), block_of(taker, 2))
        assert taker.take_changes() is None
    for thread in threading.enumerate():
        if thread.name.startswith("kv-receive"):
            thread.join(30)
    assert threading.active_count() <= before
