"""Weights rounded to codes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nano_inference.stages.executor.runner.kernels.codes import unpack, unpack_plain
from nano_inference.stages.executor.runner.linear.rounding import (
    Rounding,
    round_rows,
    round_weight,
)

ROUNDINGS = (
    Rounding(8),
    Rounding(8, 32, True),
    Rounding(4, 128),
    Rounding(4, 32, True),
)


def weight_of(outputs: int, inputs: int, seed: int = 0) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))


def plain(rounding: Rounding, weight: Tensor) -> Tensor:
    return unpack_plain(rounding.form(*weight.shape), round_rows(weight, rounding))


@pytest.mark.parametrize(
    ("rounding", "most"),
    [
        (Rounding(8), 0.0075),
        (Rounding(8, 32, True), 0.005),
        (Rounding(4, 128), 0.1),
        (Rounding(4, 32, True), 0.085),
    ],
)
def test_rounded_weights_are_close(rounding: Rounding, most: float) -> None:
    weight = weight_of(70, 256)
    assert 0.5 * most < (plain(rounding, weight) - weight).norm() / weight.norm() < most


def test_all_weights_within_a_group_s_range_are_rounded_to_the_nearest() -> None:
    weight = weight_of(70, 256)
    codes = round_rows(weight, Rounding(8))
    steps = codes.scales.wide()
    assert ((plain(Rounding(8), weight) - weight).abs() <= 0.75 * steps).all()


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_packed_weight_has_the_codes_of_its_rows(rounding: Rounding) -> None:
    """The weight is rounded in parts, of which none shows."""
    weight = weight_of(9000, 130)
    form, packed = round_weight(weight, rounding)
    assert torch.equal(unpack(form, packed), plain(rounding, weight))


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_zeros_and_extreme_numbers_are_rounded(rounding: Rounding) -> None:
    weight = weight_of(4, 256).clamp(-3, 3)
    weight[0] = 0
    weight[1, 128:] = 0
    weight[2] *= 1e38
    weight[3] *= 1e-41
    found = plain(rounding, weight)
    assert torch.equal(found[0], torch.zeros(256))
    assert torch.equal(found[1, 128:], torch.zeros(128))
    assert found.isfinite().all()
    assert (found[2] - weight[2]).double().norm() < 0.2 * weight[2].double().norm()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_numbers_that_are_none_are_refused(rounding: Rounding, number: float) -> None:
    weight = weight_of(4, 256)
    weight[2, 17] = number
    with pytest.raises(ValueError, match="infinite"):
        round_rows(weight, rounding)


def test_symmetric_codes_of_8_bits_have_a_step_for_each_sign() -> None:
    codes = round_rows(weight_of(64, 96).sign(), Rounding(8)).codes
    assert {*codes.flatten().tolist()} == {1, 255}
