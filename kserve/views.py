"""Arrays over memory that is somebody else's later on."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from .tensors import Array

_NOTHING: Any = (1, (0,), np.dtype("V1"), False, b"")
"""The state of an empty array of no type, as numpy pickles it."""


class Views:
    """Arrays without a copy, which end together.

    Numpy has no way to end an array. So each is given the state of another one: when they have
    ended they are empty, of dtype void, and can't be written, so that their elements raise
    IndexError, arithmetic TypeError, and writing ValueError.

    Views that were made of these arrays (`array[1:]`, `array.reshape(…)`, a tensor of torch) are
    not known here. They go on showing the memory, which stays mapped for as long as the array lives
    that they were made of: to use one then can't crash, but it shows and changes what belongs to
    another by then.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._address = _address_of(np.frombuffer(memory, np.uint8))
        self._alive: weakref.WeakValueDictionary[int, Array] = weakref.WeakValueDictionary()

    def make(self, shape: int | Sequence[int], dtype: np.dtype[Any], offset: int) -> Array:
        """An array over the memory from an offset on."""
        array: Array = np.ndarray(shape, dtype, self._memory, offset)
        self._alive[id(array)] = array
        return array

    def offset_of(self, array: Array) -> int | None:
        """Where in the memory an array begins, a view of one too; None when it does not lie there
        in one piece."""
        offset = _address_of(array) - self._address
        inside = 0 <= offset <= offset + array.nbytes <= len(self._memory)
        return offset if inside and array.flags.c_contiguous else None

    def end(self) -> None:
        """Ends them all. No other thread may be using one."""
        for array in list(self._alive.values()):
            array.__setstate__(_NOTHING)
            array.flags.writeable = False
            # It held the mapping, which views of it still need.
            weakref.finalize(array, _hold, self._memory).atexit = False
        self._alive.clear()


def _address_of(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _hold(memory: mmap.mmap) -> None:
    """Its argument is held until this is called."""
