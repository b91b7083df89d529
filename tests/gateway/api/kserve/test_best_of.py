"""`M.best_of`: its nested calls, its choice and its buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import anyio
import pytest

from nano_inference.bus.public import Completion, GenerateRequest, Output
from nano_inference.config import load_config
from nano_inference.gateway.api.kserve.models.best_of import BestOfModel
from nano_inference.gateway.api.kserve.service import InferenceService
from nano_inference.gateway.server.http import EngineError
from nano_inference.kserve.pool import BufferPool, PoolSlot
from nano_inference.kserve.tensors import InferRequest, InferResponse
from nano_inference.telemetry import now_ns

from ....errors import raises
from ....pipeline.kserve import a_call, as_lists, infer_request, service_of, services_of
from ...fake import FakeEngine, completion, sample

SAMPLES = ((5,), (6, 7, 8), (9, 10))


class Engine(FakeEngine):
    """Returns given samples, and scores by a table.

    Attributes:
        scores: The logprob of each token of a sample that begins with this one.
        ref_scores: The same by the reference model; None where there is none.
        failing: It can't score a sample that begins with this token.
        hangs: It takes for ever to score.
        service: The models.
        pool: Pool of the model's buffers.
    """

    service: InferenceService
    pool: BufferPool

    async def infer(self, request: InferRequest) -> InferResponse:
        return await self.service.infer_once(a_call(), request)

    def __init__(self) -> None:
        super().__init__()
        self.samples: Sequence[tuple[int, ...]] = SAMPLES
        self.scores = {5: -2.0, 6: -1.0, 9: -3.0}
        self.ref_scores: dict[int, float] | None = None
        self.failing = 0
        self.hangs = False
        self.outputs = self._answer

    def _answer(self, request: GenerateRequest) -> list[Output]:
        if request.sampling.prompt_logprobs is None:
            made = [sample(ids, sample_index=index) for index, ids in enumerate(self.samples)]
            return [completion(request, *made)]
        if self.hangs:
            return []
        prompt, (first, *_) = request.prompt_token_ids, request.prompt_token_ids[2:]
        if first == self.failing:
            raise EngineError("no", code="out_of_blocks")
        return [self._scored(request, len(prompt), first)]

    def _scored(self, request: GenerateRequest, length: int, first: int) -> Completion:
        own = (None, *(self.scores[first],) * (length - 1))
        ref = None
        if self.ref_scores is not None:
            ref = (None, *(self.ref_scores[first],) * (length - 1))
        return completion(request, prompt_logprobs=own, prompt_ref_logprobs=ref)


@pytest.fixture
def engine() -> Engine:
    """An engine and its models, with a pool of its own."""
    made: Any = Engine()
    config = load_config(env={}, overrides={"admission.max_samples": 1000})
    made.service, made.pool = service_of(made, config), BufferPool(8 * 1024, use_shm=False)
    services = services_of(made, config)
    made.service._models["tiny.best_of"] = BestOfModel(made.service, services, made.pool)
    return cast(Engine, made)


def wanted(**inputs: Any) -> Any:
    given = {"input_ids": [1, 2], "best_of": 3, "sampling_parameters": {"max_tokens": 8}}
    return infer_request("tiny.best_of", **given | inputs)


async def test_the_likeliest_sample_is_given(engine: Engine) -> None:
    found = as_lists(await engine.service.infer_once(a_call("mine"), wanted()))
    assert found == {
        "output_ids": [6, 7, 8],
        "logprobs": [-0.5, -1.5, -2.5],
        "weight_version": [3, 3, 3],
        "finish_reason": ["length"],
        "score": [-1],
        "scores": [-2, -1, -3],
    }
    sampled, *scored = engine.requests
    assert (sampled.n, sampled.prompt_token_ids, sampled.sampling.max_tokens) == (3, (1, 2), 8)
    asked_for = sorted(each.prompt_token_ids or () for each in scored)
    assert asked_for == [(1, 2, *each) for each in SAMPLES]
    assert {each.tenant for each in engine.requests} == {"mine"}
    statistics = engine.service.statistics
    names = [each.name for each in engine.service.specs()]
    assert {name: statistics.model(name).stats["success"]["count"] for name in names} == {
        "tiny": 0,
        "tiny.tokens": 1,
        "tiny.score": 3,
        "tiny.embed": 0,
        "tiny.best_of": 1,
    }


@pytest.mark.parametrize("samples", [0, 1001, 2**40])
async def test_best_of_is_limited_by_admission(engine: Engine, samples: int) -> None:
    with raises("invalid_n", r"from 1 to 1000 \(admission.max_samples\)"):
        await engine.infer(wanted(best_of=samples))
    assert not engine.requests


async def test_an_expired_call_names_its_parameter(engine: Engine) -> None:
    with raises("expired", r"\(timeout_ns\) was over"):
        await engine.infer(wanted(parameters={"timeout_ns": -1}))
    assert not engine.requests


async def test_the_reference_model_scores_if_there_is_one(engine: Engine) -> None:
    engine.ref_scores = {5: -1.0, 6: -2.0, 9: -0.5}
    found = as_lists(await engine.infer(wanted()))
    assert (found["output_ids"], found["scores"]) == ([9, 10], [-1, -2, -0.5])


async def test_parameters_hold_for_nested_calls(engine: Engine) -> None:
    parameters = {"priority": 2, "cache_salt": "s", "max_tokens": 5, "timeout_ns": 10**10}
    request = infer_request("tiny.best_of", input_ids=[1, 2], best_of=3, parameters=parameters)
    await engine.infer(request)
    assert {(each.priority, each.cache_salt) for each in engine.requests} == {(-2, "s")}
    assert engine.requests[0].sampling.max_tokens == 5
    budgets = [each.budget_ns or 0 for each in engine.requests]
    assert 10**10 > budgets[0] >= max(budgets[1:]) > 0


async def test_a_sample_without_tokens_is_the_last_choice(engine: Engine) -> None:
    engine.samples = ((), (9,), ())
    found = as_lists(await engine.infer(wanted()))
    assert (found["output_ids"], found["scores"]) == ([9], [-math.inf, -3, -math.inf])
    engine.samples = ((), (), ())
    found = as_lists(await engine.infer(wanted()))
    assert (found["output_ids"], found["score"]) == ([], [-math.inf])


async def test_all_buffers_are_acquired_at_once_and_released(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    original = PoolSlot.scratch

    def scratch(self: PoolSlot, specs: Any, *given: Any) -> Any:
        calls.append(len(specs))
        return original(self, specs, *given)

    monkeypatch.setattr(PoolSlot, "scratch", scratch)
    await engine.infer(wanted())
    assert calls == [5]
    assert engine.pool.free_slots == engine.pool.n_slots


async def test_waiting_for_buffers_ends_with_the_deadline(engine: Engine) -> None:
    with await engine.pool.acquire_slot(engine.pool.n_slots):
        with raises("expired", "time"):
            await engine.service.infer_once(a_call(deadline_ns=now_ns() + 10**7), wanted())
        assert engine.pool.waiting == 0
    assert engine.requests == []
    assert (await engine.infer(wanted())).outputs


@pytest.mark.parametrize(
    ("inputs", "code"),
    [
        ({"sampling_parameters": {"n": 2}}, "invalid_n"),
        ({"sampling_parameters": {"logprobs": 2}}, "unsupported"),
        ({"best_of": 1000, "sampling_parameters": {"max_tokens": 10**6}}, "request_too_large"),
        ({"input_ids": []}, "empty_prompt"),
    ],
)
async def test_impossible_calls_are_refused(
    engine: Engine, inputs: dict[str, Any], code: str
) -> None:
    with raises(code):
        await engine.infer(wanted(**inputs))
    assert engine.requests == []
    assert engine.pool.free_slots == engine.pool.n_slots


async def test_a_failed_score_cancels_the_others(engine: Engine) -> None:
    engine.failing = 6
    with raises("out_of_blocks"):
        await engine.infer(wanted())
    assert engine.pool.free_slots == engine.pool.n_slots


async def test_a_call_that_is_cancelled_frees_its_buffers(engine: Engine) -> None:
    engine.hangs = True
    async with anyio.create_task_group() as group:
        group.start_soon(engine.infer, wanted())
        await engine.until(lambda: len(engine.requests) == 4)
        assert engine.pool.free_slots < engine.pool.n_slots
        group.cancel_scope.cancel()
    assert engine.pool.free_slots == engine.pool.n_slots
    assert len(engine.left) == 3
