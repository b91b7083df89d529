"""`nano-inference`, as the program that `commands.Command` runs.

`up` has its fork servers from here: processes that have waited for it since before it began, and
need import nothing. What they do then is done by its own code. That it starts fork servers by
itself is shown by tests/cli/test_children.py and tests/pipeline/test_processes.py.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

from nano_inference.cli.app import main as run_command
from nano_inference.cli.children import MOST_BYTES, ForkServer
from nano_inference.cli.fork_server import serve

SERVERS = 2
"""Number of servers, the same as `up` starts."""


class Waiting:
    """A process that serves once it is told with which variables: as much of a `Popen` as
    `ForkServer` uses, and its connection."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.connection = connection
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def communicate(self) -> None:
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def hand_out(waiting: list[Waiting]) -> None:
    """Has fork servers be these, each once."""
    start = ForkServer._open

    async def open_waiting(self: ForkServer) -> None:
        if not waiting:
            return await start(self)
        one = waiting.pop()
        self._process, self._connection = one, one.connection  # type: ignore[assignment]
        variables = os.environ if self._environment is None else self._environment
        one.connection.send(json.dumps(dict(variables)).encode())
        await self._receive()

    ForkServer._open = open_waiting  # type: ignore[method-assign]


def serve_when_needed(connection: socket.socket) -> list[str] | None:
    """Wait for the environment of a command, then `serve`."""
    variables = connection.recv(MOST_BYTES)
    if not variables:
        return None
    os.environ.clear()
    os.environ.update(json.loads(variables))
    return serve(connection)


def main() -> None:
    arguments: list[str] | None = sys.argv[1:]
    waiting: list[Waiting] = []
    for _ in range(SERVERS if "up" in sys.argv[1:2] else 0):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if pid := os.fork():
            theirs.close()
            waiting.append(Waiting(pid, ours))
            continue
        for connection in (ours, *(each.connection for each in waiting)):
            connection.close()
        os.setsid()
        arguments = serve_when_needed(theirs)
        break
    else:
        hand_out(waiting)
    sys.exit(0 if arguments is None else run_command(arguments))


if __name__ == "__main__":
    main()
