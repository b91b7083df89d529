"""A buffer pool: memory in slots, for the tensors of concurrent calls."""

from __future__ import annotations

import asyncio
import math
import mmap
import os
import secrets
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, overload

import numpy as np
from numpy.typing import DTypeLike

from ..config import NanoInferenceError, shown
from .shared_memory import OwnSharedMemory
from .tensors import Array, SharedMemory, TensorError, read_only

Shape = int | Sequence[int]

_BYTE: np.dtype[Any] = np.dtype(np.uint8)

_NOTHING: Any = (1, (0,), np.dtype("V1"), False, b"")
"""The pickled state of an empty array of dtype void."""


class PoolAcquireTimeout(NanoInferenceError):
    """The deadline passed before enough slots were free; the waiter has left the queue.

    Attributes:
        span: Number of slots requested.
        waited_ns: Time waited.
    """

    code = "pool_timeout"

    def __init__(self, span: int, waited_ns: int) -> None:
        super().__init__(
            f"{span} slots of the pool were not free together within {waited_ns / 1e9:.3f} s; give "
            "it more slots, or the request more time"
        )
        self.span = span
        self.waited_ns = waited_ns


# --- the queue ------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Waiter:
    """A request for adjacent slots.

    Attributes:
        span: Number of slots.
        wake: Called when the slots have been assigned.
        since_ns: When the waiter came, as `time.monotonic_ns()` counts.
        first: Index of the first assigned slot; None without slots.
    """

    span: int
    wake: Callable[[], object]
    since_ns: int = field(default_factory=time.monotonic_ns)
    first: int | None = None


class SlotQueue:
    """The free slots of a pool, and a strict FIFO queue for them.

    Only the head of the queue is served, so that small requests can't starve a large one.

    Attributes:
        waiting: The queue, head first.
    """

    def __init__(self, n_slots: int) -> None:
        """Raises ValueError without a slot."""
        if n_slots < 1:
            raise ValueError(f"a pool of {n_slots} slots can give none; it needs at least 1")
        self.waiting: OrderedDict[Waiter, None] = OrderedDict()
        self._free = bytearray(b"\1" * n_slots)  # a flag for each slot

    @property
    def free_slots(self) -> int:
        return sum(self._free)

    def enter(self, span: int, wake: Callable[[], object]) -> Waiter:
        """Join the queue; an empty queue with enough free slots assigns them at once.

        Raises:
            ValueError: The pool has fewer slots.
        """
        if not 1 <= span <= len(self._free):
            raise ValueError(
                f"{span} adjacent slots can never be free in a pool of {len(self._free)}"
            )
        waiter = Waiter(span, wake)
        self.waiting[waiter] = None
        self._serve()
        return waiter

    def leave(self, waiter: Waiter) -> list[Waiter]:
        """Leave the queue, or return the assigned slots; idempotent.

        Returns:
            Waiters that were assigned slots because of it.
        """
        if waiter.first is None:
            self.waiting.pop(waiter, None)
        else:
            self._free[waiter.first : waiter.first + waiter.span] = b"\1" * waiter.span
            waiter.first = None
        return self._serve()

    def _serve(self) -> list[Waiter]:
        served = []
        while self.waiting:
            waiter = next(iter(self.waiting))
            first = self._free.find(b"\1" * waiter.span)
            if first < 0:
                break
            self._free[first : first + waiter.span] = bytes(waiter.span)
            waiter.first = first
            del self.waiting[waiter]
            served.append(waiter)
        return served


# --- a slot ---------------------------------------------------------------------------------------


class SlotViews:
    """The arrays of a slot and of its subslots, which end together.

    Numpy can't end an array, so each is given another array's state: an ended array is empty, of
    dtype void and read-only. Indexing raises IndexError, arithmetic TypeError, writing ValueError.

    Views that users make of these arrays (`array[1:]`, `array.reshape(…)`, a tensor of torch) are
    not tracked. They keep the memory mapped, so their use can't crash, but after the release they
    show and change the data of the slot's next owner.

    Attributes:
        ended: The slot was released.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self.ended = False
        self._lock = threading.Lock()
        self._memory = memory
        self._address = _address_of(np.frombuffer(memory, np.uint8))
        self._alive: weakref.WeakValueDictionary[int, Array] = weakref.WeakValueDictionary()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock a slot in use. Raises RuntimeError if it was released."""
        with self._lock:
            if self.ended:
                raise RuntimeError("this slot was released before; acquire another one")
            yield

    def make(self, shape: Shape, dtype: np.dtype[Any], offset: int) -> Array:
        """Return an array over the memory from an offset on. Requires the lock."""
        array: Array = np.ndarray(shape, dtype, self._memory, offset)
        self._alive[id(array)] = array
        return array

    def offset_of(self, array: Array) -> int | None:
        """Return where a contiguous array, or a view of one, begins; None outside the memory."""
        offset = _address_of(array) - self._address
        inside = 0 <= offset <= offset + array.nbytes <= len(self._memory)
        return offset if inside and array.flags.c_contiguous else None

    def end(self) -> None:
        """End all arrays, which no other thread may be using.

        Raises:
            RuntimeError: They have ended before.
        """
        with self.locked():
            self.ended = True
            for array in list(self._alive.values()):
                array.__setstate__(_NOTHING)
                array.flags.writeable = False
                # The array held the mapping, which users' views of it still need.
                weakref.finalize(array, _hold, self._memory).atexit = False
            self._alive.clear()


@dataclass(eq=False)
class PoolSlot:
    """A part of a pool's memory that belongs to its owner until it is released.

    The end of a `with` block releases it, unless it was released before. A slot is also a
    `TensorMemory` of the pool's region, within the slot's bounds.

    Attributes:
        pool: The slot's pool.
        views: The slot's arrays.
        offset: Bytes from the pool's beginning.
        n_bytes: Size in bytes.
        waiter: The queue's record of the slot; None for a subslot.
    """

    pool: BufferPool
    views: SlotViews
    offset: int
    n_bytes: int
    waiter: Waiter | None = None

    def __post_init__(self) -> None:
        self._cursor = self.offset

    def __enter__(self) -> PoolSlot:
        return self

    def __exit__(self, *error: object) -> None:
        if not self.is_released:
            self.pool.release_slot(self)

    @property
    def is_released(self) -> bool:
        """Whether the slot, or the slot that this one is a part of, was released."""
        return self.views.ended

    @overload
    def scratch(self, shape: Shape, dtype: DTypeLike) -> Array: ...

    @overload
    def scratch(self, shape: list[tuple[Shape, DTypeLike]]) -> list[Array]: ...

    def scratch(
        self, shape: Shape | list[tuple[Shape, DTypeLike]], dtype: DTypeLike | None = None
    ) -> Array | list[Array]:
        """Make arrays over the slot's memory, after those made before, without a copy.

        They are aligned for their dtype, uninitialised, and end with the slot (`SlotViews`).

        Args:
            shape: Of one array; or pairs of shape and dtype for a list of arrays, all of which are
                made or none.
            dtype: Of the one array; not of Python objects.

        Raises:
            ValueError: They don't fit into the rest of the slot, or are of Python objects.
            RuntimeError: The slot was released.
        """
        if dtype is not None:
            return self._carve([(shape, dtype)])[0]  # type: ignore[list-item]  # one shape
        return self._carve(shape)  # type: ignore[arg-type]  # pairs

    def subslot(self, n_bytes: int) -> PoolSlot:
        """Return a part of the slot's rest, for arrays of its own.

        It ends with the slot; releasing it does nothing. Raises as `scratch`.
        """
        with self.views.locked():
            start = self._cursor
            if n_bytes < 0:
                raise ValueError(f"a subslot can't have {shown(n_bytes)} bytes; give 0 or more")
            self._advance(start + n_bytes)
        return PoolSlot(self.pool, self.views, start, n_bytes)

    def offset_of(self, array: Array) -> int | None:
        """Return where in the pool a contiguous array in this slot begins; None outside the slot.

        Raises:
            RuntimeError: The slot was released.
        """
        with self.views.locked():
            offset = self.views.offset_of(array)
        inside = offset is not None and self._contains(offset, array.nbytes)
        return offset if inside else None

    def read(self, place: SharedMemory) -> Array:
        """Return a place's bytes: uint8 `[byte_size]`, read-only, no copy, ended with the slot.

        Raises:
            TensorError: The place is outside the slot.
            RuntimeError: The slot was released.
        """
        return read_only(self.array_at(place, place.byte_size, _BYTE))

    def array_at(self, place: SharedMemory, shape: Shape, dtype: DTypeLike) -> Array:
        """Return an array over the beginning of a place: no copy, ended with the slot.

        Raises as `read`, and ValueError if the array is larger than its place.
        """
        found = _memory_dtype(dtype)
        if place.region != self.pool.name or not self._contains(place.offset, place.byte_size):
            raise TensorError(
                f"{shown(place.byte_size)} bytes at {shown(place.offset)} of the region "
                f"{shown(place.region)} are not within the slot, which has {self.n_bytes} at "
                f"{self.offset} of {self.pool.name}"
            )
        if _count(shape) * found.itemsize > place.byte_size:
            raise ValueError(f"an array of {found} {shown(shape)} has more bytes than its place")
        with self.views.locked():
            return self.views.make(shape, found, place.offset)

    def write(self, place: SharedMemory, data: bytes | memoryview | Array) -> None:
        """Write bytes to the beginning of a place. Raises as `read`."""
        given: Array = np.frombuffer(data, np.uint8)
        if len(given) > place.byte_size:
            raise TensorError(
                f"{len(given)} bytes don't fit a place of {shown(place.byte_size)} in a slot",
                remedy="choose a larger place",
            )
        self.array_at(place, len(given), _BYTE)[:] = given

    def _carve(self, wanted: Sequence[tuple[Shape, DTypeLike]]) -> list[Array]:
        found = [(shape, _memory_dtype(dtype)) for shape, dtype in wanted]
        with self.views.locked():
            places, end = [], self._cursor
            for shape, dtype in found:
                start = -(-end // dtype.alignment) * dtype.alignment
                places.append(start)
                end = start + _count(shape) * dtype.itemsize
            self._advance(end)
            return [
                self.views.make(shape, dtype, place)
                for (shape, dtype), place in zip(found, places, strict=True)
            ]

    def _advance(self, end: int) -> None:
        last = self.offset + self.n_bytes
        if end > last:
            raise ValueError(
                f"{end - self._cursor} bytes were requested of a slot with {last - self._cursor} "
                "left; acquire more slots at once (span), or a pool with larger ones"
            )
        self._cursor = end

    def _contains(self, offset: int, n_bytes: int) -> bool:
        return self.offset <= offset <= offset + n_bytes <= self.offset + self.n_bytes


# --- the pool -------------------------------------------------------------------------------------


class BufferPool(AbstractContextManager["BufferPool"]):
    """Memory in slots of one size, for the tensors of concurrent calls.

    ```python
    with BufferPool(64 << 20) as pool:
        with await pool.acquire_slot() as slot:
            ids, mask = slot.scratch([((4, 512), np.int64), ((4, 512), np.bool_)])
            ...
    ```

    Slots are assigned in strict FIFO order. Any threads and event loops may use a pool, but only in
    the process that made it.

    Attributes:
        n_bytes: Size in bytes.
        n_slots: Number of slots.
        slot_bytes: Size of a slot.
        use_shm: The memory is shared memory, which a server can read and write.
        name: The name under which clients register it at a server.
        key: Of the shared memory object; "" without one.
    """

    def __init__(
        self, n_bytes: int, n_slots: int = 8, use_shm: bool = True, name: str = ""
    ) -> None:
        """Reserve the memory.

        Args:
            n_bytes: Size; a remainder of the division by `n_slots` is unused.
            n_slots: Number of slots.
            use_shm: False: tensors travel within messages, and the memory is private.
            name: Of the region at a server; "" for a unique one. Registering a pool replaces
                another one of the same name.

        Raises:
            ValueError: A slot would be empty.
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
        self._leaving: deque[Waiter] = deque()
        self._taken: set[PoolSlot] = set()

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def free_slots(self) -> int:
        """Number of free slots."""
        with self._locked():
            return self._queue.free_slots

    @property
    def waiting(self) -> int:
        """Number of waiters."""
        with self._locked():
            return len(self._queue.waiting)

    async def acquire_slot(self, span: int = 1, deadline_ns: int = 0) -> PoolSlot:
        """Wait for slots, to be released by `release_slot` or at the end of a `with` block.

        A cancelled waiter has left the queue, and holds no slots.

        Args:
            span: Number of adjacent slots, which become one.
            deadline_ns: When to stop waiting, as `time.time_ns()` counts; 0 is never. Free slots
                are assigned after the deadline, too.

        Raises:
            ValueError: The pool has fewer slots.
            PoolAcquireTimeout: The deadline has passed.
            RuntimeError: The pool is closed, or of another process.
        """
        woken = asyncio.Event()
        wake = partial(asyncio.get_running_loop().call_soon_threadsafe, woken.set)
        with self._waiter(span, wake) as waiter:
            if waiter.first is None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_left_s(deadline_ns)):
                        await woken.wait()
        return self._take(waiter)

    def acquire_slot_blocking(self, span: int = 1, deadline_ns: int = 0) -> PoolSlot:
        """`acquire_slot` for threads: it blocks the calling one."""
        woken = threading.Event()
        with self._waiter(span, woken.set) as waiter:
            if waiter.first is None:
                woken.wait(_left_s(deadline_ns))
        return self._take(waiter)

    def release_slot(self, slot: PoolSlot) -> None:
        """Return a slot, and end its arrays (`SlotViews`).

        Nothing happens for a subslot, and once the pool is closed.

        Raises:
            RuntimeError: It was released before.
            ValueError: It is another pool's.
        """
        if slot.pool is not self:
            raise ValueError(f"this slot is of the pool {slot.pool.name}, not of {self.name}")
        if slot.waiter is None or self._closed:
            return
        slot.views.end()
        with self._locked():
            self._taken.discard(slot)
            if not self._closed:
                self._wake(self._queue.leave(slot.waiter))

    def close(self) -> None:
        """Remove the memory. Slots in use end, and waiters get a RuntimeError."""
        with self._locked():
            self._closed = True
            slots, self._taken = self._taken, set()
            waiters = list(self._queue.waiting)
        for slot in slots:
            with suppress(RuntimeError):  # another thread has just released it
                slot.views.end()
        for waiter in waiters:
            with suppress(RuntimeError):  # its event loop is closed
                waiter.wake()
        if self._object is not None:
            self._object.close()

    @contextmanager
    def _waiter(self, span: int, wake: Callable[[], object]) -> Iterator[Waiter]:
        """Yield a waiter in the queue, which leaves it if the block is cancelled."""
        if os.getpid() != self._owner:
            raise RuntimeError("this pool is of the process that made it; make one here")
        with self._locked():
            self._check_open()
            waiter = self._queue.enter(span, wake)
        try:
            yield waiter
        except BaseException:
            # The garbage collector closes a coroutine that is no longer awaited, possibly while
            # this thread holds the lock. Then the lock's holder removes the waiter.
            self._leaving.append(waiter)
            self._remove_leaving()
            raise

    def _take(self, waiter: Waiter) -> PoolSlot:
        with self._locked():
            self._check_open()
            if waiter.first is None:
                self._wake(self._queue.leave(waiter))
                raise PoolAcquireTimeout(waiter.span, time.monotonic_ns() - waiter.since_ns)
            size = self.slot_bytes
            views = SlotViews(self._memory)
            slot = PoolSlot(self, views, waiter.first * size, waiter.span * size, waiter)
            self._taken.add(slot)
            return slot

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"the pool {self.name} is closed")

    def _wake(self, served: list[Waiter]) -> None:
        for waiter in served:
            try:
                waiter.wake()
            except RuntimeError:  # its event loop is closed, so it can't take its slots
                served += self._queue.leave(waiter)

    def _remove_leaving(self) -> None:
        while self._leaving and self._lock.acquire(blocking=False):
            try:
                while self._leaving:
                    self._wake(self._queue.leave(self._leaving.popleft()))
            finally:
                self._lock.release()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        finally:
            self._remove_leaving()


def _left_s(deadline_ns: int) -> float | None:
    if not deadline_ns:
        return None
    return max(0.0, min((deadline_ns - time.time_ns()) / 1e9, threading.TIMEOUT_MAX))


def _memory_dtype(given: DTypeLike) -> np.dtype[Any]:
    dtype = np.dtype(given)
    if dtype.hasobject:
        raise ValueError(f"an array of {dtype} has Python objects, which are not in the memory")
    return dtype


def _count(shape: Shape) -> int:
    dimensions = [shape] if isinstance(shape, int) else list(shape)
    if any(each < 0 for each in dimensions):
        raise ValueError(f"the shape {shown(shape)} has a dimension below 0")
    return math.prod(dimensions)


def _address_of(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _hold(memory: mmap.mmap) -> None:
    """Keep the argument alive until this is called."""
