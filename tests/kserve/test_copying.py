"""Two threads copy each byte once; one thread copies alone if the other is busy."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from nano_inference.kserve import shared_memory
from nano_inference.kserve.shared_memory import copy_by_two

SIZES = [0, 1, 1 << 20, (4 << 20) - 1, 4 << 20, (9 << 20) + 12345]


@pytest.mark.parametrize("size", SIZES)
def test_every_byte_is_copied(size: int) -> None:
    source = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    target = np.zeros(size, np.uint8)
    copy_by_two(target, source)
    assert np.array_equal(target, source)


def test_a_busy_helper_is_not_awaited() -> None:
    free = threading.Event()
    busy = shared_memory._copy_helper.submit(free.wait, 30)
    source = np.arange(5 << 20, dtype=np.uint32).view(np.uint8)
    target = np.zeros_like(source)
    copy_by_two(target, source)
    assert not busy.done()
    free.set()
    assert busy.result()
    assert np.array_equal(target, source)


def test_errors_are_raised() -> None:
    source = np.zeros(8 << 20, np.uint8)
    target = np.zeros(8 << 20, np.uint8)
    target.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        copy_by_two(target, source)
