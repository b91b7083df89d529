"""Each call of a model is counted once, by how it ended, in statistics and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from nano_inference.config import NanoInferenceError, RequestError
from nano_inference.gateway.api.kserve.served import Answer, ModelCall
from nano_inference.gateway.api.kserve.service import InferenceService
from nano_inference.gateway.api.kserve.statistics import (
    ModelStatistics,
    encode_statistics,
    statistics_json,
)
from nano_inference.gateway.policy.caller import Caller
from nano_inference.kserve.tensors import InferRequest, ModelSpec
from nano_inference.telemetry.instruments import MODEL_CALL_DURATION

from ....measured import Measured
from ....pipeline.kserve import origin


class Ending:
    """Ends as it is told to."""

    def __init__(self, name: str = "m", **more: Any) -> None:
        self.spec = ModelSpec(name=name, inputs=(), outputs=(), **more)
        self.end: Callable[[ModelCall], None] = lambda call: None

    async def infer(self, call: ModelCall, answer: Answer) -> None:
        self.end(call)
        await answer(())

    async def trouble(self) -> str:
        return ""


def fail(error: BaseException) -> Callable[[ModelCall], None]:
    def end(call: ModelCall) -> None:
        raise error

    return end


async def test_calls_are_counted_by_their_end() -> None:
    model, measured = Ending(), Measured()
    service = InferenceService([model, Ending("other")], measured.metrics)
    request = InferRequest(model_name="m")
    await service.infer_once(origin(), request)
    for error in (RequestError("no", code="overloaded"), ValueError(), asyncio.CancelledError()):
        model.end = fail(error)
        with pytest.raises(type(error)):
            await service.infer_once(origin(), request)
    (told,) = statistics_json(service, "m")["model_stats"]
    assert (told["inference_count"], told["execution_count"]) == (1, 1)
    assert told["inference_stats"]["success"]["count"] == 1
    assert told["inference_stats"]["fail"]["count"] == 3
    assert told["last_inference"] > 0
    values = measured.values(MODEL_CALL_DURATION)
    codes = [("m", code) for code in ("", "overloaded", "internal_error", "cancelled")]
    assert set(values) == set(codes)


async def test_what_was_not_computed_was_waited_for() -> None:
    found = ModelStatistics()
    found.add(100, 30)
    found.add(100, None)
    # By another clock it may have taken longer than altogether.
    found.add(100, 500)
    assert (found.queue.ns, found.compute.ns, found.success.ns) == (70, 230, 300)
    assert (found.queue.count, found.compute.count) == (3, 3)


def test_what_runs_side_by_side_is_computed_once() -> None:
    call = ModelCall(InferRequest(model_name="m"), origin())
    for ns in (5, 9, 7):
        call.computed(ns)
    assert call.compute_ns == 9


async def test_both_interfaces_tell_the_same() -> None:
    model = Ending()
    service = InferenceService([model, Ending("never", versions=("1", "2"))])
    model.end = lambda call: call.computed(10)
    await service.infer_once(origin(), InferRequest(model_name="m"))
    told, encoded = statistics_json(service)["model_stats"], encode_statistics(service)
    assert [(each["name"], each["version"]) for each in told] == [
        ("m", "1"),
        ("never", "1"),
        ("never", "2"),
    ]
    for each, message in zip(told, encoded.model_stats, strict=True):
        assert message.name == each["name"]
        assert message.last_inference == each["last_inference"]
        for name, duration in each["inference_stats"].items():
            found = getattr(message.inference_stats, name)
            assert {"count": found.count, "ns": found.ns} == duration
    (second,) = statistics_json(service, "never", "2")["model_stats"]
    assert second == told[2]
    assert told[0]["inference_stats"]["compute_infer"]["ns"] == 10
    assert told[1]["inference_stats"]["success"] == {"count": 0, "ns": 0}


async def test_nobody_is_told_of_models_that_he_may_not_use() -> None:
    service = InferenceService([Ending(), Ending("m.more", allowed_as="m"), Ending("other")])
    caller = Caller(models=("m",))
    found = statistics_json(service, caller=caller)["model_stats"]
    assert [each["name"] for each in found] == ["m", "m.more"]
    for name in ("other", "nothing"):
        for tell in (statistics_json, encode_statistics):
            with pytest.raises(NanoInferenceError) as refused:
                tell(service, name, caller=caller)
            assert refused.value.code == "model_not_found"
