"""Host slots that other executors may read: memory of this process, or shared with this host.

The memory is an anonymous file (memfd), which ends with the process and its readers. So a killed
process leaves nothing behind. A reader opens it through /proc, which the kernel allows to processes
of the same user only.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol, Self

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

Bytes = npt.NDArray[np.uint8]

ANOTHER_SIZE = "the other executor's blocks have another size"

_FORMAT = 2
_HEADER = struct.Struct("<8sQ16sQQQ")  # magic, format, incarnation, slots, bytes of a slot, step
STEP = struct.Struct("<Q")
_STEP_START = _HEADER.size - STEP.size
_MAGIC = b"nano-kv\0"
_ENTRY = struct.Struct("<QQ16s")
"""A slot's entry: generation, checksum, name."""

_PAGE = 4096

_HERE: Final[weakref.WeakValueDictionary[str, SharedSlots]] = weakref.WeakValueDictionary()
"""The slots of executors in this process, by incarnation."""


class SlotAddress(msgspec.Struct, frozen=True, array_like=True):
    """The address at which an executor's slots can be read.

    Attributes:
        incarnation: Incarnation of the memory, 32 hexadecimal digits.
        host: The host and its process ids; "" if the memory is of its own process only.
        pid: The process.
        descriptor: Descriptor of the memory, in that process.
        tcp: host:port; "" if it doesn't listen.
    """

    incarnation: str
    host: str = ""
    pid: int = 0
    descriptor: int = -1
    tcp: str = ""

    def encode(self) -> str:
        """Return it as it travels in messages."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> Self:
        """Raises msgspec.ValidationError or msgspec.DecodeError."""
        return msgspec.json.decode(text, type=cls)


class WantedBlock(NamedTuple):
    """A block to read: its slot and name there, and the memory that it is read into."""

    slot: int
    name: bytes
    into: Bytes


class BlockSource(Protocol):
    """The offered blocks of another executor."""

    def read(self, wanted: Sequence[WantedBlock]) -> list[bool]:
        """Read blocks. Returns for each whether it is whole; else its memory is undefined.

        Raises:
            OSError: The other executor can't be reached, or was too slow.
        """

    def step(self) -> int:
        """Return the last step whose blocks are offered. Raises OSError, as `read`."""

    def close(self) -> None:
        """Free what the reader holds."""


class SlotMemory:
    """Slots, and for each offered one its name, its checksum and a generation.

    A generation is even while its slot is offered. It is odd while the slot may be written to, and
    grows each time. A reader copies a slot without a lock, and drops the copy if the generation is
    another one afterwards.

    Attributes:
        bytes: `[slots, bytes of a slot]`.
    """

    def __init__(self, memory: mmap.mmap, num_slots: int, slot_bytes: int) -> None:
        self._memory = memory
        start = _data_offset(num_slots)
        data = np.frombuffer(memory, np.uint8, num_slots * slot_bytes, start)
        self.bytes: Bytes = data.reshape(num_slots, slot_bytes)

    def read(self, wanted: Sequence[WantedBlock]) -> list[bool]:
        """Read blocks from another executor's memory; see `BlockSource.read`."""
        if any(block.into.nbytes != self.bytes.shape[1] for block in wanted):
            raise OSError(ANOTHER_SIZE)
        return [self._read(*block) for block in wanted]

    def step(self) -> int:
        """Return the last step of the other executor; see `BlockSource.step`."""
        (step,) = STEP.unpack_from(self._memory, _STEP_START)
        return int(step)

    def close(self) -> None:
        """The memory is unmapped with its last user."""

    def entry(self, slot: int) -> tuple[int, int, bytes]:
        """Return a slot's generation, checksum and name."""
        found: tuple[int, int, bytes] = _ENTRY.unpack_from(self._memory, self._place(slot))
        return found

    def offers(self, slot: int, name: bytes) -> bool:
        """Whether a slot is offered under a name."""
        if not 0 <= slot < len(self.bytes):
            return False
        generation, _, its_name = self.entry(slot)
        return not generation % 2 and its_name == name

    def _read(self, slot: int, name: bytes, into: Bytes) -> bool:
        if not self.offers(slot, name):
            return False
        entry = self.entry(slot)
        np.copyto(into, self.bytes[slot])
        return entry == self.entry(slot) and xxhash.xxh3_64_intdigest(into.data) == entry[1]

    def _place(self, slot: int) -> int:
        return _HEADER.size + slot * _ENTRY.size


class SharedSlots(SlotMemory):
    """The slots of this executor.

    Attributes:
        address: Address at which they can be read without TCP.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        """Allocate the memory, with all its pages.

        Raises:
            OSError: There is not enough memory.
        """
        size = _data_offset(num_slots) + num_slots * slot_bytes
        incarnation = secrets.token_hex(16)
        self._descriptor, host = -1, ""
        if sys.platform == "linux":
            self._descriptor = os.memfd_create("nano-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            host = this_host()
            try:
                os.posix_fallocate(self._descriptor, 0, size)
                fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
                memory = _map(self._descriptor, size, write=True)
            except OSError:
                os.close(self._descriptor)
                raise
        else:
            memory = mmap.mmap(-1, size)
        header = _HEADER.pack(_MAGIC, _FORMAT, bytes.fromhex(incarnation), num_slots, slot_bytes, 0)
        memory[: _HEADER.size] = header
        super().__init__(memory, num_slots, slot_bytes)
        for slot in range(num_slots):
            self._set(slot, 1)
        self.address = SlotAddress(incarnation, host, os.getpid(), self._descriptor)
        _HERE[incarnation] = self

    def offer(self, slot: int, name: bytes) -> None:
        """Let others read a slot."""
        if not self.offers(slot, name):
            generation, _, _ = self.entry(slot)
            checksum = xxhash.xxh3_64_intdigest(self.bytes[slot].data)
            self._set(slot, generation + generation % 2, checksum, name)

    def set_step(self, step: int) -> None:
        """Note that the blocks of a step are offered; 0: a new epoch begins."""
        STEP.pack_into(self._memory, _STEP_START, step)

    def reader(self) -> SlotMemory:
        """Return the slots for another executor in this process."""
        return SlotMemory(self._memory, *self.bytes.shape)

    def withdraw(self, slot: int) -> None:
        """End the offer of a slot, before it is written to."""
        generation, _, _ = self.entry(slot)
        if not generation % 2:
            self._set(slot, generation + 1)

    def close(self) -> None:
        """Withdraw all slots, and free the memory once its last user is gone."""
        _HERE.pop(self.address.incarnation, None)
        for slot in range(len(self.bytes)):
            self.withdraw(slot)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _set(self, slot: int, generation: int, checksum: int = 0, name: bytes = bytes(16)) -> None:
        place = self._place(slot)
        if generation % 2:
            # First the generation: a reader must not take the old entry for the new one.
            struct.pack_into("<Q", self._memory, place, generation)
            return
        struct.pack_into("<Q16s", self._memory, place + 8, checksum, name)
        struct.pack_into("<Q", self._memory, place, generation)


class AttachedSlots(SlotMemory):
    """The slots of another process of this host."""

    def __init__(self, address: SlotAddress) -> None:
        """Map them.

        Raises:
            OSError: The process has ended, or its memory can't be read.
        """
        path = f"/proc/{address.pid}/fd/{address.descriptor}"
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # Sealed, so that the mapping can't lose its pages; the file of another process that got
            # the id of an ended one has another incarnation.
            if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise OSError(f"{path} is not the memory of an executor")
            size = os.fstat(descriptor).st_size
            if size < _HEADER.size:
                raise OSError(f"{path} is too small")
            memory = _map(descriptor, size, write=False)
        finally:
            os.close(descriptor)
        magic, form, incarnation, slots, slot_bytes, _ = _HEADER.unpack_from(memory, 0)
        if (magic, form, incarnation.hex()) != (_MAGIC, _FORMAT, address.incarnation):
            raise OSError(f"{path} is the memory of another executor")
        if _data_offset(slots) + slots * slot_bytes > size:
            raise OSError(f"{path} is cut off")
        super().__init__(memory, slots, slot_bytes)


def slots_here(incarnation: str) -> SharedSlots | None:
    """Return the slots of an executor in this process; None if it runs elsewhere."""
    return _HERE.get(incarnation)


def this_host() -> str:
    """Return a name for this host and its process ids; "" if it has none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _data_offset(num_slots: int) -> int:
    """Return the place of the first slot in the memory."""
    return -(-(_HEADER.size + num_slots * _ENTRY.size) // _PAGE) * _PAGE


def _map(descriptor: int, size: int, *, write: bool) -> mmap.mmap:
    # Populated: the first touch of a page costs several times its copying.
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
    return mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, protection)
