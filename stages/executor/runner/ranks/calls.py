"""Calls from rank 0 to the other ranks beside their commands: about groups of trainers, while steps
are computed."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait

import msgspec

from .....bus.control import JoinWeightsGroup
from .....bus.weights import GroupWeights
from .rank_error import RankError

_POLL_S = 0.05


class Call(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One thing to do. Ranks begin calls in order, and reply when one has ended."""


class JoinGroup(Call, frozen=True):
    """Join a group. `wish`: that of rank 0, whose rank is the first of the model's."""

    wish: JoinWeightsGroup


class LeaveGroup(Call, frozen=True):
    """Leave a group, or cancel its join. Not replied to."""

    group: str


class ReceiveParts(Call, frozen=True):
    """Receive a broadcast, and hold this rank's parts of the tensors.

    Attributes:
        receipt: The number under which they are held.
        source: As in `UpdateWeights`, as the next one.
        timeout_s: Longest silence of the group.
        most_tensors: `WeightLimits`, as the next one.
        most_bytes: Limit of bytes of all tensors.
    """

    receipt: int
    source: GroupWeights
    timeout_s: float
    most_tensors: int
    most_bytes: int


class DropParts(Call, frozen=True):
    """Free what is held of receipts. Not replied to."""

    receipts: tuple[int, ...]


class ReadParts(Call, frozen=True):
    """Reply with this rank's parts of a tensor in place."""

    name: str


class Numbered(msgspec.Struct, frozen=True, array_like=True):
    """A call and the number of its reply."""

    number: int
    call: JoinGroup | LeaveGroup | ReceiveParts | DropParts | ReadParts


class CallReply(msgspec.Struct, frozen=True, array_like=True):
    """The end of a call.

    Attributes:
        number: Number of the call.
        error: Why it has failed; "" if it has not.
        code: Code of the error.
        checksum: Checksum of the received tensors.
        parts: Parts of a tensor: the bounds in each dimension of the whole one, and the bytes.
    """

    number: int
    error: str = ""
    code: str = ""
    checksum: int = 0
    parts: tuple[tuple[tuple[tuple[int, int], ...], bytes], ...] = ()


class Calls:
    """Rank 0's side. Any thread may call its methods."""

    def __init__(
        self,
        connections: Sequence[Connection],
        check: Callable[[], None],
        failed: Callable[[str], RankError],
        timeout_s: float,
    ) -> None:
        """Begin.

        Args:
            connections: To the other ranks, in their order.
            check: Raises RankError if one has failed.
            failed: Fails all ranks, with a reason, and returns the error.
            timeout_s: Longest wait for a reply after a call's own deadline.
        """
        self._connections = list(connections)
        self._check, self._failed, self._timeout_s = check, failed, timeout_s
        self._lock = threading.Lock()
        self._number = 0
        # By call, and then by rank; of calls that are waited for.
        self._replies: dict[int, dict[int, CallReply]] = {}
        # Receipts that nothing refers to. Filled by finalizers, which may run anywhere.
        self._dropped: deque[int] = deque()

    def start(self, call: Call) -> int:
        """Send a call to all other ranks; return its number, for `replies`.

        Raises:
            RankError: A rank has failed.
        """
        self._check()
        with self._lock:
            self._number += 1
            if isinstance(call, JoinGroup | ReceiveParts | ReadParts):
                self._replies[self._number] = {}
            self._send(self._number, call)
            return self._number

    def drop(self, receipt: int) -> None:
        """Have what is held of a receipt freed, with the next `flush`."""
        self._dropped.append(receipt)

    def flush(self) -> None:
        """Send what `drop` has noted. Raises RankError as `start`."""
        if not self._dropped:
            return
        receipts = [self._dropped.popleft() for _ in range(len(self._dropped))]
        self.start(DropParts(tuple(receipts)))

    def replies(self, number: int, deadline: float) -> list[CallReply]:
        """Wait for the replies to a call, in the order of ranks.

        Args:
            number: Number of the call.
            deadline: Deadline of the call, by the monotonic clock; a rank without a reply some time
                later has failed.

        Raises:
            RankError: A rank has failed.
        """
        try:
            while True:
                with self._lock:
                    self._collect()
                    found = self._replies[number]
                    if len(found) == len(self._connections):
                        return [found[rank] for rank in sorted(found)]
                self._check()
                if time.monotonic() > deadline + self._timeout_s:
                    rank = min({*range(len(self._connections))} - found.keys()) + 1
                    raise self._failed(f"rank {rank} does not answer a call about new weights")
                wait(self._connections, _POLL_S)
        finally:
            with self._lock:
                del self._replies[number]

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections:
            connection.close()

    def _send(self, number: int, call: Call) -> None:
        message = msgspec.msgpack.encode((number, call))
        for rank, connection in enumerate(self._connections, 1):
            try:
                connection.send_bytes(message)
            except OSError as error:
                raise self._failed(f"rank {rank} can't be reached: {error}") from None

    def _collect(self) -> None:
        for rank, connection in enumerate(self._connections):
            try:
                while connection.poll(0):
                    reply = msgspec.msgpack.decode(connection.recv_bytes(), type=CallReply)
                    if reply.number in self._replies:
                        self._replies[reply.number][rank] = reply
            except (OSError, EOFError) as error:
                raise self._failed(f"rank {rank + 1} has ended: {error}") from None
