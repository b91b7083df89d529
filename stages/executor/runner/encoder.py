"""Models whose tokens look ahead, such as BERT: each prompt as a whole, without a KV cache.

They run as Transformers has them, on prompts that are filled up to one length and with its own
masks, so that what a position is, and what a token sees, is each model's own business.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ....config import ModelError
from .batch import IntArray
from .loaded_model import LoadedModel

_MOST_PADDING = 8
"""At most one of so many tokens of a pass is padding."""

_PADDED = (3, 24, 96)
"""Lengths at which it is looked whether padding shows."""


@torch.inference_mode()
def encode(
    model: LoadedModel, prompts: Sequence[IntArray], max_tokens: int
) -> Iterator[tuple[int, Tensor]]:
    """The last hidden states of prompts, in passes of similar length.

    Args:
        model: An encoder.
        prompts: `[tokens]` each, at least one token.
        max_tokens: Of one pass, padding included; a longer prompt has one of its own.

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
    """One pass: `[prompts, longest, hidden]`, of which what is behind a prompt counts for nothing.

    Prompts are filled up at the end, so that their tokens are where they would be alone.
    """
    longest = max(map(len, prompts))
    # None and -1 mean that there is none.
    filler = max(0, getattr(model.hf_config, "pad_token_id", None) or 0)
    input_ids = np.full((len(prompts), longest), filler, np.int64)
    mask = np.zeros((len(prompts), longest), np.int64)
    for row, prompt in enumerate(prompts):
        input_ids[row, : len(prompt)] = prompt
        mask[row, : len(prompt)] = 1
    output = model.module(
        input_ids=torch.from_numpy(input_ids).to(model.device),
        attention_mask=torch.from_numpy(mask).to(model.device),
        **_without_cache(model.module),
    )
    states: Tensor = output.last_hidden_state
    return states


@torch.inference_mode()
def looks_ahead(module: Any, device: torch.device) -> bool:
    """Whether a token's state depends on the token behind it: asked of the model, not its config.

    Raises:
        ModelError: The model makes no states of token ids.
    """
    states = []
    for second in (1, 2):
        # In passes of one shape: then what does not depend on it has the same bits.
        tokens = torch.tensor([[1, second]], device=device)
        try:
            output = module(
                input_ids=tokens, attention_mask=torch.ones_like(tokens), **_without_cache(module)
            )
            states.append(output.last_hidden_state)
        except Exception as error:
            raise ModelError(
                f"{type(module).__name__} makes no states of token ids: {error!s:.300}; choose "
                "another model"
            ) from error
    if states[0].shape[:2] != (1, 2):
        raise ModelError(
            f"{type(module).__name__} gives {tuple(states[0].shape)} for two tokens, so that no "
            "vectors can be made of them; choose another model"
        )
    return not torch.equal(states[0][:, 0], states[1][:, 0])


@torch.inference_mode()
def padding_shows(model: LoadedModel) -> bool:
    """Whether an encoder gives prompts other states beside longer ones, as convolutions do, which
    know no mask."""
    generator = np.random.default_rng(0)
    for length in _PADDED:
        long = min(2 * length, model.max_model_len)
        prompts = [generator.integers(0, model.vocab_size, size) for size in (length, long)]
        if length < long:
            alone = forward(model, prompts[:1])[0]
            beside = forward(model, prompts)[0, :length]
            # Rounding is far below this, and a number that comes from another token above it.
            tolerance = torch.finfo(model.dtype).eps ** 0.5 * float(alone.abs().max())
            if not float((alone - beside).abs().max()) <= tolerance:
                return True
    return False


def longest_prompt(module: nn.Module, hf_config: PreTrainedConfig, fallback: int) -> int:
    """The longest prompt that an encoder has positions for, in tokens."""
    limit = getattr(hf_config.get_text_config(), "max_position_embeddings", None) or fallback
    for name, part in module.named_modules():
        # As RoBERTa does, who numbers from behind the padding's place in the table.
        if name.endswith("position_embeddings") and getattr(part, "padding_idx", None) is not None:
            limit = min(limit, part.num_embeddings - part.padding_idx - 1)
    return int(limit)


def _without_cache(module: Any) -> dict[str, bool]:
    takes = inspect.signature(module.forward).parameters
    return {"use_cache": False} if "use_cache" in takes else {}
