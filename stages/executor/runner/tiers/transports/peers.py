"""Other executors whose offered blocks this one reads."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from ......config import ModelError
from .slots import AttachedSlots, BlockSource, SlotAddress, WantedBlock, slots_here, this_host
from .tcp import TcpSlots

_POLL_S = 0.001
"""Seconds between two reads of another executor's step, while its blocks are awaited."""

_FAILURES = (OSError, ModelError, msgspec.MsgspecError)


class Transfer(NamedTuple):
    """A finished read.

    Attributes:
        transport: "process", "memory" or "tcp"; "" if there is no way.
        seconds: Its duration.
        num_blocks: Blocks that came whole.
        num_bytes: Their bytes.
        num_failed: Other blocks.
        error: Why none came; "" if some did, or were not offered any more.
    """

    transport: str
    seconds: float
    num_blocks: int
    num_bytes: int
    num_failed: int
    error: str = ""


class Peers:
    """Connections to other executors, by address; any thread may read.

    A connection that fails is dropped, and made again for the next read. Reads that were requested
    before the failure fail with it: if an executor hangs, a sequence waits for one time limit,
    however many reads it needs.
    """

    def __init__(self, secret: str = "") -> None:
        """Args: as `engine.kv_secret`."""
        self._secret = secret
        self._sources: dict[str, BlockSource] = {}
        # By address: connecting to one executor delays no read from another.
        self._connecting: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._failed_at: dict[str, float] = {}

    def read(
        self, address: str, wanted: Sequence[WantedBlock], asked_at: float | None = None
    ) -> tuple[list[bool], Transfer]:
        """Read blocks from one executor.

        Args:
            address: Address of the executor.
            wanted: The blocks.
            asked_at: When they were requested, on `time.perf_counter`; None for now.

        Returns:
            For each block whether it is whole, and the transfer.
        """
        started = time.perf_counter()
        asked_at = started if asked_at is None else asked_at
        transport, error, whole = "", "", [False] * len(wanted)
        source: BlockSource | None = None
        try:
            transport, connect = way_to(SlotAddress.decode(address), self._secret)
            source = self._source(address, connect, asked_at)
            whole = source.read(wanted)
        except _FAILURES as problem:
            error = str(problem)
            self._fail(address, source)
        num_bytes = sum(each.into.nbytes for each, came in zip(wanted, whole, strict=True) if came)
        seconds = time.perf_counter() - started
        failed = whole.count(False)
        return whole, Transfer(transport, seconds, len(whole) - failed, num_bytes, failed, error)

    def wait(self, address: str, step: int, asked_at: float, is_over: Callable[[], bool]) -> None:
        """Wait until the blocks of a step are offered, or until a read would fail.

        Args:
            address: Address of the executor.
            step: Its step.
            asked_at: As for `read`.
            is_over: Ends the wait.
        """
        source: BlockSource | None = None
        try:
            _, connect = way_to(SlotAddress.decode(address), self._secret)
            source = self._source(address, connect, asked_at)
            while source.step() < step and not is_over():
                time.sleep(_POLL_S)
        except _FAILURES:
            self._fail(address, source)

    def close(self) -> None:
        """End all connections; reads in flight fail."""
        for address in [*self._sources]:
            self._drop(address)
        self._failed_at.clear()

    def _source(
        self, address: str, connect: Callable[[], BlockSource], asked_at: float
    ) -> BlockSource:
        if (source := self._sources.get(address)) is not None:
            return source
        with self._connecting[address]:
            if asked_at <= self._failed_at.get(address, -1.0):
                raise ConnectionError("the other executor has failed meanwhile")
            if address not in self._sources:
                self._sources[address] = connect()
            return self._sources[address]

    def _fail(self, address: str, source: BlockSource | None) -> None:
        """Drop a connection, unless another read has, and a third has connected again."""
        if source is self._sources.get(address):
            self._failed_at[address] = time.perf_counter()
            self._drop(address)

    def _drop(self, address: str) -> None:
        if (source := self._sources.pop(address, None)) is not None:
            source.close()


def way_to(address: SlotAddress, secret: str) -> tuple[str, Callable[[], BlockSource]]:
    """Return the shortest way to an executor's slots, and how to connect.

    Raises:
        OSError: There is none.
    """
    here = slots_here(address.incarnation)
    if here is not None:
        return "process", here.reader
    if address.host and address.host == this_host():
        return "memory", lambda: AttachedSlots(address)
    if address.tcp:
        return "tcp", lambda: TcpSlots(address, secret)
    raise ConnectionError(
        "the other executor is on another host, and doesn't listen; set engine.kv_listen there"
    )
