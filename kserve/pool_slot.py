"""A slot of a `BufferPool`, and the arrays that are made in it."""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import DTypeLike

from ..config import shown
from .tensors import Array, SharedMemory, TensorError
from .views import Views

if TYPE_CHECKING:
    from .pool import BufferPool

Shape = int | Sequence[int]

_BYTE: np.dtype[Any] = np.dtype(np.uint8)


class _Life:
    """What a slot and its parts have in common: they end together."""

    __slots__ = ("ended", "lock", "views")

    def __init__(self, memory: mmap.mmap) -> None:
        self.lock = threading.Lock()
        self.views = Views(memory)
        self.ended = False

    @contextmanager
    def open(self) -> Iterator[Views]:
        """Raises RuntimeError when it has ended."""
        with self.lock:
            if self.ended:
                raise RuntimeError("this slot was released before; acquire another one")
            yield self.views

    def end(self) -> None:
        """Raises RuntimeError when it has ended before."""
        with self.open() as views:
            self.ended = True
            views.end()


class PoolSlot:
    """A part of a pool's memory that is its owner's alone until it is released.

    At the end of a `with` block it is released, if it has not been by then. It reads and writes as
    a `TensorMemory` of the pool's region, within its own bounds.

    Attributes:
        pool: Whose it is.
        offset: Where it begins in the pool, in bytes.
        n_bytes: How large it is.
        first: Its first slot of the pool; None for a part of a slot.
        span: How many slots it has.
    """

    def __init__(
        self, pool: BufferPool, life: _Life, offset: int, n_bytes: int, first: int | None, span: int
    ) -> None:
        self.pool, self.offset, self.n_bytes = pool, offset, n_bytes
        self.first, self.span = first, span
        self._life = life
        self._cursor = offset

    @classmethod
    def taken(cls, pool: BufferPool, memory: mmap.mmap, first: int, span: int) -> PoolSlot:
        """One that has just been taken from a pool."""
        size = pool.slot_bytes
        return cls(pool, _Life(memory), first * size, span * size, first, span)

    def __enter__(self) -> PoolSlot:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self.is_released:
            self.pool.release_slot(self)

    @property
    def is_released(self) -> bool:
        """Whether it, or what it is a part of, was given back."""
        return self._life.ended

    @overload
    def scratch(self, shape: Shape, dtype: DTypeLike) -> Array: ...

    @overload
    def scratch(self, shape: list[tuple[Shape, DTypeLike]]) -> list[Array]: ...

    def scratch(
        self, shape: Shape | list[tuple[Shape, DTypeLike]], dtype: DTypeLike | None = None
    ) -> Array | list[Array]:
        """Makes arrays over the slot's memory, behind those made before; nothing is copied.

        They begin where their dtype may, have anything in them, and end with the slot: `Views` says
        what becomes of them.

        Args:
            shape: Of one array; or pairs of shape and dtype, for a list of arrays. All of these are
                made, or none.
            dtype: Of the one; any but of Python objects.

        Raises:
            ValueError: They don't fit into what is left of the slot, or can't be in memory.
            RuntimeError: The slot was released.
        """
        if dtype is not None:
            return self._carve([(shape, dtype)])[0]  # type: ignore[list-item]  # it is one shape
        return self._carve(shape)  # type: ignore[arg-type]  # these are pairs

    def subslot(self, n_bytes: int) -> PoolSlot:
        """A part of what is left of the slot, in which arrays can be made apart.

        It ends with the slot; to release it does nothing. Raises as `scratch`.
        """
        with self._life.open():
            start = self._cursor
            if n_bytes < 0:
                raise ValueError(f"a part of {shown(n_bytes)} bytes is none")
            self._advance(start + n_bytes)
        return PoolSlot(self.pool, self._life, start, n_bytes, None, 0)

    def offset_of(self, array: Array) -> int | None:
        """Where in the pool an array begins that lies in this slot, in one piece; else None.

        Raises RuntimeError when the slot was released.
        """
        with self._life.open() as views:
            offset = views.offset_of(array)
        if offset is None or not self._has(offset, array.nbytes):
            return None
        return offset

    def read(self, place: SharedMemory) -> Array:
        """What is there, as uint8 `[byte_size]`: read-only, not copied, and ended with the slot.

        Raises:
            TensorError: The place is not within the slot.
            RuntimeError: The slot was released.
        """
        array = self._view(place)
        array.flags.writeable = False
        return array

    def array_at(self, place: SharedMemory, shape: Shape, dtype: DTypeLike) -> Array:
        """An array over the beginning of a place: not copied, and ended with the slot.

        Raises as `read`, and ValueError when it does not fit.
        """
        found = _memory_dtype(dtype)
        if _count(shape) * found.itemsize > place.byte_size:
            raise ValueError(f"an array of {found} {shown(shape)} has more bytes than its place")
        return self._view(place, shape, found)

    def write(self, place: SharedMemory, data: bytes | memoryview | Array) -> None:
        """Puts bytes at the beginning of a place. Raises as `read`."""
        given: Array = np.frombuffer(data, np.uint8)
        if len(given) > place.byte_size:
            raise TensorError(
                f"{len(given)} bytes are to be put into {shown(place.byte_size)} of a slot"
            )
        self._view(place)[: len(given)] = given

    def end(self) -> None:
        """Ends its arrays and those of its parts; for its pool. Raises RuntimeError the second
        time."""
        self._life.end()

    def _carve(self, wanted: Sequence[tuple[Shape, DTypeLike]]) -> list[Array]:
        found = [(shape, _memory_dtype(dtype)) for shape, dtype in wanted]
        with self._life.open() as views:
            places, end = [], self._cursor
            for shape, dtype in found:
                start = -(-end // dtype.alignment) * dtype.alignment
                places.append(start)
                end = start + _count(shape) * dtype.itemsize
            self._advance(end)
            return [
                views.make(shape, dtype, place)
                for (shape, dtype), place in zip(found, places, strict=True)
            ]

    def _advance(self, end: int) -> None:
        last = self.offset + self.n_bytes
        if end > last:
            raise ValueError(
                f"{end - self._cursor} bytes are wanted of a slot that has {last - self._cursor} "
                "left; acquire more slots at once (span), or a pool with larger ones"
            )
        self._cursor = end

    def _view(
        self, place: SharedMemory, shape: Shape | None = None, dtype: np.dtype[Any] = _BYTE
    ) -> Array:
        """An array over a place, or over all of it as bytes. Raises as `read`."""
        if place.region != self.pool.name or not self._has(place.offset, place.byte_size):
            raise TensorError(
                f"{shown(place.byte_size)} bytes at {shown(place.offset)} of the region "
                f"{shown(place.region)} are not within the slot, which has {self.n_bytes} at "
                f"{self.offset} of {self.pool.name}"
            )
        with self._life.open() as views:
            return views.make(place.byte_size if shape is None else shape, dtype, place.offset)

    def _has(self, offset: int, n_bytes: int) -> bool:
        return self.offset <= offset <= offset + n_bytes <= self.offset + self.n_bytes


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
