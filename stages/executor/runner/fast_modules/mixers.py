"""Patterns of mixers with recurrent state, imported for models that have some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.cpu import Linear
from ..kernels.mixers import DeltaMixer, KernelOperators
from ..kernels.packed import Packed
from ..kv_cache import KVCache
from ..linear.choose import method_of
from ..loaded_model import LoadedModel
from ..mixers.find import Mixers
from .calls import Calls, pack

_DELTA_PARTS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_DELTA_MODULES = {*_DELTA_PARTS, "conv1d", "norm", "out_proj"}


class MixerPass:
    """A mixer's pass up to its last layer, on `[tokens, hidden]`.

    Attributes:
        packed: Its projections, computed side by side.
        kernel: Mixes their outputs.
    """

    def __init__(
        self,
        module: nn.Module,
        packed: list[Packed],
        kernel: DeltaMixer,
        mixers: Mixers,
        calls: Calls,
    ) -> None:
        self.packed, self.kernel = packed, kernel
        self._mixers, self._calls = mixers, calls
        self._layers = [getattr(module, name) for name in _DELTA_PARTS]
        self._projection = Linear(packed)

    def __call__(self, rows: Tensor, *_: Any, **__: Any) -> Tensor:
        if self._calls.together:
            projected = self._projection(rows)
        else:
            projected = torch.cat([layer(rows) for layer in self._layers], 1)
        return self.kernel(projected, step_segments(self._mixers))


def step_segments(mixers: Mixers) -> int:
    """Return the address of the current step's segments for the kernels."""
    operators = mixers.operators
    assert isinstance(operators, KernelOperators)
    return operators.segments_at(mixers.segments)


def mixer_pass(
    module: nn.Module, model: LoadedModel, cache: KVCache, calls: Calls
) -> MixerPass | None:
    """Return a pass for a Gated DeltaNet; None for other mixers, or without kernels."""
    mixers = model.mixers
    if mixers is None or not isinstance(mixers.operators, KernelOperators):
        return None
    parts: Mapping[str, Any] = dict(module.named_children())
    index, packed = mixers.index_of(module), pack(module, _DELTA_PARTS)
    if parts.keys() != _DELTA_MODULES or index is None or not packed:
        return None
    epsilon = getattr(parts["norm"], "variance_epsilon", None)
    if method_of(parts["out_proj"]) is None or not isinstance(epsilon, float):
        return None
    try:
        states = cache.recurrent[index]
        kernel = DeltaMixer(module, parts["conv1d"], parts["norm"], epsilon, states)
    except (KeyError, ValueError):
        return None
    cache.follow(kernel.find_states)
    return MixerPass(module, packed, kernel, mixers, calls)
