"""Weights through a torch.distributed group, whose rank 0 broadcasts them: the executor's side.

The group is private: it is not the default process group, and torch's registries don't know it. It
meets its peers in the store, under the keys where those look for it who make theirs by what
trainers copy from torch (slime's `init_process_group`, SGLang's `init_custom_process_group`).

Buffers travel as bytes, so any dtype that torch has can be sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ......bus.control import JoinWeightsGroup
from ......bus.weights import GroupWeights
from ......config import WeightsError, shown
from ..limits import UNLIMITED, WeightLimits
from .layout import as_tensor, buckets, sizes_of
from .rendezvous import CPU, await_port, broken, open_group, open_store, time_left, was_left

_IN_FLIGHT = 2
"""Broadcasts that are under way at a time: one is sent while the next is packed."""

_MOST_JOINS = 16
"""That are under way at a time: each has a thread, and torch's part of it can't be ended."""


class WeightGroups:
    """The groups that an executor is in. `receive` blocks, the other methods don't.

    A group is left as soon as anything goes wrong in it: what was still to be received would be
    taken for the next weights. The trainer's broadcasts then fail, and both sides join anew.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: dict[str, Member] = {}
        self._joining: dict[str, _Joining] = {}
        # Threads that join, also for somebody who does not wait any more.
        self._joins = 0

    def join(self, wish: JoinWeightsGroup, device: torch.device) -> Future[None]:
        """Joins a group, on a thread of its own; one of the same name is left first.

        Args:
            wish: As `check_arguments` lets it pass.
            device: Where the executor's weights are.

        Returns:
            Done when the group is joined. It has a WeightsError when the group can't be, the others
            did not come in time, or the group was left meanwhile.

        Raises:
            WeightsError: As many groups as may be are being joined.
        """
        self.leave(wish.group)
        joining = _Joining()
        joining.done.set_running_or_notify_cancel()  # whoever waits for it can't cancel it
        with self._lock:
            if self._joins == _MOST_JOINS:
                raise WeightsError(
                    f"{_MOST_JOINS} groups are being joined; join again when their time is up",
                    code="weights_busy",
                )
            # Under the lock, so that it is counted only when there is one.
            args = (wish, device, joining)
            threading.Thread(target=self._join, args=args, daemon=True, name="weights-join").start()
            self._joins += 1
            self._joining[wish.group] = joining
        return joining.done

    def _join(self, wish: JoinWeightsGroup, device: torch.device, joining: _Joining) -> None:
        member: Member | None = None
        failure: Exception | None = None
        try:
            member = _meet(wish, device, joining.stop)
        except Exception as error:  # noqa: BLE001  (whoever waits for it gets it)
            failure = error
        with self._lock:
            self._joins -= 1
            wanted = self._joining.get(wish.group) is joining
            if wanted:
                del self._joining[wish.group]
                if member is not None:
                    self._members[wish.group] = member
        if not wanted:
            if member is not None:
                member.let_go()
        elif failure is not None:
            joining.done.set_exception(failure)
        else:
            joining.done.set_result(None)

    def leave(self, name: str) -> None:
        """Leaves a group, if this is in it or joins it; whoever waits for it is told at once."""
        with self._lock:
            joining = self._joining.pop(name, None)
            member = self._members.pop(name, None)
            if member is not None:
                member.stop.set()
                # Else the thread that receives does it.
                if not member.receiving:
                    member.let_go()
        if joining is not None:
            joining.stop.set()
            joining.done.set_exception(was_left())

    def skip(self, name: str) -> None:
        """Says that a broadcast of this group will not be received."""
        with self._lock:
            member = self._members.get(name)
            if member is None:
                return  # nothing was sent to it, and it may be that it is being joined
            if member.receiving:
                member.skipped = True
                return
        self.leave(name)

    def close(self) -> None:
        """Leaves all groups."""
        for name in [*self._members, *self._joining]:
            self.leave(name)

    def receive(
        self, source: GroupWeights, timeout_s: float, limits: WeightLimits = UNLIMITED
    ) -> dict[str, Tensor]:
        """The tensors that rank 0 broadcasts.

        Raises:
            WeightsError: This is not in the group, or out of step with it; the message makes no
                sense; a peer is gone, or was silent until `timeout_s` had passed.
        """
        with self._lock:
            member = self._members.get(source.group)
            if member is not None:
                member.receiving = True
        if member is None:
            raise WeightsError(
                f"the executor is not in the group {shown(source.group)}; join it first, and "
                "again after an update that failed"
            )
        try:
            return member.receive(source, time.monotonic() + timeout_s, limits)
        except BaseException:
            member.skipped = True
            raise
        finally:
            with self._lock:
                member.receiving = False
                known = self._members.get(source.group) is member
                if known and member.skipped:
                    del self._members[source.group]
                if member.skipped or not known:
                    member.let_go()


class _Joining:
    """A group that is being joined.

    Attributes:
        stop: Set when nobody waits for it any more.
        done: As `WeightGroups.join` gives it.
    """

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.done: Future[None] = Future()


@dataclass
class Member:
    """A group that this process is in.

    Attributes:
        group: One of torch's process groups.
        device: Where its buffers are.
        stop: Set when nobody waits for its broadcasts any more.
        broadcasts: How many it has made.
        under_way: Those that are not known to be finished, oldest first.
        receiving: Whether one is being received.
        skipped: Whether there was one that nobody received.
    """

    group: Any
    device: torch.device
    stop: threading.Event = field(default_factory=threading.Event)
    broadcasts: int = 0
    under_way: list[Any] = field(default_factory=list)
    receiving: bool = False
    skipped: bool = False

    def receive(
        self, source: GroupWeights, deadline: float, limits: WeightLimits
    ) -> dict[str, Tensor]:
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
        tensors: dict[str, Tensor] = {}

        def buffers() -> Iterator[Tensor]:
            for bucket in buckets(source.tensors, sizes, source.bucket_bytes):
                buffer = self._empty(sum(sizes[index] for index in bucket))
                start = 0
                for index in bucket:
                    part = buffer[start : start + sizes[index]]
                    tensors[source.tensors[index].name] = as_tensor(part, source.tensors[index])
                    start += sizes[index]
                yield buffer

        self.broadcast(buffers(), deadline)
        return {meta.name: tensors[meta.name] for meta in source.tensors}

    def broadcast(self, buffers: Iterator[Tensor], deadline: float) -> None:
        """From rank 0 to all others, in order. `[bytes]` each, uint8."""
        for buffer in buffers:
            if len(self.under_way) == _IN_FLIGHT:
                self._finish_one(deadline)
            self._start(buffer, deadline)
            self.broadcasts += 1
        while self.under_way:
            self._finish_one(deadline)

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
            self.under_way.append(self.group.broadcast([buffer], options))
        except RuntimeError as error:
            raise broken(error, deadline) from None

    def _finish_one(self, deadline: float) -> None:
        # Not by work.wait(): Gloo's can't be ended from outside, and whoever stops the executor
        # would have to wait for a trainer that hangs.
        work = self.under_way[0]
        pause = 0.00005
        while not work.is_completed():
            self._check_time(deadline)
            self.stop.wait(pause)
            pause = min(2 * pause, 0.005)
        del self.under_way[0]
        try:
            work.wait()
        except RuntimeError as error:
            raise broken(error, deadline) from None

    def let_go(self) -> None:
        """Drops the process group, once nothing is under way: its destructor waits for that."""
        if self.device.type == "cuda":
            self.group.abort()
        if all(work.is_completed() for work in self.under_way):
            self.under_way, self.group = [], None
            return

        def later() -> None:
            # Here and not in the destructor: a program may end meanwhile, and a thread that comes
            # back to Python from C++ then would abort it.
            while not all(work.is_completed() for work in self.under_way):
                time.sleep(0.05)
            self.under_way, self.group = [], None

        threading.Thread(target=later, daemon=True, name="weights-group-end").start()

    def _empty(self, size: int) -> Tensor:
        try:
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        except RuntimeError:
            raise WeightsError(f"there is no memory for {size} bytes of new weights") from None


def _meet(wish: JoinWeightsGroup, device: torch.device, stop: threading.Event) -> Member:
    deadline = time.monotonic() + wish.timeout_s
    await_port(wish.address, deadline, stop)
    store = open_store(wish.address, wish.world_size, False, deadline)
    if stop.is_set():
        raise was_left()
    group = open_group(
        store, wish.group, wish.rank, wish.world_size, wish.backend, device, deadline
    )
    return Member(group, device if wish.backend == "nccl" else CPU)
