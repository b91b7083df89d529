"""Prompts of a wrong type are refused by every call that takes prompts, and never converted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from nano_inference import EngineConfig, InferenceEngine, RequestError, SamplingParams

from .builders import refused

GREEDY = SamplingParams(temperature=0, max_tokens=2)


@pytest.fixture(scope="module")
def engine() -> Iterator[InferenceEngine]:
    with InferenceEngine(EngineConfig(dtype="bfloat16")) as engine:
        yield engine


NO_PROMPT: list[tuple[Any, str]] = [
    ([1.5], "invalid_token_ids"),
    ([True, 2], "invalid_token_ids"),
    (["a"], "invalid_token_ids"),
    ([[1]], "invalid_token_ids"),
    (np.array([1.0, 2.0]), "invalid_token_ids"),
    (torch.tensor([True]), "invalid_token_ids"),
    (b"ab", "invalid_prompt"),
    (None, "invalid_prompt"),
    (7, "invalid_prompt"),
    ({1: 2}, "invalid_prompt"),
    ({1, 2}, "invalid_prompt"),
]


@pytest.mark.parametrize(("prompt", "code"), NO_PROMPT)
def test_prompt_of_a_wrong_type_is_refused(engine: InferenceEngine, prompt: Any, code: str) -> None:
    for refuse in (
        lambda: engine.generate(["1 + 1 =", prompt], GREEDY),
        lambda: engine.add_request(prompt, GREEDY),
        lambda: engine.embed([prompt]),
        lambda: engine.score([prompt], [[1]]),
        lambda: engine.score([[1]], [prompt]),
    ):
        with pytest.raises(RequestError) as refused:
            refuse()
        assert refused.value.code == code
    prediction: Any = 0 if prompt is None else prompt
    with refused(RequestError, "invalid_prediction"):
        engine.generate(["1 + 1 ="], GREEDY, predictions=[prediction])
    assert not engine.has_pending()


@pytest.mark.parametrize("prompts", ["abc", b"abc", 7, None, {"a": 1}, np.array(5), np.array(b"a")])
def test_prompts_that_are_no_list_are_refused(engine: InferenceEngine, prompts: Any) -> None:
    for refuse in (
        lambda: engine.generate(prompts, GREEDY),
        lambda: engine.embed(prompts),
        lambda: engine.score(prompts, [[1]] * 3),
    ):
        with refused(RequestError, "invalid_prompt", match="pass a list"):
            refuse()
    if prompts is not None:
        with refused(RequestError, "invalid_prediction", match=r"predictions is .*; pass a list"):
            engine.generate(["1 + 1 ="], GREEDY, predictions=prompts)


def test_prompts_may_be_arrays_tensors_and_iterators(engine: InferenceEngine) -> None:
    wanted = engine.generate([[5, 6], [7, 8]], GREEDY)
    for prompts in (
        [np.array([5, 6]), torch.tensor([7, 8])],
        torch.tensor([[5, 6], [7, 8]]),
        iter([[np.int64(5), torch.tensor(6)], range(7, 9)]),
    ):
        found = engine.generate(prompts, GREEDY)  # type: ignore[arg-type]
        assert [each.prompt_tokens for each in found] == [each.prompt_tokens for each in wanted]
        assert [each.logprobs for each in found] == [each.logprobs for each in wanted]


@pytest.mark.parametrize("number", [1.5, 2.0, True, "2", None, 0])
def test_wrong_number_of_samples_is_refused(engine: InferenceEngine, number: Any) -> None:
    with refused(RequestError, "invalid_n"):
        engine.generate([[1]], GREEDY, number)


@pytest.mark.parametrize("params", [5, "abc", [object()], {"temperature": 0}, [5]])
def test_parameters_of_a_wrong_type_are_refused(engine: InferenceEngine, params: Any) -> None:
    for refuse in (
        lambda: engine.generate([[1]], params),
        lambda: engine.score([[1]], [[2]], params),
    ):
        with refused(RequestError, "invalid_request", match="sampling_params"):
            refuse()


@pytest.mark.parametrize("name", ["stop", "constraint"])
def test_bytes_in_place_of_text_are_refused(engine: InferenceEngine, name: str) -> None:
    given: dict[str, Any] = {"stop": (b"ab",), "constraint": {"regex": b"ab"}}
    with refused(RequestError, "invalid_request", match="got `bytes`"):
        engine.generate([[1]], SamplingParams(**{name: given[name]}))


@pytest.mark.parametrize("adapter", [5, None, ["a"]])
def test_adapter_of_a_wrong_type_is_refused(engine: InferenceEngine, adapter: Any) -> None:
    with refused(RequestError, "unknown_model"):
        engine.generate([[1]], GREEDY, adapter=adapter)
