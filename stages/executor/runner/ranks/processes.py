"""Rank 0's side: the processes of the other ranks, and the commands to them."""

from __future__ import annotations

import atexit
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import msgspec

from .....config import EngineConfig, ModelError
from .....config.collector import collector_paused
from .calls import Calls
from .commands import Command, Load, Reply, Report, encode
from .group import RankGroup
from .groups import GroupMemories
from .rank_error import RankError

LOAD_TIMEOUT_S = 1800.0
"""For ranks that wait for another one to read its shard, or to check what it has loaded."""

_START_TIMEOUT_S = 120.0
"""For the process that starts ranks, which imports torch first."""

_RANK_WORKER = f"""
from {collector_paused.__module__} import collector_paused
with collector_paused():
    from {__package__.rpartition(".")[0]} import rank_worker
rank_worker.main()
"""

_PARTING_S = 1.0
"""For other ranks to end by themselves."""

_POLL_S = 0.05


class RankProcess:
    """A rank's process.

    Attributes:
        pid: Its number.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        # Readable when the process has ended; and no other process can be meant by it.
        self._handle = os.pidfd_open(pid)

    @property
    def has_ended(self) -> bool:
        """Whether it has."""
        return self.wait(0)

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; return whether it has ended."""
        ready = select.poll()
        ready.register(self._handle, select.POLLIN)
        return bool(ready.poll(timeout_s * 1000))

    def kill(self) -> None:
        """End it, at once; the object is unusable then."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        self.wait(_PARTING_S)
        os.close(self._handle)


class _ForkServer:
    """A process that has imported the model runner, and forks ranks: a rank that is started again
    after a failure is there in a fraction of a second. It ends with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # -P: a module of the working folder must not shadow others.
            command = [sys.executable, "-P", "-c", _RANK_WORKER, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # An interrupt at the terminal is for this process, which ends the others.
                start_new_session=True,
            )
        self._connection.settimeout(_START_TIMEOUT_S)
        atexit.register(self._process.kill)

    def fork(
        self, rank: int, connections: Sequence[Connection], memories: Sequence[int]
    ) -> RankProcess:
        """Start a rank with these descriptors.

        Raises:
            OSError: It can't be started.
        """
        with self._lock:
            message = [str(rank).encode()]
            files = [*(each.fileno() for each in connections), *memories]
            socket.send_fds(self._connection, message, files)
            answer = self._connection.recv(64)
        if not answer:
            status = self._process.wait()
            _fork_server.cache_clear()
            raise OSError(f"the process that starts ranks has ended with status {status}")
        return RankProcess(int(answer))


@cache
def _fork_server(process: int) -> _ForkServer:
    """`process`: the number of this process; a fork of it needs a server of its own."""
    return _ForkServer()


class Ranks:
    """The other ranks of a model, as child processes, seen from rank 0.

    A rank ends when its connection closes, so none outlives this process. After a RankError every
    rank has to be started anew.

    Attributes:
        groups: Exchange between ranks while they compute.
        calls: Other operations of the ranks.
        size: The number of ranks, this one included.
    """

    def __init__(self, config: EngineConfig, threads: int) -> None:
        """Start the processes, and have them load their shards.

        Args:
            config: The settings.
            threads: Threads of a step, for each rank.
        """
        self.size = config.num_ranks
        self._timeout_s = config.rank_timeout_s
        self._processes: list[RankProcess] = []
        self._connections: list[Connection] = []
        beside: list[Connection] = []
        self._failure = ""
        memories = GroupMemories(config)
        self.groups = memories.groups
        self.groups.set_timeout(LOAD_TIMEOUT_S)
        try:
            try:
                ranks = range(1, self.size)
                beside.extend(self._start(rank, memories.of(rank)) for rank in ranks)
            finally:
                self.calls = Calls(beside, self.check, self._failed, self._timeout_s)
                memories.close_descriptors()
            self.tell(Load(config, threads))
        except BaseException:
            self.close()
            raise

    @property
    def group(self) -> RankGroup:
        """All ranks."""
        return self.groups.all

    def _start(self, rank: int, memories: Sequence[int]) -> Connection:
        """Start a rank; return its connection for calls."""
        (ours, theirs), (beside, their_beside) = Pipe(), Pipe()
        with theirs, their_beside:
            try:
                process = _fork_server(os.getpid()).fork(rank, [theirs, their_beside], memories)
            except OSError as error:
                beside.close()
                raise RankError(f"rank {rank} can't be started: {error}") from None
        self._processes.append(process)
        self._connections.append(ours)
        # A stopped rank must not stop this one when its buffer is full.
        for each in (ours, beside):
            with socket.socket(fileno=os.dup(each.fileno())) as connection:
                seconds = struct.pack("ll", max(int(self._timeout_s), 1), 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        return beside

    @property
    def pids(self) -> list[int]:
        """The processes of the other ranks, in their order."""
        return [process.pid for process in self._processes]

    def tell(self, command: Command) -> None:
        """Send the other ranks a command, which they run after all earlier ones.

        Raises:
            RankError: A rank has failed.
        """
        message = encode(command)
        self.check()
        self.calls.flush()
        for rank, connection in enumerate(self._connections, 1):
            try:
                connection.send_bytes(message)
            except OSError as error:
                raise self._failed(f"rank {rank} can't be reached: {error}") from None

    def ask(self, command: Command, timeout_s: float | None = None) -> list[Reply]:
        """`tell`, and wait for the replies, in the order of ranks.

        Raises:
            RankError: A rank has failed, or doesn't reply in time.
        """
        self.tell(command)
        return self.replies(timeout_s)

    def replies(self, timeout_s: float | None = None) -> list[Reply]:
        """Wait for a reply of each of the other ranks. Raises as `ask`."""
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        found: list[Reply] = []
        for rank, connection in enumerate(self._connections, 1):
            while not connection.poll(_POLL_S):
                self.check()
                if time.monotonic() > deadline:
                    raise self._failed(f"rank {rank} does not answer")
            try:
                found.append(msgspec.msgpack.decode(connection.recv_bytes(), type=Reply))
            except (OSError, EOFError) as error:
                raise self._failed(f"rank {rank} has ended: {error}") from None
        return found

    def loaded(self) -> None:
        """Wait until the other ranks have loaded their shards.

        Raises:
            ModelError: One of them can't.
            RankError: As `ask`.
        """
        _check(self.replies(LOAD_TIMEOUT_S))

    def prepared(self) -> str:
        """Wait until they can run steps; return why one is not deterministic, "" if all are.

        Raises as `loaded`.
        """
        replies = self.replies(LOAD_TIMEOUT_S)
        _check(replies)
        self.groups.set_timeout(self._timeout_s)
        reasons = (each.not_deterministic for each in replies)
        return next(filter(None, reasons), "")

    def why(self, error: RankError) -> Exception:
        """Return what is behind an error while models are loaded: the ModelError of another rank,
        if it is one, and else the error."""
        with suppress(RankError):
            self._failure = ""
            _check(self.replies(_PARTING_S))
        return error

    def report(self) -> list[Reply]:
        """Return the resource use of the other ranks. Raises as `ask`."""
        return self.ask(Report())

    def check(self) -> None:
        """Raises RankError if a process has ended, or the group has failed. From any thread."""
        for rank, process in enumerate(self._processes, 1):
            if process.has_ended:
                raise self._failed(f"rank {rank} has ended")
        if self._failure:
            raise RankError(self._failure)

    def _failed(self, reason: str) -> RankError:
        self._failure = self._failure or reason
        self.groups.fail(reason)
        return RankError(self._failure)

    def close(self) -> None:
        """End the other ranks."""
        for connection in self._connections:
            connection.close()
        self.calls.close()
        deadline = time.monotonic() + _PARTING_S
        for process in self._processes:
            process.wait(max(deadline - time.monotonic(), 0))
            process.kill()
        self.groups.close()


def _check(replies: Sequence[Reply]) -> None:
    """Raises ModelError for the first error."""
    for rank, reply in enumerate(replies, 1):
        if reply.error:
            raise ModelError(f"{reply.error} (rank {rank})", code=reply.code)
