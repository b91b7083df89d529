"""A trainer's forward pass with exactly the logprobs of a deterministic engine.

Trainer and engine run the same code of Transformers, with different shapes: the engine computes
single tokens of a batch from cached keys and values, the trainer whole sequences. In deterministic
mode (docs/determinism.md) the engine's results don't depend on shapes, so a trainer with the same
arithmetic gets the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from ..config import EngineConfig, ModelError
from ..stages.admission.checks import check_token_ids
from ..stages.executor.driver.logprobs import scale_logits
from ..stages.executor.runner.attention.backend import PREFIX, AttentionBackend
from ..stages.executor.runner.attention.choose import choose_backend
from ..stages.executor.runner.attention.gather import visible
from ..stages.executor.runner.attention.interface import attend, latent_of, probe_mask
from ..stages.executor.runner.attention_options import AttentionOptions
from ..stages.executor.runner.batch import Rows
from ..stages.executor.runner.fast_modules.modules import FastModules
from ..stages.executor.runner.fixed_tiles import FixedTiles, require_cpu
from ..stages.executor.runner.inputs import InputBuilder
from ..stages.executor.runner.kv_cache import KVCache
from ..stages.executor.runner.model import wrap_model
from .engine_requests import ArgumentError, check_prompts, token_ids_of

IMPLEMENTATION = f"{PREFIX}exact"
"""The name for `attn_implementation`."""

_BLOCK_SIZE = 64
"""Positions per block of the scratch cache, without effect on the bits."""


class ExactForward:
    """Logprobs of whole sequences with the bits of a deterministic engine, and gradients (CPU).

    ```python
    exact = ExactForward(model)  # the trainer's; EngineConfig(deterministic=True) for the engine
    (logprobs,) = exact.logprobs([sample.prompt_tokens + sample.completion_tokens])
    (-logprobs[-len(sample.completion_tokens):].sum()).backward()
    ```

    The forward pass has the engine's bits for the same weights, dtype, number of threads and
    machine, and requests without penalties, bias and `min_tokens`. The backward pass is torch's,
    through the model's own code, which runs again where kernels ran forward; attention's gradient
    is that of `scaled_dot_product_attention` on the same inputs. It is exact within rounding.
    Sequences of a model with recurrent state run one by one.

    The model can only be called through this object, since its attention is replaced.
    """

    def __init__(
        self,
        module: nn.Module,
        max_model_len: int = 1 << 20,
        kernels: Literal["auto", "off"] = "auto",
        latent_attention: Literal["auto", "on", "off"] = "auto",
    ) -> None:
        """Replace the model's attention, and set eval mode, since dropout can't be exact.

        Args:
            module: A Transformers causal language model, on CPU.
            max_model_len: The longest sequence; the model's own limit applies, too.
            kernels: As the engine's `kernels`, which the bits depend on.
            latent_attention: As the engine's, likewise.

        Raises:
            ModelError: The model's architecture is not supported.
        """
        self._model = wrap_model(module, max_model_len, latent_attention=latent_attention)
        require_cpu(self._model.device)
        if self._model.forms:
            raise ModelError(
                f"the weights are codes ({self._model.forms}), which have no gradients; give the "
                "trainer's own model, of plain weights"
            )
        if self._model.index_keys:
            raise ModelError(
                "attention whose indexer chooses tokens has no exact training pass",
                remedy="train another model, or by its own forward pass",
            )
        for options in self._model.attention_options:
            if options.softcap is not None or options.sinks is not None:
                raise ModelError(
                    "attention with a soft cap or sinks has no exact training pass",
                    remedy="train another model, or by its own forward pass",
                )
        config = EngineConfig(deterministic=True, kernels=kernels, block_size=_BLOCK_SIZE)
        backend, without_kernels = choose_backend(config, self._model)
        if (mixers := self._model.mixers) is not None:
            if not without_kernels:
                mixers.use_kernels(self._model.dtypes.activations, self._model.device)
            mixers.keep_gradients()
        self._builder = InputBuilder(self._model, _BLOCK_SIZE, backend)
        self._tiles = FixedTiles()
        self._cache = self._states = KVCache(self._model, 1, _BLOCK_SIZE, num_slots=1)
        self._fast_modules: FastModules | None = None
        if not without_kernels:
            parts = (self._model, self._cache, self._builder)
            self._fast_modules = FastModules(*parts, with_gradients=True)
            self._cache.moved()  # scratch buffers of inference mode can't be used outside
        AttentionInterface.register(IMPLEMENTATION, exact_attention)
        AttentionMaskInterface.register(IMPLEMENTATION, probe_mask)
        self._model.module.set_attn_implementation(IMPLEMENTATION)  # type: ignore[operator]

    def logprobs(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> tuple[Tensor, ...]:
        """Return the logprobs of each sequence's tokens after the first.

        Args:
            sequences: Token ids, at least two each; sequences don't attend to one another.
            temperature: Divisor of the logits, as in sampling; 0 counts as 1.

        Returns:
            `[len(sequence) - 1]` float32 for each sequence.

        Raises:
            RequestError: A sequence is too short or too long, or has an invalid token id.
        """
        sequences = [self._checked(sequence) for sequence in check_prompts(sequences)]
        if self._model.mixers is None:
            return self._logprobs(sequences, temperature)
        # A mixer's own code, which has the gradients, takes one sequence.
        return tuple(self._logprobs([sequence], temperature)[0] for sequence in sequences)

    def _logprobs(
        self, sequences: Sequence[Sequence[int]], temperature: float
    ) -> tuple[Tensor, ...]:
        counts = np.array([len(sequence) - 1 for sequence in sequences])
        inputs = np.concatenate([np.array(sequence[:-1]) for sequence in sequences])
        targets = torch.tensor([token for sequence in sequences for token in sequence[1:]])
        rows = self._rows(counts)
        step = self._builder.build(rows, inputs, np.arange(len(inputs)))
        fast = self._fast_modules
        states = nullcontext() if step.states is None else step.states.active(self._states)
        with self._tiles, states, nullcontext() if fast is None else fast.active():
            output = self._model.module(
                input_ids=step.input_ids,
                position_ids=step.position_ids,
                attention_mask=step.position_ids.new_empty(1, 1, 1, 1),
                use_cache=False,
                attention_backend=step.backend,
                attention_batch=step.attention,
                kv_cache=self._cache,
                sequence_lengths=counts.tolist(),
            )
            logits = output.logits[0].float()
            temperatures = torch.full((len(inputs),), float(temperature))

            def logprobs_of(logits: Tensor, *, kernels: bool = False) -> Tensor:
                scaled = scale_logits(logits, temperatures, kernels=kernels)
                return scaled.logprobs(targets[:, None])[:, 0]

            if fast is None:
                logprobs = logprobs_of(logits)
            else:
                run = partial(logprobs_of, kernels=True)
                logprobs = _Exact.apply(run, logprobs_of, logits)  # type: ignore[no-untyped-call]
        return torch.split(logprobs, counts.tolist())

    def _checked(self, sequence: Sequence[int]) -> tuple[int, ...]:
        """Raises RequestError."""
        limit, vocab_size = self._model.max_model_len, self._model.vocab_size
        ids = token_ids_of(sequence, "a sequence is token ids", "invalid_prompt")
        if not 2 <= len(ids) <= limit + 1:
            raise ArgumentError(
                f"a sequence has {len(ids)} tokens; sequences must have 2 to {limit + 1} tokens",
                code="invalid_prompt",
            )
        check_token_ids("a sequence", ids, vocab_size, "invalid_token_ids")
        return ids

    def _rows(self, counts: np.ndarray[Any, np.dtype[np.int64]]) -> Rows:
        """Return one row per sequence, each with its own blocks in a cache that is large enough."""
        blocks = -(-counts // _BLOCK_SIZE)
        ends = np.cumsum(blocks)
        if ends[-1] > self._cache.num_blocks:
            self._cache = KVCache(self._model, int(ends[-1]), _BLOCK_SIZE, num_slots=1)
        columns = np.minimum(np.arange(blocks.max()), blocks[:, None] - 1)
        tables = (ends - blocks)[:, None] + columns
        states = None if self._model.mixers is None else np.arange(len(counts))
        return Rows(np.zeros_like(counts), counts, tables, 0, states=states)


def exact_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    attention_backend: AttentionBackend[Any] | None,
    attention_batch: Any,
    kv_cache: KVCache,
    sequence_lengths: Sequence[int],
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Deterministic mode's attention over whole sequences, for Transformers' interface.

    Args:
        module: The attention layer.
        query: `[1, heads, tokens, dim]`.
        key: `[1, kv_heads, tokens, dim]`.
        value: `[1, kv_heads, tokens, value_dim]`; of a latent layer, a part of the key.
        attention_mask: Ignored, since the batch holds the masks.
        attention_backend: Computes the forward pass; None for torch, exact within rounding.
        attention_batch: The sequences, as prepared by the back end.
        kv_cache: Scratch memory.
        sequence_lengths: Tokens of each sequence.
        scaling: Factor of the scores; 1/sqrt(dim) when None.
        sliding_window: The layer's window, None for full attention.

    Returns:
        `[1, tokens, heads, value_dim]`, and None for the weights.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = kv_cache.index_of[module.layer_idx]  # type: ignore[index]
    options = AttentionOptions(scale, sliding_window, chunk=kv_cache.specs[layer].chunk)
    latent = latent_of(module)

    def differentiable(query: Tensor, key: Tensor, other: Tensor) -> Tensor:
        value = other
        if latent is not None:
            key, value = latent.expand_by(key, other)
        return _attend_each(query, key, value, sequence_lengths, options)

    other = value if latent is None else latent.weight
    if attention_backend is None:
        return differentiable(query, key, other), None

    def run(*_: Tensor) -> Tensor:
        states = query, key, value
        return attend(module, states, options, attention_backend, attention_batch, kv_cache)

    output: Tensor = _Exact.apply(run, differentiable, query, key, other)  # type: ignore[no-untyped-call]
    return output, None


class _Exact(torch.autograd.Function):
    """Forward with the engine's bits, backward through a function of torch."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., Tensor], differentiable: Callable[..., Tensor], *inputs: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.differentiable = differentiable
        return run(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.differentiable(*inputs)
        return (None, None, *torch.autograd.grad(output, inputs, gradients))


def _attend_each(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], options: AttentionOptions
) -> Tensor:
    """Attention of concatenated sequences, in the shapes of `exact_attention`."""
    queries, keys, values = (
        torch.split(tensor, list(lengths), dim=2) for tensor in (query, key, value)
    )
    outputs = [_attend(*part, options) for part in zip(queries, keys, values, strict=True)]
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _attend(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Attention of one sequence; each tensor is `[1, heads, tokens, dim]`."""
    count, span, scale = query.shape[2], options.span, options.scale
    mask = visible(0, count, 0, span, query.device) if span.first(count - 1) else None
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
