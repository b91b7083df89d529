"""The models of other packages are served beside those of the lane."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import metadata

import pytest

from nano_inference.config import ConfigError, load_config
from nano_inference.gateway.api.kserve.repository import ENTRY_POINTS, ModelContext
from nano_inference.gateway.api.kserve.served import Answer, ModelCall, ServedModel
from nano_inference.kserve.tensors import InferRequest, ModelSpec, NamedTensor, TensorSpec

from ....pipeline.kserve import asked, origin, service_of, told
from ...fake import FakeEngine


class Doubled:
    """Asks the lane's model with its token ids twice."""

    def __init__(self, context: ModelContext, name: str = "doubled") -> None:
        ids = TensorSpec("input_ids", "INT64", (-1,))
        made = TensorSpec("output_ids", "INT64", (-1, -1))
        self.spec = ModelSpec(name=name, inputs=(ids,), outputs=(made,))
        self._context = context

    async def infer(self, call: ModelCall, answer: Answer) -> None:
        given = call.request.input("input_ids")
        assert given is not None
        twice = NamedTensor("input_ids", given.repeat(2))
        model = f"{self._context.config.engine.model_name}.tokens"
        request = InferRequest(model_name=model, inputs=(twice,))
        response = await self._context.service.infer_once(call.origin, request)
        await answer(response.outputs)

    async def trouble(self) -> str:
        return ""


Function = Callable[[ModelContext], Iterable[ServedModel]]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Function]:
    """What packages have registered, by name."""
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


async def test_a_package_s_models_are_served(registered: dict[str, Function]) -> None:
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
    found = told(await service.infer_once(origin("mine"), asked("doubled", input_ids=[1, 2])))
    assert found == {"output_ids": [[5, 6]]}
    (request,) = engine.requests
    assert (request.prompt_token_ids, request.tenant) == ((1, 1, 2, 2), "mine")


@pytest.mark.parametrize(
    ("name", "model", "words"),
    [
        ("mind", "mine", "did you mean 'mine'"),
        ("mine", "tiny.score", "two models 'tiny.score'"),
    ],
)
def test_what_can_not_be_served_is_told_at_the_start(
    registered: dict[str, Function], name: str, model: str, words: str
) -> None:
    registered["mine"] = lambda context: [Doubled(context, model)]
    config = load_config(env={}, overrides={"gateway.models": [name]})
    with pytest.raises(ConfigError, match=words):
        service_of(FakeEngine(), config)  # type: ignore[arg-type]


def test_without_any_package_nothing_is_near(registered: dict[str, Function]) -> None:
    config = load_config(env={}, overrides={"gateway.models": ["mine"]})
    with pytest.raises(ConfigError, match="no installed package"):
        service_of(FakeEngine(), config)  # type: ignore[arg-type]
