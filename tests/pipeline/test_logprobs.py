"""Logprobs of generated tokens and of given completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
import torch
from torch import Tensor

from nano_inference import (
    BusClient,
    Completion,
    EngineConfig,
    InferenceEngine,
    Pipeline,
    RequestError,
    SamplingParams,
)
from nano_inference.bus.public import CompletionChunk, TokenLogprob

from ..soaking import in_soak
from . import reference
from .builders import raises
from .conftest import BUSES, config_maker

# --- generated tokens ------------------------------------------------------------------------


in_module_loop = pytest.mark.asyncio(loop_scope="module")

PROMPT = "Story about Zoë, a cat and a red ball. Ana is 31 years old and lives in Oslo. JSON:"


def table_of(token_ids: Sequence[int], temperature: float = 1.0) -> Tensor:
    """`[tokens, vocab]`, Transformers' log_softmax after each token."""
    with torch.inference_mode():
        logits: Tensor = reference.model()(torch.tensor([list(token_ids)])).logits[0].double()
    return (logits / temperature).log_softmax(-1)


def holds(
    token_ids: Sequence[int],
    logprobs: Sequence[float | None] | None,
    tops: Sequence[Sequence[TokenLogprob]] | None,
    count: int,
    temperature: float = 1.0,
) -> None:
    """A prompt's logprobs, and the likeliest tokens, are those of Transformers."""
    table = table_of(token_ids, temperature)
    assert logprobs is not None
    assert logprobs[0] is None
    expected = table[torch.arange(len(token_ids) - 1), list(token_ids[1:])]
    assert list(logprobs[1:]) == pytest.approx(expected.tolist(), abs=1e-4)
    if not count:
        assert tops is None
        return
    assert tops is not None
    assert len(tops) == len(token_ids)
    assert tuple(tops[0]) == ()
    for place, top in enumerate(tops[1:]):
        values, _ = table[place].topk(count)
        assert [each.logprob for each in top] == pytest.approx(values.tolist(), abs=1e-4)
        own = [float(table[place, each.token_id]) for each in top]
        assert own == pytest.approx(values.tolist(), abs=1e-4)


# --- the whole pipeline -----------------------------------------------------------------------


@in_module_loop
@pytest.mark.parametrize("shared", BUSES, indirect=True)
async def test_all_logprobs_reach_the_client(shared: Pipeline) -> None:
    request = {
        "prompt": PROMPT,
        "n": 3,
        "sampling": {
            "temperature": 1.5,
            "seed": 4,
            "max_tokens": 12,
            "logprobs": 3,
            "prompt_logprobs": 2,
            "repetition_penalty": 1.2,
            "presence_penalty": 0.3,
            "frequency_penalty": 0.2,
            "logit_bias": {"40": 2.5},
            "min_tokens": 4,
        },
    }
    outputs = [output async for output in shared.submit(request)]
    completion = outputs[-1]
    assert completion.status == "done", completion.error
    prompt = reference.tokenizer().encode(PROMPT)
    assert completion.prompt_token_ids == tuple(prompt)
    holds(prompt, completion.prompt_logprobs, completion.prompt_top_logprobs, 2, 1.5)
    chunks = [output for output in outputs if isinstance(output, CompletionChunk)]
    assert len({sample.token_ids for sample in completion.samples}) > 1
    for sample in completion.samples:
        assert len(sample.token_ids) >= 4
        assert sample.top_logprobs is not None
        assert [len(top) for top in sample.top_logprobs] == [3] * len(sample.token_ids)
        assert sample.weight_versions == ((0, 0),)
        own = [chunk for chunk in chunks if chunk.sample_index == sample.sample_index]
        assert tuple(top for c in own for top in c.top_logprobs or ()) == sample.top_logprobs
        for token_id, logprob, top in zip(
            sample.token_ids, sample.logprobs, sample.top_logprobs, strict=True
        ):
            assert [each.logprob for each in top] == sorted((e.logprob for e in top), reverse=True)
            met = {each.token_id: each.logprob for each in top}
            assert met.get(token_id, logprob) == logprob


# --- given completions -----------------------------------------------------------------------


LENGTH = 256
# Deterministic, so that the bits do not depend on the batch.
SETTINGS: dict[str, Any] = {
    "engine__deterministic": True,
    "engine__max_model_len": LENGTH,
    "engine__reference_model_path": "tiny",
    "pipeline__restart_backoff_s": 0.01,
}
ENGINE = EngineConfig(dtype="float32", deterministic=True, max_model_len=LENGTH)
PROMPTS = ["98 + 25 =", "Story about Emma, a dog and", "12 + 30 ="]
REQUESTS = [
    {
        "prompt": prompt,
        "n": 2,
        "stream": index != 1,
        "sampling": {"max_tokens": 12, "seed": 5, "temperature": 0.7, "prompt_logprobs": 0},
    }
    for index, prompt in enumerate(PROMPTS)
]


@pytest.fixture(scope="module")
def trained() -> dict[str, Tensor]:
    """Other weights than those of the reference model."""
    return {name: each * 1.5 for name, each in reference.model().state_dict().items()}


@pytest.fixture(scope="module")
def policy(trained: dict[str, Tensor]) -> Iterator[InferenceEngine]:
    with InferenceEngine(ENGINE) as engine:
        engine.update_weights(trained, blocking=True)
        yield engine


@pytest.fixture(scope="module")
def frozen() -> Iterator[InferenceEngine]:
    with InferenceEngine(ENGINE) as engine:
        yield engine


# Over memory every day: what this file asks of pipelines of its own.
@pytest_asyncio.fixture(
    params=[in_soak("memory"), "redis-links"], scope="module", loop_scope="module"
)
async def scoring(
    request: pytest.FixtureRequest, trained: dict[str, Tensor]
) -> AsyncIterator[Pipeline]:
    """A pipeline whose weights have changed since its reference model was loaded."""
    async with Pipeline(config_maker(request)(**SETTINGS)) as pipeline:
        assert await pipeline.client.update_weights(trained) == 1
        yield pipeline


def check(completion: Completion, frozen: InferenceEngine) -> None:
    """All that the reference model is asked for is there, to the last bit."""
    assert completion.status == "done", completion.error
    prompt = completion.prompt_token_ids
    assert len(completion.samples) == 2
    for sample in completion.samples:
        params = SamplingParams(temperature=0.7)
        assert [sample.ref_logprobs] == frozen.score([prompt], [sample.token_ids], params)
    assert completion.prompt_ref_logprobs is not None
    first, *rest = completion.prompt_ref_logprobs
    params = SamplingParams(temperature=0.7)
    assert (first, [tuple(rest)]) == (None, frozen.score([prompt[:1]], [prompt[1:]], params))


@in_module_loop
async def test_samples_have_the_logprobs_of_the_reference_model(
    scoring: Pipeline, frozen: InferenceEngine
) -> None:
    completions = await asyncio.gather(*map(scoring.complete, REQUESTS))
    for completion in completions:
        check(completion, frozen)
        assert completion.prompt_ref_logprobs != completion.prompt_logprobs
        for sample in completion.samples:
            assert sample.weight_version == 1
            assert sample.ref_logprobs != sample.logprobs


@in_module_loop
async def test_given_completions_are_scored_as_by_the_engine(
    scoring: Pipeline, policy: InferenceEngine, frozen: InferenceEngine
) -> None:
    prompts = [reference.tokenizer().encode(prompt) for prompt in PROMPTS]
    completions = [[21, 22], [40] * 30, [7]]
    params = [SamplingParams(temperature=each) for each in (1.0, 0.5, 0.0)]
    found = await scoring.score(prompts, completions, params)
    assert [each.logprobs for each in found] == policy.score(prompts, completions, params)
    assert [each.ref_logprobs for each in found] == frozen.score(prompts, completions, params)
    assert [each.weight_version for each in found] == [1] * 3


@in_module_loop
async def test_many_are_scored_in_order(scoring: Pipeline) -> None:
    completions = [[2 + number % 100] for number in range(150)]
    found = await scoring.score([[3, 4]] * 150, completions)
    by_token = {one[0]: each for one, each in zip(completions, found, strict=True)}
    assert len({each.logprobs for each in found}) > 50
    assert found == [by_token[one[0]] for one in completions]


@in_module_loop
async def test_invalid_scoring_requests_are_refused(scoring: Pipeline) -> None:
    with raises("prompt_too_long"):
        await scoring.score([[3, 4], [3]], [[5], [5] * LENGTH])
    for prompt in ([1.5], "a", None, [True]):
        for prompts, completions in (([prompt], [[3]]), ([[3]], [prompt])):
            with pytest.raises(RequestError, match="token ids"):
                await scoring.score(prompts, completions)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="token ids"):
        await scoring.embed([[1.5]])  # type: ignore[list-item]
    for prompts, completions in (([[3]], []), ([[3]], [[]])):
        with pytest.raises(ValueError, match="one completion for each prompt"):
            await scoring.score(prompts, completions)
    with pytest.raises(ValueError, match="2 prompts and 1 sampling_params"):
        await scoring.score([[3], [3]], [[4], [4]], [SamplingParams()])


async def test_a_client_elsewhere_scores_in_the_name_of_a_tenant(
    redis_url: str, request: pytest.FixtureRequest
) -> None:
    """Without a reference model, the weights in place alone."""
    request.param = "redis"
    config = config_maker(request)(engine__dtype="float32")
    async with Pipeline(config) as pipeline, BusClient.connect(config.bus) as client:
        tail = await client.bus.results.tail()
        (found,) = await client.score([[3, 4]], [[5]])
        assert found.ref_logprobs is None
        assert len(found.logprobs) == 1
        answer = await anext(tail)
        assert answer.prompt_token_ids == (3, 4, 5)
        await tail.aclose()
        completion = await pipeline.complete(REQUESTS[0])
        assert completion.samples[0].ref_logprobs is None
        assert completion.prompt_ref_logprobs is None
