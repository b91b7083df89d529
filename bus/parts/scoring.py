"""Logprobs of prompts, and a reference model."""

from __future__ import annotations

from ..sections import Section
from ..steps import PromptLogprobs


class PromptScores(Section, frozen=True):
    """In StepResult: for sequences with logprobs of their prompts."""

    prompts: tuple[PromptLogprobs, ...]

    def concerns(self, seq_ids: set[int]) -> bool:
        return any(each.seq_id in seq_ids for each in self.prompts)


class ReferenceScoring(Section, frozen=True):
    """In RequestOpened: the reference model scores each sample.

    Attributes:
        temperature: Temperature of the reference model's logprobs.
    """

    temperature: float
