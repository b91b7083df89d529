"""Forks: requests that go on from a token of another one, and share its KV."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import AsyncMock

import pytest

from nano_inference import (
    Completion,
    EngineConfig,
    Fork,
    GenerateRequest,
    InferenceEngine,
    Pipeline,
    SamplingParams,
)
from nano_inference.bus.public import CompletionChunk
from nano_inference.config import RequestError
from nano_inference.stages.admission.requests import Requests
from nano_inference.stages.executor.core import ExecutorCore
from nano_inference.stages.streaming.core import StreamingCore

from .. import oracle
from ..soaking import in_soak
from . import short_model
from .builders import break_once, end_of, error_code, finish

SHORT_MODEL = True
SAMPLED = SamplingParams(temperature=1, max_tokens=40, ignore_eos=True, seed=3)
PROMPT = tuple(40 + i % 60 for i in range(50))


def of(parent: str, at: int, index: int = 0, **fields: Any) -> GenerateRequest:
    """A fork of a request, with a seed of its own."""
    sampling = SamplingParams(temperature=1, max_tokens=6, ignore_eos=True, seed=at)
    fork = Fork(request_id=parent, at=at, sample_index=index)
    return GenerateRequest(**{"fork": fork, "sampling": sampling, **fields})


def fresh(fork: GenerateRequest, path: tuple[int, ...]) -> GenerateRequest:
    """The request without a fork that it must equal, which finds no KV."""
    return GenerateRequest(
        prompt_token_ids=path, sampling=fork.sampling, n=fork.n, cache_salt="fresh"
    )


def values(completion: Completion) -> list[tuple[Any, ...]]:
    assert completion.error is None, completion.error
    return [(each.token_ids, each.logprobs, each.text) for each in completion.samples]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_tree_of_64_forks_equals_fresh_prompts_and_shares_the_kv(
    shared: Pipeline,
) -> None:
    parent = GenerateRequest(
        request_id="root", prompt_token_ids=PROMPT, sampling=SAMPLED, n=2, stream=False
    )
    root = await shared.complete(parent)
    level = [of("root", 5 * i, i % 2, request_id=f"a{i}", n=2) for i in range(8)]
    first = await asyncio.gather(*map(shared.complete, level))
    leaves = [of(f"a{i // 7}", i % 7, i % 2, request_id=f"b{i}") for i in range(56)]
    second = await asyncio.gather(*map(shared.complete, leaves))
    ends = {"root": root, **{each.request_id: each for each in (*first, *second)}}
    computed, plain = 0, []
    for wanted in (*level, *leaves):
        fork, found = wanted.fork, ends[wanted.request_id]
        assert fork is not None
        above = ends[fork.request_id]
        path = above.prompt_token_ids + above.samples[fork.sample_index].token_ids[: fork.at]
        assert found.prompt_token_ids == path
        plain.append(shared.complete(fresh(wanted, path)))
        origin = found.fork
        assert origin is not None
        assert (origin.request_id, origin.entry_id, origin.at) == (
            fork.request_id,
            above.entry_id,
            fork.at,
        )
        assert path[len(path) - origin.num_generated :] == path[len(PROMPT) :]
        computed += found.usage.prompt_tokens * wanted.n - found.usage.cached_tokens
    for wanted, again in zip((*level, *leaves), await asyncio.gather(*plain), strict=True):
        assert values(ends[wanted.request_id]) == values(again)
    whole = sum(len(ends[each.request_id].prompt_token_ids) * each.n for each in (*level, *leaves))
    assert whole == 5028
    assert computed < 200  # 72 samples, and the last token of each at least
    replayed = await shared.replay(ends["b55"])
    assert replayed.verdict == "equal"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_running_request_is_forked_once_it_has_the_token(shared: Pipeline) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    parent = GenerateRequest(request_id="running", prompt_token_ids=PROMPT, sampling=sampling)
    entry_id = await shared.publish(parent)
    child = asyncio.create_task(shared.fork("running", 30, like=of("running", 30)))
    found = await child
    seen = [each async for each in shared.client.follow("running", entry_id)]
    *chunks, end = seen
    assert isinstance(end, Completion)
    tokens = sum(len(each.token_ids) for each in chunks if isinstance(each, CompletionChunk))
    assert tokens == 90
    path = (*PROMPT, *end.samples[0].token_ids[:30])
    assert found.prompt_token_ids == path
    assert found.timings.finished_ns < end.timings.finished_ns
    assert values(found) == values(await shared.complete(fresh(of("running", 30), path)))


@pytest.mark.asyncio(loop_scope="module")
async def test_a_cancelled_parent_leaves_its_tokens_to_forks(shared: Pipeline) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=180, ignore_eos=True)
    parent = GenerateRequest(request_id="cut", prompt_token_ids=PROMPT, sampling=sampling)
    outputs = shared.submit(parent)
    async for output in outputs:
        if isinstance(output, CompletionChunk) and output.token_offset > 10:
            break
    running = asyncio.create_task(shared.complete(of("cut", 8)))
    never = asyncio.create_task(shared.complete(of("cut", 170)))
    await outputs.aclose()
    assert (await running).status == "done"
    late = await shared.complete(of("cut", 9))
    assert late.prompt_token_ids[: len(PROMPT)] == PROMPT
    assert late.usage.prompt_tokens == len(PROMPT) + 9
    assert error_code(await never) == "invalid_fork"


@pytest.mark.asyncio(loop_scope="module")
async def test_forks_of_nothing_are_refused(shared: Pipeline) -> None:
    parent = GenerateRequest(
        request_id="p", prompt_token_ids=PROMPT, sampling=SAMPLED, tenant="a", stream=False
    )
    await shared.complete(parent)
    wrong = {
        "unknown_request": [of("q", 1, tenant="a"), of("p", 1), of("p", 1, tenant="b")],
        "invalid_fork": [
            of("p", 41, tenant="a"),
            of("p", -1, tenant="a"),
            of("p", 2**62, tenant="a"),
            of("p", 1, 1, tenant="a"),
            of("p", 1, -1, tenant="a"),
            of("", 1),
            of("me", 1, request_id="me"),
            of("p", 1, tenant="a", prompt="1"),
            of("p", 1, tenant="a", prompt_token_ids=(1,)),
        ],
        "unknown_model": [of("p", 1, tenant="a", model="other")],
    }
    for code, requests in wrong.items():
        for request in requests:
            assert error_code(await shared.complete(request)) == code, request
    good = await shared.complete(of("p", 40, tenant="a"))
    assert good.usage.prompt_tokens == 90


def test_an_engine_forks_unfinished_requests_and_samples() -> None:
    folder = str(short_model.folder())
    with InferenceEngine(EngineConfig(model_path=folder, dtype="float32")) as engine:
        parent = engine.add_request(PROMPT, SAMPLED)
        while len(engine._streaming._requests["engine-1"].samples) == 0:
            engine.step()
        for _ in range(20):
            engine.step()
        child = engine.fork(parent, 17, SamplingParams(max_tokens=5, seed=1))
        with pytest.raises(RequestError, match="tokens so far"):
            engine.fork(parent, 39)
        with pytest.raises(RequestError, match="no unfinished request"):
            engine.fork("other", 1)
        with pytest.raises(RequestError, match="has 1 samples"):
            engine.fork(parent, 1, sample_index=1)
        samples = {sample.request_id: sample for sample in finish(engine)}
        first = samples[parent]
        path = PROMPT + first.completion_tokens[:17]
        (plain,) = engine.generate([path], SamplingParams(max_tokens=5, seed=1))
        assert samples[child].prompt_tokens == path
        assert samples[child].completion_tokens == plain.completion_tokens
        again = engine.fork(first, 17, SamplingParams(max_tokens=5, seed=1))
        (same,) = finish(engine)
        assert (same.request_id, same.logprobs) == (again, plain.logprobs)


def test_kv_is_not_shared_over_an_update() -> None:
    folder, greedy = str(short_model.folder()), SamplingParams(temperature=0, max_tokens=4)
    with InferenceEngine(EngineConfig(model_path=folder, dtype="float32")) as engine:
        weights = dict(engine.state_dict())
        engine.update_weights(oracle.remembering(weights, 1))
        (parent,) = engine.generate([PROMPT], SAMPLED)
        engine.update_weights(oracle.remembering(weights, 2))
        (pure,) = engine.generate([PROMPT[::-1]], greedy)
        engine.fork(parent, 20, greedy)
        (fork,) = finish(engine)
        assert fork.weight_version == 2
        assert fork.completion_tokens == (oracle.token_of(2),) * 4
        assert all(oracle.is_pure(each, pure.logprobs[0]) for each in fork.logprobs)


@pytest.mark.parametrize(
    ("make_config", "owner", "method", "after"),
    [
        ("memory", Requests, "room", 3),
        in_soak("memory", ExecutorCore, "execute", 20),
        in_soak("redis-links", Requests, "room", 3),
        in_soak("redis-links", StreamingCore, "absorb", 20),
    ],
    indirect=["make_config"],
)
async def test_a_fork_goes_on_after_a_failure_though_its_parent_is_gone(
    exact: Pipeline, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, after: int
) -> None:
    parent = GenerateRequest(
        request_id="p", prompt_token_ids=PROMPT, sampling=SAMPLED, stream=False
    )
    root = await exact.complete(parent)
    wanted = of("p", 30, request_id="f", sampling=SamplingParams(max_tokens=100, seed=1))
    outputs = exact.submit(wanted)
    async for output in outputs:
        assert isinstance(output, CompletionChunk)
        break
    epoch = exact._actors["admission"].epoch
    gone: Any = AsyncMock(return_value=[])
    monkeypatch.setattr(type(exact.bus.results), "recorded", gone)
    break_once(monkeypatch, owner, method, after)
    for index in range(4):  # the failing methods run
        await exact.complete(fresh(of("p", index), PROMPT))
    found = await end_of(outputs)
    path = (*PROMPT, *root.samples[0].token_ids[:30])
    assert found.prompt_token_ids == path
    assert values(found) == values(await exact.complete(fresh(wanted, path)))
    assert exact._actors["admission"].epoch > epoch
    assert not gone.await_count
