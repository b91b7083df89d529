"""Kinds of state: the tensors that one layer keeps of a sequence."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

import msgspec
import torch


class StateTensor(msgspec.Struct, frozen=True):
    """One tensor of a layer's state.

    Attributes:
        shape: Shape of the numbers of one token, or of one sequence.
        dtype: Dtype of the numbers.
        per_token: Whether each token has numbers of its own, in blocks (keys and values). Otherwise
            a sequence has them once, in a slot, and a step replaces them (a recurrent state, a
            convolution's window).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    per_token: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of one token, or of one sequence."""
        return math.prod(self.shape) * self.dtype.itemsize


class LayerState(Protocol):
    """A kind of state."""

    def tensors(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """Return a layer's tensors, in a fixed order.

        Args:
            dtype: Dtype of the model's KV cache; a kind may keep its numbers in another.
        """


class IndexKeys(msgspec.Struct, frozen=True):
    """The keys of one attention layer's indexer, which chooses the tokens that a query sees.

    Attributes:
        layer: The `layer_idx`.
        width: Numbers of a token.
    """

    layer: int
    width: int

    def tensors(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """Return the state: a key of each token."""
        return (StateTensor((self.width,), dtype, True),)


def token_bytes(tensors: Iterable[StateTensor]) -> int:
    """Return the bytes of one token."""
    return sum(each.num_bytes for each in tensors if each.per_token)


def sequence_bytes(tensors: Iterable[StateTensor]) -> int:
    """Return the bytes of one sequence, besides those of its tokens."""
    return sum(each.num_bytes for each in tensors if not each.per_token)
