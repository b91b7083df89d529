"""Greedy tokens and logprobs equal those of Transformers' `generate`, for every architecture."""

from __future__ import annotations

import random

import pytest
import torch

from nano_inference.config import EngineConfig, SamplingParams
from nano_inference.stages.executor import ExecutorCore, wrap_model

from .models import ARCHITECTURES, VOCAB, make_model
from .plans import Generation, Planner

NEW_TOKENS = 10
PROMPT_LENGTHS = (1, 3, 7, 8, 19, 33)


def reference(model: object, prompt: list[int]) -> tuple[list[int], list[float], float]:
    """Transformers' greedy tokens, their logprobs, and the smallest lead of a chosen token."""
    ids = torch.tensor([prompt])
    output = model.generate(  # type: ignore[attr-defined]
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = output.sequences[0, len(prompt) :].tolist()
    logits = torch.cat(output.logits).double()
    logprobs = logits.log_softmax(-1)[torch.arange(NEW_TOKENS), tokens]
    best = logits.topk(2).values
    return tokens, logprobs.tolist(), float((best[:, 0] - best[:, 1]).min())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_equals_generate(name: str, device: str) -> None:
    model = make_model(name)
    rng = random.Random(name)
    prompts = [[rng.randrange(1, VOCAB) for _ in range(length)] for length in PROMPT_LENGTHS]
    expected = [reference(model, prompt) for prompt in prompts]
    assert min(lead for _, _, lead in expected) > 1e-4, "a near tie would decide the test"
    assert len({tuple(tokens) for tokens, _, _ in expected}) > len(prompts) // 2

    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    config = EngineConfig(block_size=4, kv_cache_bytes=1 << 21, max_batch_size=8)
    core = ExecutorCore(config, model=wrap_model(model.to(device), 128))
    generations = [
        Generation(index, prompt, sampling, arrives=index % 3)
        for index, prompt in enumerate(prompts)
    ]
    planner = Planner(core, chunk=7, shuffle=1)
    planner.run(generations)

    mixed = [r for r in planner.results if 0 < len(r.seq_ids) < len(prompts)]
    assert mixed, "prefills and decodes were to share steps"
    for generation, (tokens, logprobs, _) in zip(generations, expected, strict=True):
        assert generation.token_ids == tokens
        assert generation.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert generation.reason == "length"
