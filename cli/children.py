"""The processes that `up` starts: as forks of a warm process, or as programs of their own."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

import anyio
import anyio.abc
import msgspec

from ..config import EngineConfig, split_role

READY = b"ready"
"""Sent once by a fork server, when everything is imported."""

GO = b"\n"
"""Sent to a fork once the watchdog has its id: no fork runs whose parent was killed before."""

MOST_BYTES = 1 << 16
"""Size of a message."""

ROOM = " " * 512
"""The fork server's last argument, which the longer command lines of forks overwrite."""

GRACE_S = 0.5
"""Time for processes to exit in order, once the process that started them was killed."""

_READ_BYTES = 1 << 16
_PIPES: dict[str, Any] = {
    **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT},
    "start_new_session": True,  # without Ctrl-C of the terminal
}
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h

# The shell waits for the end of a pipe that only its parent holds open; until then the parent sends
# what to kill. It kills even processes in one long call, such as loading a model.
_WATCHDOG = """
targets=' '
while read -r word target; do
    case $word in
        +) targets="$targets$target " ;;
        -) targets="${targets%%" $target "*} ${targets#*" $target "}" ;;
    esac
done
sleep "$0"
for target in $targets; do kill -s KILL -- "$target"; done
"""


def python() -> list[str]:
    """Return a command that runs a module. -P: a `redis.py` in the working folder is ignored."""
    return [sys.executable, "-P", "-m"]


class Watchdog:
    """A shell that kills its targets once this process has ended, even by SIGKILL."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        """`grace_s`: from the end of this process to the kill."""
        self._grace_s = grace_s
        self._targets: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def add(self, target: int) -> None:
        """Add a process, or with a negative number its process group."""
        if target not in self._targets:
            self._targets.add(target)
            self._send("+", target)

    def remove(self, target: int) -> None:
        """Remove a target that has ended: its number may be used again."""
        if target in self._targets and self._process is not None:
            self._targets.remove(target)
            self._send("-", target)

    def close(self) -> None:
        """End the shell, without killing targets."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _send(self, word: str, target: int) -> None:
        if self._process is None:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _WATCHDOG, str(self._grace_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,  # without Ctrl-C of the terminal
            )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the shell was killed
            self._process.stdin.write(f"{word} {target}\n".encode())


class Spawned:
    """A child that was started as a program of its own.

    Children drain when they read `DRAIN` on standard input, and exit when it closes, that is when
    this process ends. They have sessions of their own, so that Ctrl-C stops this process alone,
    which stops the children in order.
    """

    def __init__(self, process: anyio.abc.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, or a signal's negative number; None while it runs."""
        return self._process.returncode

    async def tell(self, word: bytes) -> None:
        """Write to its standard input, unless it has ended."""
        assert self._process.stdin is not None
        with suppress(anyio.BrokenResourceError):
            await self._process.stdin.send(word)

    async def output(self) -> AsyncGenerator[bytes, None]:
        """Yield standard output and standard error, until both are closed."""
        assert self._process.stdout is not None
        async for chunk in self._process.stdout:
            yield chunk

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def wait(self) -> int:
        """Wait for its end, and return `returncode`."""
        return await self._process.wait()


async def spawn(command: Sequence[str], environment: Mapping[str, str] | None) -> Spawned:
    """Start a program with this environment (None: this process's)."""
    return Spawned(await anyio.open_process(command, env=environment, **_PIPES))


class Forked:
    """A fork of a fork server, and a child of this process. See `Spawned`."""

    def __init__(self, pid: int, given: int, output: int) -> None:
        """Args: its process id, our ends of its standard input and of its output."""
        self.pid = pid
        self._given, self._output = given, output
        self._status: int | None = None
        self._open = True
        self._waiting = anyio.Lock()
        # Readable once the process has ended, and never refers to another process.
        self._handle = os.pidfd_open(pid)

    @property
    def returncode(self) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    async def tell(self, word: bytes) -> None:
        if self.returncode is None:
            with suppress(BrokenPipeError):
                os.write(self._given, word)

    async def output(self) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                await anyio.wait_readable(self._output)
                chunk = os.read(self._output, _READ_BYTES)
                if not chunk:
                    return
                yield chunk
        finally:
            os.close(self._output)

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._handle, number)

    async def wait(self) -> int:
        async with self._waiting:  # only one task may wait for a descriptor
            while (status := self.returncode) is None:
                await anyio.wait_readable(self._handle)
            if self._open:
                self._open = False
                os.close(self._handle)
                os.close(self._given)
        return status


Child = Spawned | Forked


class ForkServerLost(Exception):
    """A fork server can't be started, or has ended."""


class ForkServer:
    """Starts commands as forks of a process that has imported what they need.

    The server is started at first use, and again if it was killed.
    """

    def __init__(
        self,
        stages: Sequence[str],
        environment: Mapping[str, str] | None,
        watchdog: Watchdog | None = None,
        engine: EngineConfig | None = None,
    ) -> None:
        """Args: its imports, the environment of all its forks (None: ours), the watchdog, and the
        settings of the model that it loads."""
        self._stages = stages
        self._engine = msgspec.json.encode(engine)
        self._watchdog = watchdog
        self._environment = environment
        self._lock = anyio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket

    async def start(self, arguments: Sequence[str]) -> Forked:
        """Run `nano-inference` with these arguments.

        Raises:
            ForkServerLost: There is no server.
        """
        async with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self.close()
            try:
                if self._process is None:
                    await self._open()
                return await self._fork(arguments)
            except OSError as error:
                self.close()
                raise ForkServerLost(str(error)) from None
            except BaseException:
                self.close()  # an unread answer may be on its way
                raise

    def close(self) -> None:
        """End the server; its forks keep running."""
        if self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.communicate()  # closes the pipes
            if self._watchdog is not None:
                self._watchdog.remove(-self._process.pid)
            self._process = None

    async def _open(self) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        module = "nano_inference.cli.fork_server"
        with theirs:
            number = theirs.fileno()
            # Not asyncio's subprocess: it would watch the process.
            self._process = subprocess.Popen(  # noqa: ASYNC220
                [*python(), module, str(number), *self._stages, ROOM],
                pass_fds=[number],
                env=self._environment,
                # As its forks have: Python's files depend on their kind. They are not read: if the
                # server fails, the command is spawned, and prints the error.
                **_PIPES,
            )
        if self._watchdog is not None:
            self._watchdog.add(-self._process.pid)
        # Not on the command line, which every user can read: `engine.kv_secret` is a setting too.
        self._connection.send(self._engine)
        await self._receive()

    async def _fork(self, arguments: Sequence[str]) -> Forked:
        given_end, given = os.pipe()
        output, output_end = os.pipe()
        try:
            message = json.dumps(list(arguments)).encode()
            with adopting_orphans():
                try:
                    socket.send_fds(self._connection, [message], [given_end, output_end])
                finally:
                    os.close(given_end)
                    os.close(output_end)
                child = Forked(int(await self._receive()), given, output)
            if self._watchdog is not None:
                self._watchdog.add(-child.pid)
            await child.tell(GO)
            return child
        except BaseException:
            # A fork that was started after all exits.
            os.close(given)
            os.close(output)
            raise

    async def _receive(self) -> bytes:
        await anyio.wait_readable(self._connection)
        message = self._connection.recv(MOST_BYTES)
        if not message:
            raise ForkServerLost("it has ended")
        return message


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Within the block this process becomes the parent of descendants whose parent ends.

    Not for longer, since it reaps only forks: processes that a killed child has started, such as
    the ranks of a model, are left to the init process.
    """
    _adopt(1)
    try:
        yield
    finally:
        _adopt(-1)


_adopting = 0
"""Open blocks of `adopting_orphans`: two fork servers may fork at a time."""

_adopting_lock = threading.Lock()


def _adopt(change: int) -> None:
    global _adopting
    with _adopting_lock:
        _adopting += change
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, _adopting > 0, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


class Forks:
    """Starts children by their roles. Executors have a fork server of their own, since only they
    import torch."""

    def __init__(
        self,
        roles: Iterable[str],
        start_method: Literal["forkserver", "spawn"],
        environment: Mapping[str, str] | None,
        say: Callable[[str], None],
        engine: EngineConfig | None = None,
    ) -> None:
        """Args: all roles, how to start them, their environment (None: ours), a printer, and the
        settings of the model whose weights all executors share."""
        self._environment = environment
        self._say = say
        self._servers: dict[str, ForkServer] = {}
        # Each child has a session, and so a process group, with all processes that it starts.
        self._watchdog = Watchdog()
        if start_method == "spawn" or sys.platform != "linux":
            return
        stages = dict.fromkeys(split_role(role)[0] for role in roles)
        alone = ForkServer(("executor",), environment, self._watchdog, engine)
        others = [stage for stage in stages if stage != "executor"]
        together = ForkServer(others, environment, self._watchdog)
        self._servers = {stage: alone if stage == "executor" else together for stage in stages}

    async def start(self, role: str, arguments: Sequence[str]) -> Child:
        """Run `nano-inference` with these arguments, for this role."""
        if server := self._servers.get(split_role(role)[0]):
            try:
                return await server.start(arguments)
            except ForkServerLost as error:
                self._say(f"{role} can't be forked ({error}); starting it as a program of its own")
        child = await spawn([*python(), "nano_inference", *arguments], self._environment)
        self._watchdog.add(-child.pid)
        return child

    def ended(self, child: Child) -> None:
        """Forget a child that has ended."""
        self._watchdog.remove(-child.pid)

    def close(self) -> None:
        """End the fork servers; children keep running."""
        for server in self._servers.values():
            server.close()
        self._watchdog.close()
