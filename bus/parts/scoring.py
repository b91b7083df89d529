"""Logprobs of prompts, and a reference model."""

from __future__ import annotations

from ..control import InternalPart
from ..sections import Section
from ..steps import PromptLogprobs


class TargetLogprobs(InternalPart, frozen=True, array_like=True):
    """Logprobs of some of a prompt's targets, from one step.

    Attributes:
        seq_id: The sequence, always the first sample of its request.
        first: The number of targets before these, padding not counted.
        logprobs: `[targets]`, float32, little-endian.
    """

    seq_id: int
    first: int
    logprobs: bytes


class PromptScores(Section, frozen=True):
    """In StepResult: for sequences with logprobs of their prompts, or of targets there."""

    prompts: tuple[PromptLogprobs, ...]
    targets: tuple[TargetLogprobs, ...] = ()

    def concerns(self, seq_ids: set[int]) -> bool:
        scored = [each.seq_id for each in self.prompts] + [each.seq_id for each in self.targets]
        return not seq_ids.isdisjoint(scored)


class ReferenceScoring(Section, frozen=True):
    """In RequestOpened: the reference model scores each sample.

    Attributes:
        temperature: Temperature of the reference model's logprobs.
    """

    temperature: float
