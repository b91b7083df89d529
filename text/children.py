"""Programs of this folder that run in child processes, since they must be limited or killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path


def start_child(program: Path, connections: Sequence[Connection]) -> subprocess.Popen[bytes]:
    """Start a program with the descriptors of its ends of connections, which are closed here.

    Raises OSError.
    """
    descriptors = [each.fileno() for each in connections]
    try:
        return subprocess.Popen(
            # -P: the program's folder must not shadow modules.
            [sys.executable, "-P", str(program), *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=descriptors,
            # An interrupt at the terminal is for the service, which closes the connections.
            start_new_session=True,
        )
    finally:
        for each in connections:
            each.close()


def end_child(process: subprocess.Popen[bytes], connections: Sequence[Connection]) -> None:
    """Close our ends of the connections, at which the program's own children end, and kill it."""
    for each in connections:
        each.close()
    process.kill()
    process.wait()
