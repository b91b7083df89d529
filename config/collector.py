"""Python's cyclic garbage collector while much is loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector. Loading makes millions of objects that stay, and the collector would
    visit them again and again: a third of the time to load a model of a gigabyte and its tokenizer.

    If two threads load at once, the first that ends resumes it.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
