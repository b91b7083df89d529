"""The pass of routed experts with codes, imported for models that have some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from ..kernels import cpu
from ..kernels.codes import PANEL
from ..kernels.compile import KernelsUnavailable
from ..kernels.cpu import Linear, LinearKind
from ..kernels.packed import Packed
from ..linear.experts import ExpertCodes, QuantizedExperts
from .calls import Calls, kind_of


class _Product:
    """A product of one expert's rows with its codes.

    The kernel's tensors are views of the experts' parameters, found anew in each call, since these
    may be replaced or released.
    """

    def __init__(self, experts: QuantizedExperts, name: str, kind: LinearKind, dtype: Any) -> None:
        """Raises KernelsUnavailable: the kernels don't have these codes."""
        codes: Any = experts.get_submodule(name)
        count = 1 if kind is LinearKind.PLAIN else 2
        form = replace(codes.form, outputs=codes.form.outputs // count)
        self._codes, self._experts, self._name = codes, experts, f"{name}_bias"
        self._parts: list[dict[str, Any]] = [{"bias": None} for _ in range(count)]
        sizes = (form.inputs, form.outputs, form, dtype, codes.activation_bits)
        self._linear = Linear([Packed(each, *sizes) for each in self._parts], kind)

    def __call__(self, number: int, rows: Tensor) -> Tensor:
        for name, tensor in self._codes.of(number).items():
            for own, part in zip(self._parts, tensor.chunk(len(self._parts)), strict=True):
                own[name] = part
        if (bias := self._experts._parameters.get(self._name)) is not None:
            self._parts[0]["bias"] = bias.data[number]
        return self._linear(rows)


def expert_pass(
    experts: QuantizedExperts, dtype: torch.dtype, calls: Calls
) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """Return a pass of a layer's experts; None without kernels for it.

    Args:
        experts: The experts.
        dtype: Dtype of activations.
        calls: The options of the passes.
    """
    first, last = (each.name for each in experts.products)
    quantized = all(isinstance(experts._modules.get(each), ExpertCodes) for each in (first, last))
    if calls.kernels is not cpu or not quantized:
        return None
    kind = _gate_of(experts)
    try:
        into, out = (
            _Product(experts, first, kind, dtype),
            _Product(experts, last, LinearKind.PLAIN, dtype),
        )
    except KernelsUnavailable:
        return None

    def expert(number: int, rows: Tensor) -> Tensor:
        inner = into(number, rows)
        if kind is LinearKind.PLAIN:
            inner = experts.activate(inner).contiguous()
        return out(number, inner)

    def forward(hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return experts.sum(hidden, top_k_index, top_k_weights, expert)

    return forward


def _gate_of(experts: QuantizedExperts) -> LinearKind:
    """Return the kind of kernel with the experts' gate; PLAIN if the module computes it."""
    product, kind = experts.products[0], kind_of(experts.plain_activation)
    # Gates and ups are whole panels, beside each other.
    if (
        kind is None
        or product.outputs % (2 * PANEL)
        or f"{product.name}_bias" in experts._parameters
    ):
        return LinearKind.PLAIN
    return kind
