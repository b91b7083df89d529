"""Logprobs of prompts, and a reference model."""

from __future__ import annotations

from ..control import InternalPart
from ..messages import TopLogprobs
from ..sections import Section


class PromptLogprobs(InternalPart, frozen=True, array_like=True):
    """Logprobs of a part of a prompt, from one step.

    Attributes:
        seq_id: The sequence, always the first sample of its request.
        start: Position in the prompt of the first token reported, at least 1.
        logprobs: `[k]`, of the tokens at `start .. start + k - 1`.
        top_logprobs: `[k]`, or empty when none were requested.
        ranks: `[k]`, with top logprobs: each token's place among all tokens, from 1.
    """

    seq_id: int
    start: int
    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...] = ()
    ranks: tuple[int, ...] = ()


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
