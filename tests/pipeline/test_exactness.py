"""Under any load, a request gets the tokens of Transformers for its prompt alone."""

from __future__ import annotations

import asyncio
import random

import pytest

from nano_inference import Completion, GenerateRequest, Pipeline, SamplingParams

from . import reference
from .conftest import MakeConfig

LIMIT_S = 240


def mixed_requests(number: int) -> list[GenerateRequest]:
    """Texts of the model's tasks, some after a long common context, some cut off early."""
    rng = random.Random(7)
    context = "Ana is 31 years old and lives in Oslo. " * 12
    requests = []
    for index in range(number):
        prompt = f"{rng.randrange(100)} + {rng.randrange(100)} ="
        if index % 3 == 1:
            prompt = f"Story about Ana, a cat and a red ball number {rng.randrange(50)}:"
        if index % 5 == 2:
            prompt = context[: rng.randrange(1, len(context))] + prompt
        requests.append(
            GenerateRequest(
                request_id=f"r{index}",
                prompt=prompt,
                sampling=SamplingParams(
                    temperature=0, max_tokens=rng.choice([1, 4, 16, 48]), ignore_eos=index % 4 == 3
                ),
            )
        )
    return requests


def check_tokens(request: GenerateRequest, completion: Completion) -> None:
    """They are those of Transformers."""
    assert completion.status == "done", completion.error
    (sample,) = completion.samples
    wanted = reference.generate(
        reference.tokenizer().encode(request.prompt),
        request.sampling.max_tokens,
        ignore_eos=request.sampling.ignore_eos,
        claimed=sample.token_ids,
    )
    assert list(sample.token_ids) == wanted, request.prompt


async def test_transformers_is_not_talked_into_anything() -> None:
    """The reference tells claimed tokens from its own."""
    prompt = reference.tokenizer().encode("98 + 25 =")
    wanted = reference.generate(prompt, 16)
    longer = reference.generate(prompt, 16, ignore_eos=True)
    assert len(wanted) < len(longer) == 16
    for claimed in (wanted, wanted[:-1], [*wanted[:-2], 7, wanted[-1]], longer):
        assert reference.generate(prompt, 16, claimed=claimed) == wanted
        assert reference.generate(prompt, 16, claimed=claimed, ignore_eos=True) == longer


@pytest.mark.soak
async def test_concurrent_requests_equal_transformers_token_for_token(
    make_config: MakeConfig, soak: bool
) -> None:
    requests = mixed_requests(200 if soak else 80)
    # A small budget and a small cache, so that chunked prefill, mixing and waiting really happen.
    config = make_config(
        engine__max_batch_size=48, engine__max_tokens_per_batch=96, engine__kv_cache_bytes=6 << 20
    )
    async with Pipeline(config) as pipeline:
        completions = await asyncio.gather(*map(pipeline.complete, requests))
    for request, completion in zip(requests, completions, strict=True):
        check_tokens(request, completion)
        prompt_ids = reference.tokenizer().encode(request.prompt)
        assert completion.usage.prompt_tokens == len(prompt_ids)
