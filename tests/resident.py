"""How much memory this process holds."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

import pytest

STATM = Path("/proc/self/statm")

needs_proc = pytest.mark.skipif(not STATM.exists(), reason="memory is read from /proc")


def resident_bytes() -> int:
    """Without what is free, or the allocator's habits would count (glibc's; others do without)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
