"""Encoders such as BERT, whose tokens look ahead: each prompt as a whole, without a KV cache.

They run Transformers' own code, on padded prompts and with its own masks, so positions and masks
are the model's.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ....config import EngineConfig, ModelError
from .batch import IntArray
from .loaded_model import Dtypes, LoadedModel, with_codes

_MOST_PADDING = 8
"""At most one in this many tokens of a pass is padding."""

_PADDED = (3, 24, 96)
"""Prompt lengths at which the effect of padding is tested."""


def wrap_encoder(module: Any, config: EngineConfig) -> LoadedModel:
    """Wrap an encoder. Raises ModelError if deterministic mode is required."""
    if config.deterministic is True:
        raise ModelError(
            f"deterministic mode is for models that generate, and {type(module).__name__} makes "
            "embeddings; set deterministic to false"
        )
    hf_config: PreTrainedConfig = module.config
    weight = module.get_input_embeddings().weight
    # A prompt must fit a step.
    most = min(config.max_model_len, config.max_tokens_per_batch)
    model = LoadedModel(
        module=module.eval(),
        hf_config=hf_config,
        device=weight.device,
        dtypes=Dtypes.of(weight.dtype),
        max_model_len=min(most, longest_prompt(module, hf_config, most)),
        vocab_size=weight.shape[0],
        layers=(),
        generates=False,
        is_encoder=True,
        shards=with_codes(module, weight.dtype),
    )
    return replace(model, may_pad=not padding_shows(model))


@torch.inference_mode()
def encode(
    model: LoadedModel, prompts: Sequence[IntArray], max_tokens: int
) -> Iterator[tuple[int, Tensor]]:
    """Compute the last hidden states of prompts, in passes of similar length.

    Args:
        model: An encoder.
        prompts: `[tokens]` each, at least one token.
        max_tokens: Limit of tokens in one pass, padding included; a longer prompt has its own pass.

    Yields:
        For each prompt, in any order, its index and its states, `[tokens, hidden]`.
    """
    lengths = np.array([len(prompt) for prompt in prompts])
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        longest = int(lengths[order[start]])
        least = longest - longest // _MOST_PADDING if model.may_pad else longest
        fitting = lengths[order[start:]] >= least
        count = max(min(int(fitting.sum()), max_tokens // longest), 1)
        indices = order[start : start + count].tolist()
        states = forward(model, [prompts[index] for index in indices])
        for index, row in zip(indices, states, strict=True):
            yield index, row[: lengths[index]]
        start += count


def forward(model: LoadedModel, prompts: Sequence[IntArray]) -> Tensor:
    """Run one pass: `[prompts, longest, hidden]`, valid up to each prompt's length.

    Padding is at the end, so that tokens keep their positions.
    """
    longest = max(map(len, prompts))
    # None and -1 mean that there is no padding token.
    filler = max(0, getattr(model.hf_config, "pad_token_id", None) or 0)
    input_ids = np.full((len(prompts), longest), filler, np.int64)
    mask = np.zeros((len(prompts), longest), np.int64)
    for row, prompt in enumerate(prompts):
        input_ids[row, : len(prompt)] = prompt
        mask[row, : len(prompt)] = 1
    ids, masks = (torch.from_numpy(array).to(model.device) for array in (input_ids, mask))
    return _states(model.module, ids, masks)


@torch.inference_mode()
def looks_ahead(module: Any, device: torch.device) -> bool:
    """Return whether a token's state depends on the next token, by running the model.

    Raises:
        ModelError: The model can't compute states from token ids.
    """
    states = []
    for second in (1, 2):
        # In passes of one shape, independent states have equal bits.
        tokens = torch.tensor([[1, second]], device=device)
        try:
            states.append(_states(module, tokens, torch.ones_like(tokens)))
        except Exception as error:
            raise ModelError(
                f"{type(module).__name__} returns no states for token ids: {error!s:.300}; "
                "choose another model"
            ) from error
    if states[0].shape[:2] != (1, 2):
        raise ModelError(
            f"{type(module).__name__} returns {tuple(states[0].shape)} for two tokens, which "
            "can't be pooled; choose another model"
        )
    return not torch.equal(states[0][:, 0], states[1][:, 0])


@torch.inference_mode()
def padding_shows(model: LoadedModel) -> bool:
    """Return whether padding changes an encoder's states, as in convolutions without masks."""
    generator = np.random.default_rng(0)
    for length in _PADDED:
        long = min(2 * length, model.max_model_len)
        prompts = [generator.integers(0, model.vocab_size, size) for size in (length, long)]
        if length < long:
            alone = forward(model, prompts[:1])[0]
            beside = forward(model, prompts)[0, :length]
            # Above rounding errors, and below the effect of another token.
            tolerance = torch.finfo(model.dtypes.activations).eps ** 0.5 * float(alone.abs().max())
            if not float((alone - beside).abs().max()) <= tolerance:
                return True
    return False


def longest_prompt(module: nn.Module, hf_config: PreTrainedConfig, fallback: int) -> int:
    """Return the longest prompt for which an encoder has positions, in tokens."""
    limit = getattr(hf_config.get_text_config(), "max_position_embeddings", None) or fallback
    for name, part in module.named_modules():
        # RoBERTa's positions start after the padding index.
        if name.endswith("position_embeddings") and getattr(part, "padding_idx", None) is not None:
            limit = min(limit, part.num_embeddings - part.padding_idx - 1)
    return int(limit)


def _states(module: Any, input_ids: Tensor, mask: Tensor) -> Tensor:
    takes = inspect.signature(module.forward).parameters
    cache = {"use_cache": False} if "use_cache" in takes else {}
    states: Tensor = module(input_ids=input_ids, attention_mask=mask, **cache).last_hidden_state
    return states
