"""Weights through a torch.distributed group whose rank 0 broadcasts them.

The group is private: not the default process group, and unknown to torch's registries. Its members
meet in the store under the keys that trainers use who copy torch (slime's `init_process_group`,
SGLang's `init_custom_process_group`). Buffers travel as bytes, so any dtype that torch has can be
sent.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ......bus.control import JoinWeightsGroup
from ......bus.weights import GroupWeights, TensorMeta
from ......config import WeightsError, shown
from ..checks import UNLIMITED, WeightLimits, check_stored
from .background import Background
from .layout import as_bytes, as_tensor, buckets, distinct, meta_of, sizes_of

BACKENDS = ("gloo", "nccl")

CPU = torch.device("cpu")
"""Where Gloo's buffers are."""

_LOOK_S = 5.0
"""How long one attempt to connect may take; between two it is seen whether somebody still waits."""


def open_group(
    store: Any,
    name: str,
    rank: int,
    world_size: int,
    backend: str,
    device: torch.device,
    deadline: float,
) -> Any:
    """Meets the others and connects to them. `store` is where they meet."""
    makers: dict[str, Callable[..., Any]] = {"gloo": _gloo, "nccl": _nccl}
    if backend not in makers:
        raise WeightsError(f"backend {shown(backend)} is unknown; use 'gloo' or 'nccl'")
    # The prefix that trainers give their store, and those that torch's own function puts on it.
    kind = "cpu/" if backend == "gloo" else "cuda/"
    for prefix in (name, f"{name}/", kind):
        store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    try:
        store.set_timeout(time_left(deadline))
        return makers[backend](store, rank, world_size, device, time_left(deadline))
    except (RuntimeError, ValueError) as error:
        raise broken(error, deadline) from None


def _gloo(store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


def _nccl(store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    if device.type != "cuda" or not dist.is_nccl_available():
        raise WeightsError("NCCL needs a GPU and a build of PyTorch that has it; use 'gloo'")
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def open_store(address: str, world_size: int, is_master: bool, deadline: float) -> Any:
    host, port = host_and_port(address)
    try:
        # A master that waits for workers counts those that say the same. Ours does not wait.
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, port, world_size, is_master, time_left(deadline), wait_for_workers=not is_master
        )
    except (RuntimeError, ValueError) as error:
        raise broken(error, deadline) from None


def host_and_port(address: str) -> tuple[str, int]:
    """Raises WeightsError for what is no address."""
    host, _, port = address.rpartition(":")
    digits = port.isascii() and port.isdigit() and len(port) <= 5
    if not host or not digits or int(port) > 65535:
        raise WeightsError(f"a group's address is host:port, not {shown(address)}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def await_port(address: str, deadline: float, stop: threading.Event) -> None:
    """Waits until somebody listens. torch's own waiting takes longer than it may, and is loud.

    Raises:
        WeightsError: Nobody did in time, or `stop` was set.
    """
    place = host_and_port(address)
    while not stop.is_set():
        try:
            socket.create_connection(
                place, min(time_left(deadline).total_seconds(), _LOOK_S)
            ).close()
            return
        except OSError as error:
            if time.monotonic() + 0.05 > deadline:
                raise WeightsError(
                    f"nobody keeps a group at {shown(address)}: {error.strerror or error}",
                    code="weights_timeout",
                ) from None
        stop.wait(0.05)
    raise was_left()


def was_left() -> WeightsError:
    """For whoever waits for a group that is left meanwhile."""
    return WeightsError("the group was left", code="weights_interrupted")


def time_left(deadline: float) -> timedelta:
    """The time that is left.

    Raises:
        WeightsError: None is.
    """
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise WeightsError("the others were silent for too long", code="weights_timeout")
    # To the millisecond: torch takes no less, and 0 as none.
    return timedelta(milliseconds=max(round(1000 * seconds), 1))


def broken(error: Exception, deadline: float) -> WeightsError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "imed out" in reason or "timeout" in reason.lower() or time.monotonic() > deadline:
        return WeightsError(f"the group did not answer in time: {reason}", code="weights_timeout")
    return WeightsError(f"the group is broken: {reason}", code="weights_interrupted")


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


BUCKET_BYTES = 64 << 20

_PARTING_S = 5.0
"""How long the end of a group may take, which is milliseconds unless torch hangs."""


class Sending:
    """A broadcast that is under way.

    Attributes:
        source: What `update_weights` must be told.
    """

    def __init__(self, source: GroupWeights, future: Future[None]) -> None:
        self.source = source
        self._future = future

    def result(self) -> None:
        """Waits until all is sent; the tensors may then change.

        Raises:
            WeightsError: An executor is gone, or did not take it in time.
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

    After an update that failed, make a new one: executors have left this one.

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
        """Opens the place where the others join, and waits for them in the background.

        Args:
            address: host:port to listen on; port 0 takes a free one.
            world_size: Members, this one included.
            name: Of the group; the executors join under the same name.
            backend: "gloo", or "nccl" where all have GPUs.
            device: Of NCCL's buffers; the current CUDA device when None.
            timeout_s: For the others to join, and for each sync.

        Raises:
            WeightsError: The address can't be listened on, or there is no such backend.
        """
        self._name = name
        self._timeout_s = timeout_s
        place = torch.device(device or "cuda") if backend == "nccl" else CPU
        deadline = time.monotonic() + timeout_s
        host, _ = host_and_port(address)
        store = open_store(address, world_size, True, deadline)
        self.address = f"{host}:{store.port}"
        self._stop = threading.Event()
        self._sent = 0
        self._thread = Background("weights-group")

        def join() -> Member:
            group = open_group(store, name, 0, world_size, backend, place, deadline)
            return Member(group, place, self._stop)

        self._member = self._thread.submit(join)

    def __enter__(self) -> WeightsGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def broadcast(
        self, state_dict: Mapping[str, Tensor], bucket_bytes: int = BUCKET_BYTES
    ) -> Sending:
        """Begins to send tensors, which must not change till it is done, and returns at once.

        Args:
            state_dict: Tensors by name, on any device. Of several names of one tensor, as tied
                parameters have, the first is sent.
            bucket_bytes: Tensors travel together up to so many bytes; 0 sends each by itself.

        Raises:
            WeightsError: The numbers of a tensor can't be read: it is sparse, quantised, on the
                meta device, or its storage was freed.
        """
        check_stored(state_dict)
        tensors = distinct(state_dict)
        metas = tuple(meta_of(name, tensor) for name, tensor in tensors.items())
        sizes = sizes_of(metas)
        plan = buckets(metas, sizes, bucket_bytes)
        source = GroupWeights(self._name, metas, bucket_bytes, self._sent)
        self._sent += len(plan)
        deadline = time.monotonic() + self._timeout_s

        def send() -> None:
            member = self._member.result()
            packed = _pack(tensors, metas, plan, member.device)
            member.broadcast(packed, deadline)

        return Sending(source, self._thread.submit(send))

    def close(self) -> None:
        """Leaves the group; what is still being sent fails."""
        self._stop.set()
        ended = self._thread.submit(lambda: self._member.result().let_go())
        self._thread.close()
        if self._member.done():
            wait([ended], _PARTING_S)


def _pack(
    tensors: Mapping[str, Tensor],
    metas: tuple[TensorMeta, ...],
    plan: list[list[int]],
    device: torch.device,
) -> Iterator[Tensor]:
    for bucket in plan:
        # Again, since the trainer may have freed some meanwhile.
        check_stored({metas[index].name: tensors[metas[index].name] for index in bucket})
        parts = [as_bytes(tensors[metas[index].name]).to(device) for index in bucket]
        yield parts[0] if len(parts) == 1 else torch.cat(parts)
