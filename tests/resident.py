"""The memory of this process."""

from __future__ import annotations

import ctypes
import gc
import os
import re
from pathlib import Path

import pytest
from torch import Tensor

STATM = Path("/proc/self/statm")
_RANGE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")

needs_proc = pytest.mark.skipif(not STATM.exists(), reason="memory is read from /proc")


def resident_bytes() -> int:
    """Without what is free, or the allocator's habits would count (glibc's; others do without)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def resident_bytes_of_file(file: Path) -> int:
    """Bytes of this process's mappings of a file that are in memory."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if _RANGE.match(line):
            inside = line.endswith(str(file))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def asks_for_huge_pages(tensor: Tensor) -> bool:
    """Whether the system knows that the tensor's pages are to be large."""
    address, inside = tensor.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := _RANGE.match(line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return " hg" in line
    raise AssertionError("the tensor is in no memory of this process")
