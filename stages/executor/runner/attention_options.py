"""Options of attention, for its back ends and their kernels."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AttentionOptions(NamedTuple):
    """Options of one layer's attention, the same in every step.

    Attributes:
        scale: Factor of the scores.
        window: As in LayerSpec.
        softcap: Scores become softcap * tanh(score / softcap) (Gemma 2).
        sinks: `[heads]`, attention sinks: a score without a value in each softmax (GPT-OSS).
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
