"""Memory of a process that is ours alone: what it need not look at, and what it gives back."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from pathlib import Path

import anyio

LOOK_S = 3.0

IDLE_SHARE = 0.1
"""Of the time of a core: who uses less is not held up by looking for what is not needed."""

WORTH_BYTES = 8 << 20
"""How much more than after the last time a process must hold for it to be worth the trouble."""

_STATM = Path("/proc/self/statm")
_KNOWS_ITSELF = _STATM.exists()


def spare_collector() -> None:
    """What a process has made to start with is there to stay: the garbage collector, which stops
    everything while it looks, need not look at it each time."""
    gc.collect()
    gc.freeze()


async def give_back_forever() -> None:
    """Gives back to the system what a burst of work has left, once the process is idle again.

    Of requests that have ended much stays otherwise: circles wait for the collector, which comes
    when more is made, and the allocator keeps what is free. Linux only; elsewhere it does nothing.
    """
    held, used_s = 0, time.process_time()
    while _KNOWS_ITSELF:
        await anyio.sleep(LOOK_S)
        before_s, used_s = used_s, time.process_time()
        if used_s - before_s < IDLE_SHARE * LOOK_S and _resident_bytes() >= held + WORTH_BYTES:
            gc.collect()
            if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
                trim(0)
            held = _resident_bytes()


def _resident_bytes() -> int:
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
