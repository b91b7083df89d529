"""FP8, MXFP4 and NVFP4: unpacked weights are those of the formats' definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nano_inference.config import ModelError
from nano_inference.stages.executor.runner.kernels.codes import unpack_plain
from nano_inference.stages.executor.runner.linear.formats.choose import format_of
from nano_inference.stages.executor.runner.linear.formats.float4 import read_experts

from .test_integers import INPUTS, OUTPUTS, read, weight_of

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
NUMBERS = torch.Generator().manual_seed(0)


def fp8(rows: int = OUTPUTS, columns: int = INPUTS) -> Tensor:
    return torch.randn(rows, columns, generator=NUMBERS).to(torch.float8_e4m3fn)


def fp4(*shape: int) -> tuple[Tensor, Tensor]:
    """Return random numbers, and them packed two in a byte."""
    codes = torch.randint(0, 16, shape, generator=NUMBERS)
    values = torch.where(codes < 8, 1, -1) * E2M1[codes % 8]
    return values, (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


SCALES: dict[str, tuple[dict[str, Any], str, tuple[int, ...], tuple[int, int]]] = {
    "one scale": (FP8, "weight_scale", (), (OUTPUTS, INPUTS)),
    "one scale in a list": (FP8, "weight_scale_inv", (1,), (OUTPUTS, INPUTS)),
    "one by output": (FP8, "weight_scale", (OUTPUTS, 1), (1, INPUTS)),
    "fbgemm": (FP8 | {"quant_method": "fbgemm_fp8"}, "weight_scale", (OUTPUTS, 1), (1, INPUTS)),
    "blocks": (FP8 | {"weight_block_size": [128, 128]}, "weight_scale_inv", (1, 2), (128, 128)),
    "small blocks": (FP8 | {"weight_block_size": [16, 64]}, "weight_scale_inv", (5, 3), (16, 64)),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "weight_scale", (), (72, 160)),
}


@pytest.mark.parametrize("name", SCALES)
def test_fp8_is_read_exactly(name: str) -> None:
    config, tensor, shape, (rows, columns) = SCALES[name]
    weight, scales = fp8(), torch.rand(shape, generator=NUMBERS) + 0.1
    found = read(config, {"weight": weight, tensor: scales})
    grid = scales.reshape(shape if len(shape) == 2 else (1, 1))
    spread = grid.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    assert torch.equal(weight_of(found), spread[:OUTPUTS, :INPUTS] * weight.float())


def test_scales_that_are_exponents_are_kept_so() -> None:
    weight, exponents = fp8(), torch.randint(1, 250, (OUTPUTS, 5), generator=NUMBERS)
    found = read(FP8 | {"quant_method": "mxfp8"}, {
        "weight": weight, "weight_scale_inv": exponents.to(torch.uint8)
    })  # fmt: skip
    assert found.plain.scales.values.dtype is torch.uint8
    spread = (exponents - 127).double().exp2().float().repeat_interleave(32, 1)
    assert torch.equal(weight_of(found), spread * weight.float())


def test_mxfp4_experts_are_read_exactly_also_with_the_smallest_exponent() -> None:
    values, blocks = fp4(3, 24, 2, 32)
    exponents = torch.randint(100, 140, (3, 24, 2), generator=NUMBERS)
    for lowest, dtype in ((100, torch.uint8), (0, torch.float32)):
        exponents[1, 5, 0] = lowest
        form, experts = read_experts("experts.down_proj", blocks, exponents.to(torch.uint8))
        scales = (exponents - 127).double().exp2().float()
        wanted = (values * scales[..., None]).flatten(2)
        assert torch.equal(torch.stack([unpack_plain(form, each) for each in experts]), wanted)
        assert {each.scales.values.dtype for each in experts} == {dtype}


def test_nvfp4_of_modelopt_is_read_exactly() -> None:
    values, packed = fp4(OUTPUTS, INPUTS)
    scales = (torch.rand(OUTPUTS, INPUTS // 16, generator=NUMBERS) * 64).to(torch.float8_e4m3fn)
    common = torch.tensor(0.25)
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    found = read(config, {"weight": packed, "weight_scale": scales, "weight_scale_2": common})
    wanted = values * (scales.float() * common).repeat_interleave(16, 1)
    assert torch.equal(weight_of(found), wanted)


BLOCKS = {"weight_block_size": [16, 64]}
GOOD = {"weight": fp8(), "weight_scale_inv": torch.ones(5, 3)}


@pytest.mark.parametrize(
    ("changes", "tensors", "message"),
    [
        ({"weight_block_size": [16]}, {}, r"quantization_config\.weight_block_size is"),
        ({"weight_block_size": "16"}, {}, r"quantization_config\.weight_block_size is"),
        ({"weight_block_size": [16, 60]}, {}, "multiple of 8"),
        ({"weight_block_size": [0, 64]}, {}, r"quantization_config\.weight_block_size\[0\] is 0"),
        ({"fmt": "e5m2"}, {}, "'e5m2'"),
        ({}, {"weight": fp8().to(torch.float8_e5m2)}, "dtype float8_e5m2"),
        ({}, {"weight_scale_inv": torch.ones(5, 2)}, r"weight_scale_inv has the shape \[5, 2\]"),
        ({}, {"weight_scale_inv": torch.full((5, 3), torch.nan)}, "NaN"),
        ({}, {"weight_scale": torch.ones(())}, "2 tensors of scales"),
        ({}, {"weight_scale_inv": torch.full((5, 3), 255).to(torch.uint8)}, "NaN"),
    ],
)
def test_broken_fp8_is_refused_by_name(
    changes: dict[str, Any], tensors: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read(FP8 | BLOCKS | changes, GOOD | tensors)


def test_activations_that_stay_unquantised_are_said() -> None:
    assert "activations" in format_of(FP8).notes[0]


def test_experts_of_other_shapes_are_refused_by_name() -> None:
    _, blocks = fp4(3, 24, 2, 32)
    with pytest.raises(ModelError, match=r"down_proj\.scales has the shape \[24, 3\]"):
        read_experts("experts.down_proj", blocks, torch.full((3, 24, 3), 127).to(torch.uint8))
    with pytest.raises(ModelError, match=r"down_proj_blocks and .*_scales have"):
        read_experts("experts.down_proj", blocks[0], torch.zeros(3, 24, 2).to(torch.uint8))
