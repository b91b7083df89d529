"""Loading of quantised checkpoints: which of their tensors are a layer's, and under which name.

Transformers renames tensors of many architectures, and stacks experts. Layers are found by the
tensors that the files have, and keep the checkpoint's names, which the patterns of its
quantization_config are about. So excluded and mixed layers need no further rule.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from .....config import EngineConfig, ModelError
from ..checkpoint import UNREADABLE, is_coded
from ..kernels.codes import Codes, PlainCodes, pack_plain, unpack_plain
from ..linear.choose import method_of
from ..linear.experts import ExpertProduct, expert_products, stack_codes
from ..linear.formats.choose import format_of
from ..linear.formats.float4 import ExpertBlocks, read_experts
from ..linear.formats.stored import ReadLayer, StoredLayer, join_plain, unsupported, with_offsets
from .loading import (
    KEPT,
    CodedLayer,
    LayerCodes,
    Plan,
    StoredCodes,
    plan_for,
    quantized_already,
    stored_config,
)

_OLD_FILES: dict[str, dict[str, str]] = {
    "quantize_config.json": {"quant_method": "gptq"},
    "quant_config.json": {"quant_method": "awq"},
    "hf_quant_config.json": {"quant_method": "modelopt"},
}
"""Configurations of checkpoints whose config.json has none: of AutoGPTQ, AutoAWQ and ModelOpt."""


def plan_of(
    config: EngineConfig, hf_config: PreTrainedConfig, folder: Path, files: Mapping[str, Path]
) -> Plan | None:
    """Return the plan for a checkpoint, by its own configuration or the settings; None to load it
    without ours.

    Args:
        config: The settings.
        hf_config: The model's configuration.
        folder: The checkpoint's folder.
        files: The file of each tensor in files of safetensors.

    Raises:
        ModelError: The settings ask for codes of weights that are codes already, or these can't be
            read.
    """
    stored = stored_config(hf_config)
    if stored is None and any(map(is_coded, files)):
        stored = _find_config(folder)
    if stored is None:
        return plan_for(config, hf_config)
    if config.quantization != "auto":
        raise quantized_already(config, stored)
    return FormatCodes(stored, files, config.activation_bits)


def _find_config(folder: Path) -> Mapping[str, Any]:
    """Return the quantization_config of a checkpoint whose config.json has none.

    Raises:
        ModelError: No file has one.
    """
    for name, fields in _OLD_FILES.items():
        try:
            found = json.loads((folder / name).read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValueError, *UNREADABLE) as error:
            raise ModelError(f"can't read {folder / name}: {error}; copy it again") from error
        if isinstance(found, dict):
            own = found.get("quantization")
            return {**fields, **(own if isinstance(own, dict) else found)}
    raise ModelError(
        f"the weights in {folder} are quantised, and config.json has no quantization_config that "
        "says how; copy or download the folder again"
    )


class FormatCodes(StoredCodes):
    """The layers of a checkpoint that are stored as codes."""

    def __init__(
        self,
        config: Mapping[str, Any],
        files: Mapping[str, Path],
        activation_bits: Literal[16, 8] = 16,
    ) -> None:
        """Find the layers.

        Args:
            config: The quantization_config.
            files: The file of each tensor.
            activation_bits: As in EngineConfig.

        Raises:
            ModelError: The configuration or a layer isn't read here.
        """
        self.activation_bits = activation_bits
        self._format = format_of(config)
        self.label = self._format.label
        if not files:
            raise ModelError(
                "quantised weights are read from files of safetensors only; convert the checkpoint"
            )
        is_stacked = isinstance(self._format, ExpertBlocks)
        self.stored = () if is_stacked else tuple(sorted(self._format.names))
        self._layers = _layers_of(files, self._format.markers)
        for owner, tensors in self._layers.items() if not is_stacked else ():
            unknown = tensors - self._format.names - self._format.ignored - {"bias"}
            if unknown:
                raise ModelError(
                    f"{owner}.{min(unknown)} is a tensor that {self.label} doesn't have, so its "
                    "layer would be read wrongly; give the unquantised checkpoint, with "
                    "engine.quantization int8 or int4"
                )
        if not self._layers:
            raise ModelError(
                f"quantization_config in config.json says {self.label}, and no tensor of the "
                "checkpoint is stored so; take the section out if its weights are plain"
            )
        self._names: dict[str, str] = {}
        self._unpacked: set[str] = set()
        self._model: Any = None
        self._notes = [*self._format.notes]
        self._experts: dict[str, dict[str, list[str]]] = {}
        self._sources: list[str] = []

    @property
    def notes(self) -> tuple[str, ...]:
        notes = [*self._notes]
        if self._unpacked:
            notes.append(
                f"{len(self._unpacked)} layers are unpacked to plain weights, such as "
                f"{min(self._unpacked)}"
            )
        return tuple(notes)

    def dtype(self, own: torch.dtype | None) -> torch.dtype:
        if own in (torch.float32, torch.bfloat16):
            return own
        if own is torch.float16:
            self._notes.append("activations are bfloat16, for kernels, in place of float16")
        return torch.bfloat16

    def conversions(self, own: list[Any], model: Any, collect: ConversionOps) -> list[Any]:
        self._model = model
        if isinstance(self._format, ExpertBlocks):
            parts = ("blocks", "scales")
            return own + [
                WeightConverter([f"{name}_{part}" for part in parts], name, [collect])
                for name in ("gate_up_proj", "down_proj")
            ]
        found = deepcopy(own)  # they count what they rename
        renamings = [each for each in found if isinstance(each, WeightRenaming)]
        converters = [each for each in found if isinstance(each, WeightConverter)]
        state, prefix = model.state_dict(), model.base_model_prefix
        self._sources = [source for each in converters for source in each.source_patterns]
        joined = set[str]()
        for owner in sorted(self._layers, key=dot_natural_key):
            key = f"{owner}.weight"
            name, source = rename_source_key(key, renamings, converters, prefix, state)
            if name not in state and key in state:
                name, source = key, None
            if source is not None:
                self._experts.setdefault(name, {}).setdefault(source, []).append(owner)
                joined.add(source)
            elif name in state:
                self._names[name.removesuffix(".weight")] = owner
        return [self._collecting(each, joined, collect) for each in own]

    def _collecting(self, own: Any, joined: AbstractSet[str], collect: ConversionOps) -> Any:
        """Return a conversion that collects stored tensors, if it joins quantised layers."""
        if not isinstance(own, WeightConverter) or joined.isdisjoint(own.source_patterns):
            return own
        kinds = [type(each) for each in own.operations]
        if kinds not in ([MergeModulelist], [MergeModulelist, Concatenate]):
            raise ModelError(
                f"{own.source_patterns[0]} is stored quantised, and Transformers joins or splits "
                "it; give the unquantised checkpoint, with engine.quantization int8 or int4"
            )
        sources = [each.removesuffix("weight") for each in own._original_source_patterns]
        named = [f"{each}{name}" for each in sources for name in sorted(self._format.names)]
        return own.copy(named, own._original_target_patterns, operations=[collect])

    def handles(self, name: str) -> bool:
        return name in self._names

    def read_experts(self, name: str, stored: Mapping[str, list[Tensor]]) -> CodedLayer | None:
        module = self._model.get_submodule(name.rpartition(".")[0])
        found = [each for each in expert_products(module) if name.endswith(f".{each.name}")]
        if not found:
            return None
        [product] = found
        if isinstance(self._format, ExpertBlocks):
            parts = (stored.get(f"{product.name}_{part}", []) for part in ("blocks", "scales"))
            form, experts = read_experts(name, *(part[0] if part else None for part in parts))
        else:
            form, experts = self._joined(name, stored, product)
        if (len(experts), form.outputs, form.inputs) != product[1:4]:
            raise ModelError(
                f"{name} has {len(experts)} experts of {form.outputs} outputs and {form.inputs} "
                f"inputs, and config.json makes it {', '.join(map(str, product[1:4]))}; the two "
                "are not of one model"
            )
        packed = (pack_plain(form, each) for each in experts)
        return CodedLayer(form, stack_codes(packed, len(experts)))

    def _joined(
        self, name: str, stored: Mapping[str, list[Tensor]], product: ExpertProduct
    ) -> tuple[Codes, list[PlainCodes]]:
        """Return the form of an expert and the codes of each, of layers stored one by one."""
        count, parts = product.experts, self._experts[name]
        sources = sorted(parts, key=self._sources.index)
        read: list[list[ReadLayer]] = [[] for _ in range(count)]
        for source in sources:
            prefix, owners = source.removesuffix("weight"), parts[source]
            for own in self._format.names:
                number = len(stored.get(f"{prefix}{own}", ()))
                if number not in (0, count) or len(owners) != count:
                    raise ModelError(
                        f"{name}: {number} of {count} experts have {prefix}{own} in the "
                        "checkpoint; copy or download it again"
                    )
            for expert, owner in enumerate(owners):
                tensors = {
                    own: stored[f"{prefix}{own}"][expert]
                    for own in self._format.names
                    if stored.get(f"{prefix}{own}")
                }
                shape = product.outputs // len(sources), product.inputs
                read[expert].append(self._format.read(StoredLayer(owner, tensors, *shape)))
        layers = [layer for expert in read for layer in expert]
        if len({each.form for each in layers}) > 1 or any(
            each.input_order is not None for each in layers
        ):
            raise unsupported(f"{name}: experts that differ in bits, groups or order of inputs")
        form = msgspec.structs.replace(layers[0].form, outputs=product.outputs)
        joined = [join_plain([each.plain for each in expert]) for expert in read]
        if any(each.offsets is not None for each in joined):
            joined = [with_offsets(each) for each in joined]
        return form, joined

    def read(
        self, name: str, stored: Mapping[str, Tensor], shape: tuple[int, int]
    ) -> LayerCodes | Tensor:
        layer = self._format.read(StoredLayer(self._names[name], stored, *shape))
        module = self._model.get_submodule(name)
        is_embedding = type(module) is nn.Embedding and layer.input_order is None
        if (is_embedding or method_of(module) is not None) and not KEPT.search(name):
            return LayerCodes(*layer)
        self._unpacked.add(name)
        return _unpacked(layer)


def _layers_of(names: Collection[str], markers: frozenset[str]) -> dict[str, set[str]]:
    """Return the tensors of each layer that has one of the markers."""
    layers: dict[str, set[str]] = {}
    for name in names:
        owner, _, own = name.rpartition(".")
        layers.setdefault(owner, set()).add(own)
    return {owner: own for owner, own in layers.items() if own & markers}


def _unpacked(layer: ReadLayer) -> Tensor:
    weight = unpack_plain(layer.form, layer.plain)
    return weight if layer.input_order is None else weight[:, layer.input_order.argsort()]
