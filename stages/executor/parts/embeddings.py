"""Embeddings: prompts' vectors."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from ....bus.control import EmbeddingCapacity, ReplicaCapacity
from ....bus.parts.embeddings import PooledResult
from ....bus.sections import with_sections
from ..driver.pooling import PromptPooler, embedding_capacity, report_pooled
from ..driver.sampled import Sampled
from ..driver.step import LaunchedStep
from . import ExecutorState, Part


class Embeddings(Part):
    """Pools prompts in steps, and reports their vectors."""

    def __init__(self, state: ExecutorState, capacity: EmbeddingCapacity) -> None:
        super().__init__(state)
        self._capacity = capacity
        most, in_order = state.config.max_tokens_per_batch, "deterministic" not in state.off
        self._pooler = PromptPooler(state.runner, state.table, most, in_order=in_order)
        state.steps.pooler = self._pooler

    def finish(self, step: LaunchedStep, sampled: Sampled) -> None:
        if step.outputs.pooled:
            step.parts.append(PooledResult(report_pooled(step.outputs.pooled)))

    def forget(self, seq_id: int) -> None:
        self._pooler.forget(seq_id)

    def reset(self) -> None:
        self._pooler.clear()

    def capacity(self, found: ReplicaCapacity) -> ReplicaCapacity:
        found = replace(found, capabilities=(*found.capabilities, "embed"))
        return with_sections(found, self._capacity)


def make_embeddings(state: ExecutorState) -> Iterator[Embeddings]:
    """Make the part; nothing if the model makes no vectors in its role.

    Raises:
        ModelError: As `embedding_capacity`.
    """
    if (capacity := embedding_capacity(state.config, state.model)) is not None:
        yield Embeddings(state, capacity)
