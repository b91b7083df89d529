"""State of a process on this machine, from the kernel.

A late heartbeat doesn't distinguish a stopped or killed process from a busy one. The kernel does,
at once, for processes of the reader's own machine and PID namespace.
"""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path
from typing import Literal

ProcessState = Literal["unknown", "running", "stopped", "gone"]
"""`stopped`: by SIGSTOP or Ctrl-Z. `unknown`: on another machine or in another container."""

_PROC = Path("/proc")


def identity_of(pid: int) -> str:
    """Return a globally unique identity of a process; "" where the kernel hides it.

    Made of the machine's boot id, the PID namespace and the start time, since PIDs are reused.
    """
    machine, started = _machine(), _stat(pid)[1]
    return f"{machine}/{started}" if machine and started else ""


class ProcessUse:
    """Processor time and memory of this process."""

    _LEAST_S = 0.5

    def __init__(self) -> None:
        self._cpu = 0.0
        self._seen = time.monotonic(), time.process_time()

    def read(self) -> tuple[float, int]:
        """Return the cores in use, over the half second before or longer, and resident bytes."""
        seen = time.monotonic(), time.process_time()
        passed_s, used_s = (now - before for now, before in zip(seen, self._seen, strict=True))
        if passed_s >= self._LEAST_S:
            self._cpu, self._seen = used_s / passed_s, seen
        try:
            pages = int((_PROC / "self/statm").read_bytes().split()[1])
        except (OSError, IndexError):
            pages = 0
        return round(self._cpu, 2), pages * os.sysconf("SC_PAGE_SIZE")


def state_of(pid: int, process: str) -> ProcessState:
    """Return the process's state.

    Args:
        pid: Its PID, in its own namespace.
        process: `identity_of` the process, computed there.
    """
    machine, _, started = process.rpartition("/")
    if not machine or machine != _machine():
        return "unknown"
    state, started_here = _stat(pid)
    if not state:
        return "unknown" if _exists(pid) else "gone"
    if started_here != started or state in "ZX":
        return "gone"
    return "stopped" if state == "T" else "running"


@cache
def _machine() -> str:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{(_PROC / 'self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, str]:
    """Return a process's state and start time from /proc/PID/stat; empty where it can't be read."""
    try:
        # The name, in parentheses, may contain any character.
        fields = (_PROC / f"{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""


def _exists(pid: int) -> bool:
    """Return whether the process exists, even where /proc hides other users' processes."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True
