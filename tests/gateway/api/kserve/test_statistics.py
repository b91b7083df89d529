"""Each call of a model is counted once by how it ended, in the statistics and in the metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from nano_inference.config import RequestError
from nano_inference.gateway.api.kserve.served import Answer, ModelCall
from nano_inference.gateway.api.kserve.service import InferenceService, ModelStatistics
from nano_inference.kserve.protobuf import message
from nano_inference.kserve.tensors import InferRequest
from nano_inference.telemetry.instruments import MODEL_CALL_DURATION

from ....measured import Measured
from ....pipeline.kserve import origin
from .calls import FakeModel


class Ending(FakeModel):
    """Calls `end` before it answers."""

    end: Callable[[ModelCall], None] = staticmethod(lambda call: None)

    async def answer_all(self, call: ModelCall, answer: Answer) -> None:
        self.end(call)
        await answer(())


def fail(error: BaseException) -> Callable[[ModelCall], None]:
    def end(call: ModelCall) -> None:
        raise error

    return end


async def test_calls_are_counted_by_their_end() -> None:
    model, measured = Ending("m"), Measured()
    service = InferenceService([model, Ending("other")], measured.metrics)
    request = InferRequest(model_name="m")
    model.end = lambda call: call.computed(10)
    await service.infer_once(origin(), request)
    for error in (RequestError("no", code="overloaded"), ValueError(), asyncio.CancelledError()):
        model.end = fail(error)
        with pytest.raises(type(error)):
            await service.infer_once(origin(), request)
    told = service.statistics.model("m").to_json("m", "1")
    assert (told["inference_count"], told["execution_count"]) == (1, 1)
    assert told["inference_stats"]["success"]["count"] == 1
    assert told["inference_stats"]["fail"]["count"] == 3
    assert told["inference_stats"]["compute_infer"] == {"count": 1, "ns": 10}
    assert told["last_inference"] > 0
    assert message("ModelStatisticsResponse")(model_stats=[told]).model_stats[0].name == "m"
    nothing = service.statistics.model("other").to_json("other", "1")
    assert nothing["inference_stats"]["success"] == {"count": 0, "ns": 0}
    values = measured.values(MODEL_CALL_DURATION)
    codes = [("m", code) for code in ("", "overloaded", "internal_error", "cancelled")]
    assert set(values) == set(codes)


def test_time_that_was_not_computed_was_queued() -> None:
    found = ModelStatistics()
    found.add(100, 30)
    found.add(100, None)
    # Another clock may have measured more than the whole call.
    found.add(100, 500)
    assert (found.queue["ns"], found.compute["ns"], found.success["ns"]) == (70, 230, 300)
    assert (found.queue["count"], found.compute["count"]) == (3, 3)


def test_concurrent_work_is_computed_once() -> None:
    call = ModelCall(InferRequest(model_name="m"), origin())
    for ns in (5, 9, 7):
        call.computed(ns)
    assert call.compute_ns == 9
