"""Loading of quantised checkpoints: which of their tensors are a layer's, and under which name.

Transformers renames tensors of many architectures, and stacks experts. Layers are found by the
tensors that the files have, and keep the checkpoint's names, which the patterns of its
quantization_config are about. So excluded and mixed layers need no further rule.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D

from ....config import ModelError
from .checkpoint import UNREADABLE
from .linear.codes import unpack_plain
from .linear.formats.choose import format_of
from .linear.formats.stored import ReadLayer, StoredLayer
from .quantized_loading import KEPT, LayerCodes, StoredCodes

_OLD_FILES: dict[str, dict[str, str]] = {
    "quantize_config.json": {"quant_method": "gptq"},
    "quant_config.json": {"quant_method": "awq"},
    "hf_quant_config.json": {"quant_method": "modelopt"},
}
"""Configurations of checkpoints whose config.json has none: of AutoGPTQ, AutoAWQ and ModelOpt."""


def find_config(folder: Path) -> Mapping[str, Any]:
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

    def __init__(self, config: Mapping[str, Any], files: Mapping[str, Path]) -> None:
        """Find the layers.

        Args:
            config: The quantization_config.
            files: The file of each tensor.

        Raises:
            ModelError: The configuration or a layer isn't read here.
        """
        self._format = format_of(config)
        self.label = self._format.label
        if not files:
            raise ModelError(
                "quantised weights are read from files of safetensors only; convert the checkpoint"
            )
        self.stored = tuple(sorted(self._format.names))
        self._layers = _layers_of(files, self._format.markers)
        for owner, tensors in self._layers.items():
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

    def rename(self, conversions: list[Any], model: Any) -> list[Any]:
        """Find the names of layers in the model, and return conversions of tensors.

        Args:
            conversions: Those of Transformers for the model.
            model: The model, on the meta device.
        """
        self._model = model
        own = deepcopy(conversions)  # they count what they rename
        renamings = [each for each in own if isinstance(each, WeightRenaming)]
        converters = [each for each in own if isinstance(each, WeightConverter)]
        state, prefix = model.state_dict(), model.base_model_prefix
        for owner in self._layers:
            key = f"{owner}.weight"
            name, source = rename_source_key(key, renamings, converters, prefix, state)
            if name not in state and key in state:
                name, source = key, None
            if source is not None:
                raise ModelError(
                    f"{owner} is stored quantised, and Transformers joins it with others or splits "
                    "it; give the unquantised checkpoint, with engine.quantization int8 or int4"
                )
            if name in state:
                self._names[name.removesuffix(".weight")] = owner
        return conversions

    def handles(self, name: str) -> bool:
        return name in self._names

    def read(
        self, name: str, stored: Mapping[str, Tensor], shape: tuple[int, int]
    ) -> LayerCodes | Tensor:
        layer = self._format.read(StoredLayer(self._names[name], stored, *shape))
        module = self._model.get_submodule(name)
        kinds = [nn.Linear, Conv1D, *([nn.Embedding] if layer.input_order is None else [])]
        if type(module) in kinds and not KEPT.search(name):
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
