"""compressed-tensors: integers, FP8, MXFP4 and NVFP4, with a scheme for each group of layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from ......config import ModelError
from ...kernels.codes import Codes, PlainCodes, Scales
from .float4 import read_mxfp4, read_nvfp4
from .fp8 import read_fp8, spread_scales
from .stored import (
    CheckpointFormat,
    Positive,
    ReadLayer,
    StoredLayer,
    group_order,
    integer_form,
    offsets_of,
    settings_of,
    unpack_bits,
    unsupported,
    words_of,
)

LAYOUTS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
)


class Weights(msgspec.Struct):
    """The quantisation of weights."""

    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    group_size: int | None = None
    strategy: str | None = None
    block_structure: (
        tuple[Positive, Positive]
        | Annotated[str, msgspec.Meta(pattern=r"^[1-9]\d*x[1-9]\d*$")]
        | None
    ) = None
    actorder: bool | str | None = None

    @property
    def group(self) -> int:
        """Inputs of a group; -1 for all."""
        return self.group_size or -1

    @property
    def block(self) -> tuple[int, int]:
        """Outputs and inputs that share a scale, where there are blocks or groups."""
        if self.block_structure is None:
            return 1, max(self.group, 1)
        if not isinstance(self.block_structure, str):
            return self.block_structure
        rows, columns = self.block_structure.split("x")
        return int(rows), int(columns)

    @property
    def label(self) -> str:
        """The numbers, such as "int4"."""
        return f"{'int' if self.type == 'int' else 'fp'}{self.num_bits}"


class Scheme(msgspec.Struct):
    """One of `config_groups`."""

    targets: list[str]
    weights: Weights | None = None
    input_activations: dict[str, Any] | None = None
    output_activations: dict[str, Any] | None = None
    format: str | None = None


class Settings(msgspec.Struct):
    """Fields of a quantization_config."""

    config_groups: dict[str, Scheme]
    format: str
    quantization_status: str = "compressed"
    kv_cache_scheme: dict[str, Any] = {}
    sparsity_config: dict[str, Any] = {}
    transform_config: dict[str, Any] = {}


class CompressedTensors(CheckpointFormat):
    """Checkpoints of compressed-tensors, such as LLM Compressor's."""

    markers = frozenset({"weight_packed", "weight_scale"})
    names = frozenset(
        {
            "weight",
            "weight_packed",
            "weight_scale",
            "weight_zero_point",
            "weight_global_scale",
            "weight_shape",
            "weight_g_idx",
        }
    )
    ignored = frozenset(
        {
            "input_scale",
            "input_zero_point",
            "input_global_scale",
            "output_scale",
            "output_zero_point",
            "k_scale",
            "v_scale",
        }
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Check the configuration.

        Raises:
            ModelError: A field has a wrong type or value.
        """
        own = settings_of(config, Settings)
        self._schemes = [each for each in own.config_groups.values() if each.weights is not None]
        for layout in (own.format, *(each.format or own.format for each in self._schemes)):
            if layout not in LAYOUTS:
                raise unsupported(
                    f"quantization_config in config.json: the compressed-tensors format {layout!r}"
                )
        if own.quantization_status != "compressed":
            raise unsupported(
                f"quantization_config in config.json: quantization_status "
                f"{own.quantization_status!r}, whose weights are not stored as integers,",
                "save the model compressed",
            )
        if own.sparsity_config.get("format", "dense") != "dense":
            raise unsupported("quantization_config in config.json: sparsity_config")
        if own.transform_config.get("config_groups"):
            raise unsupported("quantization_config in config.json: transform_config")
        kinds = dict.fromkeys(each.weights.label for each in self._schemes if each.weights)
        self.label = f"compressed-tensors {' and '.join(kinds)}"
        notes = []
        if any(each.input_activations or each.output_activations for each in self._schemes):
            notes.append("activations are not quantised: of input_activations nothing is applied")
        if own.kv_cache_scheme:
            notes.append("kv_cache_scheme is not applied")
        self.notes = tuple(notes)

    def read(self, layer: StoredLayer) -> ReadLayer:
        weights = self._weights_of(layer.name)
        match weights.type, weights.num_bits:
            case "int", _:
                return _read_integers(layer, weights)
            case "float", 8:
                return read_fp8(layer, "weight_scale", [weights.block])
            case "float", 4 if "weight_global_scale" in layer.tensors:
                common = 1 / layer.scales("weight_global_scale", [(), (1,)]).float()
                return read_nvfp4(layer, "weight_packed", "weight_scale", common)
            case "float", 4:
                return read_mxfp4(layer, "weight_packed", "weight_scale", weights.group)
        raise unsupported(
            f"quantization_config in config.json: weights of {weights.num_bits} bits of type "
            f"{weights.type!r}"
        )

    def _weights_of(self, name: str) -> Weights:
        """Return the quantisation of a layer: by its name, then a pattern, then its class."""
        tests = (
            lambda target: target == name,
            lambda target: target.startswith("re:") and re.match(target[3:], name) is not None,
            lambda target: target == "Linear",
        )
        for test in tests:
            for scheme in self._schemes:
                if scheme.weights is not None and any(map(test, scheme.targets)):
                    return scheme.weights
        raise ModelError(
            f"{name} is stored quantised, and no target in config_groups of quantization_config "
            "in config.json matches it; the two are not of one checkpoint",
            remedy="copy or download the folder again",
        )


def _read_integers(layer: StoredLayer, weights: Weights) -> ReadLayer:
    bits = weights.num_bits
    scales, group = spread_scales(layer, "weight_scale", [weights.block])
    form = integer_form(layer, bits, group)
    shape = layer.outputs, layer.inputs
    if "weight_packed" in layer.tensors:
        if "weight_shape" in layer.tensors:
            _check_shape(layer, shape)
        words = layer.outputs, words_of(layer.inputs, bits)
        codes = unpack_bits(layer.take("weight_packed", (torch.int32,), [words]), bits, shape[1])
    else:
        codes = layer.take("weight", (torch.int8,), [shape]).short() + form.zero
        if int(codes.min()) < 0 or int(codes.max()) >> bits:
            raise layer.error("weight", f"has integers of more than {bits} bits")
        codes = codes.to(torch.uint8)
    order = _order(layer, form, weights)
    if order is not None:
        codes = codes[:, order]
    offsets = None
    if not weights.symmetric or "weight_zero_point" in layer.tensors:
        offsets = offsets_of(form, scales, _zero_points(layer, form, bits))
    return ReadLayer(form, PlainCodes(codes, Scales(scales), offsets), order)


def _check_shape(layer: StoredLayer, shape: tuple[int, int]) -> None:
    stored = layer.take("weight_shape", (torch.int64, torch.int32), [(2,)]).tolist()
    if stored != list(shape):
        raise layer.error(
            "weight_shape",
            f"is {stored}, and config.json makes it {list(shape)}; the two are not of one model",
        )


def _zero_points(layer: StoredLayer, form: Codes, bits: int) -> Tensor:
    """`[outputs, groups]`, or of one output, as codes."""
    found, zero = layer.tensors.get("weight_zero_point"), 1 << bits - 1
    packed = words_of(layer.outputs, bits), form.groups
    if found is not None and found.dtype is torch.int32:
        words = layer.take("weight_zero_point", (torch.int32,), [packed])
        return unpack_bits(words.T, bits, layer.outputs).T
    shapes: list[tuple[int, ...]] = [(layer.outputs, form.groups)]
    if form.groups == 1:
        shapes += [(), (1,), (1, 1), (layer.outputs,)]
    values = layer.take("weight_zero_point", (torch.int8, torch.int32), shapes)
    return values.int().reshape(-1, form.groups) + zero


def _order(layer: StoredLayer, form: Codes, weights: Weights) -> Tensor | None:
    groups = layer.tensors.get("weight_g_idx")
    wanted = weights.actorder in ("group", "dynamic", True)
    # -1 in its place says that inputs are in order.
    if groups is None or bool((groups == -1).any()):
        if wanted and groups is None:
            raise layer.error(
                "weight_g_idx", "is missing, with actorder 'group'; copy the checkpoint again"
            )
        return None
    return group_order(layer, "weight_g_idx", form)
