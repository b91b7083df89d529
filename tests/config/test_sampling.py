"""Sampling parameters are checked where a Python caller makes them."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from nano_inference import (
    AsyncEngine,
    Constraint,
    EngineConfig,
    InferenceEngine,
    RequestError,
    SamplingParams,
)
from nano_inference.config.other_names import unknown_argument

from ..errors import raises

WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "a range": ({"temperature": -1}, "invalid_temperature", "is -1; it must be 0 .greedy. or"),
    "two": ({"top_p": 7, "min_p": 2}, "invalid_top_p", "top_p is 7; .*; min_p is 2; it must be"),
    "nan": ({"top_p": float("nan")}, "invalid_top_p", "top_p is nan; it must be above 0"),
    "text": ({"temperature": "hot"}, "invalid_temperature", "is 'hot'; it must be a number"),
    "a fraction": ({"max_tokens": 1.5}, "invalid_max_tokens", "is 1.5; it must be a whole number"),
    "no list": ({"stop": 5}, "invalid_request", "stop is 5; it must be a list"),
    "an empty stop": ({"stop": ["a", ""]}, "invalid_stop", "would stop at once; leave that out"),
    "a bias": ({"logit_bias": {3: 101}}, "invalid_logit_bias", "of token 3 is 101; it must be"),
    "two together": ({"min_tokens": 9, "max_tokens": 8}, "invalid_min_tokens", "from 0 to max_"),
    "a form": ({"constraint": {"rex": "a"}}, "invalid_request", "constraint.rex is not known here"),
    "an endless form": (
        {"constraint": Constraint(regex="a"), "ignore_eos": True},
        "invalid_constraint",
        "leave these out",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_parameter_is_refused_when_it_is_made(case: str) -> None:
    given, code, why = WRONG[case]
    with raises(code, why, RequestError, param=next(iter(given))) as refused:
        SamplingParams(**given)
    assert isinstance(refused.value, ValueError)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "constraint has no kind; give exactly one of json_object, json_schema, regex"),
        ({"json_object": True, "regex": "a"}, "has json_object and regex; give exactly one"),
        ({"regex": 5}, "constraint.regex is 5; it must be a text"),
        ({"choice": "ab"}, "constraint.choice is 'ab'; it must be a list"),
        ({"choice": ["a", ""]}, "choice must be texts that are not empty"),
        ({"json_schema": [1]}, "json_schema is a list; it must be a text or an object"),
    ],
)
def test_a_wrong_constraint_is_refused_when_it_is_made(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Constraint(**given)


def test_numbers_of_numpy_and_torch_become_pythons() -> None:
    given = SamplingParams(
        temperature=np.float32(0.5),
        max_tokens=torch.tensor(8),
        stop_token_ids=np.array([1, 2]),
        logit_bias={np.int64(3): np.float32(1)},
        forced_tokens=[np.int32(4)],
        top_k=np.int64(-1),
    )
    assert given == SamplingParams(
        temperature=0.5, max_tokens=8, stop_token_ids=[1, 2], logit_bias={3: 1.0}, forced_tokens=[4]
    )
    assert msgspec.json.encode(given)


OTHER: list[tuple[type, dict[str, Any], str]] = [
    (SamplingParams, {"n": 4}, "give num_samples_per_prompt to generate"),
    (SamplingParams, {"max_new_tokens": 5}, "say max_tokens=5"),
    (SamplingParams, {"guided_json": {}}, "say constraint=Constraint"),
    (SamplingParams, {"temprature": 1}, "did you mean 'temperature'"),
    (EngineConfig, {"tensor_parallel_size": 2}, "say tensor_parallel=2"),
    (EngineConfig, {"model_pth": "a"}, "did you mean 'model_path'"),
    (InferenceEngine, {"model": "a"}, r"pass EngineConfig\(model_path='a'\)"),
    (AsyncEngine, {"max_model_len": 8}, r"pass EngineConfig\(max_model_len=8\)"),
]


@pytest.mark.parametrize(("kind", "given", "why"), OTHER)
def test_names_of_other_engines_are_translated(kind: type, given: dict[str, Any], why: str) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__} has no {next(iter(given))}; .*{why}"):
        kind(**given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"temperature": 0}, "temperature=0"),
        ({"max_new_tokens": 5}, "max_tokens=5"),
        ({"regex": "a"}, "constraint=Constraint(regex=…)"),
    ],
)
def test_sampling_parameters_of_a_call_belong_into_sampling_params(
    given: dict[str, Any], says: str
) -> None:
    error = unknown_argument(
        "generate", given, ["prompts", "sampling_params"], (), SamplingParams.__struct_fields__
    )
    assert str(error).endswith(f"; say sampling_params=SamplingParams({says})")


def test_attributes_of_other_engines_are_translated() -> None:
    engine: Any = object.__new__(InferenceEngine)
    same = {"tokenizer": "ChatRenderer", "chat": "ChatRenderer", "encode": "embed"}
    for name, ours in same.items():
        with pytest.raises(AttributeError, match=f"InferenceEngine has no {name}; .*{ours}"):
            getattr(engine, name)
    assert not hasattr(engine, "llm_engine")


def test_decoding_leaves_the_check_to_admission() -> None:
    params = msgspec.json.decode(b'{"temperature": -1}', type=SamplingParams)
    assert params.temperature == -1
    assert msgspec.structs.replace(SamplingParams(), top_k=-5).top_k == -5


def test_parameters_show_their_differences_from_the_defaults() -> None:
    params = SamplingParams(temperature=0, stop="\n", constraint=Constraint(regex="a+"))
    shown = r"SamplingParams(temperature=0, stop=('\n',), constraint=Constraint(regex='a+'))"
    assert repr(params) == shown
    assert repr(SamplingParams()) == "SamplingParams()"
    assert pickle.loads(pickle.dumps(params)) == params
