"""An update that came in parts is had as a whole or not at all."""

from __future__ import annotations

import pytest
import torch

from nano_inference.bus.weights import StagedWeights
from nano_inference.config import WeightsError
from nano_inference.stages.executor.changes.parts import Origin, WeightParts


def parts(**names: float) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value) for name, value in names.items()}


def test_all_parts_together_once() -> None:
    kept = WeightParts()
    kept.add("u", parts(a=1, b=2))
    kept.add("u", parts(b=3, c=4))
    found, origin = kept.take(StagedWeights("u", 2))
    assert origin is None
    assert {name: tensor.item() for name, tensor in found.items()} == {"a": 1, "b": 3, "c": 4}
    with pytest.raises(WeightsError, match="0 of the update's 2"):
        kept.take(StagedWeights("u", 2))


def test_another_update_begins_anew() -> None:
    kept = WeightParts()
    kept.add("old", parts(a=1))
    kept.add("new", parts(b=2))
    assert set(kept.take(StagedWeights("new", 1))[0]) == {"b"}


def test_only_a_single_part_tells_where_all_is_to_be_had_again() -> None:
    kept, folder = WeightParts(), Origin("/weights", "stamp")
    kept.add("u", parts(a=1), folder)
    assert kept.take(StagedWeights("u", 1))[1] == folder
    kept.add("v", parts(a=1), folder)
    kept.add("v", parts(b=1), folder)
    assert kept.take(StagedWeights("v", 2))[1] is None


@pytest.mark.parametrize(
    "wanted", [StagedWeights("u", 2), StagedWeights("v", 1), StagedWeights("v", 0)]
)
def test_when_some_are_missing_nothing_is_kept(wanted: StagedWeights) -> None:
    kept = WeightParts()
    kept.add("u", parts(a=1))
    with pytest.raises(WeightsError) as refused:
        kept.take(wanted)
    assert refused.value.code == "weights_incomplete"
    with pytest.raises(WeightsError, match="0 of"):
        kept.take(StagedWeights("u", 1))


def test_dropped() -> None:
    kept = WeightParts()
    kept.add("u", parts(a=1))
    kept.drop()
    kept.add("u", parts(b=1))
    assert set(kept.take(StagedWeights("u", 1))[0]) == {"b"}
