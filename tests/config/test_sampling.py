"""Sampling parameters are checked where a Python caller makes them."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import pytest

from nano_inference import Constraint, RequestError, SamplingParams

from ..errors import raises

WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "a range": ({"temperature": -1}, "invalid_temperature", "is -1; it must be 0 .greedy. or"),
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
