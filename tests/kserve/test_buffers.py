"""Buffers are reused once no view of them is left, within limits."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nano_inference.config import RequestError
from nano_inference.kserve.shared_memory import WarmBuffers

SIZE = 256 << 10


def test_memory_is_reused() -> None:
    buffers = WarmBuffers()
    first = buffers.take(SIZE)
    address = first.ctypes.data
    del first
    assert buffers.idle_bytes == SIZE
    again = buffers.take(SIZE - 100)
    assert again.ctypes.data == address
    assert again.shape == (SIZE - 100,)
    assert buffers.idle_bytes == 0


@pytest.mark.parametrize(
    "look",
    [
        lambda array: array[5:],
        lambda array: array[8:16].view(np.float32).reshape(2, 1),
        lambda array: memoryview(array)[7:],
        lambda array: np.frombuffer(array.data, np.int64),
    ],
)
def test_memory_with_a_live_view_is_not_reused(look: Callable[[Any], Any]) -> None:
    buffers = WarmBuffers()
    first = buffers.take(SIZE)
    first[:] = 7
    view = look(first)
    del first
    buffers.take(SIZE)[:] = 1
    assert set(bytes(view)) == {7}
    assert buffers.idle_bytes == SIZE, "the second one's alone"
    del view
    assert buffers.idle_bytes == 2 * SIZE


def test_no_more_is_kept_than_allowed() -> None:
    buffers = WarmBuffers(max_idle_bytes=3 * SIZE)
    taken = [buffers.take(SIZE) for _ in range(5)]
    taken.append(buffers.take(4 * SIZE))
    taken.clear()
    assert buffers.idle_bytes == 3 * SIZE


def test_small_buffers_are_not_kept() -> None:
    buffers = WarmBuffers()
    assert [buffers.take(size).shape for size in (0, 1, 1000)] == [(0,), (1,), (1000,)]
    assert (buffers.idle_bytes, buffers.used_bytes) == (0, 0)


def test_no_more_is_in_use_than_allowed() -> None:
    buffers = WarmBuffers(max_used_bytes=SIZE + 100)
    large, small = buffers.take(SIZE), buffers.take(100)
    view = large[5:]
    del large
    for size in (1, SIZE, 10**15):
        with pytest.raises(RequestError, match="leaves no room") as caught:
            buffers.take(size)
        assert caught.value.code == "overloaded"
    assert buffers.used_bytes == SIZE + 100
    del small
    buffers.take(100)
    del view
    assert buffers.used_bytes == 0
    buffers.take(SIZE)


def test_the_garbage_collector_may_run_during_take() -> None:
    """Which is on the same thread, so that to wait for the lock would be for ever."""
    buffers = WarmBuffers()
    circle: list[object] = [buffers.take(SIZE)]
    circle.append(circle)
    gone = weakref.ref(circle[0])
    del circle
    with buffers._lock:
        gc.collect()
        assert gone() is None
    assert (buffers.idle_bytes, buffers.used_bytes) == (SIZE, 0)


def test_an_impossible_size_is_a_memory_error() -> None:
    buffers = WarmBuffers()
    with pytest.raises(MemoryError, match="not available"):
        buffers.take(1 << 61)
    assert buffers.used_bytes == 0
