"""compressed-tensors: unpacked weights are those that the package of this name unpacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor

from nano_inference.config import ModelError
from nano_inference.stages.executor.runner.linear.formats.choose import format_of

from .test_integers import INPUTS, OUTPUTS, read, weight_of

NVFP4 = "nvfp4-pack-quantized"


def config_of(layout: str, **weights: Any) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
    }


def compressed(layout: str, **weights: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Return a random layer as the package stores it, and as it unpacks it."""
    numbers = torch.Generator().manual_seed(0)
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    rows, columns = {
        "tensor": (1, 1),
        "channel": (OUTPUTS, 1),
        "block": (-(-OUTPUTS // 16), -(-INPUTS // 32)),
    }.get(str(args.strategy), (OUTPUTS, -(-INPUTS // (args.group_size or INPUTS))))
    state = {
        "weight": torch.randn(OUTPUTS, INPUTS, generator=numbers),
        # Rounded, as checkpoints have them.
        "weight_scale": (torch.rand(rows, columns, generator=numbers) / 4 + 0.05).half().float(),
    }
    if not args.symmetric:
        high = 1 << args.num_bits - 1
        zeros = torch.randint(-high, high, (rows, columns), generator=numbers)
        zeros[0], zeros[1] = -high, high - 1
        state["weight_zero_point"] = zeros.to(torch.int8)
    if layout == NVFP4:
        state["weight_scale"] = (state["weight_scale"] * 64).to(torch.float8_e4m3fn).float()
        state["weight_global_scale"] = torch.tensor([64.0 * 3])
    if "mx" in layout:
        state["weight_scale"] = state["weight_scale"].log2().floor().exp2()
    if args.strategy == "tensor":
        state["weight_scale"] = state["weight_scale"].view(1)
    compressor: Any = BaseCompressor.get_value_from_registry(layout)
    stored = compressor.compress(state, scheme)
    return stored, compressor.decompress(stored, scheme)["weight"]


INT4, INT8 = {"num_bits": 4, "type": "int"}, {"num_bits": 8, "type": "int"}
FP8, FP4 = {"num_bits": 8, "type": "float"}, {"num_bits": 4, "type": "float"}
GROUP = {"strategy": "group", "group_size": 32}
BLOCK = {"strategy": "block", "block_structure": [16, 32]}


@pytest.mark.parametrize(
    ("layout", "weights"),
    [
        ("pack-quantized", INT4 | GROUP),
        ("pack-quantized", INT4 | GROUP | {"symmetric": False}),
        ("pack-quantized", INT4 | GROUP | {"group_size": 80, "actorder": "weight"}),
        ("pack-quantized", INT4 | {"strategy": "channel", "symmetric": False}),
        ("pack-quantized", INT8 | {"strategy": "channel"}),
        ("pack-quantized", INT8 | GROUP | {"symmetric": False}),
        ("pack-quantized", {"num_bits": 3, "type": "int"} | GROUP | {"symmetric": False}),
        ("pack-quantized", {"num_bits": 6, "type": "int"} | GROUP),
        ("int-quantized", INT8 | {"strategy": "channel"}),
        ("int-quantized", INT8 | {"strategy": "tensor"}),
        ("naive-quantized", INT8 | {"strategy": "channel", "symmetric": False}),
        ("naive-quantized", INT4 | GROUP),
        ("float-quantized", FP8 | {"strategy": "tensor"}),
        ("float-quantized", FP8 | {"strategy": "channel"}),
        ("float-quantized", FP8 | BLOCK),
        ("mxfp8-quantized", FP8 | GROUP),
        ("mxfp4-pack-quantized", FP4 | GROUP),
        (NVFP4, FP4 | {"strategy": "tensor_group", "group_size": 16}),
    ],
)
def test_layers_are_read_as_the_package_reads_them(layout: str, weights: dict[str, Any]) -> None:
    stored, weight = compressed(layout, **weights)
    found = read(config_of(layout, **weights), stored)
    if layout == NVFP4:  # the package rounds its scales to bfloat16
        torch.testing.assert_close(weight_of(found), weight.float(), rtol=2**-7, atol=0)
    else:
        assert torch.equal(weight_of(found), weight.float())
    assert found.input_order is None


def test_groups_in_the_order_of_activations_are_read() -> None:
    weights = INT4 | GROUP | {"symmetric": False}
    stored, weight = compressed("pack-quantized", **weights)
    order = torch.randperm(INPUTS, generator=torch.Generator().manual_seed(1))
    groups = torch.arange(INPUTS) // 32
    # The codes of an input stay at its place; only its group is another's.
    codes, scales = read(config_of("pack-quantized", **weights), stored).plain[:2]
    stored["weight_g_idx"] = groups[order].int()
    found = read(config_of("pack-quantized", **weights, actorder="group"), stored)
    plain = read(config_of("pack-quantized", **weights), stored | {"weight_g_idx": -groups - 1})
    offsets = plain.plain.offsets
    assert offsets is not None
    wanted = scales.values[:, groups[order]] * (codes.float() - 8)
    wanted -= offsets.values[:, groups[order]]
    assert torch.equal(weight_of(found), wanted)
    torch.testing.assert_close(weight_of(plain), weight)


def test_a_layer_s_scheme_is_that_of_its_name_then_a_pattern_then_the_class() -> None:
    groups = {
        "class": {"targets": ["Linear"], "weights": INT8 | {"strategy": "channel"}},
        "pattern": {"targets": ["re:.*down_proj"], "weights": INT4 | GROUP},
        "name": {"targets": ["model.layers.1.mlp.down_proj"], "weights": INT4 | GROUP},
    }
    groups["name"]["weights"] = INT4 | {"strategy": "channel"}
    config = config_of("pack-quantized") | {"config_groups": groups}
    for name, weights in [
        ("model.layers.0.self_attn.q_proj", INT8 | {"strategy": "channel"}),
        ("model.layers.0.mlp.down_proj", INT4 | GROUP),
        ("model.layers.1.mlp.down_proj", INT4 | {"strategy": "channel"}),
    ]:
        stored, weight = compressed("pack-quantized", **weights)
        torch.testing.assert_close(weight_of(read(config, stored, name=name)), weight)


def test_activations_and_kv_that_stay_unquantised_are_said() -> None:
    config = config_of("int-quantized", **INT8, strategy="channel")
    assert format_of(config).notes == ()
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True}
    config["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    assert [note.split()[0] for note in format_of(config).notes] == [
        "activations",
        "kv_cache_scheme",
    ]


def one_group(targets: Any, **weights: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": targets, "weights": INT4 | weights}}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "marlin-24"}, "format 'marlin-24'"),
        ({"quantization_status": "frozen"}, "quantization_status 'frozen'"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        (one_group("Linear"), r"quantization_config\.config_groups\[...\]\.targets"),
        (one_group(["lm_head"]), "no target"),
        (one_group(["Linear"], num_bits=9, **GROUP), "9 bits"),
        (one_group(["Linear"], block_structure="16 by 32"), r"\.block_structure"),
        (one_group(["Linear"], block_structure=[0, 32]), r"\.block_structure"),
        (one_group(["Linear"], type="log"), "of type 'log'"),
    ],
)
def test_changed_meanings_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    stored, _ = compressed("pack-quantized", **INT4, **GROUP)
    with pytest.raises(ModelError, match=message):
        read(config_of("pack-quantized", **INT4, **GROUP) | changes, stored)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"weight_scale": None}, r"weight_scale is missing"),
        ({"weight_scale": torch.ones(OUTPUTS, 2)}, r"weight_scale has the shape \[72, 2\]"),
        ({"weight_scale": torch.full((OUTPUTS, 5), torch.inf)}, "weight_scale has scales"),
        ({"weight_packed": torch.zeros(OUTPUTS, 19).int()}, r"weight_packed has the shape"),
        ({"weight_shape": torch.tensor([72, 152])}, r"weight_shape is \[72, 152\]"),
        ({"weight_zero_point": None}, "weight_zero_point is missing"),
        ({"weight_g_idx": torch.full((INPUTS,), 7)}, "weight_g_idx names group 7 of 5"),
    ],
)
def test_broken_layers_are_refused_by_name(tensors: dict[str, Any], message: str) -> None:
    weights = INT4 | GROUP | {"symmetric": False}
    stored, _ = compressed("pack-quantized", **weights)
    layer = {name: each for name, each in {**stored, **tensors}.items() if each is not None}
    with pytest.raises(ModelError, match=message):
        read(config_of("pack-quantized", **weights), layer)
