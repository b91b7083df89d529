"""Buffers that are used again: memory that was written before is much faster than new memory."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque

import numpy as np

from ..config import RequestError
from .tensors import Array

_SMALLEST = 64 << 10
"""For fewer bytes new memory costs next to nothing."""

_UNLIMITED = 1 << 62


class WarmBuffers:
    """Arrays of bytes whose memory comes back when nobody looks at it any more, and is kept.

    Page faults make a new array of 64 MiB several times slower to fill than one that was filled
    before. It may be used by several threads.
    """

    def __init__(self, max_idle_bytes: int = 256 << 20, max_used_bytes: int = _UNLIMITED) -> None:
        """Makes none yet.

        Args:
            max_idle_bytes: How much is kept while it is not in use; what comes back beyond it is
                given back to the system.
            max_used_bytes: How much may be in use.
        """
        self._max_idle_bytes = max_idle_bytes
        self._max_used_bytes = max_used_bytes
        self._lock = threading.Lock()
        self._idle: list[mmap.mmap] = []
        self._used_bytes = 0
        self._back: deque[tuple[int, mmap.mmap | None]] = deque()

    @property
    def idle_bytes(self) -> int:
        """How much is kept and not in use."""
        self._settle()
        return sum(map(len, self._idle))

    @property
    def used_bytes(self) -> int:
        """How much is in use."""
        self._settle()
        return self._used_bytes

    def take(self, n_bytes: int) -> Array:
        """An array `[n_bytes]` of uint8, with anything in it.

        Its memory comes back when it and all views of it are gone.

        Raises:
            RequestError: overloaded: as much is in use as may be.
            MemoryError: The system has none.
        """
        # Powers of two, so that tensors of nearly the same size share buffers. What is not touched
        # of it is never there.
        size = 1 << (n_bytes - 1).bit_length() if n_bytes >= _SMALLEST else 0
        self._settle()
        with self._lock:
            if self._used_bytes + n_bytes > self._max_used_bytes:
                raise RequestError(
                    f"other requests have {self._used_bytes} bytes of tensors in memory, which "
                    f"leaves no room for {n_bytes} more; try again",
                    code="overloaded",
                )
            self._used_bytes += n_bytes
            kept = next((each for each in self._idle if len(each) == size), None)
            if kept is not None:
                self._idle.remove(kept)
        try:
            memory = kept or (_new(size) if size else None)
            array: Array = np.frombuffer(memory or bytearray(n_bytes), np.uint8, n_bytes)
        except BaseException:
            self._put(n_bytes, None)
            raise
        weakref.finalize(array, self._put, n_bytes, memory).atexit = False
        return array

    def _put(self, n_bytes: int, memory: mmap.mmap | None) -> None:
        # The garbage collector may call this at any moment, even while this thread has the lock.
        # Then what has come back waits until somebody asks.
        self._back.append((n_bytes, memory))
        self._settle()

    def _settle(self) -> None:
        while self._back and self._lock.acquire(blocking=False):
            try:
                while self._back:
                    n_bytes, memory = self._back.popleft()
                    self._used_bytes -= n_bytes
                    idle = sum(map(len, self._idle))
                    if memory is not None and idle + len(memory) <= self._max_idle_bytes:
                        self._idle.append(memory)
            finally:
                self._lock.release()


def _new(size: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, size)
    except (OSError, ValueError, OverflowError):
        raise MemoryError(f"{size} bytes for tensors are not to be had") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
