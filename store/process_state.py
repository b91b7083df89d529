"""Whether a process of this machine runs, as the kernel tells it.

A heartbeat that is late can't tell a process that was stopped or killed from one that is busy. The
kernel can, at once, for processes of the reader's own machine and PID namespace.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Literal

ProcessState = Literal["unknown", "running", "stopped", "gone"]
"""`stopped`: by SIGSTOP, or Ctrl-Z in its shell. `unknown`: of another machine or container."""

_PROC = Path("/proc")


def identity_of(pid: int) -> str:
    """What no other process has that ever was; "" where the kernel doesn't tell it.

    Its parts: the machine's boot, the PID namespace, and when the process started, since PIDs are
    used again.
    """
    machine, started = _machine(), _stat(pid)[1]
    return f"{machine}/{started}" if machine and started else ""


def state_of(pid: int, process: str) -> ProcessState:
    """How a process is now.

    Args:
        pid: Its PID, in its own namespace.
        process: What `identity_of` returned there.
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
    """A process's state and start, as /proc/PID/stat has them; empty where it can't be read."""
    try:
        # The name, in parentheses, may hold anything.
        fields = (_PROC / f"{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""


def _exists(pid: int) -> bool:
    """Whether there is such a process, also where /proc hides those of other users."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True
