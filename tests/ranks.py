"""The process that starts ranks, without the seconds that importing torch takes.

It is a fork of the tests' fork server (`programs`). In programs of their own ranks start as they do
for users.
"""

from __future__ import annotations

import atexit
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nano_inference.stages.executor.runner.ranks import processes

from .programs import LIMIT_S, Program

SERVER = Path(__file__).with_name("rank_server.py")


class ForkedServer(processes._ForkServer):
    """A fork server like its base, from another parent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(LIMIT_S)
        with theirs:
            process = Program(SERVER, connection=(self._connection, theirs))
        self._process = process  # type: ignore[assignment]
        atexit.register(process.kill)


@contextmanager
def forked_rank_servers() -> Iterator[None]:
    """Meanwhile ranks of this process have such a parent."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "_ForkServer", ForkedServer)
        yield
