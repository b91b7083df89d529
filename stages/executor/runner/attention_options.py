"""Options of attention, for its back ends and their kernels."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from torch import Tensor

from .batch import IntArray

_Positions = TypeVar("_Positions", int, IntArray, Tensor)


class Span(NamedTuple):
    """The positions that a query sees, up to its own; all of them by default.

    Attributes:
        window: A query sees itself and the `window - 1` tokens before it.
        chunk: The sequence is cut into chunks of so many positions, of which a query sees its own
            (Llama 4).
    """

    window: int | None = None
    chunk: int | None = None

    @property
    def kind(self) -> str:
        """Transformers' name of the kind of attention, in short."""
        if self.chunk is not None:
            return "chunked"
        return "full" if self.window is None else "sliding"

    def first(self, positions: _Positions) -> _Positions:
        """Return the first position that queries at these positions see."""
        if self.chunk is not None:
            return positions // self.chunk * self.chunk
        if self.window is None:
            return positions * 0
        low = positions - (self.window - 1)
        return low * (low > 0)


class AttentionOptions(NamedTuple):
    """Options of one layer's attention, the same in every step.

    Attributes:
        scale: Factor of the scores.
        window: As in Span.
        softcap: Scores become softcap * tanh(score / softcap) (Gemma 2).
        sinks: `[heads]`, attention sinks: a score without a value in each softmax (GPT-OSS).
        chunk: As in Span.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    chunk: int | None = None

    @property
    def span(self) -> Span:
        """The positions that a query sees."""
        return Span(self.window, self.chunk)
