"""The output of Transformers' own `generate`: float32, greedy, one prompt alone. By the bundled
model, unless another folder is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from nano_inference.config import EngineConfig
from nano_inference.text.tokenizer import load_tokenizer

FOLDER = EngineConfig().model_folder


@cache
def model(folder: Path = FOLDER) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@cache
def tokenizer():  # type: ignore[no-untyped-def]
    return load_tokenizer(FOLDER)


def generate(
    prompt_ids: Sequence[int],
    max_tokens: int,
    *,
    ignore_eos: bool = False,
    claimed: Sequence[int] = (),
    folder: Path = FOLDER,
) -> list[int]:
    """The generated token ids, the stop token included.

    Args:
        claimed: What somebody takes them for. Whether they are tells one forward pass over all of
            them, which takes much less time than one for each token.
    """
    tokens = tuple(claimed)
    if tokens and _is_generated(tuple(prompt_ids), tokens, max_tokens, ignore_eos, folder):
        return list(tokens)
    return list(_generated(tuple(prompt_ids), max_tokens, ignore_eos, folder))


@cache
def _is_generated(
    prompt_ids: tuple[int, ...],
    tokens: tuple[int, ...],
    max_tokens: int,
    ignore_eos: bool,
    folder: Path,
) -> bool:
    """Whether each token is the likeliest after those before it, and the end is in its place."""
    ends = model(folder).generation_config.eos_token_id
    stops = set() if ignore_eos else {ends} if isinstance(ends, int) else set(ends)
    if stops.intersection(tokens[:-1]) or len(tokens) > max_tokens:
        return False
    if len(tokens) < max_tokens and tokens[-1] not in stops:
        return False
    with torch.inference_mode():
        logits = model(folder)(torch.tensor([prompt_ids + tokens])).logits[0]
    return logits[len(prompt_ids) - 1 : -1].argmax(-1).tolist() == list(tokens)


@cache
def _generated(
    prompt_ids: tuple[int, ...], max_tokens: int, ignore_eos: bool, folder: Path
) -> list[int]:
    stop = {"eos_token_id": None} if ignore_eos else {}
    with torch.inference_mode():
        output = model(folder).generate(
            torch.tensor([list(prompt_ids)]),
            attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
            do_sample=False,
            max_new_tokens=max_tokens,
            **stop,
        )
    return output[0, len(prompt_ids) :].tolist()


def logprobs(prompt_ids: list[int], completion_ids: list[int]) -> list[float]:
    """log-softmax of the logits at each completion token."""
    with torch.inference_mode():
        logits = model()(torch.tensor([prompt_ids + completion_ids])).logits[0].float()
    table = logits.log_softmax(-1)
    first = len(prompt_ids) - 1
    return [table[first + i, token].item() for i, token in enumerate(completion_ids)]
