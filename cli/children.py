"""The processes that `up` starts: as programs of their own, or as forks of one that is warm."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence

import anyio
import anyio.abc

from .fork_server import GO, MOST_BYTES, ROOM
from .watchdog import Watchdog


def python() -> list[str]:
    """Runs a module. Without -P a `redis.py` in the working folder would be taken for redis."""
    return [sys.executable, "-P", "-m"]


_READ_BYTES = 1 << 16
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class Child(ABC):
    """A process of ours.

    Its standard input takes the word to drain. It closes when this process ends in whatever way,
    and the child then leaves. It has a session of its own, for Ctrl-C goes to this process alone,
    which stops the children in order.
    """

    @property
    @abstractmethod
    def pid(self) -> int:
        """The number of the process."""

    @property
    @abstractmethod
    def returncode(self) -> int | None:
        """What it ended with; a signal's number as a negative one, None while it runs."""

    @abstractmethod
    async def tell(self, word: bytes) -> None:
        """Writes to its standard input; what has just ended is told nothing."""

    @abstractmethod
    def output(self) -> AsyncGenerator[bytes, None]:
        """What it writes to standard output and standard error, until both are closed."""

    @abstractmethod
    def send_signal(self, number: signal.Signals) -> None:
        """Sends it a signal, unless it has ended."""

    @abstractmethod
    async def wait(self) -> int:
        """Waits for its end, and returns what it ended with."""


class Spawned(Child):
    """A program that has just been started."""

    def __init__(self, process: anyio.abc.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def tell(self, word: bytes) -> None:
        assert self._process.stdin is not None
        try:
            await self._process.stdin.send(word)
        except anyio.BrokenResourceError:
            return

    async def output(self) -> AsyncGenerator[bytes, None]:
        assert self._process.stdout is not None
        async for chunk in self._process.stdout:
            yield chunk

    def send_signal(self, number: signal.Signals) -> None:
        try:
            self._process.send_signal(number)
        except ProcessLookupError:
            return

    async def wait(self) -> int:
        return await self._process.wait()


async def spawn(command: Sequence[str], environment: Mapping[str, str] | None) -> Spawned:
    """Starts a program with this environment (None: this process's own)."""
    process = await anyio.open_process(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=environment,
    )
    return Spawned(process)


class Forked(Child):
    """A fork of a fork server, which this process has adopted."""

    def __init__(self, pid: int, given: int, output: int) -> None:
        """Args: its number, and our ends of its standard input and of its output."""
        self._pid = pid
        self._given, self._output = given, output
        self._status: int | None = None
        self._open = True
        self._waiting = anyio.Lock()
        # Readable once the process has ended; and no other process can be meant by it.
        self._handle = os.pidfd_open(pid)

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def returncode(self) -> int | None:
        if self._status is None:
            ended = os.waitid(os.P_PIDFD, self._handle, os.WEXITED | os.WNOHANG)
            if ended is not None:
                killed = ended.si_code != os.CLD_EXITED
                self._status = -ended.si_status if killed else ended.si_status
        return self._status

    async def tell(self, word: bytes) -> None:
        if self.returncode is None:
            try:
                os.write(self._given, word)
            except BrokenPipeError:
                return

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
        async with self._waiting:  # only one may wait for a descriptor
            while (status := self.returncode) is None:
                await anyio.wait_readable(self._handle)
            if self._open:
                self._open = False
                os.close(self._handle)
                os.close(self._given)
        return status


class ForkServerLost(Exception):
    """A fork server can't be had, or has ended."""


class ForkServer:
    """Starts our commands as forks of a process that has imported what they need.

    It is started when it is needed first, and again when somebody has ended it.
    """

    def __init__(
        self,
        stages: Sequence[str],
        environment: Mapping[str, str] | None,
        watchdog: Watchdog | None = None,
    ) -> None:
        """Args: what it imports, the environment of all its forks (None: our own), and what ends
        the server when this process is killed."""
        self._stages = stages
        self._watchdog = watchdog
        self._environment = environment
        self._lock = anyio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket

    async def start(self, arguments: Sequence[str]) -> Forked:
        """Runs `nano-inference` with these arguments.

        Raises:
            ForkServerLost: It can't be had.
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
                self.close()  # an answer to nobody may be on its way
                raise

    def close(self) -> None:
        """Ends it; its forks go on."""
        if self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.communicate()  # which closes the pipes
            if self._watchdog is not None:
                self._watchdog.remove(-self._process.pid)
            self._process = None

    def _command(self, connection: int) -> list[str]:
        """The program, which is given its end of the connection."""
        return [*python(), "nano_inference.cli.fork_server", str(connection), *self._stages, ROOM]

    async def _open(self) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            # Asyncio's own would have it watched; it ends unseen, or because we close.
            self._process = subprocess.Popen(  # noqa: ASYNC220
                self._command(number),
                pass_fds=[number],
                # Pipes, as its forks will have: Python's files differ with what they are on.
                # Nobody reads them. Where it fails, a program of its own is started, and tells.
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self._environment,
            )
        if self._watchdog is not None:
            self._watchdog.add(-self._process.pid)
        await self._receive()

    async def _fork(self, arguments: Sequence[str]) -> Forked:
        given_end, given = os.pipe()
        output, output_end = os.pipe()
        try:
            message = json.dumps(list(arguments)).encode()
            adopt_orphans()
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
            # If it has been started after all, it leaves.
            os.close(given)
            os.close(output)
            raise

    async def _receive(self) -> bytes:
        await anyio.wait_readable(self._connection)
        message = self._connection.recv(MOST_BYTES)
        if not message:
            raise ForkServerLost("it has ended")
        return message


def adopt_orphans() -> None:
    """Makes this process the parent of what is forked for it, once who forked it has ended."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "orphans can't be adopted")
