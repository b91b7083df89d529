"""Models of other packages, and the statistics of all models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from importlib import metadata

import pytest

from nano_inference.config import ConfigError, RequestError, load_config
from nano_inference.gateway.api.kserve.repository import ENTRY_POINTS, ModelContext
from nano_inference.gateway.api.kserve.served import Answer, ModelCall, ServedModel
from nano_inference.gateway.api.kserve.service import InferenceService, ModelStatistics
from nano_inference.kserve.protobuf import message
from nano_inference.kserve.tensors import InferRequest, ModelSpec, NamedTensor, TensorSpec
from nano_inference.telemetry.instruments import MODEL_CALL_DURATION

from ....measured import Measured
from ....pipeline.kserve import a_call, as_lists, infer_request, service_of
from ...fake import FakeEngine
from .calls import FakeModel


class Doubled:
    """Calls the engine's model with its token ids repeated."""

    def __init__(self, context: ModelContext, name: str = "doubled") -> None:
        ids = TensorSpec("input_ids", "INT64", (-1,))
        made = TensorSpec("output_ids", "INT64", (-1, -1))
        self.spec = ModelSpec(name=name, inputs=(ids,), outputs=(made,))
        self._context = context

    async def infer(self, call: ModelCall, answer: Answer) -> None:
        given = call.request.input("input_ids")
        twice = NamedTensor("input_ids", given.repeat(2))
        model = f"{self._context.config.engine.model_name}.tokens"
        request = InferRequest(model_name=model, inputs=(twice,))
        response = await self._context.service.infer_once(call.call, request)
        await answer(response.outputs)

    async def trouble(self) -> str:
        return ""


Function = Callable[[ModelContext], Iterable[ServedModel]]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Function]:
    """The functions that packages have registered, by name."""
    found: dict[str, Function] = {}

    class Found:
        def __init__(self, name: str) -> None:
            self.name = name

        def load(self) -> Function:
            return found[self.name]

    monkeypatch.setattr(
        metadata, "entry_points", lambda group: map(Found, found) if group == ENTRY_POINTS else []
    )
    return found


async def test_models_of_a_package_are_served(registered: dict[str, Function]) -> None:
    registered["mine"] = lambda context: [Doubled(context), Doubled(context, "again")]
    registered["others"] = lambda context: [Doubled(context, "others")]
    engine, config = FakeEngine(), load_config(env={}, overrides={"gateway.models": ["mine"]})
    service = service_of(engine, config)  # type: ignore[arg-type]
    names = [each.name for each in service.specs()]
    assert names == [
        "tiny",
        "tiny.tokens",
        "tiny.score",
        "tiny.embed",
        "tiny.best_of",
        "doubled",
        "again",
    ]
    found = as_lists(
        await service.infer_once(a_call("mine"), infer_request("doubled", input_ids=[1, 2]))
    )
    assert found == {"output_ids": [[5, 6]]}
    (request,) = engine.requests
    assert (request.prompt_token_ids, request.tenant) == ((1, 1, 2, 2), "mine")


@pytest.mark.parametrize(
    ("name", "model", "words"),
    [("mind", "mine", "did you mean 'mine'"), ("mine", "tiny.score", "two models 'tiny.score'")],
)
def test_bad_packages_are_refused_at_the_start(
    registered: dict[str, Function], name: str, model: str, words: str
) -> None:
    registered["mine"] = lambda context: [Doubled(context, model)]
    config = load_config(env={}, overrides={"gateway.models": [name]})
    with pytest.raises(ConfigError, match=words):
        service_of(FakeEngine(), config)  # type: ignore[arg-type]


def test_an_unknown_package_is_refused(registered: dict[str, Function]) -> None:
    config = load_config(env={}, overrides={"gateway.models": ["mine"]})
    with pytest.raises(ConfigError, match="no installed package"):
        service_of(FakeEngine(), config)  # type: ignore[arg-type]


# --- statistics -----------------------------------------------------------------------------------


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
    service = InferenceService(measured.metrics)
    service.add(model)
    service.add(Ending("other"))
    request = InferRequest(model_name="m")
    model.end = lambda call: call.computed(10)
    await service.infer_once(a_call(), request)
    for error in (RequestError("no", code="overloaded"), ValueError(), asyncio.CancelledError()):
        model.end = fail(error)
        with pytest.raises(type(error)):
            await service.infer_once(a_call(), request)
    answered = service.statistics.model("m").to_json("m", "1")
    assert (answered["inference_count"], answered["execution_count"]) == (1, 1)
    assert answered["inference_stats"]["success"]["count"] == 1
    assert answered["inference_stats"]["fail"]["count"] == 3
    assert answered["inference_stats"]["compute_infer"] == {"count": 1, "ns": 10}
    assert answered["last_inference"] > 0
    assert message("ModelStatisticsResponse")(model_stats=[answered]).model_stats[0].name == "m"
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
    assert [found.stats[name] for name in ("queue", "compute_infer", "success")] == [
        {"count": 3, "ns": ns} for ns in (70, 230, 300)
    ]


def test_concurrent_work_is_computed_once() -> None:
    call = ModelCall(InferRequest(model_name="m"), a_call())
    for ns in (5, 9, 7):
        call.computed(ns)
    assert call.compute_ns == 9
