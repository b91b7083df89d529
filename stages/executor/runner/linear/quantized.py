"""Linear layers and embeddings whose weights are codes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar, Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from ..device import trim
from ..kernels.codes import PANEL, Codes, unpack, unpack_rows
from ..kernels.packed import Packed
from ..shards import Box, whole_box
from .method import LinearMethod
from .requantizing import CodesBox
from .rounding import Rounding

_UNPACKED = 1 << 20
"""Numbers that are unpacked at a time, 4 MiB in float32: larger pieces stay with malloc."""

_LARGE = 1 << 24
"""Weights of a layer that takes far longer to unpack than `trim`."""


class _Coded(nn.Module):
    """A module with a weight of codes.

    Attributes:
        holds_codes: Marks modules whose tensors are not those of the whole model.
        form: The form of the codes.
        dtype: Dtype of activations.
        rounding: Makes codes of new weights; None if the codes were read from a checkpoint.
        transposed: Whether the whole model's weight is `[inputs, outputs]`.
    """

    holds_codes: ClassVar[bool] = True
    rounding: Rounding | None = None
    transposed = False

    def __init__(self, form: Codes, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.form, self.dtype = form, dtype
        for name, tensor in tensors.items():
            if not isinstance(tensor, nn.Parameter):
                tensor = nn.Parameter(tensor, requires_grad=False)
            self.register_parameter(name, tensor)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The packed weight, by the names of `pack_plain`."""
        own = self._parameters.items()
        return {name: each.data for name, each in own if name != "bias" and each is not None}

    @property
    def weight(self) -> Tensor:
        """The unpacked weight, for code that reads a layer's weight; computed by each access."""
        return self.unpacked()

    @property
    def placeholder(self) -> Tensor:
        """A tensor of the weight's shape, dtype and device, without its numbers."""
        one = self._parameters["codes"].new_empty(1, dtype=self.dtype)  # type: ignore[union-attr]
        return one.expand(self.form.outputs, self.form.inputs)

    def unpacked(self) -> Tensor:
        """Return the weight, `[outputs, inputs]`, in the activations' dtype."""
        return torch.cat(list(self.parts()))

    def parts(self) -> Iterator[Tensor]:
        """Iterate over the unpacked weight, some outputs at a time."""
        tensors, count = self.tensors, max(_UNPACKED // self.form.inputs // PANEL, 1) * PANEL
        for start in range(0, self.form.outputs, count):
            stop = min(start + count, self.form.outputs)
            yield unpack(self.form, tensors, start, stop).to(self.dtype)
        if self.form.outputs * self.form.inputs >= _LARGE:
            # Freed pieces stay with malloc, between small objects: 10 % of a model of 7 billion
            # weights after one pass.
            trim(torch.device("cpu"))

    def boxes(self, name: str) -> list[Box]:
        """Return the parts of the layer's "weight" or "bias", for `shards.boxes_in`."""
        if name != "weight":
            return [whole_box(self, name)]
        place = (slice(0, self.form.outputs), slice(0, self.form.inputs))
        return [
            CodesBox(
                self.tensors["codes"],
                place[::-1] if self.transposed else place,
                self.form,
                self.tensors,
                self.dtype,
                self.rounding,
                transposed=self.transposed,
            )
        ]


@contextmanager
def without_products() -> Iterator[None]:
    """Have quantised layers return zeros, for passes whose shapes alone matter.

    Unpacking a model of 7 billion weights takes most of a minute.
    """
    QuantizedLinear.multiplies = False
    try:
        yield
    finally:
        QuantizedLinear.multiplies = True


class QuantizedLinear(_Coded, LinearMethod):
    """A linear layer whose weight is codes, `scale * (value - zero) - offset`; its own method.

    Its own pass unpacks the weight to the activations' dtype: it is the reference for kernels, and
    what runs without them.

    Attributes:
        bias: `[outputs]`, or None.
        activation_bits: As in EngineConfig; for kernels alone.
        multiplies: Whether a pass multiplies; see `without_products`.
    """

    bias: nn.Parameter | None
    multiplies: ClassVar[bool] = True
    activation_bits: Literal[16, 8] = 16

    def __init__(
        self,
        form: Codes,
        tensors: Mapping[str, Tensor],
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Take the weights.

        Args:
            form: The form of the codes.
            tensors: As `pack_plain` returns them. They become parameters of these names;
                parameters are shared, such as those of tied layers.
            bias: `[outputs]`, or None.
            dtype: Dtype of activations.
        """
        super().__init__(form, tensors, dtype)
        self.in_features, self.out_features = form.inputs, form.outputs
        self.inputs, self.outputs = form.inputs, form.outputs
        own = None if bias is None else nn.Parameter(bias.to(dtype), requires_grad=False)
        self.register_parameter("bias", own)

    @property
    def layer(self) -> nn.Module:
        return self

    def forward(self, x: Tensor) -> Tensor:
        """`[..., inputs]` to `[..., outputs]`."""
        if not self.multiplies:
            return x.new_zeros(*x.shape[:-1], self.outputs)
        products, start = [], 0
        for part in self.parts():
            stop = start + len(part)
            bias = None if self.bias is None else self.bias[start:stop]
            products.append(F.linear(x, part, bias))
            start = stop
        return products[0] if len(products) == 1 else torch.cat(products, -1)

    def pack(self) -> Packed | None:
        if self.form.numbers != "integer":
            return None
        own = self._parameters
        return Packed(own, self.inputs, self.outputs, self.form, self.dtype, self.activation_bits)


class ReorderedLinear(nn.Module, LinearMethod):
    """A quantised layer whose groups are of inputs in another order, such as GPTQ's act-order.

    It is computed alone: layers over the same rows may have different orders.

    Attributes:
        inner: The layer for inputs in the order of its groups.
        order: The whole layer's input of each input of `inner`, `[inputs]` int64.
    """

    def __init__(self, inner: QuantizedLinear, order: Tensor) -> None:
        super().__init__()
        self.inner = inner
        self.order: Tensor
        self.register_buffer("order", order, persistent=False)
        self.in_features, self.out_features = inner.inputs, inner.outputs
        self.inputs, self.outputs = inner.inputs, inner.outputs

    @property
    def layer(self) -> nn.Module:
        return self

    @property
    def weight(self) -> Tensor:
        """The unpacked weight in the layer's own order; computed by each access."""
        return self.inner.weight.index_select(1, self.order.argsort())

    @property
    def bias(self) -> nn.Parameter | None:
        """As of `inner`."""
        return self.inner.bias

    def forward(self, x: Tensor) -> Tensor:
        """`[..., inputs]` to `[..., outputs]`."""
        output: Tensor = self.inner(x.index_select(-1, self.order))
        return output

    def boxes(self, name: str) -> list[Box]:
        found = self.inner.boxes(name)
        return [
            msgspec.structs.replace(box, order=self.order) if isinstance(box, CodesBox) else box
            for box in found
        ]


class QuantizedEmbedding(_Coded):
    """An embedding whose rows are codes, such as those of an output layer that it is tied to.

    Attributes:
        plain: The embedding that it replaces, without its weight: what it does beside the lookup,
            such as scaling, applies to the unpacked rows.
    """

    def __init__(
        self,
        form: Codes,
        tensors: Mapping[str, Tensor],
        plain: nn.Embedding,
        dtype: torch.dtype,
    ) -> None:
        """Take the weights.

        Args:
            form: The form of the codes, one output for each token.
            tensors: As of `QuantizedLinear`.
            plain: The embedding that it replaces.
            dtype: Dtype of the rows.
        """
        super().__init__(form, tensors, dtype)
        self.num_embeddings, self.embedding_dim = form.outputs, form.inputs
        self.plain = None if type(plain) is nn.Embedding else plain
        if self.plain is not None:
            self.plain.weight, self.plain.padding_idx = None, None  # type: ignore[assignment]

    def forward(self, ids: Tensor) -> Tensor:
        """`[...]` to `[..., width]`."""
        rows = unpack_rows(self.form, self.tensors, ids.flatten()).to(self.dtype)
        if self.plain is None:
            return rows.view(*ids.shape, self.embedding_dim)
        places = torch.arange(len(rows), device=ids.device).view(ids.shape)
        output: Tensor = functional_call(self.plain, {"weight": rows}, (places,))
        return output
