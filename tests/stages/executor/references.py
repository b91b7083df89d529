"""Transformers' results for the small models, once per architecture and session."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .models import VOCAB, make_model

NEW_TOKENS = 64
"""At full length; every day it is half of them."""

PROMPT_LENGTHS = (34, 19, 7, 2)
"""Two prompts of each: more than a block and less, more than a window and less."""

_PROMPT_SEEDS = {
    "llama": 5,
    "qwen2_window": 6,
    "mistral": 1,
    "gemma2": 1,
    "gemma3_text": 3,
    "phi3": 5,
    "olmo2": 2,
    "mixtral": 4,
    "gpt_oss": 5,
    "qwen3_moe": 3,
}
"""Prompts that lead nowhere near a tie: of 512 choices at random some always come close."""


@dataclass(frozen=True)
class Reference:
    """Greedy generation by Transformers' `generate`, in float32.

    Attributes:
        tokens: `[prompts][new tokens]`.
        logprobs: `[prompts][new tokens]`, of these tokens.
        lead: By how much the chosen token's logit leads the next best, where it does so least.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    lead: float


@cache
def model_of(name: str) -> Any:
    """The model of an architecture, with Transformers' eager attention."""
    return make_model(name)


@cache
def reference(name: str, new_tokens: int) -> Reference:
    """The reference of an architecture; `name` is one of models.ARCHITECTURES."""
    tokens: list[list[int]] = []
    logprobs: list[list[float]] = []
    leads = []
    for pair in make_prompts(name):
        chosen, logits = generate(model_of(name), pair, new_tokens)
        leads.append(least_lead(logits))
        tokens += chosen.tolist()
        logprobs += logits.log_softmax(-1).gather(-1, chosen[..., None])[..., 0].tolist()
    return Reference(tokens, logprobs, min(leads))


@torch.no_grad()
def generate(model: Any, prompts: list[list[int]], new_tokens: int) -> tuple[Tensor, Tensor]:
    """Transformers' greedy tokens, `[prompts, new tokens]`, and the logits before each, in float64.

    The prompts have one length: a batch without padding, in which no row sees the other.
    """
    ids = torch.tensor(prompts)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new_tokens,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return output.sequences[:, ids.shape[1] :], torch.stack(output.logits, dim=1).double()


def least_lead(logits: Tensor) -> float:
    """By how much the largest logit leads the next, where it does so least."""
    best = logits.topk(2).values
    return float((best[..., 0] - best[..., 1]).min())


def prompts_of(name: str) -> list[list[int]]:
    """Eight. The second of each length begins like the first."""
    return [prompt for pair in make_prompts(name) for prompt in pair]


def make_prompts(name: str) -> list[list[list[int]]]:
    """Pairs of prompts of one length, whose first halves agree."""
    rng = random.Random(f"{name}/{_PROMPT_SEEDS.get(name, 0)}")

    def draw(number: int) -> list[int]:
        return [rng.randrange(1, VOCAB) for _ in range(number)]

    pairs = []
    for length in PROMPT_LENGTHS:
        first = draw(length)
        pairs.append([first, first[: length // 2] + draw(length - length // 2)])
    return pairs


def in_bfloat16(model: Any, attention: str) -> Any | None:
    """The model rounded to bfloat16; None if Transformers has no such attention for it."""
    rounded = copy.deepcopy(model).bfloat16()
    try:
        rounded.set_attn_implementation(attention)
    except ValueError:
        return None
    return rounded


@torch.no_grad()
def scored(model: Any, prompt: list[int], completion: list[int]) -> Tensor:
    """log-softmax of the logits before each completion token, `[completion, vocab]` in float64."""
    ids = torch.tensor([prompt + completion[:-1]])
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 :]
    return logits.double().log_softmax(-1)
