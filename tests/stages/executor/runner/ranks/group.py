"""Ranks as threads of one process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from nano_inference.stages.executor.runner.ranks.group import RankGroup
from nano_inference.stages.executor.runner.ranks.rank_error import RankError

_WAIT_S = 120.0

_POLL_S = 0.05

T = TypeVar("T")

Mail = dict[tuple[int, int], "queue.Queue[Tensor]"]
"""Messages by sender and receiver."""


class ThreadGroup(RankGroup):
    """A rank among threads, which exchange tensors through a list.

    Attributes:
        calls: Its operations so far, by name and shape.
    """

    def __init__(
        self, rank: int, barrier: threading.Barrier, places: list[Tensor | None], mail: Mail
    ) -> None:
        self.rank, self.size = rank, barrier.parties
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self._barrier, self._places, self._mail = barrier, places, mail

    def all_gather(self, tensor: Tensor) -> Tensor:
        self.calls.append(("all_gather", tuple(tensor.shape)))
        return torch.stack(self._exchange(tensor))

    def broadcast(self, tensor: Tensor) -> None:
        self.calls.append(("broadcast", tuple(tensor.shape)))
        tensor.copy_(self._exchange(tensor)[0])

    def send(self, tensor: Tensor, to: int) -> None:
        self._mail[self.rank, to].put(tensor.clone())

    def receive(self, tensor: Tensor, source: int) -> None:
        mail = self._mail[source, self.rank]
        for _ in range(int(_WAIT_S / _POLL_S)):
            try:
                message = mail.get(timeout=_POLL_S)
            except queue.Empty:
                if self._barrier.broken:
                    break
                continue
            same = (message.shape, message.dtype) == (tensor.shape, tensor.dtype)
            assert same, f"{message.shape} {message.dtype} came for {tensor.shape} {tensor.dtype}"
            tensor.copy_(message)
            return
        raise RankError("another rank has ended")

    def fail(self, reason: str) -> None:
        self._barrier.abort()

    def close(self) -> None:
        self._barrier.abort()

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        assert tensor.is_contiguous()
        self._places[self.rank] = tensor.clone()
        self._wait()
        tensors = [place for place in self._places if place is not None]
        shapes = {(tuple(each.shape), each.dtype) for each in tensors}
        self._wait()
        assert len(shapes) == 1, f"the ranks are out of step: {shapes}"
        return tensors

    def _wait(self) -> None:
        try:
            self._barrier.wait(_WAIT_S)
        except threading.BrokenBarrierError:
            raise RankError("another rank has ended") from None


def make_groups(size: int) -> list[ThreadGroup]:
    """The ranks of a group, in order."""
    barrier = threading.Barrier(size)
    places: list[Tensor | None] = [None] * size
    ranks = range(size)
    mail: Mail = {(source, to): queue.Queue() for source in ranks for to in ranks}
    return [ThreadGroup(rank, barrier, places, mail) for rank in ranks]


def on_ranks(size: int, work: Callable[[RankGroup], T]) -> list[T]:
    """Run work on each of so many ranks at the same time; return their results in order.

    The first error of a rank that is no RankError is raised, or else the first RankError.
    """
    groups = make_groups(size)

    def run(group: ThreadGroup) -> T:
        try:
            return work(group)
        except BaseException:
            group.close()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, group) for group in groups]
        errors = [future.exception() for future in futures]
    found = [error for error in errors if error is not None]
    own = [error for error in found if not isinstance(error, RankError)]
    if found:
        raise (own or found)[0]
    return [future.result() for future in futures]
