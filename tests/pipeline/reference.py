"""What Transformers' own `generate` gives: the bundled model, float32, greedy, one prompt alone."""

from __future__ import annotations

from functools import cache

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from nano_inference.config import EngineConfig
from nano_inference.stages.tokenizer import load_tokenizer

FOLDER = EngineConfig().model_folder


@cache
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@cache
def tokenizer():  # type: ignore[no-untyped-def]
    return load_tokenizer(FOLDER)


def generate(prompt_ids: list[int], max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
    """The generated token ids, the stop token included."""
    return list(_generated(tuple(prompt_ids), max_tokens, ignore_eos))


@cache
def _generated(prompt_ids: tuple[int, ...], max_tokens: int, ignore_eos: bool) -> list[int]:
    stop = {"eos_token_id": None} if ignore_eos else {}
    with torch.inference_mode():
        output = model().generate(
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
