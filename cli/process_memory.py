"""Memory of a process that is ours alone: what it need not look at, and what it gives back."""

from __future__ import annotations

import ctypes
import gc
import time

import anyio

LOOK_S = 3.0

IDLE_SHARE = 0.1
"""Of the time of a core: who uses less is not held up by looking for what is not needed."""

WORTH_S = 0.3
"""So much must a process have worked since the last time for it to be worth the trouble."""


def spare_collector() -> None:
    """What a process has made to start with is there to stay: the garbage collector, which stops
    everything while it looks, need not look at it each time."""
    gc.collect()
    gc.freeze()


async def give_back_forever() -> None:
    """Gives back to the system what a burst of work has left, once the process is idle again.

    Of requests that have ended much stays otherwise: circles wait for the collector, which comes
    when more is made, and the allocator keeps what is free.
    """
    looked_s = used_s = 0.0
    while True:
        await anyio.sleep(LOOK_S)
        before_s, used_s = used_s, time.process_time()
        if used_s - before_s < IDLE_SHARE * LOOK_S and used_s - looked_s >= WORTH_S:
            looked_s = used_s
            gc.collect()
            if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
                trim(0)
