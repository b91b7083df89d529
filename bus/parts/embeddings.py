"""Embeddings: a prompt's vector."""

from __future__ import annotations

from ..pooling import PooledPrompt
from ..sections import Section


class PooledResult(Section, frozen=True):
    """In StepResult: vectors of prompts that are computed, each of which ends its sequence."""

    prompts: tuple[PooledPrompt, ...]

    @property
    def ended(self) -> tuple[int, ...]:
        return tuple([prompt.seq_id for prompt in self.prompts])

    def concerns(self, seq_ids: set[int]) -> bool:
        return any(each.seq_id in seq_ids for each in self.prompts)
