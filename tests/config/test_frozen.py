"""Settings are frozen: they have a hash, and nobody's list or dict changes them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from nano_inference import Config, Constraint, EngineConfig, SamplingParams


@pytest.mark.parametrize("kind", [SamplingParams, EngineConfig, Config])
def test_equal_settings_have_one_hash(kind: type[msgspec.Struct]) -> None:
    assert hash(kind()) == hash(kind())
    assert len({kind(), kind()}) == 1


def test_the_hash_depends_on_the_contents_of_collections() -> None:
    schema = Constraint(json_schema={"enum": [1, {"a": None}]})
    one = SamplingParams(logit_bias={1: 1, 2: 2.0}, stop=("a",), constraint=schema)
    two = SamplingParams(logit_bias={2: 2, 1: 1.0}, stop=("a",), constraint=copy.deepcopy(schema))
    assert one == two
    assert hash(one) == hash(two)
    assert hash(one) != hash(SamplingParams(logit_bias={1: 1.5}))


def test_a_callers_collections_are_taken_over() -> None:
    ids, stop, bias = [1, 2], ["a"], {5: 1.0}
    given: dict[str, Any] = {"stop_token_ids": ids, "stop": stop, "logit_bias": bias}
    params = SamplingParams(**given)
    before = hash(params)
    ids.append(3)
    stop.append("b")
    bias[6] = 2.0
    assert (params.stop_token_ids, params.stop, params.logit_bias) == ({1, 2}, ("a",), {5: 1.0})
    assert hash(params) == before


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(logit_bias={5: 1.0})])
def test_a_logit_bias_can_not_be_changed(params: SamplingParams) -> None:
    before = dict(params.logit_bias)
    for change in (
        lambda bias: bias.update({6: 1.0}),
        lambda bias: bias.__setitem__(6, 1.0),
        lambda bias: bias.setdefault(6, 1.0),
        lambda bias: bias.__ior__({6: 1.0}),
        lambda bias: bias.clear(),
    ):
        with pytest.raises(TypeError, match="frozen"):
            change(params.logit_bias)
    assert params.logit_bias == before
    for again in (copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert (again, hash(again)) == (params, hash(params))
    encoded = msgspec.json.encode(params)
    assert (b"logit_bias" in encoded) == bool(before), "an empty one is left out"
    assert msgspec.json.decode(encoded, type=SamplingParams) == params


def test_values_of_a_wrong_type_are_left_unchanged() -> None:
    params = replace(SamplingParams(), stop_token_ids=[[1]], stop=5)
    assert params.stop_token_ids == [[1]]
    assert params.stop == 5
