"""Models with recurrent state in training: `ExactForward` has the engine's bits, and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from nano_inference import ExactForward

from ...soaking import in_soak
from .models import RECURRENT, make_model
from .test_recurrent import lane_of, prompts_of

KINDS = [name if name in ("lfm2", "qwen3_5_text") else in_soak(name) for name in RECURRENT]

MAX_DIFFERENCE = 2e-3
"""Of gradients, relative to the largest of a tensor, which scans and their chunked forms have."""


@pytest.mark.parametrize("name", KINDS)
def test_logprobs_are_the_engine_s_bits_and_gradients_the_model_s(name: str) -> None:
    prompts = prompts_of(name)
    answers = lane_of(name).run(prompts, 8)
    sequences = [prompt + each.token_ids for prompt, each in zip(prompts, answers, strict=True)]
    module, plain = make_model(name), make_model(name)

    exact = ExactForward(module, 96).logprobs(sequences)

    for prompt, found, answer in zip(prompts, exact, answers, strict=True):
        assert found[len(prompt) - 1 :].tolist() == answer.logprobs
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(len(each) - 1, generator=generator) for each in sequences]
    _backward(exact, weights)
    for sequence, weight in zip(sequences, weights, strict=True):
        tokens = torch.tensor([sequence])
        logits = plain(input_ids=tokens[:, :-1], use_cache=False).logits
        logprobs = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[0, :, 0]
        _backward([logprobs], [weight])
    wanted = dict(plain.named_parameters())
    for key, parameter in module.named_parameters():
        if wanted[key].grad is None:
            assert parameter.grad is None, key
            continue
        bound = MAX_DIFFERENCE * max(wanted[key].grad.abs().max().item(), 1)
        torch.testing.assert_close(parameter.grad, wanted[key].grad, rtol=0, atol=bound, msg=key)


def _backward(logprobs: Sequence[Any], weights: Sequence[torch.Tensor]) -> None:
    sum((row * weight).sum() for row, weight in zip(logprobs, weights, strict=True)).backward()
