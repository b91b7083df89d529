"""Weights that spell their version: what they sample, and what it may rest on, is known."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

FIRST_TOKEN = 100
"""The token that version 0 spells; version v spells this one plus v."""

NUM_SPELLINGS = 500


def token_of(version: int) -> int:
    """The token that weights of a version sample at temperature 0."""
    return FIRST_TOKEN + version % NUM_SPELLINGS


def spelling(weights: Mapping[str, Tensor], version: int) -> dict[str, Tensor]:
    """Weights for a model like the bundled one (tied embeddings) that always sample one token.

    Every token is embedded alike, so queries and keys don't matter and each layer adds to the
    residual stream the mean of the values in its KV. Only the first layer adds anything: a value
    that spells the version. The output is that mean, read off by the embeddings. So the logprob
    of the token is the same for every prompt, and another one as soon as any KV that was attended
    to comes from another version.
    """
    new = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    for name in new:
        if name.endswith("norm.weight"):
            new[name].fill_(1.0)
    embedding = new["model.embed_tokens.weight"]
    width = embedding.shape[1]
    generator = torch.Generator().manual_seed(0)
    # The first place tells nothing, so that what is read is only what attention added.
    codes = torch.randn(NUM_SPELLINGS, width // 4, generator=generator)
    codes /= codes.norm(dim=1, keepdim=True)
    spelled = slice(FIRST_TOKEN, FIRST_TOKEN + NUM_SPELLINGS)
    embedding[spelled, 1 : 1 + width // 4] = codes.to(embedding.dtype)
    embedding[:, 0] = 4.0
    values = new["model.layers.0.self_attn.v_proj.bias"]
    values[: width // 4] = 100 * codes[version % NUM_SPELLINGS].to(values.dtype)
    output = new["model.layers.0.self_attn.o_proj.weight"]
    for place in range(width // 4):
        output[1 + place, place] = 1.0
    return {name: tensor for name, tensor in new.items() if name != "lm_head.weight"}
