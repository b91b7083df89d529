"""Copies of large pieces of memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .tensors import Array

_PIECE_BYTES = 1 << 20

_FOR_TWO_BYTES = 4 << 20
"""For fewer bytes it is not worth while to wake another thread."""

_helper = ThreadPoolExecutor(1, "kserve-copy")


def copy_by_two(target: Array, source: Array) -> None:
    """Copies bytes from one array `[bytes]` to another of the same length.

    One thread can't fill the memory's bandwidth. So a second one helps with what is large, piece by
    piece, as far as it comes: where it has no time, the caller's copies all of it.
    """
    if len(target) < _FOR_TWO_BYTES:
        np.copyto(target, source)
        return
    pieces = iter(range(0, len(target), _PIECE_BYTES))

    def copy() -> None:
        for at in pieces:
            piece = slice(at, at + _PIECE_BYTES)
            np.copyto(target[piece], source[piece])

    helping = _helper.submit(copy)
    copy()
    if not helping.cancel():
        helping.result()
