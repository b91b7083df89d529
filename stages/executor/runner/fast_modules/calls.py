"""Options of a model's passes, and the weights that they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..device import trim
from ..fixed_tiles import FixedTiles
from ..kernels import cpu
from ..kernels.cpu import Linear, LinearKind
from ..kernels.packed import Packed
from ..linear.choose import method_of

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
GATED = ("gate_proj", "up_proj")
"""Names of linear layers over the same rows."""


@dataclass
class Calls:
    """Shared, mutable options of a model's passes.

    Attributes:
        tiles: Fixed shapes for torch's part, so that bits don't depend on the batch.
        kernels: The module with RMSNorm, rotate and gate for the device; products are ours too if
            it is `cpu`.
        together: Whether several linear layers may be computed in one product, without calling the
            modules; otherwise each is called by itself, with any wrappers.
    """

    tiles: FixedTiles
    kernels: ModuleType = cpu
    together: bool = True

    def linear(
        self, layers: Sequence[Packed], kind: LinearKind = LinearKind.PLAIN
    ) -> Callable[..., Tensor] | None:
        """Return our product of these layers; None if the modules compute theirs."""
        if self.kernels is cpu:
            return Linear(layers, kind)
        (first, *others), plain = layers, (LinearKind.PLAIN, LinearKind.WIDE)
        if others:
            from .joined import JoinedLinear, lie_together

            if not lie_together(layers):
                return None
            gate = None if kind in plain else partial(self.kernels.gate, kind=kind)
            return JoinedLinear(layers, gate)
        if first.codes is None or kind not in plain:
            return None
        from ..kernels.triton_quantized import Linear as TritonLinear

        return TritonLinear(first, wide=kind == LinearKind.WIDE)


def pack(module: nn.Module, names: Sequence[str]) -> list[Packed]:
    """Return the weights of a module's linear layers for the kernels; none if a layer is missing,
    the kernels don't have it, or only some have codes."""
    methods = [method_of(getattr(module, name, None)) for name in names]
    packed = [None if method is None else method.pack() for method in methods]
    found = [each for each in packed if each is not None]
    alike = len({each.codes is None for each in found}) == 1
    return found if alike and len(found) == len(names) else []


def join_weights(model: nn.Module) -> None:
    """Have layers over the same rows share a tensor, one module after the other, so that memory for
    one of them is enough."""
    from .joined import lay_together

    for module in model.modules():
        moved = [lay_together(pack(module, names)) for names in (PROJECTIONS, GATED)]
        if any(moved):
            trim(next(module.parameters()).device)


def kind_of(activation: object) -> LinearKind | None:
    """Return the kind of kernel that computes this activation of a gate."""
    if not callable(activation):
        return None
    x = torch.linspace(-8, 8, 257)
    known = {
        LinearKind.GATED_SILU: F.silu(x),
        LinearKind.GATED_TANH_GELU: F.gelu(x, approximate="tanh"),
    }
    output = activation(x)
    for kind, values in known.items():
        if torch.allclose(output, values, rtol=0, atol=1e-6):
            return kind
    return None
