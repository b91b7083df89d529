"""Linear layers over the same rows in one product of PyTorch's, whose weights lie side by side.

The modules' parameters are views of one tensor. So updates in place reach the product, and adapters
and modules that are called by themselves need nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..kernels.packed import Packed


def lie_together(layers: Sequence[Packed]) -> bool:
    """Return whether layers' weights, and biases if any, each lie side by side in one tensor."""
    both = [_parts(layers, name) for name in ("weight", "bias")]
    return _may_join(layers) and all(not parts or _whole(parts) is not None for parts in both)


@torch.no_grad()
def lay_together(layers: Sequence[Packed]) -> bool:
    """Have layers of plain weights lie so, and return whether any has moved. The parameters stay
    the same objects."""
    if not _may_join(layers) or lie_together(layers):
        return False
    for parts in (_parts(layers, name) for name in ("weight", "bias")):
        # Of released memory, one number remains.
        if not all(each.is_contiguous() for each in parts):
            return False
        if parts:
            whole = torch.cat([each.data for each in parts])
            for part, place in zip(parts, torch.split(whole, [*map(len, parts)]), strict=True):
                part.data = place
    return True


class JoinedLinear:
    """Linear layers that `lie_together`, with outputs side by side."""

    def __init__(
        self, layers: Sequence[Packed], gate: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> None:
        """Take the layers; with a gate, two, and the output is the gate's."""
        self._layers, self._gate = layers, gate

    def __call__(self, rows: Tensor) -> Tensor:
        """`[rows, inputs]` to `[rows, outputs]`."""
        weight, bias = (self._joined(name) for name in ("weight", "bias"))
        assert weight is not None
        output = F.linear(rows, weight, bias)
        return output if self._gate is None else self._gate(*output.chunk(2, 1))

    def _joined(self, name: str) -> Tensor | None:
        if not (parts := _parts(self._layers, name)):
            return None
        # Others may have replaced a parameter's tensor.
        return torch.cat([*parts]) if (whole := _whole(parts)) is None else whole


def _may_join(layers: Sequence[Packed]) -> bool:
    if len(layers) < 2 or any(each.codes is not None for each in layers):
        return False
    return len({(each.inputs, each.dtype, each.parameters["bias"] is None) for each in layers}) == 1


def _parts(layers: Sequence[Packed], name: str) -> list[nn.Parameter]:
    found = (each.parameters.get(name) for each in layers)
    return [each for each in found if each is not None]


def _whole(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the tensor of which these are the parts, in order; None if they lie elsewhere."""
    first, at = parts[0], parts[0].storage_offset()
    memory = first.untyped_storage().data_ptr()
    for part in parts:
        if part.untyped_storage().data_ptr() != memory or part.storage_offset() != at:
            return None
        at += part.numel()
    shape = sum(map(len, parts)), *first.shape[1:]
    return first.as_strided(shape, first.stride())
