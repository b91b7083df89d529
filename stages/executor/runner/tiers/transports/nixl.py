"""Blocks through NIXL, which reads them by RDMA where the hosts have it (UCX).

The way to an executor's memory is asked for over TCP (`tcp.py`), where both sides prove that they
know the secret. NIXL's own connections prove nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import numpy as np
import xxhash

from ......config import ModelError
from .slots import (
    ANOTHER_SIZE,
    ENTRY,
    STEP,
    STEP_START,
    Bytes,
    SharedSlots,
    SlotAddress,
    WantedBlock,
)
from .tcp import TIMEOUT_S, TcpSlots

_POLL_S = 20e-6
_AT_ONCE = 64
"""Blocks of one transfer."""


@contextmanager
def _errors() -> Iterator[None]:
    """Raise an OSError for NIXL's errors, which have no class in common."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        raise OSError(f"NIXL: {error}") from None


class NixlMemory(msgspec.Struct, frozen=True, array_like=True):
    """What a reader must know of an executor's memory.

    Attributes:
        agent: NIXL's description of the agent.
        start: Address of the memory in its process.
        data: Where the first slot begins in it.
        num_slots: Number of slots.
        slot_bytes: Bytes of a slot.
    """

    agent: bytes
    start: int
    data: int
    num_slots: int
    slot_bytes: int


class NixlAgent:
    """This executor's agent: others read its slots, and it reads theirs into them.

    Attributes:
        memory: For the readers, as MessagePack.
    """

    def __init__(self, slots: SharedSlots) -> None:
        """Start the agent.

        Raises:
            ModelError: NIXL is not installed, or doesn't start.
        """
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise ModelError(
                f"engine.kv_nixl needs the extra nixl, which can't be imported ({error}); install "
                "nano-inference[nixl], or set it to false"
            ) from None
        try:
            with _errors():
                config = nixl_agent_config(backends=["UCX"])
                self._agent = nixl_agent(slots.address.incarnation, config)
                self._slots = slots.raw
                self._register(slots.raw)
                description = self._agent.get_agent_metadata()
        except OSError as error:
            raise ModelError(f"engine.kv_nixl is true, and NIXL doesn't start: {error}") from None
        memory = NixlMemory(
            description, slots.raw.ctypes.data, slots.data_start, *slots.bytes.shape
        )
        self.memory = msgspec.msgpack.encode(memory)
        self._lock = threading.Lock()
        self._registered: dict[int, Any] = {}
        self._abandoned: list[Bytes] = []

    def connect(self, memory: NixlMemory) -> str:
        """Return the name of another executor's agent. Raises OSError: it can't be reached."""
        with self._lock, _errors():
            name = self._agent.add_remote_agent(memory.agent)
        return name.decode() if isinstance(name, bytes) else str(name)

    def disconnect(self, name: str) -> None:
        """Forget another executor's agent."""
        with self._lock, suppress(OSError), _errors():  # it may have ended
            self._agent.remove_remote_agent(name)

    def read(self, name: str, pieces: Sequence[tuple[int, Bytes]], until: float) -> None:
        """Read (address there, memory here) of each piece, into memory from `reserve`.

        Raises:
            OSError: The other executor can't be reached, or is too slow. The memory may be written
                to later: `abandon` it.
        """
        theirs = [(address, into.nbytes, 0) for address, into in pieces]
        ours = [(into.ctypes.data, into.nbytes, 0) for _, into in pieces]
        agent = self._agent
        with _errors():
            with self._lock:
                local = agent.get_xfer_descs(ours, "DRAM")
                remote = agent.get_xfer_descs(theirs, "DRAM")
                handle = agent.initialize_xfer("READ", local, remote, name)
                state = agent.transfer(handle)
            # Not under the lock: an executor that hangs delays no read from another.
            while state == "PROC" and time.monotonic() < until:
                time.sleep(_POLL_S)
                with self._lock:
                    state = agent.check_xfer_state(handle)
            with self._lock:
                agent.release_xfer_handle(handle)
        if state == "PROC":
            raise TimeoutError("the other executor was too slow")
        if state != "DONE":
            raise OSError(f"NIXL: a transfer ended as {state}")

    def reserve(self, size: int) -> Bytes:
        """Return memory to read into; free it with `release`."""
        memory: Bytes = np.empty(size, np.uint8)
        with self._lock:
            self._registered[memory.ctypes.data] = self._register(memory)
        return memory

    def release(self, memory: Bytes) -> None:
        """Free memory to which nothing is being read."""
        with self._lock:
            self._agent.deregister_memory(self._registered.pop(memory.ctypes.data))

    def abandon(self, memory: Bytes) -> None:
        """Keep memory for ever to which a transfer may still write."""
        self._abandoned.append(memory)

    def _register(self, memory: Bytes) -> Any:
        return self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")


class NixlSlots:
    """The slots of another executor, read through NIXL.

    Blocks are read into memory of their own and copied from there: a transfer that is given up may
    still write.
    """

    def __init__(self, address: SlotAddress, secret: str, agent: NixlAgent) -> None:
        """Connect.

        Raises:
            OSError: It can't be reached, or doesn't know the secret.
            msgspec.MsgspecError: Its description can't be read.
        """
        tcp = TcpSlots(address, secret)
        try:
            self._memory = msgspec.msgpack.decode(tcp.describe(), type=NixlMemory)
        finally:
            tcp.close()
        self._agent = agent
        self._name = agent.connect(self._memory)
        self._lock = threading.Lock()
        self._closed = self._failed = False
        self._entries = agent.reserve(_AT_ONCE * ENTRY.size).reshape(_AT_ONCE, ENTRY.size)
        self._blocks = agent.reserve(_AT_ONCE * self._memory.slot_bytes).reshape(_AT_ONCE, -1)
        self._step = agent.reserve(STEP.size)

    def read(self, wanted: Sequence[WantedBlock]) -> list[bool]:
        """As BlockSource.read."""
        if any(block.into.nbytes != self._memory.slot_bytes for block in wanted):
            raise OSError(ANOTHER_SIZE)
        until, whole = time.monotonic() + TIMEOUT_S, []
        with self._reading():
            for start in range(0, len(wanted), _AT_ONCE):
                whole += self._read(wanted[start : start + _AT_ONCE], until)
        return whole

    def step(self) -> int:
        """As BlockSource.step."""
        with self._reading():
            pieces = [(self._memory.start + STEP_START, self._step)]
            self._agent.read(self._name, pieces, time.monotonic() + TIMEOUT_S)
            return int(STEP.unpack(self._step.data)[0])

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock:
            if self._closed or self._failed:
                raise ConnectionError("the connection has ended")
            try:
                yield
            except OSError:
                self._failed = True
                raise
            finally:
                if self._closed:
                    self._free()

    def close(self) -> None:
        """Forget the other executor. A read in flight goes on to its end."""
        self._closed = True
        if self._lock.acquire(blocking=False):
            self._free()
            self._lock.release()

    def _free(self) -> None:
        free = self._agent.abandon if self._failed else self._agent.release
        for memory in (self._entries, self._blocks, self._step):
            free(memory)
        self._agent.disconnect(self._name)

    def _read(self, wanted: Sequence[WantedBlock], until: float) -> list[bool]:
        memory = self._memory
        inside = [number for number, each in enumerate(wanted) if each.slot < memory.num_slots]
        self._fetch(inside, wanted, self._entries, SharedSlots.TABLE_START, until)
        entries = {number: ENTRY.unpack(self._entries[number].data) for number in inside}
        offered = [
            number
            for number, (generation, _, name) in entries.items()
            if not generation % 2 and name == wanted[number].name
        ]
        self._fetch(offered, wanted, self._blocks, memory.data, until)
        whole = [False] * len(wanted)
        for number in offered:
            # The slot may have been given away between both reads: then the checksum doesn't fit.
            block = self._blocks[number]
            whole[number] = xxhash.xxh3_64_intdigest(block.data) == entries[number][1]
            if whole[number]:
                np.copyto(wanted[number].into, block)
        return whole

    def _fetch(
        self,
        numbers: Sequence[int],
        wanted: Sequence[WantedBlock],
        into: Bytes,
        start: int,
        until: float,
    ) -> None:
        """Read a row of a table there for each of these blocks, to the row of its number here."""
        base, size = self._memory.start + start, into.shape[1]
        pieces = [(base + wanted[number].slot * size, into[number]) for number in numbers]
        if pieces:
            self._agent.read(self._name, pieces, until)
