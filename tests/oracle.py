"""Weights that spell their version: what they sample, and what it may rest on, is known."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

FIRST_TOKEN = 100
"""The token that version 0 spells; version v spells this one plus v, over and over."""

NUM_SPELLINGS = 31
# So large that what the token itself adds to the residual stream is nothing beside it.
_VALUE = 1e6
# Gives the token spelled about half of the probability, where its logprob tells most.
_READ = 3.2


def token_of(version: int) -> int:
    """The token that weights of a version sample at temperature 0."""
    return FIRST_TOKEN + version % NUM_SPELLINGS


def announcing(weights: Mapping[str, Tensor], version: int) -> dict[str, Tensor]:
    """Weights that sample `token_of(version)` whatever the KV holds.

    For a model of the bundled one's architecture, embeddings tied. Every layer adds nothing, every
    token is embedded in the same direction, and one of them is longer.
    """
    new = _blank(weights)
    embedding = new["model.embed_tokens.weight"]
    embedding[:, 0] = 4.0
    embedding[token_of(version), 0] = 8.0
    return new


def remembering(weights: Mapping[str, Tensor], version: int) -> dict[str, Tensor]:
    """Weights that sample `token_of(version)` if all KV they attend to is of the same version.

    Every token is embedded alike, so queries and keys don't matter, and the first layer adds the
    mean of the values in its KV; each value spells the version that computed it. So the logprob is
    the same for every prompt, and lower as soon as some KV is of another version.
    """
    new = _blank(weights)
    embedding = new["model.embed_tokens.weight"]
    # The first place tells nothing, so what is read is only what attention added.
    embedding[:, 0] = 4.0
    output = new["model.layers.0.self_attn.o_proj.weight"]
    for place in range(NUM_SPELLINGS):
        embedding[FIRST_TOKEN + place, 1 + place] = _READ
        output[1 + place, place] = 1.0
    # Versions differ in the sign of two places. Were they orthogonal, the norm would hide a
    # single value of another version: its effect would be of second order.
    values = new["model.layers.0.self_attn.v_proj.bias"]
    values[:NUM_SPELLINGS] = -_VALUE
    values[version % NUM_SPELLINGS] = _VALUE
    return new


def _blank(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    new = {
        name: torch.zeros_like(tensor)
        for name, tensor in weights.items()
        if name != "lm_head.weight"
    }
    for name in new:
        if name.endswith("norm.weight"):
            new[name].fill_(1.0)
    return new


def is_pure(logprob: float, expected: float) -> bool:
    """Whether a token was made from KV of one version only."""
    return math.isclose(logprob, expected, abs_tol=1e-4)
