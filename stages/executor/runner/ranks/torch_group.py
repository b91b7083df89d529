"""Ranks that exchange tensors through torch.distributed: gloo for CPU, NCCL for CUDA (untried)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, FileStore, ProcessGroupGloo, Store

from .group import RankError, RankGroup, sum_pairwise
from .tags import Kind, out_of_step, tag_of

_LOOPBACK = "127.0.0.1"

# Sent messages of a rank that its peer may not have received yet.
_MESSAGES = 2

_LONGEST_S = 1e6


class TorchGroup(RankGroup):
    """Ranks of a process group, which isn't the default one: a trainer may have that.

    Ranks compare tags before each operation on CPU tensors, since gloo ends the process that
    receives a tensor of another size. On CUDA tensors they don't, and a rank that is out of step
    is noticed by the timeout.

    A rank whose process ends, or that fails or closes its group, closes its connections, so that
    operations of other ranks fail at once; messages that weren't received are lost. An operation of
    a rank's own thread isn't interrupted before its timeout.
    """

    def __init__(self, process_group: Any, timeout_s: float = RankGroup.timeout_s) -> None:
        """
        Args:
            process_group: A `ProcessGroup`, or a backend such as `ProcessGroupGloo`. The group
                should have the only reference, so that it can close the connections.
            timeout_s: As the attribute.
        """
        self._process_group = process_group
        self.rank, self.size = process_group.rank(), process_group.size()
        self._why = ""
        self._sent: dict[int, deque[_Sent]] = {}
        self.timeout_s = timeout_s

    @classmethod
    def gloo(
        cls,
        store: Store | Path,
        rank: int,
        size: int,
        timeout_s: float = RankGroup.timeout_s,
    ) -> Self:
        """Connect ranks of this host over its loopback interface, on free ports.

        Args:
            store: The rendezvous, used once: a store, or a private folder.
            rank: This rank.
            size: The number of ranks.
            timeout_s: Of the rendezvous, and then of each operation.

        Raises:
            RankError: Not all ranks have come.
        """
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        options._timeout = _delta(timeout_s)
        try:
            if isinstance(store, Path):
                store = FileStore(str(store / "ranks"), size)
            store.set_timeout(_delta(timeout_s))
            return cls(ProcessGroupGloo(store, rank, size, options), timeout_s)
        except RuntimeError as error:
            raise RankError(f"rank {rank} has not met the others: {_first_line(error)}") from None

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self._all_gather(Kind.all_gather, tensor)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        # Not the process group's own, whose order of additions depends on the number of ranks.
        return sum_pairwise([*self._all_gather(Kind.all_reduce, tensor)])

    def broadcast(self, tensor: Tensor) -> None:
        tag = tag_of(Kind.broadcast, tensor)
        with self._running():
            self._compare(tag, tensor.device)
            if tensor.numel():
                options = BroadcastOptions()
                options.rootRank = options.rootTensor = 0
                self._finish(self._process_group.broadcast([_bytes_of(tensor)], options))

    def send(self, tensor: Tensor, to: int) -> None:
        tensor = tensor.contiguous()
        tag = tag_of(Kind.message, tensor)
        with self._running():
            sent = self._sent.setdefault(to, deque())
            while len(sent) >= _MESSAGES:
                for work in sent[0].works:
                    self._finish(work)
                sent.popleft()
            parts = [torch.tensor([tag])] if tensor.device.type == "cpu" else []
            parts += [_bytes_of(tensor.clone())] if tensor.numel() else []
            works = [self._process_group.send([part], to, 0) for part in parts]
            sent.append(_Sent(parts, works))

    def receive(self, tensor: Tensor, source: int) -> None:
        tag = tag_of(Kind.message, tensor)
        with self._running():
            if tensor.device.type == "cpu":
                theirs = torch.empty(1, dtype=torch.int64)
                self._finish(self._process_group.recv([theirs], source, 0))
                if int(theirs) != tag:
                    raise RankError(out_of_step(self.rank, tag, source, int(theirs)))
            if tensor.numel():
                self._finish(self._process_group.recv([_bytes_of(tensor)], source, 0))

    def fail(self, reason: str) -> None:
        self._why = self._why or reason
        self._process_group = None
        self._sent.clear()

    def close(self) -> None:
        self.fail("the group is closed")

    def _all_gather(self, kind: Kind, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        result = tensor.new_empty((self.size, *tensor.shape))
        tag = tag_of(kind, tensor)
        with self._running():
            self._compare(tag, tensor.device)
            if tensor.numel():
                results = [_bytes_of(each) for each in result]
                self._finish(self._process_group.allgather([results], [_bytes_of(tensor)]))
        return result

    def _compare(self, tag: int, device: torch.device) -> None:
        if device.type != "cpu":
            return
        tags = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        self._finish(self._process_group.allgather([tags], [torch.tensor([tag])]))
        for other, theirs in enumerate(map(int, tags)):
            if theirs != tag:
                raise RankError(out_of_step(self.rank, tag, other, theirs))

    def _finish(self, work: Any) -> None:
        work.wait(_delta(self.timeout_s))

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Raise an operation's errors as RankError.

        No frame of an operation has a variable for the process group: an error would keep the
        frames, and so the connections.
        """
        try:
            if self._why:
                raise RankError(self._why)
            self._process_group._set_default_timeout(_delta(self.timeout_s))
            yield
        except RankError as error:
            self.fail(str(error))
            raise
        except (RuntimeError, AttributeError) as error:
            self.fail(f"an exchange with other ranks failed: {_first_line(error)}")
            raise RankError(self._why) from None
        except BaseException as error:
            self.fail(f"rank {self.rank} stopped: {error!r}")
            raise


class _Sent(NamedTuple):
    """A message, kept until it has been received."""

    parts: list[Tensor]
    works: list[Any]


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _delta(seconds: float) -> timedelta:
    return timedelta(seconds=min(seconds, _LONGEST_S))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
