"""Starts and stops trainers that are programs."""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import TracebackType

from safetensors.torch import load_file
from torch import Tensor

from nano_inference.bus.weights import GroupWeights
from nano_inference.cli.children import adopt_orphans
from nano_inference.cli.fork_server import MOST_BYTES, READY
from nano_inference.stages.executor.weights.transports.layout import meta_of

LIMIT_S = 120.0


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@cache
def _fork_server() -> socket.socket:
    """Of `peer.py`, for as long as this process lives."""
    connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        program = Path(__file__).with_name("peer.py")
        process = subprocess.Popen(
            [sys.executable, str(program), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Numpy's threads, as in the fork server of `up`.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
    atexit.register(process.kill)
    connection.settimeout(LIMIT_S)
    assert connection.recv(MOST_BYTES) == READY
    return connection


class Peer:
    """`peer.py`, rank 0 of a group, which is killed at the end of the block."""

    def __init__(self, group: str = "weights", world_size: int = 2) -> None:
        self.group = group
        self.address = free_address()
        server = _fork_server()
        adopt_orphans()
        (given, stdin), (stdout, output) = os.pipe(), os.pipe()
        message = json.dumps([self.address, str(world_size), group]).encode()
        socket.send_fds(server, [message], [given, output])
        os.close(given)
        os.close(output)
        self._pid = int(server.recv(MOST_BYTES))
        self._stdin, self._stdout = open(stdin, "w"), open(stdout)  # noqa: SIM115
        self._alive = True

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    def tell(self, command: str, file: Path) -> None:
        self._stdin.write(f"{command} {file}\n")
        self._stdin.flush()

    def hear(self) -> str:
        """The next thing it has done."""
        return self._stdout.readline().strip()

    def source(self, file: Path) -> GroupWeights:
        """What is to be said of a file that it sends."""
        return described(self.group, load_file(file))

    def hang(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def kill(self) -> None:
        if self._alive:
            self._alive = False
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._stdin.close()
            self._stdout.close()


def described(group: str, tensors: Mapping[str, Tensor]) -> GroupWeights:
    """What a trainer like slime says of the tensors that it broadcasts one by one."""
    return GroupWeights(group, tuple(meta_of(name, each) for name, each in sorted(tensors.items())))
