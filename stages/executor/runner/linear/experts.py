"""Routed experts whose weights are codes.

Transformers stacks the experts of a layer in one tensor for each product and describes their
arithmetic by attributes of the module (`use_experts_implementation`): so one class holds for all
architectures that do so, and others are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .codes import Codes, PlainCodes, pack_plain, unpack

_DOWN = "down_proj"
_FIRST = ("gate_up_proj", "up_proj")


class ExpertProduct(NamedTuple):
    """One product of a layer's experts.

    Attributes:
        name: Name of the module's parameter, `[experts, outputs, inputs]`.
        experts: Their number.
        outputs: Output features.
        inputs: Input features.
        transposed: Whether the parameter is `[experts, inputs, outputs]` instead.
    """

    name: str
    experts: int
    outputs: int
    inputs: int
    transposed: bool


def expert_products(module: nn.Module) -> tuple[ExpertProduct, ...]:
    """Return the products of routed experts that can be quantised; () for any other module.

    Args:
        module: A module of the whole model, possibly on the meta device.
    """
    described = hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")
    first = next((name for name in _FIRST if name in module._parameters), None)
    if not described or first is None or _DOWN not in module._parameters:
        return ()
    transposed = bool(module.is_transposed)
    found = []
    for name in (first, _DOWN):
        experts, *sizes = module.get_parameter(name).shape
        inputs, outputs = sizes if transposed else sizes[::-1]
        found.append(ExpertProduct(name, experts, outputs, inputs, transposed))
    return tuple(found)


def is_other_mixture(module: nn.Module) -> bool:
    """Return whether a module has stacked experts of a kind that isn't known here."""
    stacked = any(
        each is not None and each.dim() == 3 and name.split("_")[0] in ("gate", "up", "down", "w1")
        for name, each in module._parameters.items()
    )
    return stacked and not expert_products(module)


def stack_codes(form: Codes, experts: Iterable[PlainCodes]) -> dict[str, Tensor]:
    """Return the tensors of `pack_plain`, each with the experts as its first dimension.

    Args:
        form: The form of one expert's codes.
        experts: The weights of each expert; they may be made one at a time.
    """
    packed = [pack_plain(form, plain) for plain in experts]
    return {name: torch.stack([each[name] for each in packed]) for name in packed[0]}


class ExpertCodes(nn.Module):
    """The codes of one product of all experts, as parameters with the names of `pack_plain`.

    Attributes:
        form: The form of one expert's codes.
    """

    def __init__(self, form: Codes, tensors: Mapping[str, Tensor]) -> None:
        """Take the weights: `tensors` are those of `stack_codes`, possibly on the meta device."""
        super().__init__()
        self.form = form
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def of(self, expert: int) -> dict[str, Tensor]:
        """Return one expert's tensors, views of the parameters."""
        return {
            name: each.data[expert] for name, each in self._parameters.items() if each is not None
        }

    def unpacked(self, expert: int) -> Tensor:
        """Return one expert's weight, `[outputs, inputs]` float32."""
        return unpack(self.form, self.of(expert))

    def write(self, expert: int, plain: PlainCodes) -> None:
        """Replace one expert's weight, in place."""
        for name, new in pack_plain(self.form, plain).items():
            self.get_parameter(name).data[expert].copy_(new)


class QuantizedExperts(nn.Module):
    """The routed experts of a layer, whose weights are codes.

    Its own pass unpacks one expert at a time: it is the reference for kernels, and what runs
    without them. Activation, biases and further norms are the replaced module's. The outputs of a
    token's experts are weighted in the dtype that Transformers weighs them in, and added in
    float32 in the order of the router's choice, so a token's sum depends on no other token.

    "gate_up_proj" (of experts without a gate "up_proj") and "down_proj" are `ExpertCodes`, or
    stacked weights as they were.

    Attributes:
        products: The products, in their order.
        num_experts: Experts of the layer.
    """

    def __init__(self, whole: nn.Module) -> None:
        """Take the place of Transformers' module, still without codes.

        Args:
            whole: The module, with weights or on the meta device. Its tensors are registered here,
                and it must not be used further.
        """
        super().__init__()
        self.products = expert_products(whole)
        self.num_experts = self.products[0].experts
        for name, parameter in whole._parameters.items():
            self.register_parameter(name, parameter)
        for name, child in whole._modules.items():
            self.add_module(name, child)
        # In a tuple, so that it is no module of the model.
        self._whole: tuple[Any] = (whole,)

    def put(self, name: str, form: Codes, tensors: Mapping[str, Tensor]) -> None:
        """Replace a product's stacked weights by codes.

        Args:
            name: Of `products`.
            form: The form of one expert's codes.
            tensors: Those of `stack_codes`.
        """
        for owner in (self, *self._whole):
            del owner._parameters[name]
        self.add_module(name, ExpertCodes(form, tensors))

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts.

        Args:
            hidden: `[tokens, hidden]`.
            top_k_index: `[tokens, top_k]`, each token's experts; `num_experts` stands for none.
            top_k_weights: `[tokens, top_k]`.

        Returns:
            `[tokens, hidden]`.
        """
        return self._sum(hidden, top_k_index, top_k_weights, self._expert)

    def weight(self, name: str, number: int) -> Tensor:
        """Return the weight of one expert in a product, `[outputs, inputs]`, unpacked."""
        codes = self._modules.get(name)
        if isinstance(codes, ExpertCodes):
            return codes.unpacked(number)
        weight = self.get_parameter(name)[number]
        return weight.t() if self.products[0].transposed else weight

    # --- inside -------------------------------------------------------------------------------

    def _sum(
        self,
        hidden: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        expert: Callable[[int, Tensor], Tensor],
    ) -> Tensor:
        tokens, top_k = top_k_index.shape
        chosen = top_k_index.flatten()
        slots = hidden.new_zeros(tokens * top_k, self.products[1].outputs)
        for number, places in self._runs(chosen):
            slots[places] = expert(number, hidden[places // top_k])
        if "post_expert_norm" in self._modules:
            slots = self.post_expert_norm(slots)  # type: ignore[operator]
        weighted = (slots * top_k_weights.reshape(-1, 1)).view(tokens, top_k, -1)
        total = weighted[:, 0].float()
        for place in range(1, top_k):
            total = total + weighted[:, place]
        return total.to(hidden.dtype)

    def _runs(self, chosen: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Iterate over the chosen experts, with the places in `chosen` of each."""
        counts = torch.bincount(chosen, minlength=self.num_experts).tolist()
        runs = torch.split(torch.argsort(chosen, stable=True), counts)
        for number, places in enumerate(runs[: self.num_experts]):
            if len(places):
                yield number, places

    def _expert(self, number: int, rows: Tensor) -> Tensor:
        """`[rows, hidden]` of one expert, by unpacked weights."""
        first, down = (each.name for each in self.products)
        return self._linear(down, number, self._activate(self._linear(first, number, rows)))

    def _linear(self, name: str, number: int, rows: Tensor) -> Tensor:
        return F.linear(rows, self.weight(name, number).to(rows.dtype), self._bias(name, number))

    def _bias(self, name: str, number: int) -> Tensor | None:
        bias = self._parameters.get(f"{name}_bias")
        return None if bias is None else bias.data[number]

    def _activate(self, rows: Tensor) -> Tensor:
        [whole] = self._whole
        activated: Tensor = whole._apply_gate(rows) if whole.has_gate else whole.act_fn(rows)
        return activated
