"""Slots of memory for tensors on their way, in shared memory where a server can read it."""

from __future__ import annotations

import asyncio
import mmap
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType

from ..config import NanoInferenceError
from .own_memory import OwnSharedMemory
from .pool_slot import PoolSlot
from .slot_queue import SlotQueue, Waiter


class PoolAcquireTimeout(NanoInferenceError):
    """A deadline has passed before there were enough free slots; who waited has left the queue.

    Attributes:
        span: How many were wanted.
        waited_ns: How long they were waited for.
    """

    code = "pool_timeout"

    def __init__(self, span: int, waited_ns: int) -> None:
        super().__init__(
            f"{span} slots of the pool were not free together within {waited_ns / 1e9:.3f} s; give "
            "it more slots, or the request more time"
        )
        self.span = span
        self.waited_ns = waited_ns


class BufferPool:
    """A piece of memory in slots of one size, for tensors of several requests at a time.

    ```python
    with BufferPool(64 << 20) as pool:
        with await pool.acquire_slot() as slot:
            ids, mask = slot.scratch([((4, 512), np.int64), ((4, 512), np.bool_)])
            ...
    ```

    Slots are given strictly in turn: nobody is given some while somebody waits who came before him.
    It may be used by several threads and event loops, and only in the process that made it.

    Attributes:
        n_bytes: How large it is.
        n_slots: How many slots it has.
        slot_bytes: How large one is.
        use_shm: Whether it is in shared memory, where a server may read and write it.
        name: Under which clients register it with a server.
        key: Of the shared memory object; "" without one.
    """

    def __init__(
        self, n_bytes: int, n_slots: int = 8, use_shm: bool = True, name: str = ""
    ) -> None:
        """Reserves the memory.

        Args:
            n_bytes: How much; what is left over when it is divided by `n_slots` is not used.
            n_slots: In how many slots.
            use_shm: Without it tensors travel within messages, and nobody else sees the memory.
            name: Of the region at a server. One of its own for each pool when "": a pool that is
                registered under the name of another takes its place.

        Raises:
            ValueError: A slot would not have a byte.
            OSError: There is not enough shared memory.
        """
        self._queue = SlotQueue(n_slots)
        self.n_bytes, self.n_slots, self.slot_bytes = n_bytes, n_slots, n_bytes // n_slots
        if self.slot_bytes < 1:
            raise ValueError(f"{n_bytes} bytes are not one for each of {n_slots} slots")
        self._object = OwnSharedMemory(n_bytes, "pool") if use_shm else None
        self._memory = self._object.mapping if self._object else mmap.mmap(-1, n_bytes)
        self.use_shm = use_shm
        self.key = self._object.key if self._object else ""
        self.name = name or self.key.lstrip("/") or f"pool-{secrets.token_hex(8)}"
        self._owner = os.getpid()
        self._closed = False
        self._lock = threading.Lock()
        self._wakes: dict[Waiter, Callable[[], object]] = {}
        self._leaving: deque[Waiter] = deque()
        self._taken: set[PoolSlot] = set()

    def __enter__(self) -> BufferPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def free_slots(self) -> int:
        """How many are free now."""
        with self._locked():
            return self._queue.free_slots

    @property
    def waiting(self) -> int:
        """How many wait for slots."""
        with self._locked():
            return self._queue.waiting

    async def acquire_slot(self, span: int = 1, deadline_ns: int = 0) -> PoolSlot:
        """Waits for slots, to be given back with `release_slot` or at the end of a `with` block.

        Whoever is cancelled has left the queue, and has no slots.

        Args:
            span: How many slots beside one another, which become one.
            deadline_ns: Until when to wait, as `time.time_ns()` counts; 0 for as long as it takes.
                Slots that are free at once are given behind it too.

        Raises:
            ValueError: The pool never has so many.
            PoolAcquireTimeout: The deadline has passed.
            RuntimeError: The pool is closed, or of another process.
        """
        begun_ns = time.monotonic_ns()
        woken = asyncio.Event()
        wake = partial(asyncio.get_running_loop().call_soon_threadsafe, woken.set)
        waiter = self._ask(span, wake)
        try:
            if waiter.first is None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_left_s(deadline_ns)):
                        await woken.wait()
        except BaseException:
            self._leave(waiter)
            raise
        return self._take(waiter, begun_ns)

    def acquire_slot_blocking(self, span: int = 1, deadline_ns: int = 0) -> PoolSlot:
        """As `acquire_slot`, for threads: it blocks the one that calls it."""
        begun_ns = time.monotonic_ns()
        woken = threading.Event()
        waiter = self._ask(span, woken.set)
        try:
            if waiter.first is None:
                woken.wait(_left_s(deadline_ns))
        except BaseException:
            self._leave(waiter)
            raise
        return self._take(waiter, begun_ns)

    def release_slot(self, slot: PoolSlot) -> None:
        """Gives a slot back, and ends the arrays that it made (`Views` says how).

        Nothing happens with a part of a slot, which `subslot` made, and once the pool is closed.

        Raises:
            RuntimeError: It was given back before.
            ValueError: It is another pool's.
        """
        if slot.pool is not self:
            raise ValueError(f"this slot is of the pool {slot.pool.name}, not of {self.name}")
        if slot.first is None or self._closed:
            return
        slot.end()
        with self._locked():
            self._taken.discard(slot)
            if not self._closed:
                self._wake(self._queue.release(slot.first, slot.span))

    def close(self) -> None:
        """Removes the memory. Slots in use end, and those who wait get a RuntimeError."""
        with self._locked():
            self._closed = True
            slots, self._taken = self._taken, set()
            wakes = list(self._wakes.values())
        for slot in slots:
            with suppress(RuntimeError):  # somebody has just given it back
                slot.end()
        for wake in wakes:
            with suppress(RuntimeError):  # its event loop is closed
                wake()
        if self._object is not None:
            self._object.close()

    def _ask(self, span: int, wake: Callable[[], object]) -> Waiter:
        if os.getpid() != self._owner:
            raise RuntimeError("this pool is of the process that made it; make one here")
        with self._locked():
            if self._closed:
                raise RuntimeError(f"the pool {self.name} is closed")
            waiter = self._queue.ask(span)
            if waiter.first is None:
                self._wakes[waiter] = wake
            return waiter

    def _take(self, waiter: Waiter, begun_ns: int) -> PoolSlot:
        with self._locked():
            self._wakes.pop(waiter, None)
            if self._closed:
                raise RuntimeError(f"the pool {self.name} is closed")
            if waiter.first is None:
                self._wake(self._queue.leave(waiter))
                raise PoolAcquireTimeout(waiter.span, time.monotonic_ns() - begun_ns)
            slot = PoolSlot.taken(self, self._memory, waiter.first, waiter.span)
            self._taken.add(slot)
            return slot

    def _wake(self, served: list[Waiter]) -> None:
        for waiter in served:
            wake = self._wakes.pop(waiter)
            try:
                wake()
            except RuntimeError:  # its event loop is closed, and it will never take its slots
                served += self._queue.leave(waiter)

    def _leave(self, waiter: Waiter) -> None:
        # A coroutine that nobody awaits any more ends when the garbage collector finds it: at any
        # moment, even when this thread has the lock. Then who has it sees to the queue.
        self._leaving.append(waiter)
        self._see_off()

    def _see_off(self) -> None:
        while self._leaving and self._lock.acquire(blocking=False):
            try:
                while self._leaving:
                    waiter = self._leaving.popleft()
                    self._wakes.pop(waiter, None)
                    self._wake(self._queue.leave(waiter))
            finally:
                self._lock.release()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        finally:
            self._see_off()


def _left_s(deadline_ns: int) -> float | None:
    if not deadline_ns:
        return None
    return max(0.0, min((deadline_ns - time.time_ns()) / 1e9, threading.TIMEOUT_MAX))
