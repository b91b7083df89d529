"""The tensors of a GGUF file by the model's names, each read when Transformers' loader takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .....text.gguf_header import GgufHeader, GgufTensor
from ..kernels.codes import PANEL, unpack_plain
from ..linear.choose import method_of
from ..linear.dense import DenseLinear
from ..linear.formats.gguf import KINDS

_FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}

SLAB = 1 << 22
"""Weights that are converted at a time, so that temporary tensors are small."""

Convert = Callable[[Mapping[str, Tensor]], Tensor]
"""Makes a tensor of the model from the file's float32 tensors, by their names there."""


class Target(NamedTuple):
    """A tensor of the model.

    Attributes:
        sources: Names of the file's tensors that it is made of.
        convert: Makes it of their values; None if it is the only source itself.
        rows: The source's row of each row, `[rows]` int64, where only rows are in another order.
        inputs: The input of each of the source's columns, `[columns]` int64, likewise.
        is_whole: Whether it is the only source, up to such orders: blocks can be kept.
    """

    sources: list[str]
    convert: Convert | None = None
    rows: Tensor | None = None
    inputs: Tensor | None = None
    is_whole: bool = False


class GgufFile:
    """The weights of a GGUF file."""

    def __init__(self, path: Path, header: GgufHeader) -> None:
        self.path, self.header = path, header

    def raw(self, tensor: GgufTensor) -> Tensor:
        """Return a tensor's bytes, `[rows, bytes]` uint8, mapped from the file.

        Changes stay in memory. The file is mapped as long as the tensor exists.
        """
        rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
        shape = (rows, tensor.num_bytes // rows)
        return torch.from_numpy(np.memmap(self.path, np.uint8, "c", tensor.start, shape))

    def values(self, tensor: GgufTensor) -> Tensor:
        """Return a tensor's numbers: floats as they are in the file, others in float32."""
        rows = self.raw(tensor)
        if (dtype := _FLOATS.get(tensor.kind)) is not None:
            # Alignment of the file's data is up to its writer.
            aligned = rows if rows.data_ptr() % dtype.itemsize == 0 else rows.clone()
            return aligned.view(dtype).view(tensor.shape)
        return _unpacked(tensor.kind, rows, tensor.shape[-1]).view(tensor.shape)


class LazyTensor:
    """A tensor of the model that is read when it is indexed, as Transformers' loader does."""

    def __init__(self, file: GgufFile, target: Target, dtype: torch.dtype) -> None:
        self._file, self._target, self._dtype = file, target, dtype

    def get_dtype(self) -> str:
        """Return its type in the terms of safetensors, as the loader expects."""
        return "F32"

    def __getitem__(self, _: object) -> Tensor:
        tensors = self._file.header.tensors
        found = {name: self._file.values(tensors[name]) for name in self._target.sources}
        if self._target.convert is None:
            (values,) = found.values()
        else:
            values = self._target.convert({name: each.float() for name, each in found.items()})
        return values.to(self._dtype)


class LazyBlocks:
    """Blocks of a quantised tensor, mapped when they are indexed."""

    def __init__(self, file: GgufFile, tensor: GgufTensor) -> None:
        self._file, self._tensor = file, tensor

    def get_dtype(self) -> str:
        return "U8"

    def __getitem__(self, _: object) -> Tensor:
        return self._file.raw(self._tensor)


def slab_of(columns: int) -> int:
    """Return the rows that are converted at a time: whole panels."""
    return max(SLAB // columns // PANEL, 1) * PANEL


def _unpacked(kind: str, rows: Tensor, columns: int) -> Tensor:
    """Return `[rows, columns]` float32."""
    import gguf

    values = torch.empty(len(rows), columns)
    count = slab_of(columns)
    for start in range(0, len(rows), count):
        part = rows[start : start + count]
        if (known := KINDS.get(kind)) is not None:
            own = unpack_plain(known.form(len(part), columns), known.plain(part))
        else:
            number = gguf.GGMLQuantizationType[kind]
            own = torch.from_numpy(gguf.quants.dequantize(part.numpy(), number))
        values[start : start + count] = own
    return values


def targets_of(header: GgufHeader, whole: Any) -> dict[str, Target]:
    """Return the model's tensors that a file has, by their names in the model.

    Names, and how values were changed when the file was written, are Transformers': it has them in
    two forms, the newer one for some architectures.

    Args:
        header: The file's header.
        whole: The model, on the meta device.
    """
    from transformers.integrations.gguf import is_gguf_arch_supported

    if is_gguf_arch_supported(header.architecture):
        return _mapped_targets(header, whole)
    return _processed_targets(header, whole)


def _processed_targets(header: GgufHeader, whole: Any) -> dict[str, Target]:
    from transformers import modeling_gguf_pytorch_utils

    theirs: Any = modeling_gguf_pytorch_utils
    kind = theirs.TENSOR_PROCESSORS.get(header.architecture, theirs.TensorProcessor)
    processor = kind(config=whole.config.to_dict())
    names: dict[str, str] = theirs.get_gguf_hf_weights_map(whole, processor)
    # Experts are without the end ".weight" in the model.
    stacks = hasattr(processor, "GGUF_MOE_WEIGHTS_PATTERN")
    found: dict[str, list[str]] = {}
    for name in header.tensors:
        target = names.get(name) or (names.get(name.removesuffix(".weight")) if stacks else None)
        if target is not None:
            found.setdefault(target, []).append(name)

    def convert(values: Mapping[str, Tensor]) -> Tensor:
        parsed: dict[str, dict[str, Tensor]] = {"tensors": {}}
        for name, each in values.items():
            result = processor.process(
                weights=each.numpy(), name=name, tensor_key_mapping=names, parsed_parameters=parsed
            )
            if result.name is not None:
                return torch.from_numpy(np.ascontiguousarray(result.weights))
        (tensor,) = parsed["tensors"].values()
        return tensor

    return {target: _target(header, sources, convert) for target, sources in found.items()}


def _mapped_targets(header: GgufHeader, whole: Any) -> dict[str, Target]:
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    from transformers.integrations.gguf import get_gguf_conversion_mapping

    mapping = get_gguf_conversion_mapping(header.architecture, whole.config)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    state, prefix = whole.state_dict(), whole.base_model_prefix
    sources: dict[str, dict[str, str]] = {}
    ways: dict[str, Any] = {}
    for name in header.tensors:
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target in state:
            sources.setdefault(target, {})[name] = pattern or name
            ways[target] = by_pattern.get(pattern)

    def target_of(target: str) -> Target:
        converter, patterns = ways[target], sources[target]
        if converter is None:
            return Target([*patterns], is_whole=True)

        def convert(values: Mapping[str, Tensor]) -> Tensor:
            tensors: Any = {patterns[name]: [each] for name, each in values.items()}
            for operation in deepcopy(converter.operations):
                tensors = operation.convert(
                    tensors,
                    source_patterns=converter.source_patterns,
                    target_patterns=converter.target_patterns,
                    full_layer_name=target,
                    config=whole.config,
                )
            (tensor,) = tensors.values()
            result: Tensor = tensor[0] if isinstance(tensor, list) else tensor
            return result

        inputs = [getattr(each, "input_permutation", None) for each in converter.operations]
        order = next((each for each in inputs if each is not None), None)
        if order is not None and len(inputs) == 1:
            return Target([*patterns], convert, inputs=_unless_sorted(order), is_whole=True)
        return _target(header, [*patterns], convert)

    return {target: target_of(target) for target in ways}


def _target(header: GgufHeader, sources: Sequence[str], convert: Convert) -> Target:
    """Return the target of a conversion, after finding out whether it reorders rows alone."""
    target = Target([*sources], convert)
    shape = header.tensors[sources[0]].shape
    if len(sources) > 1 or len(shape) != 2:
        return target
    # A column of row numbers: reordered as the weights are, or changed in another way.
    probe = torch.arange(shape[0], dtype=torch.float64)[:, None]
    try:
        found = convert({sources[0]: probe.clone()})
    except (ValueError, RuntimeError, IndexError):
        return target  # of whole rows only, which change more than their order
    if found.shape != probe.shape or not torch.equal(found.sort(0).values, probe):
        return target
    return target._replace(rows=_unless_sorted(found[:, 0].long()), is_whole=True)


def _unless_sorted(order: Tensor) -> Tensor | None:
    return None if torch.equal(order, torch.arange(len(order))) else order


def has_blocks(target: Target, header: GgufHeader, module: nn.Module | None) -> bool:
    """Return whether a weight stays in its blocks: those of a linear layer or an embedding.

    Args:
        target: The weight.
        header: The file's header.
        module: The module that has it.
    """
    method = method_of(module)
    linear = isinstance(method, DenseLinear) and not method.transposed
    kept = linear or isinstance(module, nn.Embedding)
    return kept and target.is_whole and header.tensors[target.sources[0]].kind in KINDS
