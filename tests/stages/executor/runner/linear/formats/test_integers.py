"""GPTQ and AWQ: unpacked weights are those of the formats' definitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from nano_inference.config import ModelError
from nano_inference.stages.executor.runner.kernels.codes import pack_plain, unpack, unpack_plain
from nano_inference.stages.executor.runner.linear.formats.choose import format_of
from nano_inference.stages.executor.runner.linear.formats.stored import ReadLayer, StoredLayer

from .packers import awq, gptq, random_integers

OUTPUTS, INPUTS = 72, 160
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def read(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    outputs: int = OUTPUTS,
    inputs: int = INPUTS,
    name: str = "model.layers.0.mlp.up_proj",
) -> ReadLayer:
    return format_of(config).read(StoredLayer(name, tensors, outputs, inputs))


def weight_of(layer: ReadLayer) -> Tensor:
    """The weight in the layer's own order, through the layout of kernels."""
    weight = unpack(layer.form, pack_plain(layer.form, layer.plain))
    assert torch.equal(weight, unpack_plain(layer.form, layer.plain))
    return weight if layer.input_order is None else weight[:, layer.input_order.argsort()]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [-1, 32, 128, 24])
@pytest.mark.parametrize("kind", ["symmetric", "zero points", "act-order"])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq_is_read_exactly(bits: int, group: int, kind: str, version: str) -> None:
    ordered, symmetric = kind != "act-order", kind == "symmetric"
    layer = random_integers(OUTPUTS, INPUTS, bits, group, symmetric=symmetric, ordered=ordered)
    config = {
        **GPTQ, "bits": bits, "group_size": group, "desc_act": not ordered, "sym": symmetric,
        "checkpoint_format": version,
    }  # fmt: skip
    found = read(config, gptq(layer, subtract=version == "gptq"))
    assert torch.equal(weight_of(found), layer.weight)
    assert (found.input_order is None) == (ordered or group == -1)
    assert (found.plain.offsets is None) == symmetric
    assert found.form.bits == (8 if bits == 8 else 4)


def test_gptq_without_a_group_of_each_input_is_in_order() -> None:
    layer = random_integers(OUTPUTS, INPUTS, 4, 32)
    tensors = gptq(layer, subtract=True, with_order=False)
    assert torch.equal(weight_of(read(GPTQ, tensors)), layer.weight)
    zeros = tensors | {"g_idx": torch.zeros(INPUTS, dtype=torch.int32)}
    assert torch.equal(weight_of(read(GPTQ, zeros)), layer.weight)


def test_layers_of_one_word_are_read() -> None:
    for bits, inputs, outputs in ((8, 4, 4), (4, 8, 8), (4, 8, 64)):
        layer = random_integers(outputs, inputs, bits, -1)
        config = {**GPTQ, "bits": bits, "group_size": -1}
        found = read(config, gptq(layer, subtract=True), outputs, inputs)
        assert torch.equal(weight_of(found), layer.weight)


def test_zero_points_that_a_word_s_subtraction_borrowed_from_are_read() -> None:
    layer = random_integers(OUTPUTS, INPUTS, 4, 32)
    tensors = gptq(layer, subtract=False)
    words = tensors["qzeros"].long() - 0x11111111
    tensors["qzeros"] = (words & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)
    config = {**GPTQ, "sym": False, "meta": {"quantizer": ["gptqmodel:4.0.0"]}}
    assert torch.equal(weight_of(read(config, tensors)), layer.weight)


def test_layers_have_the_bits_that_a_pattern_gives_them() -> None:
    dynamic = {
        "-:.*q_proj": {},
        r"+:.*\.1\..*": {"bits": 8, "group_size": 64},
        r".*\.mlp\..*": {"bits": 3},
    }
    config = {**GPTQ, "dynamic": dynamic}
    for name, bits, group in [
        ("model.layers.1.mlp.up_proj", 8, 64),
        ("model.layers.0.mlp.up_proj", 3, 32),
        ("model.layers.0.self_attn.k_proj", 4, 32),
    ]:
        layer = random_integers(OUTPUTS, INPUTS, bits, group)
        found = read(config, gptq(layer, subtract=True), name=name)
        assert torch.equal(weight_of(found), layer.weight)


@pytest.mark.parametrize("layout", ["auto_round:auto_gptq", "auto_round:exllamav2", "awq"])
def test_autoround_is_read_by_its_layout(layout: str) -> None:
    layer = random_integers(OUTPUTS, INPUTS, 4, 32)
    tensors = awq(layer) if layout == "awq" else gptq(layer, subtract="gptq" in layout)
    extra = {"model.layers.0.mlp.up_proj": {"bits": 4}, "model.layers.0": {"bits": 8}}
    config = {
        **GPTQ, "quant_method": "auto-round", "packing_format": layout, "extra_config": extra,
    }  # fmt: skip
    assert torch.equal(weight_of(read(config, tensors)), layer.weight)


@pytest.mark.parametrize("group", [-1, 32, 128])
def test_awq_is_read_exactly_with_zero_points_of_0_and_15(group: int) -> None:
    layer = random_integers(OUTPUTS, INPUTS, 4, group)
    assert {0, 15} <= {*layer.zero_points.unique().tolist()}
    config = {**AWQ, "group_size": group}
    found = read(config, awq(layer))
    assert torch.equal(weight_of(found), layer.weight)
    assert found.input_order is None
    own = {"quant_method": "awq", "w_bit": 4, "q_group_size": group, "version": "GEMM"}
    assert torch.equal(weight_of(read(own, awq(layer))), layer.weight)


BROKEN: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "bits of another type": ({"bits": "4"}, {}, r"quantization_config\.bits is '4'"),
    "bits that are a truth value": ({"bits": True}, {}, r"quantization_config\.bits is True"),
    "a group of another type": (
        {"group_size": [32]},
        {},
        r"quantization_config\.group_size is a list",
    ),
    "a pattern that is none": ({"dynamic": {"(": {}}}, {}, "no regular expression"),
    "a group between eights": ({"group_size": 20}, {}, "multiple of 8"),
    "nine bits": ({"bits": 9}, {}, "9 bits"),
    "another layout": ({"checkpoint_format": "marlin"}, {}, "layout 'marlin'"),
    "other bits": ({"bits": 8}, {}, r"up_proj\.qweight has the shape \[20, 72\].*\[40, 72\]"),
    "other groups": ({"group_size": 64}, {}, r"up_proj\.scales has the shape \[5, 72\]"),
    "no zero points": ({}, {"qzeros": None}, r"up_proj\.qzeros is missing"),
    "scales of integers": ({}, {"scales": torch.ones(5, 72, dtype=torch.int32)}, "dtype int32"),
    "scales that are NaN": ({}, {"scales": torch.full((5, 72), torch.nan)}, "NaN"),
    "a group too many": ({}, {"g_idx": torch.full((160,), 5)}, "names group 5 of 5"),
    "a group below 0": ({}, {"g_idx": torch.full((160,), -1)}, "names group -1 of 5"),
    "uneven groups": ({"desc_act": True}, {"g_idx": torch.zeros(160).long()}, "other sizes"),
    "too few inputs": ({}, {"g_idx": torch.ones(128).long()}, r"g_idx has the shape \[128\]"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_gptq_is_refused_by_name(name: str) -> None:
    changes, tensors, message = BROKEN[name]
    layer = gptq(random_integers(OUTPUTS, INPUTS, 4, 32), subtract=True) | tensors
    with pytest.raises(ModelError, match=message):
        read(GPTQ | changes, {key: each for key, each in layer.items() if each is not None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "gemv"}, "layout 'gemv'"),
        ({"bits": 8}, "AWQ of 8 bits"),
        ({"zero_point": False}, "without zero_point"),
        ({"zero_point": "yes"}, r"quantization_config\.zero_point is 'yes'"),
    ],
)
def test_other_awq_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        format_of(AWQ | changes)


@pytest.mark.parametrize("method", ["bitsandbytes", "hqq", "aqlm", "quanto", "torchao", "eetq", 3])
def test_unread_formats_are_refused_with_advice(method: object) -> None:
    with pytest.raises(ModelError, match="unquantised checkpoint" if method != 3 else "no quant"):
        format_of({"quant_method": method})
