"""Logprobs by the reference model and of given completions, as the engine has them, over a bus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
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
from nano_inference.bus.messages import Envelope
from nano_inference.bus.scoring import SampleScored
from nano_inference.stages.executor.scoring import ReferenceModel
from nano_inference.stages.streaming.stage import StreamingStage

from . import reference
from .conftest import MakeConfig, config_maker
from .test_life import Boom, break_once

LIMIT_S = 120
LENGTH = 256
# Deterministic, so that the bits depend on nobody else in a batch.
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

in_module_loop = pytest.mark.asyncio(loop_scope="module")


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


@pytest_asyncio.fixture(params=["memory", "redis-links"], scope="module", loop_scope="module")
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
    completions = [[2 + number % 200] for number in range(300)]
    found = await scoring.score([[3, 4]] * 300, completions)
    by_token = {one[0]: each for one, each in zip(completions, found, strict=True)}
    assert len({each.logprobs for each in found}) > 100
    assert found == [by_token[one[0]] for one in completions]


@in_module_loop
async def test_what_can_not_be_scored_is_refused(scoring: Pipeline) -> None:
    with pytest.raises(RequestError) as refused:
        await scoring.score([[3, 4], [3]], [[5], [5] * LENGTH])
    assert refused.value.code == "prompt_too_long"
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
    async with (
        asyncio.timeout(LIMIT_S),
        Pipeline(config) as pipeline,
        BusClient.connect(config.bus) as client,
    ):
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


def fail_at_a_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streaming fails when it takes the first score."""
    original, left = StreamingStage.handle, [1]

    async def handle(self: StreamingStage, envelope: Envelope) -> None:
        if isinstance(envelope.body, SampleScored) and left:
            left.clear()
            raise Boom("streaming was told to fail")
        await original(self, envelope)

    monkeypatch.setattr(StreamingStage, "handle", handle)


@pytest.mark.parametrize(
    ("bus", "replicas", "failing"),
    [
        ("memory", 1, "executor"),
        ("memory", 2, "streaming"),
        ("redis-links", 1, "streaming"),
    ],
)
async def test_a_stage_may_fail_while_samples_wait_for_their_scores(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    frozen: InferenceEngine,
    bus: str,
    replicas: int,
    failing: str,
) -> None:
    request.param = bus
    make_config: MakeConfig = config_maker(request)
    config = make_config(**SETTINGS, pipeline__replicas=replicas)
    async with asyncio.timeout(LIMIT_S), Pipeline(config) as pipeline:
        if failing == "streaming":
            fail_at_a_score(monkeypatch)
        else:
            break_once(monkeypatch, ReferenceModel, "score", after=1)
        before = pipeline._actors[failing].incarnation
        for completion in await asyncio.gather(*map(pipeline.complete, REQUESTS)):
            check(completion, frozen)
        assert pipeline._actors[failing].incarnation != before
        assert (await pipeline.complete(REQUESTS[0])).status == "done"
