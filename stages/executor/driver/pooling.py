"""Vectors of prompts: the last hidden states of their tokens, pooled over the steps of a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ....bus.control import Capability, EmbeddingCapacity
from ....bus.pooling import PooledPrompt, Pooling
from ....config import EngineConfig, ModelError, PoolingKind
from ....text.pooling_config import own_pooling
from ..runner.interface import IntArray, LoadedModel, encode
from .sequences import SequenceTable

Pooled = tuple[tuple[int, Tensor, int], ...]
"""Sequences whose prompts are computed, each with its vector, `[dimensions]` on the device, and the
version of its adapter."""


class PromptPooler:
    """Pools the prompts of a lane.

    Of a prompt that takes several steps it keeps the sum of what the mean is of, or the first
    token's state, in float32 or wider; a prompt that starts again starts with nothing.
    """

    def __init__(
        self, model: LoadedModel, table: SequenceTable, max_tokens: int, *, in_order: bool = False
    ) -> None:
        """For a model and its sequences.

        Args:
            model: The model.
            table: Its sequences.
            max_tokens: That of `encode`.
            in_order: Whether to add up states one by one, so that a sum has the same bits however
                the prompt is cut.
        """
        self._max_tokens = max_tokens
        self._add_up = _add_in_order if in_order else _add
        self._model = model
        self._table = table
        self._unfinished: dict[int, Tensor] = {}

    def forget(self, seq_id: int) -> None:
        """A sequence has left."""
        self._unfinished.pop(seq_id, None)

    def clear(self) -> None:
        """All have."""
        self._unfinished.clear()

    @contextmanager
    def watching(self, rows: IntArray) -> Iterator[list[Tensor]]:
        """Within it, each pass of the model leaves its last hidden states, `[tokens, hidden]`.

        Nothing is left where none of these rows pools.
        """
        hidden: list[Tensor] = []
        if not self._table.pools[rows].any():
            yield hidden
            return

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            hidden.append(output.last_hidden_state[0])

        hook = self._model.base.register_forward_hook(keep)
        try:
            yield hidden
        finally:
            hook.remove()

    def take(
        self,
        hidden: list[Tensor],
        rows: IntArray,
        last_token: IntArray,
        num_tokens: IntArray,
        adapter_versions: tuple[int, ...] = (),
    ) -> Pooled:
        """Takes one step, before the table counts its tokens as computed.

        Args:
            hidden: What `watching` gave.
            rows: `[rows]`, of the table.
            last_token: `[rows]`, where in the batch the last token of each row is.
            num_tokens: `[rows]`, how many each row computes.
            adapter_versions: `[rows]`, as of PooledPrompt; empty where no row has an adapter.

        Returns:
            Those whose last token is among them.
        """
        if not hidden:
            return ()
        (states,) = hidden
        pooled = []
        ids = self._table.ids_of(rows).tolist()
        versions = adapter_versions or (0,) * len(ids)
        for row, seq_id, last, count, version in zip(
            rows.tolist(), ids, last_token.tolist(), num_tokens.tolist(), versions, strict=True
        ):
            pooling = self._table.pooling[row]
            if pooling is not None:
                vector = self._advance(row, seq_id, pooling, states[last + 1 - count : last + 1])
                if vector is not None:
                    pooled.append((seq_id, vector, version))
        return tuple(pooled)

    def encode(self, rows: IntArray, num_tokens: IntArray) -> Pooled:
        """Whole prompts by an encoder.

        Args:
            rows: `[rows]`, of the table.
            num_tokens: `[rows]`, how many each row computes.

        Raises:
            ValueError: It is not all of a prompt.
        """
        table = self._table
        if (num_tokens != table.num_known[rows]).any():
            raise ValueError("the plan has a part of a prompt, and the model takes whole ones")
        prompts = [table.tokens[row, : table.num_known[row]] for row in rows.tolist()]
        pooled: list[tuple[int, Tensor, int]] = []
        ids = table.ids_of(rows).tolist()
        for index, states in encode(self._model, prompts, self._max_tokens):
            pooling = table.pooling[rows[index]]
            assert pooling is not None, "such a model generates nothing"
            vector = self._advance(int(rows[index]), ids[index], pooling, states)
            assert vector is not None, "the prompt is whole"
            pooled.append((ids[index], vector, 0))
        return tuple(pooled)

    def _advance(self, row: int, seq_id: int, pooling: Pooling, states: Tensor) -> Tensor | None:
        """Takes the next tokens of a prompt, `[tokens, hidden]`; gives the vector at its end."""
        start, length = int(self._table.num_computed[row]), int(self._table.num_known[row])
        ends = start + len(states) == length
        if pooling.kind == "last":
            return finish_vector(states[-1].float(), pooling) if ends else None
        if pooling.kind == "cls":
            whole = states[0].float() if start == 0 else self._unfinished[seq_id]
        else:
            whole = self._add_up(states, self._unfinished[seq_id] if start else None)
        if not ends:
            # A copy: the step's states would live on with a view of them.
            self._unfinished[seq_id] = whole.clone()
            return None
        self.forget(seq_id)
        if pooling.kind == "mean":
            whole = (whole / length).float()
        return finish_vector(whole, pooling)


def _add(states: Tensor, before: Tensor | None) -> Tensor:
    """The sum of states, `[tokens, hidden]`, and of those before."""
    whole = states.float().sum(0)
    return whole if before is None else whole + before


def _add_in_order(states: Tensor, before: Tensor | None) -> Tensor:
    """The same in float64, of which `cumsum` adds one after the other on CPU."""
    wide = states.double()
    if before is not None:
        wide = torch.cat((before[None], wide))
    return wide.cumsum(0)[-1]


def embedding_capacity(config: EngineConfig, model: LoadedModel) -> EmbeddingCapacity | None:
    """What vectors a model makes; None of one that is not to make any, and of one that generates
    too, and whose makers pool in a way that is not known here.

    Raises:
        ModelError: So do those of one that makes nothing but vectors; or the model can't do what
            is its role.
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
    return EmbeddingCapacity(model.hidden_size, kind, own.normalize, model.is_encoder)


def capabilities_of(
    model: LoadedModel, embedding: EmbeddingCapacity | None, role: str
) -> tuple[Capability, ...]:
    """What a model can be asked for, in its role."""
    generates = model.generates and role != "embed"
    wanted: dict[Capability, bool] = {
        "generate": generates,
        "score": generates,
        "embed": embedding is not None,
    }
    return tuple(name for name, can in wanted.items() if can)


def finish_vector(vector: Tensor, pooling: Pooling) -> Tensor:
    """Cuts a pooled vector, `[hidden]` float32, to its dimensions, and then normalises it.

    A vector of zeros stays one.
    """
    vector = vector[: pooling.dimensions]
    return nn.functional.normalize(vector, dim=0) if pooling.normalize else vector.clone()


def report_pooled(pooled: Pooled) -> tuple[PooledPrompt, ...]:
    """As messages; waits for the device.

    Raises:
        ModelError: A vector is not of finite numbers.
    """
    if not pooled:
        return ()
    reports = []
    for seq_id, vector, version in pooled:
        numbers = vector.cpu()
        if not bool(torch.isfinite(numbers).all()):
            raise ModelError(
                "the model produced hidden states that are not finite numbers; its weights are "
                "damaged, or its dtype can't hold them (float16 overflows where bfloat16 does not)"
            )
        reports.append(PooledPrompt(seq_id, numbers.numpy().astype("<f4").tobytes(), version))
    return tuple(reports)
