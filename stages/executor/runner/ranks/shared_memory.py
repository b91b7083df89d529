"""Ranks of one host that exchange tensors through shared memory.

The memory is an anonymous file (memfd), which ends with its processes: a killed one leaves nothing
behind. `kernels/ranks.c` has its layout, and the waiting.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import threading
import time
from ctypes import c_bool, c_char_p, c_int, c_int64, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from .....config.engine import MOST_RANKS
from ..kernels.compile import RANKS, KernelsUnavailable, load_library
from .group import RankGroup
from .rank_error import RankError
from .tags import Kind, described, out_of_step, tag_of

SLOT_BYTES = 1 << 20
"""Default size of a slot. A larger tensor takes several rounds."""

_SLOT_ALIGNMENT = 64

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

# In a long wait, processes are checked this often.
_CHECK_S = 0.05

_SUMS = {torch.float32: 1, torch.bfloat16: 2}


class _Status(IntEnum):
    """Numbers as in ranks.c."""

    DONE = 0
    AGAIN = 1
    FAILED = 2
    CLOSED = 3
    OUT_OF_STEP = 4


class _Side(ctypes.Structure):
    _fields_ = (
        ("memory", c_void_p),
        ("rank", c_uint32),
        ("round", c_uint32),
        ("tag_before", c_uint64),
        ("kind", c_uint32),
        ("element", c_uint32),
        ("peer", c_uint32),
        ("sends", c_uint32),
        ("written", c_uint32),
        ("tag", c_uint64),
        ("bytes", c_uint64),
        ("offset", c_uint64),
        ("input", c_void_p),
        ("output", c_void_p),
        ("other", c_uint32),
        ("other_tag", c_uint64),
    )


_SIDE = ctypes.POINTER(_Side)
_STARTED = ctypes.POINTER(c_uint64)
_SIGNATURES: dict[str, tuple[list[type], type | None]] = {
    "memory_bytes": ([c_uint32, c_uint64], c_uint64),
    "map": ([c_int, c_uint64], c_void_p),
    "unmap": ([c_void_p, c_uint64], None),
    "initialise": ([c_void_p, c_uint32, c_uint64], None),
    "checked_size": ([c_void_p, c_uint64], c_uint32),
    "enter": ([_SIDE, c_void_p, c_uint32, c_uint32, c_uint64], c_bool),
    "process_of": ([c_void_p, c_uint32, _STARTED], c_uint32),
    "start": ([_SIDE, c_uint64, *[c_uint32] * 3, c_void_p, c_void_p, c_int64], c_int),
    "resume": ([_SIDE, c_int64], c_int),
    "leave": ([c_void_p, c_uint32], None),
    "fail": ([c_void_p, c_char_p], None),
    "reason": ([c_void_p], c_char_p),
}


@cache
def _library() -> ctypes.CDLL:
    """Return ranks.c, with its functions declared. They release the GIL.

    Raises:
        RankError: It can't be compiled here.
    """
    try:
        loaded = load_library(RANKS)
    except KernelsUnavailable as error:
        raise RankError(f"ranks can't share memory: {error}") from None
    for name, (arguments, result) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, result
    return loaded


class SharedMemoryGroup(RankGroup):
    """Ranks of one host.

    A rank notices within a fraction of a second that another one's process has ended, and after
    `timeout_s` that it has stopped. After an error the group is unusable, for all ranks.

    Attributes:
        descriptor: Descriptor of the memory, for other ranks to inherit.
    """

    def __init__(self, descriptor: int, rank: int) -> None:
        """Use `create` or `attach`."""
        self.descriptor, self.rank = descriptor, rank
        self._library = _library()
        self._side = _Side()
        self._pointer = ctypes.pointer(self._side)
        self._why = ""
        # `close` and `fail` may come from other threads than the operations.
        self._running, self._mapping = threading.Lock(), threading.Lock()
        self._bytes = _sealed_bytes(descriptor)
        self._memory: int | None = _mapped(descriptor, self._bytes)
        self.size = self._library.checked_size(self._memory, self._bytes)
        try:
            self._enter()
        except RankError:
            self._unmap()
            raise

    @classmethod
    def create(cls, size: int, slot_bytes: int = SLOT_BYTES) -> Self:
        """Make the memory, as rank 0, whose `close` closes the descriptor.

        Args:
            size: The number of ranks.
            slot_bytes: The size of a slot, a multiple of 64. There are two per rank, and four per
                pair of ranks and direction; unused ones take no memory.

        Raises:
            RankError: It can't be made.
        """
        descriptor = make_memory(size, slot_bytes)
        try:
            return cls(descriptor, 0)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def attach(cls, descriptor: int, rank: int) -> Self:
        """Join as another rank. The descriptor may be closed afterwards.

        Raises:
            RankError: It isn't the memory of a group, or the rank is attached already.
        """
        return cls(descriptor, rank)

    def all_gather(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        result = tensor.new_empty((self.size, *tensor.shape))
        self._run(Kind.all_gather, tensor, tensor, result)
        return result

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if tensor.dtype not in _SUMS:
            return super().all_reduce(tensor)
        tensor = tensor.contiguous()
        result = torch.empty_like(tensor)
        self._run(Kind.all_reduce, tensor, tensor, result)
        return result

    def broadcast(self, tensor: Tensor) -> None:
        """Broadcast through the shared memory. Rank 0 waits only for the broadcast before the last
        one.
        """
        self._run(Kind.broadcast, tensor, tensor, tensor)

    def send(self, tensor: Tensor, to: int) -> None:
        """Send messages of up to two slots at once; the rest of a larger one waits."""
        tensor = tensor.contiguous()
        self._run(Kind.message, tensor, tensor, None, self._checked(to))

    def receive(self, tensor: Tensor, source: int) -> None:
        self._run(Kind.message, tensor, None, tensor, self._checked(source))

    def fail(self, reason: str) -> None:
        with self._mapping:
            if self._memory is not None:
                self._library.fail(self._memory, reason.encode())

    def close(self) -> None:
        with self._mapping:
            if self._memory is None:
                return
            self._why = self._why or "the group is closed"
            self._library.leave(self._memory, self.rank)
        with self._running, self._mapping:
            self._unmap()
            if self.rank == 0:
                os.close(self.descriptor)

    def _enter(self) -> None:
        if not self.size:
            raise RankError("the descriptor isn't the memory of a group, or of another version's")
        if not 0 <= self.rank < self.size:
            raise RankError(f"there is no rank {self.rank} in a group of {self.size}")
        process = os.getpid()
        started = _start_of(process)
        if not self._library.enter(self._pointer, self._memory, self.rank, process, started):
            raise RankError(f"rank {self.rank} is attached already")

    def _checked(self, peer: int) -> int:
        if not 0 <= peer < self.size or peer == self.rank:
            raise ValueError(f"rank {self.rank} has no peer {peer} in a group of {self.size}")
        return peer

    def _unmap(self) -> None:
        self._library.unmap(self._memory, self._bytes)
        self._memory = None

    def _run(
        self,
        kind: Kind,
        tensor: Tensor,
        source: Tensor | None,
        target: Tensor | None,
        peer: int = 0,
    ) -> None:
        """Run an operation from one tensor, if any, to another, both like the first one."""
        tag = tag_of(kind, tensor)
        if tensor.device.type != "cpu":
            raise ValueError("shared memory is for tensors on the CPU")
        with self._running:
            if self._why:
                raise RankError(self._why)
            try:
                status = self._library.start(
                    self._pointer,
                    tag,
                    _SUMS.get(tensor.dtype, 0),
                    peer,
                    target is None,
                    source.data_ptr() if source is not None else None,
                    target.data_ptr() if target is not None else None,
                    int(min(self.timeout_s, _CHECK_S) * 1e9),
                )
                if status != _Status.DONE:
                    self._wait(status)
            except BaseException as error:
                if not self._why:
                    own = isinstance(error, RankError)
                    self._why = str(error) if own else f"rank {self.rank} stopped: {error!r}"
                    self.fail(self._why)
                raise

    def _wait(self, status: int) -> None:
        """Continue an operation that takes long.

        Raises:
            RankError: It has failed.
        """
        side = self._side
        deadline = time.monotonic() + self.timeout_s
        ended: int | None = None
        while status == _Status.AGAIN:
            left_s = deadline - time.monotonic()
            if self._why:
                raise RankError(self._why)
            if ended is not None:
                raise RankError(f"the process of rank {ended} has ended")
            if left_s <= 0:
                raise RankError(
                    f"rank {self.rank} has waited {self.timeout_s} s for rank {side.other} "
                    f"in {described(side.tag)}"
                )
            # Once more after its end: it may have arrived before.
            ended = self._ended()
            wait_s = 0.0 if ended is not None else min(left_s, _CHECK_S)
            status = self._library.resume(self._pointer, int(wait_s * 1e9))
        if status == _Status.CLOSED:
            raise RankError(f"rank {side.other} has closed the group")
        if status == _Status.OUT_OF_STEP:
            raise RankError(out_of_step(self.rank, side.tag, side.other, side.other_tag))
        if status == _Status.FAILED:
            raise RankError(self._library.reason(self._memory).decode(errors="replace"))

    def _ended(self) -> int | None:
        """Return a rank whose process has ended, if any."""
        started = c_uint64()
        for rank in range(self.size):
            process = self._library.process_of(self._memory, rank, ctypes.byref(started))
            if process and _start_of(process) != started.value:
                return rank
        return None


def make_memory(size: int, slot_bytes: int) -> int:
    """Make the memory of a group of other processes; return its descriptor.

    Arguments and errors as of `SharedMemoryGroup.create`.
    """
    if not 1 <= size <= MOST_RANKS:
        raise RankError(f"a group has 1 to {MOST_RANKS} ranks; got {size}")
    if slot_bytes <= 0 or slot_bytes % _SLOT_ALIGNMENT:
        raise RankError(f"slot_bytes must be a multiple of {_SLOT_ALIGNMENT}; got {slot_bytes}")
    library = _library()
    descriptor = os.memfd_create("nano-ranks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        size_bytes = library.memory_bytes(size, slot_bytes)
        os.ftruncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        memory = _mapped(descriptor, size_bytes)
        library.initialise(memory, size, slot_bytes)
        library.unmap(memory, size_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _sealed_bytes(descriptor: int) -> int:
    """Return the size of memory that can't shrink; reading beyond its end ends a process (SIGBUS).

    Raises:
        RankError: It is no such memory.
    """
    try:
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS:
            return os.fstat(descriptor).st_size
    except OSError as error:
        raise RankError(f"the descriptor isn't the memory of a group: {error}") from None
    raise RankError("the descriptor isn't the memory of a group: it isn't sealed")


def _mapped(descriptor: int, size_bytes: int) -> int:
    address: int | None = _library().map(descriptor, size_bytes)
    if address is None:
        raise RankError("the memory of the group can't be mapped")
    return address


def _start_of(process: int) -> int:
    """Return the start of a running process, in clock ticks after the machine's; 0 if it has ended.

    A process that was only killed is a zombie until its parent has noticed.
    """
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if state in "ZX" else int(fields[18])
