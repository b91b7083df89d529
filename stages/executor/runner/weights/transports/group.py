"""Weights through a torch.distributed group whose rank 0 broadcasts them.

The group is private: not the default process group, and unknown to torch's registries. Its members
meet in the store under the keys of the functions that trainers copy from torch (slime's
`init_process_group`, SGLang's `init_custom_process_group`). Buffers travel as bytes, so any dtype
of torch can be sent.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from ......bus.control import JoinWeightsGroup
from ......bus.weights import GroupWeights
from ......config import WeightsError, shown
from ...shards import NewWeight
from ..checks import UNLIMITED, WeightLimits, check_stored
from .background import Background
from .layout import (
    as_bytes,
    as_tensor,
    buckets,
    distinct,
    dtype_of,
    meta_of,
    packed_buckets,
    sizes_of,
)

BACKENDS = ("gloo", "nccl")

BUCKET_BYTES = 64 << 20

CPU = torch.device("cpu")
"""The device of Gloo's buffers."""

_CONNECT_S = 5.0
"""The time limit of one attempt to connect; in between, a stop is noticed."""

_IN_FLIGHT = 2
"""Broadcasts in flight: one is sent while the next is packed."""

_MOST_JOINS = 16
"""Joins in flight: each has a thread, and torch's part of it can't be ended."""

_PARTING_S = 5.0
"""The longest wait for the end of a group, which takes milliseconds unless torch hangs."""


# --- rendezvous ---------------------------------------------------------------------------------


def open_store(address: str, world_size: int, is_master: bool, deadline: float) -> Any:
    """Open the store at host:port, as its server or as a client."""
    host, port = host_and_port(address)
    try:
        # A server that waits for workers counts clients with the same setting. Ours does not wait.
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, port, world_size, is_master, time_left(deadline), wait_for_workers=not is_master
        )
    except (RuntimeError, ValueError) as error:
        raise broken(error, deadline) from None


def host_and_port(address: str) -> tuple[str, int]:
    """Raises WeightsError for an invalid address."""
    host, _, port = address.rpartition(":")
    digits = port.isascii() and port.isdigit() and len(port) <= 5
    if not host or not digits or int(port) > 65535:
        raise WeightsError(f"a group's address is host:port, not {shown(address)}; give one")
    return host.removeprefix("[").removesuffix("]"), int(port)


def await_port(address: str, deadline: float, stop: threading.Event) -> None:
    """Wait until the port is open. torch's own waiting exceeds the time limit, and logs.

    Raises:
        WeightsError: The time is up, or `stop` was set.
    """
    place = host_and_port(address)
    while not stop.is_set():
        try:
            timeout_s = min(time_left(deadline).total_seconds(), _CONNECT_S)
            socket.create_connection(place, timeout_s).close()
            return
        except OSError as error:
            if time.monotonic() + 0.05 > deadline:
                raise WeightsError(
                    f"no group is at {shown(address)}: {error.strerror or error}",
                    code="weights_timeout",
                    remedy="start the trainer's rank 0 first, or raise timeout_s",
                ) from None
        stop.wait(0.05)
    raise was_left()


def was_left() -> WeightsError:
    """Return the error for a group that was left while others waited for it."""
    return WeightsError("the group was left; join it again", code="weights_interrupted")


def time_left(deadline: float) -> timedelta:
    """Return the time left.

    Raises:
        WeightsError: The deadline has passed.
    """
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise WeightsError(
            "the other ranks sent nothing for too long",
            code="weights_timeout",
            remedy="join again, and send all weights",
        )
    # In milliseconds, torch's unit, and at least one: 0 means no limit.
    return timedelta(milliseconds=max(round(1000 * seconds), 1))


def broken(error: Exception, deadline: float) -> WeightsError:
    """Return the WeightsError for an error of torch's."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "imed out" in reason or "timeout" in reason.lower() or time.monotonic() > deadline:
        return WeightsError(f"the group did not answer in time: {reason}", code="weights_timeout")
    return WeightsError(f"the group is broken: {reason}", code="weights_interrupted")


# --- the executor's side ------------------------------------------------------------------------


class WeightGroups:
    """The groups of an executor. `receive` blocks, the other methods don't.

    A group is left after any error: its remaining broadcasts would be taken for the next weights.
    The trainer's broadcasts then fail, and both sides join anew.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Also those that are joining.
        self._members: dict[str, Member] = {}
        # Threads that join, cancelled joins included.
        self._joins = 0

    def join(self, wish: JoinWeightsGroup, device: torch.device) -> Future[None]:
        """Join a group on a thread of its own; one of the same name is left first.

        Args:
            wish: With valid arguments (`check_arguments`).
            device: Device of the executor's weights.

        Returns:
            Done when the group is joined. It has a WeightsError if joining failed, the others did
            not come in time, or the group was left meanwhile.

        Raises:
            WeightsError: Too many joins are in flight.
        """
        self.leave(wish.group)
        member = Member(device if wish.backend == "nccl" else CPU)
        member.joined.set_running_or_notify_cancel()  # waiters can't cancel it
        with self._lock:
            if self._joins == _MOST_JOINS:
                raise WeightsError(
                    f"{_MOST_JOINS} groups are being joined; join again when one has ended",
                    code="weights_busy",
                )
            others = self._others_join(wish)
            # Under the lock: a thread that can't be started is not counted.
            args = (wish, member, others)
            threading.Thread(target=self._join, args=args, daemon=True, name="weights-join").start()
            self._joins += 1
            self._members[wish.group] = member
        return member.joined

    def _others_join(self, wish: JoinWeightsGroup) -> Callable[[float], None]:
        """Have the other ranks of a model join; return a function that waits for them, until a
        deadline. Both raise WeightsError."""
        return lambda deadline: None

    def _others_leave(self, name: str) -> None:
        """Have the other ranks of a model leave a group, or cancel their join."""

    def _join(
        self, wish: JoinWeightsGroup, member: Member, others: Callable[[float], None]
    ) -> None:
        failure: Exception | None = None
        try:
            deadline = time.monotonic() + wish.timeout_s
            await_port(wish.address, deadline, member.stop)
            store = open_store(wish.address, wish.world_size, False, deadline)
            if member.stop.is_set():
                raise was_left()
            member.open(store, wish, deadline)
            others(deadline)
        except Exception as error:  # noqa: BLE001  (the future carries it)
            failure = error
        with self._lock:
            self._joins -= 1
            wanted = self._members.get(wish.group) is member
            member.takes_part = wanted and failure is None
            if wanted and failure is not None:
                del self._members[wish.group]
                self._others_leave(wish.group)
        if not wanted:
            member.let_go()
        elif failure is not None:
            member.let_go()  # another rank may have failed
            member.joined.set_exception(failure)
        else:
            member.joined.set_result(None)

    def leave(self, name: str) -> None:
        """Leave a group, or cancel its join; waiters get an error at once."""
        with self._lock:
            member = self._members.pop(name, None)
            if member is None:
                return
            self._others_leave(name)
            member.stop.set()
            # Otherwise the joining or receiving thread lets go.
            if member.takes_part and not member.receiving:
                member.let_go()
        if not member.takes_part:
            member.joined.set_exception(was_left())

    def skip(self, name: str) -> None:
        """Handle a broadcast of this group that will not be received."""
        with self._lock:
            member = self._members.get(name)
            if member is None or not member.takes_part:
                return  # nothing was sent to it
            if member.receiving:
                member.skipped = True
                return
        self.leave(name)

    def close(self) -> None:
        """Leave all groups."""
        for name in list(self._members):
            self.leave(name)

    def receive(
        self, source: GroupWeights, timeout_s: float, limits: WeightLimits = UNLIMITED
    ) -> Mapping[str, NewWeight]:
        """Receive the tensors that rank 0 broadcasts.

        Raises:
            WeightsError: This executor is not a member, or out of step; the message is invalid; a
                peer is gone, or silent until `timeout_s` has passed.
        """
        tensors: dict[str, Tensor] = {}
        self.receive_each(source, timeout_s, limits, tensors.__setitem__)
        return {meta.name: tensors[meta.name] for meta in source.tensors}

    def receive_each(
        self,
        source: GroupWeights,
        timeout_s: float,
        limits: WeightLimits,
        take: Callable[[str, Tensor], None],
    ) -> None:
        """Receive weights like `receive`, but hand over each named tensor when it has come."""
        with self._lock:
            member = self._members.get(source.group)
            if member is not None and member.takes_part:
                member.receiving = True
        if member is None or not member.takes_part:
            raise WeightsError(
                f"the executor is not in the group {shown(source.group)}; join it first, and "
                "again after an update that failed"
            )
        try:
            member.receive(source, time.monotonic() + timeout_s, limits, take)
        except BaseException:
            member.skipped = True
            raise
        finally:
            with self._lock:
                member.receiving = False
                known = self._members.get(source.group) is member
                if known and member.skipped:
                    del self._members[source.group]
                    self._others_leave(source.group)
                if member.skipped or not known:
                    member.let_go()


@dataclass(eq=False)
class Member:
    """This process's membership in a group.

    Attributes:
        device: Device of its buffers.
        stop: Set when it, or its join, is not wanted any more.
        group: One of torch's process groups; None before `open`.
        joined: As `WeightGroups.join` returns it.
        takes_part: Whether it has joined.
        broadcasts: Their number so far.
        in_flight: Unfinished broadcasts and their buffers, oldest first.
        receiving: Whether one is being received.
        skipped: Whether one was not received.
    """

    device: torch.device
    stop: threading.Event = field(default_factory=threading.Event)
    group: Any = None
    joined: Future[None] = field(default_factory=Future)
    takes_part: bool = False
    broadcasts: int = 0
    in_flight: list[tuple[Any, Tensor]] = field(default_factory=list)
    receiving: bool = False
    skipped: bool = False

    def open(self, store: Any, wish: JoinWeightsGroup, deadline: float) -> None:
        """Meet the other members in the store, and connect to them."""
        if wish.backend not in BACKENDS:
            raise WeightsError(f"backend {shown(wish.backend)} is unknown; use 'gloo' or 'nccl'")
        ranks = wish.rank, wish.world_size
        # The prefix that trainers give their store, and those that torch's own function adds.
        kind = "cpu/" if wish.backend == "gloo" else "cuda/"
        for prefix in (wish.group, f"{wish.group}/", kind):
            store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        try:
            store.set_timeout(time_left(deadline))
            if wish.backend == "gloo":
                self.group = dist.ProcessGroupGloo(store, *ranks, timeout=time_left(deadline))
                return
            if self.device.type != "cuda" or not dist.is_nccl_available():
                raise WeightsError(
                    "NCCL needs a GPU and a build of PyTorch that has it; use 'gloo'"
                )
            torch.cuda.set_device(self.device)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = time_left(deadline)
            self.group = dist.ProcessGroupNCCL(store, *ranks, options)
        except (RuntimeError, ValueError) as error:
            raise broken(error, deadline) from None

    def receive(
        self,
        source: GroupWeights,
        deadline: float,
        limits: WeightLimits,
        take: Callable[[str, Tensor], None],
    ) -> None:
        sizes = sizes_of(source.tensors, limits)
        if source.bucket_bytes < 0:
            raise WeightsError(
                f"bucket_bytes is {shown(source.bucket_bytes)}; it must be at least 0"
            )
        if source.first is not None and source.first != self.broadcasts:
            raise WeightsError(
                f"the trainer's next broadcast is number {shown(source.first)} of the group, and "
                f"the executor's is {self.broadcasts}; join a new group"
            )
        packed, most = source.packed, source.bucket_bytes
        plan = packed_buckets(sizes, most) if packed else buckets(source.tensors, sizes, most)
        left = iter(plan)

        def buffers() -> Iterator[Tensor]:
            for bucket in plan:
                yield self._empty(sum(sizes[index] for index in bucket))

        def finished(buffer: Tensor) -> None:
            start = 0
            for index in next(left):
                meta, part = source.tensors[index], buffer[start : start + sizes[index]]
                aligned = start % dtype_of(meta).itemsize == 0
                take(meta.name, as_tensor(part if aligned else part.clone(), meta))
                start += sizes[index]

        self.broadcast(buffers(), deadline, finished)

    def broadcast(
        self,
        buffers: Iterator[Tensor],
        deadline: float,
        finished: Callable[[Tensor], None] = lambda buffer: None,
    ) -> None:
        """Broadcast buffers, `[bytes]` uint8 each, from rank 0 to all others, in order.

        `finished` is called with each when it has come, in this order, while the next is in flight.
        """
        for buffer in buffers:
            if len(self.in_flight) == _IN_FLIGHT:
                self._finish_one(deadline, finished)
            self._start(buffer, deadline)
            self.broadcasts += 1
        while self.in_flight:
            self._finish_one(deadline, finished)

    def _check_time(self, deadline: float) -> None:
        if self.stop.is_set():
            raise was_left()
        time_left(deadline)

    def _start(self, buffer: Tensor, deadline: float) -> None:
        self._check_time(deadline)
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = time_left(deadline)
        try:
            self.in_flight.append((self.group.broadcast([buffer], options), buffer))
        except RuntimeError as error:
            raise broken(error, deadline) from None

    def _finish_one(self, deadline: float, finished: Callable[[Tensor], None]) -> None:
        # Not by work.wait(): Gloo's can't be interrupted, and stopping the executor would have to
        # wait for a trainer that hangs.
        work, buffer = self.in_flight[0]
        pause = 0.00005
        while not work.is_completed():
            self._check_time(deadline)
            self.stop.wait(pause)
            pause = min(2 * pause, 0.005)
        del self.in_flight[0]
        try:
            work.wait()
        except RuntimeError as error:
            raise broken(error, deadline) from None
        finished(buffer)

    def let_go(self) -> None:
        """Drop the process group once nothing is in flight: its destructor waits for that."""
        if self.device.type == "cuda" and self.group is not None:
            self.group.abort()

        def later() -> None:
            # Not in the destructor: at the end of a program, a thread that returns to Python from
            # C++ would abort it.
            while not all(work.is_completed() for work, _ in self.in_flight):
                time.sleep(0.05)
            self.in_flight, self.group = [], None

        if all(work.is_completed() for work, _ in self.in_flight):
            later()
        else:
            threading.Thread(target=later, daemon=True, name="weights-group-end").start()

    def _empty(self, size: int) -> Tensor:
        try:
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        except RuntimeError:
            raise WeightsError(
                f"there is no memory for {size} bytes of new weights",
                remedy="free some, or send smaller buckets",
            ) from None


# --- the trainer's side -------------------------------------------------------------------------


@dataclass(frozen=True)
class Sending:
    """A broadcast in flight.

    Attributes:
        source: The argument for `update_weights`.
    """

    source: GroupWeights
    _future: Future[None]

    def result(self) -> None:
        """Wait until all is sent; the tensors may then change.

        Raises:
            WeightsError: An executor is gone, or did not receive it in time.
        """
        self._future.result()


class WeightsGroup:
    """The trainer's side: rank 0 of a group that executors join.

    ```python
    with WeightsGroup("10.0.0.1:29600", world_size=2) as group:
        await client.join_weights_group("weights", group.address, world_size=2)
        sending = group.broadcast(model.state_dict())
        await client.update_weights(sending.source)
        sending.result()
    ```

    After a failed update, make a new group: executors have left this one.

    Attributes:
        address: host:port where the others join.
    """

    def __init__(
        self,
        address: str,
        world_size: int,
        *,
        name: str = "weights",
        backend: str = "gloo",
        device: str | torch.device | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        """Open the store where the others join, and wait for them in the background.

        Args:
            address: host:port to listen on; port 0 takes a free one.
            world_size: Members, this one included.
            name: Name of the group; the executors join under the same name.
            backend: "gloo", or "nccl" where all have GPUs.
            device: Device of NCCL's buffers; the current CUDA device when None.
            timeout_s: For the others to join, and for each sync.

        Raises:
            WeightsError: The address can't be listened on, or the backend is unknown.
        """
        wish = JoinWeightsGroup(name, address, 0, world_size, backend, timeout_s)
        self._name = name
        self._timeout_s = timeout_s
        deadline = time.monotonic() + timeout_s
        host, _ = host_and_port(address)
        store = open_store(address, world_size, True, deadline)
        self.address = f"{host}:{store.port}"
        self._sent = 0
        self._member = Member(torch.device(device or "cuda") if backend == "nccl" else CPU)
        self._thread = Background("weights-group")
        self._joined = self._thread.submit(self._member.open, store, wish, deadline)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def broadcast(
        self,
        state_dict: Mapping[str, Tensor],
        bucket_bytes: int = BUCKET_BYTES,
        *,
        packed: bool = False,
    ) -> Sending:
        """Start to send tensors, which must not change until it is done, and return at once.

        Args:
            state_dict: Tensors by name, on any device. Of several names of one tensor, as tied
                parameters have, the first is sent.
            bucket_bytes: Tensors travel together up to this size; 0 sends each by itself.
            packed: Tensors travel as in vLLM's packed broadcasts (`GroupWeights.packed`).

        Raises:
            WeightsError: A tensor can't be read: it is sparse, quantised, on the meta device, or
                its storage was freed.
        """
        check_stored(state_dict)
        tensors = distinct(state_dict)
        metas = tuple(meta_of(name, tensor) for name, tensor in tensors.items())
        sizes = sizes_of(metas)
        plan = (
            packed_buckets(sizes, bucket_bytes) if packed else buckets(metas, sizes, bucket_bytes)
        )
        source = GroupWeights(self._name, metas, bucket_bytes, self._sent, packed)
        self._sent += len(plan)
        deadline = time.monotonic() + self._timeout_s

        def send() -> None:
            self._joined.result()
            self._member.broadcast(buffers(), deadline)

        def buffers() -> Iterator[Tensor]:
            for bucket in plan:
                chosen = {metas[index].name: tensors[metas[index].name] for index in bucket}
                # Again, since the trainer may have freed some meanwhile.
                check_stored(chosen)
                parts = [as_bytes(tensor).to(self._member.device) for tensor in chosen.values()]
                yield parts[0] if len(parts) == 1 else torch.cat(parts)

        return Sending(source, self._thread.submit(send))

    def close(self) -> None:
        """Leave the group; broadcasts in flight fail."""
        self._member.stop.set()
        ended = self._thread.submit(self._member.let_go)
        self._thread.close()
        if self._joined.done():
            wait([ended], _PARTING_S)
