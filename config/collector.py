"""Python's cyclic garbage collector while much is loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_MANY = 50_000
"""Objects made in a pause, from which on it matters that the collector visits them."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector. Imports and loading make millions of objects that stay. Visiting them
    again and again takes a fifth of the time of importing torch and Transformers, and a third of
    the time to load a model of a gigabyte and its tokenizer.

    If two threads load at once, the first that ends resumes it.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        # What is frozen would be thawed; counting it visits all of it.
        if gc.get_count()[0] > _MANY and not gc.get_freeze_count():
            # Into the oldest generation, or the next collection would visit all of them (0.16 s).
            gc.freeze()
            gc.unfreeze()
        gc.enable()
