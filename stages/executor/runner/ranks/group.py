"""Exchange between ranks while they compute, and the order of sums over them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

PARTS = 4
"""Parts of a sum over a sharded dimension, where its bits must not depend on the number of ranks.
Each of 1, 2 or 4 ranks computes a run of them."""


class RankGroup(ABC):
    """Ranks that compute a model together, seen from one of them.

    All ranks call the same operations in the same order, with tensors of the same shape and dtype.
    An operation returns when this rank has its result, and may be called from one thread.

    Attributes:
        rank: This rank, from 0.
        size: The number of ranks.
        timeout_s: Longest wait of an operation for other ranks; infinite is allowed. A rank whose
            process has ended is noticed earlier.
    """

    rank: int
    size: int
    timeout_s: float = 30.0

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return every rank's tensor, `[size, *shape]`, in the order of ranks.

        Raises:
            RankError: A rank has failed.
        """

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks, in the order of `sum_pairwise`; the same bits on each rank.

        Raises:
            RankError: A rank has failed.
        """
        return sum_pairwise([*self.all_gather(tensor)])

    @abstractmethod
    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite the tensor, contiguous, with that of rank 0.

        Raises:
            RankError: A rank has failed.
        """

    @abstractmethod
    def send(self, tensor: Tensor, to: int) -> None:
        """Send a message to another rank, which receives messages in this order. The tensor may
        change afterwards.

        Returns without waiting for the receiver while at most one earlier message to it has not
        been received.

        Raises:
            RankError: A rank has failed.
        """

    @abstractmethod
    def receive(self, tensor: Tensor, source: int) -> None:
        """Overwrite the tensor, contiguous, with the next message of another rank.

        Raises:
            RankError: A rank has failed, or the message has another dtype or size.
        """

    @abstractmethod
    def fail(self, reason: str) -> None:
        """Let the operations of all ranks raise `RankError`, those that wait too. Any thread may
        call it."""

    @abstractmethod
    def close(self) -> None:
        """Release memory and connections. Operations of other ranks that wait for this one fail."""


class OneRank(RankGroup):
    """A group of one."""

    rank = 0
    size = 1

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor[None]

    def broadcast(self, tensor: Tensor) -> None:
        pass

    def send(self, tensor: Tensor, to: int) -> None:
        raise ValueError("there is no other rank")

    def receive(self, tensor: Tensor, source: int) -> None:
        raise ValueError("there is no other rank")

    def fail(self, reason: str) -> None:
        pass

    def close(self) -> None:
        pass


def sum_pairwise(parts: Sequence[Tensor]) -> Tensor:
    """Add tensors as a balanced tree over neighbours: (a + b) + (c + d).

    The sum of a power of two of parts is that of the sums of its two halves, so it is the same
    whether a rank adds all parts, or each rank a run of them and then one adds the ranks' sums.
    For this, each addition of bfloat16 rounds to bfloat16.
    """
    sums = list(parts)
    while len(sums) > 1:
        pairs = [a + b for a, b in zip(sums[::2], sums[1::2], strict=False)]
        sums = pairs + sums[len(pairs) * 2 :]
    return sums[0]


@dataclass(frozen=True, eq=False)
class Layout:
    """The cuts of dimensions into parts; a rank has a run of the parts.

    Where bits must not depend on the number of ranks, there are always `PARTS` parts, each a
    product of its own: products of other shapes may be summed in another order. Else a rank has one
    part.

    Attributes:
        group: The ranks.
        invariant: Bits don't depend on their number.
    """

    group: RankGroup
    invariant: bool

    @property
    def parts(self) -> int:
        """Parts of each sharded dimension."""
        return PARTS if self.invariant else self.group.size

    @property
    def own(self) -> range:
        """This rank's parts."""
        count = self.parts // self.group.size
        return range(self.group.rank * count, (self.group.rank + 1) * count)

    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the sum of float32 tensors, one for each own part, over all ranks."""
        return self.group.all_reduce(sum_pairwise(parts).contiguous())

    def run(self, size: int) -> slice:
        """Return this rank's run of a dimension; the last part may be shorter than the others."""
        piece = -(-size // self.parts)
        return slice(self.own.start * piece, min(self.own.stop * piece, size))
