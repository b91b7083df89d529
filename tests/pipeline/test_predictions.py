"""Speculation as clients of every kind see it: the same answers, and what was drafted for them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI

from nano_inference import EngineConfig, InferenceEngine, Pipeline, SamplingParams
from nano_inference.bus.public import Completion, CompletionChunk
from nano_inference.gateway.gateway import Gateway

from .conftest import MakeConfig, both_buses

SHORT_MODEL = True

LIMIT_S = 120
SAMPLING: dict[str, Any] = {
    "temperature": 0.7,
    "seed": 5,
    "max_tokens": 48,
    "ignore_eos": True,
    "logprobs": 2,
}
# The same bits, whoever else is in the batch.
EXACT = {"engine__deterministic": True}


async def answered(pipeline: Pipeline, request: dict[str, Any]) -> tuple[list[Any], Completion]:
    """The chunks of a request, and its end."""
    outputs = [output async for output in pipeline.submit(request)]
    assert isinstance(outputs[-1], Completion)
    assert outputs[-1].status == "done", outputs[-1].error
    return outputs[:-1], outputs[-1]


@both_buses
@pytest.mark.parametrize("kind", ["tokens", "text", "wrong"])
async def test_speculation_keeps_answers_and_counts_drafts(
    make_config: MakeConfig, kind: str
) -> None:
    request = {"prompt": "1 2 3 4 5", "n": 2, "sampling": SAMPLING}
    async with asyncio.timeout(LIMIT_S):
        async with Pipeline(make_config(**EXACT)) as without:
            _, alone = await answered(without, request)
        (first, *_) = alone.samples
        prediction = {"tokens": first.token_ids, "text": first.text, "wrong": [5, 6] * 9}[kind]
        on = make_config(**EXACT, engine__speculation="auto")
        async with Pipeline(on) as speculating:
            chunks, done = await answered(speculating, request | {"prediction": prediction})
            never = SAMPLING | {"max_draft_tokens": 0}
            _, none = await answered(speculating, request | {"sampling": never})
    for found in (done, none):
        for sample, wanted in zip(found.samples, alone.samples, strict=True):
            assert sample.token_ids == wanted.token_ids
            assert sample.logprobs == wanted.logprobs
            assert sample.top_logprobs == wanted.top_logprobs
            assert (sample.text, sample.finish_reason) == (wanted.text, wanted.finish_reason)
    for sample in done.samples:
        own = [chunk for chunk in chunks if chunk.sample_index == sample.sample_index]
        assert all(isinstance(chunk, CompletionChunk) for chunk in own)
        assert tuple(each for chunk in own for each in chunk.token_ids) == sample.token_ids
        assert "".join(chunk.text for chunk in own) == sample.text
        accepted, drafted = sample.num_accepted_draft_tokens, sample.num_draft_tokens
        assert 0 <= accepted <= drafted
        assert accepted <= len(sample.token_ids)
    usage = done.usage
    assert usage.accepted_prediction_tokens == sum(
        each.num_accepted_draft_tokens for each in done.samples
    )
    assert usage.accepted_prediction_tokens + usage.rejected_prediction_tokens == sum(
        each.num_draft_tokens for each in done.samples
    )
    assert usage.completion_tokens == alone.usage.completion_tokens
    assert none.usage.rejected_prediction_tokens == none.usage.accepted_prediction_tokens == 0


async def test_openai_s_library_gets_the_same_answer_at_once_and_in_a_stream(
    make_config: MakeConfig,
) -> None:
    asked: dict[str, Any] = {
        "model": make_config().engine.model_name,
        "messages": [{"role": "user", "content": "98 + 25 ="}],
        "temperature": 0,
        "max_tokens": 32,
        "logprobs": True,
        "extra_body": {"ignore_eos": True},
    }
    config = make_config(
        **EXACT, engine__speculation="auto", engine__draft_sources=["prediction", "ngram"]
    )
    async with (
        asyncio.timeout(LIMIT_S),
        Pipeline(config) as pipeline,
        Gateway(pipeline.client, config) as gateway,
        AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", timeout=LIMIT_S) as client,
    ):
        create = client.chat.completions.create
        never = asked | {"extra_body": {"ignore_eos": True, "max_draft_tokens": 0}}
        alone = await create(**never)
        assert alone.usage.completion_tokens_details.accepted_prediction_tokens is None
        text = alone.choices[0].message.content
        predicted = asked | {"prediction": {"type": "content", "content": text}}
        whole = await create(**predicted)
        stream = await create(**predicted, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    wanted = [each.logprob for each in alone.choices[0].logprobs.content]
    assert whole.choices[0].message.content == text
    assert [each.logprob for each in whole.choices[0].logprobs.content] == wanted
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == text
    listed = [each for choice in choices if choice.logprobs for each in choice.logprobs.content]
    assert [each.logprob for each in listed] == wanted
    for usage in (whole.usage, chunks[-1].usage):
        details = usage.completion_tokens_details
        assert details.accepted_prediction_tokens <= usage.completion_tokens == 32
        assert details.rejected_prediction_tokens >= 0


def test_engine_samples_count_their_drafts() -> None:
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    prompts = ["1 2 3 4 5", "Once"]
    exact = EngineConfig(deterministic=True)
    with InferenceEngine(exact) as engine:
        alone = engine.generate(prompts, params)
    with InferenceEngine(EngineConfig(deterministic=True, speculation="auto")) as engine:
        predictions = [alone[0].completion_tokens, None]
        found = engine.generate(prompts, params, predictions=predictions)
        engine.add_request(prompts[0], params, prediction=alone[0].completion_tokens)
        while engine.has_pending():
            found += engine.step()
    for sample, wanted in zip(found, [*alone, alone[0]], strict=True):
        assert sample.completion_tokens == wanted.completion_tokens
        assert sample.logprobs == wanted.logprobs
        assert 0 <= sample.num_accepted_draft_tokens <= sample.num_draft_tokens
