"""Prompt vectors: the last hidden states of a prompt's tokens, pooled over its steps."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from ....bus.control import EmbeddingCapacity
from ....bus.pooling import PooledPrompt, Pooling
from ....config import EngineConfig, ModelError, PoolingKind
from ....text.pooling_config import own_pooling
from ..runner.interface import IntArray, LoadedModel, ModelRunner
from .logprobs import broken_output
from .sampled import Pooled
from .sequences import SequenceTable


class PromptPooler:
    """Pools prompts.

    Between the steps of a prompt it keeps the running sum, or the first token's state, in float32
    or wider. A prompt that restarts begins from nothing.
    """

    def __init__(
        self, runner: ModelRunner, table: SequenceTable, max_tokens: int, *, in_order: bool
    ) -> None:
        """Take the parts.

        Args:
            runner: The model.
            table: Its sequences.
            max_tokens: As of `encode`.
            in_order: Add states one by one, so that a sum has the same bits however the prompt is
                cut.
        """
        self._max_tokens = max_tokens
        self._add_up = _add_in_order if in_order else _add
        self._runner = runner
        self._table = table
        self._unfinished: dict[int, Tensor] = {}

    def forget(self, seq_id: int) -> None:
        """Drop a sequence."""
        self._unfinished.pop(seq_id, None)

    def clear(self) -> None:
        """Drop all sequences."""
        self._unfinished.clear()

    def take(
        self,
        rows: IntArray,
        starts: IntArray,
        states: Iterable[tuple[int, Tensor]],
        adapter_versions: tuple[int, ...] = (),
    ) -> Pooled:
        """Pool one step.

        Args:
            rows: `[rows]`, of the table.
            starts: `[rows]`, tokens that were computed before the step.
            states: Indices of `rows`, with the last hidden states of their tokens in the step,
                `[tokens, hidden]` each.
            adapter_versions: `[rows]`, as of PooledPrompt; empty if no row has an adapter.

        Returns:
            The prompts that end in this step.
        """
        pooled = []
        ids = self._table.ids_of(rows).tolist()
        for index, own in states:
            info = self._table.info[rows[index]]
            if info is not None and info.pooling is not None:
                place = int(rows[index]), int(starts[index])
                vector = self._advance(*place, ids[index], info.pooling, own)
                if vector is not None:
                    version = adapter_versions[index] if adapter_versions else 0
                    pooled.append((ids[index], vector, version))
        return tuple(pooled)

    def encode(self, rows: IntArray, num_tokens: IntArray) -> Pooled:
        """Pool whole prompts, by an encoder.

        Args:
            rows: `[rows]`, of the table.
            num_tokens: `[rows]`, tokens that each row computes.

        Raises:
            ValueError: A prompt is not whole.
        """
        table = self._table
        if (num_tokens != table.num_known[rows]).any():
            raise ValueError("the plan has a part of a prompt, and the model needs whole prompts")
        prompts = [table.tokens[row, : table.num_known[row]] for row in rows.tolist()]
        starts = np.zeros_like(rows)
        return self.take(rows, starts, self._runner.encode(prompts, self._max_tokens))

    def _advance(
        self, row: int, start: int, seq_id: int, pooling: Pooling, states: Tensor
    ) -> Tensor | None:
        """Pool the next tokens of a prompt, `[tokens, hidden]`; return the vector at its end."""
        length = int(self._table.num_known[row])
        ends = start + len(states) == length
        if pooling.kind == "last":
            return finish_vector(states[-1].float(), pooling) if ends else None
        if pooling.kind == "cls":
            whole = states[0].float() if start == 0 else self._unfinished[seq_id]
        else:
            whole = self._add_up(states, self._unfinished[seq_id] if start else None)
        if not ends:
            # A view would keep all states of the step.
            self._unfinished[seq_id] = whole.clone()
            return None
        self.forget(seq_id)
        if pooling.kind == "mean":
            whole = (whole / length).float()
        return finish_vector(whole, pooling)


def _add(states: Tensor, before: Tensor | None) -> Tensor:
    """Return the sum of states, `[tokens, hidden]`, and of earlier ones."""
    whole = states.float().sum(0)
    return whole if before is None else whole + before


def _add_in_order(states: Tensor, before: Tensor | None) -> Tensor:
    """Likewise in float64, by `cumsum`, which adds one by one on the CPU."""
    wide = states.double()
    if before is not None:
        wide = torch.cat((before[None], wide))
    return wide.cumsum(0)[-1]


def embedding_capacity(config: EngineConfig, model: LoadedModel) -> EmbeddingCapacity | None:
    """Return the vectors that a model makes; None if its role excludes them, or if it generates and
    its own pooling is not supported.

    Raises:
        ModelError: The pooling of a model for embeddings only is not supported, or the model can't
            take its role.
    """
    if config.role == "generate":
        if not model.generates:
            raise ModelError(
                "engine.role is 'generate', and the model generates nothing; leave it out, or "
                "choose another model"
            )
        return None
    try:
        own = own_pooling(config.model_folder)
    except ModelError:
        if not model.generates or config.role == "embed":
            raise
        return None
    usual: PoolingKind = "mean" if model.is_encoder else "last"
    kind = own.kind or config.pooling or usual
    width = int(model.hf_config.get_text_config().hidden_size)
    return EmbeddingCapacity(width, kind, own.normalize, model.is_encoder)


def finish_vector(vector: Tensor, pooling: Pooling) -> Tensor:
    """Cut a pooled vector, `[hidden]` float32, to its dimensions, then normalise it, unless it is
    zero."""
    vector = vector[: pooling.dimensions]
    return nn.functional.normalize(vector, dim=0) if pooling.normalize else vector.clone()


def report_pooled(pooled: Pooled) -> tuple[PooledPrompt, ...]:
    """Wait for the vectors and return them as messages.

    Raises:
        ModelError: A vector is not finite.
    """
    reports = []
    for seq_id, vector, version in pooled:
        numbers = vector.cpu()
        if not bool(torch.isfinite(numbers).all()):
            raise broken_output("hidden states")
        reports.append(PooledPrompt(seq_id, numbers.numpy().astype("<f4").tobytes(), version))
    return tuple(reports)
