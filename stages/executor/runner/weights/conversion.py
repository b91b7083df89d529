"""Conversion of checkpoint tensors to parameters, by Transformers' rules for loading."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .....config import WeightsError, shown
from ..progress import no_progress_bars
from ..shards import ShardedWeights
from .checks import number_of, remedy_for

_LAYER = re.compile(r"^.*?\.\d+(?=\.)")
"""The beginning of a tensor's name up to its layer's number."""


class PartsMissing(WeightsError):
    """Parts of a fused parameter are missing or don't fit."""


def as_parameters(
    module: nn.Module, tensors: Mapping[str, Tensor], *, checkpoint: bool = False
) -> Mapping[str, Tensor]:
    """Convert tensors to the module's parameters: renamed, fused, split and transposed.

    May run beside the module's forward pass: the module is only read.

    Args:
        module: A Transformers model.
        tensors: By the names of its parameters, or of a checkpoint for it.
        checkpoint: They come from a checkpoint, where a name of the model may have another layout.
            Otherwise the names decide.

    Returns:
        The parameters covered by the tensors; the same tensors if no conversion is needed.

    Raises:
        PartsMissing: Parts of a fused parameter are missing.
        WeightsError: Some tensors don't belong to this model.
    """
    known = module.state_dict()
    if not tensors or (not checkpoint and tensors.keys() <= known.keys()):
        return tensors
    if not hasattr(module, "config") or not all(isinstance(v, Tensor) for v in tensors.values()):
        return tensors  # not convertible; the later check refuses them
    # Separately, since loading silently casts between the kinds. Integers first: unknown ones would
    # go unnoticed among the others.
    floating = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    integers = {name: tensor for name, tensor in tensors.items() if name not in floating}
    parameters: dict[str, Tensor] = {}
    for kind in (integers, floating):
        if kind:
            parameters |= _load(_hull(module, kind), kind)
    return parameters


def split_converted(
    weights: ShardedWeights, names: Collection[str]
) -> tuple[list[str], dict[str, list[str]]]:
    """Return the names of a checkpoint's tensors that are the model's, and groups of the others.

    `as_parameters` can convert each group by itself, which is a layer's tensors.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    rules: list[Any] = get_model_conversion_mapping(weights.whole)

    def converts(name: str) -> bool:
        return any(rule.rename_source_key(name)[1] is not None for rule in rules)

    direct = [name for name in names if name in weights.shards and not converts(name)]
    groups: dict[str, list[str]] = {}
    for name in sorted({*names} - {*direct}):
        match = _LAYER.match(name)
        groups.setdefault(match[0] if match else name, []).append(name)
    return direct, groups


def _hull(module: nn.Module, tensors: Mapping[str, Tensor]) -> Any:
    """Return a copy of the module on the meta device, to load into."""
    # No casts in the threads that Transformers starts for them.
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    dtype = dtypes.pop() if len(dtypes) == 1 else None

    def empty(tensor: Tensor) -> Tensor:
        wanted = dtype if tensor.is_floating_point() else None
        return torch.empty_like(tensor, dtype=wanted, device="meta")

    hollow: dict[int, Any] = {
        id(parameter): nn.Parameter(empty(parameter), requires_grad=False)
        for parameter in module.parameters()
    }
    hollow |= {id(buffer): empty(buffer) for buffer in module.buffers()}
    return copy.deepcopy(module, hollow)


def _load(hull: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors`: of one kind, floating or not."""
    # Imported only here, since it is not public: parameters under their own names don't need it.
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    mapping: Any = get_model_conversion_mapping(hull)
    rules = LoadStateDictConfig(weight_mapping=mapping)
    own = hull.state_dict()
    with no_progress_bars():
        info, _ = convert_and_load_state_dict_in_model(hull, dict(tensors), rules)
    state = hull.state_dict()
    loaded = {name: tensor.detach() for name, tensor in state.items() if not tensor.is_meta}
    wrong_shapes = sorted((name, tuple(shape)) for name, shape, _ in info.mismatched_keys)
    floating = next(iter(tensors.values())).is_floating_point()
    for name in sorted({*loaded, *info.conversion_errors, *(name for name, _ in wrong_shapes)}):
        if name in own and own[name].is_floating_point() != floating:
            kind = "floating-point numbers" if floating else "integers"
            raise WeightsError(
                f"the new weights don't fit: {shown(name)} comes as {kind}, and the model's is "
                f"{own[name].dtype}; send a dtype of the same kind"
            )
    hull._adjust_missing_and_unexpected_keys(info)
    if unknown := sorted(info.unexpected_keys):
        raise WeightsError(
            f"the new weights don't fit: {number_of(len(unknown))} that the model does not have, "
            f"such as {shown(unknown[0])}",
            remedy=remedy_for(unknown, own),
        )
    parts = "all parts of a parameter that the model has fused must come in one update"
    for name in sorted(info.conversion_errors):
        raise PartsMissing(f"the new weights don't fit: {name!r} can't be composed; {parts}")
    for name, shape in wrong_shapes:
        raise PartsMissing(
            f"the new weights don't fit: {name!r} is made {shape}, and the model's is "
            f"{tuple(own[name].shape)}; {parts}"
        )
    return loaded
