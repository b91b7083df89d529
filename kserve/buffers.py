"""Buffers that are used again: memory that was written before is much faster than new memory."""

from __future__ import annotations

import mmap
import threading
import weakref

import numpy as np

from .tensors import Array

_SMALLEST = 64 << 10
"""For fewer bytes new memory costs next to nothing."""


class WarmBuffers:
    """Arrays of bytes whose memory comes back when nobody looks at it any more, and is kept.

    Page faults make a new array of 64 MiB several times slower to fill than one that was filled
    before. It may be used by several threads.
    """

    def __init__(self, max_idle_bytes: int = 256 << 20) -> None:
        """Args: how much is kept while it is not in use; what comes back beyond it is given back
        to the system."""
        self._max_idle_bytes = max_idle_bytes
        self._lock = threading.Lock()
        self._idle: list[mmap.mmap] = []

    @property
    def idle_bytes(self) -> int:
        """How much is kept and not in use."""
        with self._lock:
            return sum(map(len, self._idle))

    def take(self, n_bytes: int) -> Array:
        """An array `[n_bytes]` of uint8, with anything in it.

        Its memory comes back when it and all views of it are gone. Raises MemoryError.
        """
        if n_bytes < _SMALLEST:
            return np.empty(n_bytes, np.uint8)
        # Powers of two, so that tensors of nearly the same size share buffers. What is not touched
        # of it is never there.
        size = 1 << (n_bytes - 1).bit_length()
        memory = self._kept(size) or _new(size)
        array = np.frombuffer(memory, np.uint8, n_bytes)
        weakref.finalize(array, self._put, memory).atexit = False
        return array

    def _kept(self, size: int) -> mmap.mmap | None:
        with self._lock:
            found = next((each for each in self._idle if len(each) == size), None)
            if found is not None:
                self._idle.remove(found)
        return found

    def _put(self, memory: mmap.mmap) -> None:
        # The garbage collector may call this at any moment, even while this thread has the lock.
        # Who does not get it at once lets go of the buffer.
        if not self._lock.acquire(blocking=False):
            return
        try:
            if sum(map(len, self._idle)) + len(memory) <= self._max_idle_bytes:
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
