"""Routed experts whose weights are codes.

Transformers stacks the experts of a layer in one tensor for each product and describes their
arithmetic by attributes of the module (`use_experts_implementation`): so one class holds for all
architectures that do so, and others are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.moe import _default_apply_gate

from ..kernels.codes import Codes, unpack
from ..shards import Box, whole_box
from .requantizing import CodesBox
from .rounding import Rounding, round_weight

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


def put_codes(
    model: nn.Module,
    name: str,
    form: Codes,
    tensors: Mapping[str, Tensor],
    rounding: Rounding | None = None,
) -> ExpertCodes:
    """Put codes in the place of the stacked weights of a model's parameter.

    Args:
        model: The model.
        name: Name of the parameter, such as "model.layers.0.mlp.experts.down_proj".
        form: The form of one expert's codes.
        tensors: Those of `stack_codes`.
        rounding: Makes codes of new weights; None if a format stores the codes.
    """
    path, _, own = name.rpartition(".")
    experts = model.get_submodule(path)
    if not isinstance(experts, QuantizedExperts):
        experts = QuantizedExperts(experts)
        model.set_submodule(path, experts, strict=True)
    return experts.put(own, form, tensors, rounding)


def is_other_mixture(module: nn.Module) -> bool:
    """Return whether a module has the weights of experts in a form that isn't known here."""
    own = (each for each in module._parameters.values() if each is not None)
    named = "Expert" in type(module).__name__ and any(each.dim() > 1 for each in own)
    return named and not expert_products(module)


def round_experts(
    weights: Tensor, rounding: Rounding, *, transposed: bool
) -> tuple[Codes, dict[str, Tensor]]:
    """Return codes of the weights of a product's experts: one expert's form, and `stack_codes`.

    Args:
        weights: As Transformers stacks them.
        rounding: As of `round_weight`.
        transposed: As of `ExpertProduct`.

    Raises:
        ValueError: As `round_weight`.
    """
    rows = weights.mT if transposed else weights
    form = rounding.form(*rows.shape[1:])
    return form, stack_codes((round_weight(each, rounding)[1] for each in rows), len(rows))


def stack_codes(experts: Iterable[Mapping[str, Tensor]], count: int) -> dict[str, Tensor]:
    """Return tensors with the experts as their first dimension.

    Args:
        experts: The tensors of `pack_plain` of each expert; they may be made one at a time.
        count: The number of experts.
    """
    stacked: dict[str, Tensor] = {}
    for number, packed in enumerate(experts):
        for name, tensor in packed.items():
            if name not in stacked:
                stacked[name] = tensor.new_empty(count, *tensor.shape)
            stacked[name][number] = tensor
    return stacked


class ExpertCodes(nn.Module):
    """The codes of one product of all experts, as parameters with the names of `pack_plain`.

    Attributes:
        holds_codes: Marks modules whose tensors are not those of the whole model.
        form: The form of one expert's codes.
        rounding: Makes codes of new weights; None if the codes were read from a checkpoint.
        activation_bits: As of `Packed`.
    """

    holds_codes: ClassVar[bool] = True
    activation_bits: Literal[16, 8] = 16

    def __init__(
        self, form: Codes, tensors: Mapping[str, Tensor], rounding: Rounding | None = None
    ) -> None:
        """Take the weights: `tensors` are those of `stack_codes`, possibly on the meta device."""
        super().__init__()
        self.form, self.rounding = form, rounding
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


class QuantizedExperts(nn.Module):
    """The routed experts of a layer, whose weights are codes.

    Its own pass unpacks one expert at a time: it is the reference for kernels, and what runs
    without them. Activation, biases and further norms are the replaced module's. The outputs of a
    token's experts are weighted in the dtype that Transformers weighs them in, and added in
    float32 in the order of the router's choice, so a token's sum depends on no other token.

    "gate_up_proj" (of experts without a gate "up_proj") and "down_proj" are `ExpertCodes`, or
    stacked weights as they were.

    Attributes:
        holds_experts: Marks the class for `fast_modules.patterns`.
        products: The products, in their order.
        num_experts: Experts of the layer.
    """

    holds_experts: ClassVar[bool] = True

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

    def put(
        self,
        name: str,
        form: Codes,
        tensors: Mapping[str, Tensor],
        rounding: Rounding | None = None,
    ) -> ExpertCodes:
        """Replace a product's stacked weights by codes.

        Args:
            name: Of `products`.
            form, tensors, rounding: As of `put_codes`.
        """
        self._dtype = self.get_parameter(name).dtype
        for owner in (self, *self._whole):
            del owner._parameters[name]
        codes = ExpertCodes(form, tensors, rounding)
        self.add_module(name, codes)
        return codes

    def boxes(self, name: str) -> list[Box]:
        """Return the parts of a tensor of the whole model's module, for `shards.boxes_in`."""
        codes = self._modules.get(name)
        if not isinstance(codes, ExpertCodes):
            return [whole_box(self, name)]
        form, transposed = codes.form, self.products[0].transposed
        place = (slice(0, form.outputs), slice(0, form.inputs))
        found: list[Box] = []
        for number in range(self.num_experts):
            own = (slice(number, number + 1), *(place[::-1] if transposed else place))
            tensors = codes.of(number)
            found.append(
                CodesBox(
                    tensors["codes"],
                    own,
                    form,
                    tensors,
                    self._dtype,
                    codes.rounding,
                    transposed=transposed,
                )
            )
        return found

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts.

        Args:
            hidden: `[tokens, hidden]`.
            top_k_index: `[tokens, top_k]`, each token's experts; `num_experts` stands for none.
            top_k_weights: `[tokens, top_k]`.

        Returns:
            `[tokens, hidden]`.
        """
        return self.sum(hidden, top_k_index, top_k_weights, self._expert)

    def weight(self, name: str, number: int) -> Tensor:
        """Return the weight of one expert in a product, `[outputs, inputs]`, unpacked."""
        codes = self._modules.get(name)
        if isinstance(codes, ExpertCodes):
            return codes.unpacked(number)
        weight = self.get_parameter(name)[number]
        return weight.t() if self.products[0].transposed else weight

    def sum(
        self,
        hidden: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        expert: Callable[[int, Tensor], Tensor],
    ) -> Tensor:
        """Return the weighted sum likewise.

        Args:
            hidden, top_k_index, top_k_weights: As of `forward`.
            expert: From an expert's number and its rows, `[rows, hidden]`, to its outputs.
        """
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

    def activate(self, rows: Tensor) -> Tensor:
        """Return what is between the two products, `[..., outputs]` to `[..., inputs]`."""
        [whole] = self._whole
        activated: Tensor = whole._apply_gate(rows) if whole.has_gate else whole.act_fn(rows)
        return activated

    @property
    def plain_activation(self) -> object:
        """The function of the gates if the first half of the outputs are gates, and nothing else is
        done to them; else None."""
        [whole] = self._whole
        plain = whole.has_gate and type(whole)._apply_gate is _default_apply_gate
        return getattr(whole, "act_fn", None) if plain else None

    # --- inside -------------------------------------------------------------------------------

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
        return self._linear(down, number, self.activate(self._linear(first, number, rows)))

    def _linear(self, name: str, number: int, rows: Tensor) -> Tensor:
        return F.linear(rows, self.weight(name, number).to(rows.dtype), self._bias(name, number))

    def _bias(self, name: str, number: int) -> Tensor | None:
        bias = self._parameters.get(f"{name}_bias")
        return None if bias is None else bias.data[number]
