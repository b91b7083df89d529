"""Embeddings: a prompt's vector."""

from __future__ import annotations

from ..pooling import PooledPrompt
from ..sections import Section


class PooledResult(Section, frozen=True):
    """In StepResult: vectors of prompts that are computed, each of which ends its sequence."""

    prompts: tuple[PooledPrompt, ...]
