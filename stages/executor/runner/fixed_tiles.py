"""Fixed tiles: torch's functions, run so that a row's result does not depend on other rows (CPU).

Kernels may sum in another order for another shape: a matrix product over few rows uses another
kernel than over many, and an elementwise function handles the end of its data, or of a thread's
share, by scalar code that differs from the vector code in the last bit. Inside `FixedTiles`, matrix
products have a few fixed numbers of rows, checked to give the same bits, and elementwise functions
run their vector code only.

It is a torch function mode: it sees every call of a model's Python code, for any architecture,
and changes neither the model nor global state.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ....config import ModelError

TILE_SIZES = (256, 64, 16, 8, 4)
"""Numbers of rows of a matrix product, largest first. Rows are padded to a multiple of the last."""

_REFERENCE = 16
"""The reference tile size; others are used where they give the same bits."""

_MAX_OUTPUTS = 1 << 24
"""The most outputs of a tile, if a smaller tile exists."""

_TRIED_OUTPUTS = 64
"""Different outputs of the product by which sizes are compared; others repeat them."""

_MAGNITUDES = 12
"""Powers of two over which the weights of that product are spread."""

_FEW_TERMS = 4
"""Terms of a sum that are added one by one."""

VECTOR = 64
"""Elements that every elementwise kernel handles without a scalar remainder, for any dtype."""

_PIECE = 8192
"""Elements up to which no elementwise kernel uses several threads."""

_ELEMENTWISE = (
    "silu gelu mish softplus elu selu celu logsigmoid hardswish sigmoid tanh softsign hardsigmoid"
)
"""Functions of torch.nn.functional."""

_ELEMENTWISE_METHODS = "exp exp2 expm1 log log2 log10 log1p sin cos tan tanh sigmoid erf erfc"
"""Functions of torch that are also tensor methods, and have an in-place form."""

_REFUSED = ("baddbmm", "addbmm", "addmv", "mv", "einsum", "conv1d", "tensordot")


def require_cpu(device: torch.device) -> None:
    """Raises ModelError on another device."""
    if device.type != "cpu":
        raise ModelError(
            f"deterministic mode is verified on CPU only, not on {device}; set device to 'cpu', "
            "or deterministic to false"
        )


class FixedTiles(TorchFunctionMode):
    """While entered, torch functions on CPU tensors use fixed shapes.

    ```python
    with FixedTiles():
        logits = model(...)
    ```

    Tile sizes are checked once per weight shape and number of threads, by comparing the bits of
    products that cancel; sizes that differ from 16 rows are not used.

    Raises, from inside:
        ModelError: The model uses a matrix product without a fixed shape here, or the rows of a
            tile of 16 are not treated alike on this machine.
    """

    def __init__(self) -> None:
        super().__init__()
        self._checked: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._handlers: Mapping[Any, Callable[..., Tensor]] = self._make_handlers()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        handler = self._handlers.get(func, func)
        return handler(*args, **kwargs) if kwargs else handler(*args)

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`F.linear`, by tiles of rows: `[..., in]`, `[out, in]`, `[out]` to `[..., out]`."""
        flat = rows.reshape(-1, rows.shape[-1])
        num_rows = flat.shape[0]
        sizes = self._sizes(weight, bias)
        smallest = sizes[-1]
        if num_rows % smallest:
            flat = F.pad(flat, (0, 0, 0, -num_rows % smallest))
        if flat.shape[0] in sizes:
            output = F.linear(flat, weight, bias)
        else:
            output = flat.new_empty(flat.shape[0], weight.shape[0])
            for start, stop in cut_tiles(flat.shape[0], sizes):
                output[start:stop] = F.linear(flat[start:stop], weight, bias)
        return output[:num_rows].view(*rows.shape[:-1], weight.shape[0])

    def grouped_mm(self, rows: Tensor, weights: Tensor, *, offs: Tensor, **others: Any) -> Tensor:
        """`F.grouped_mm`, as experts use it: `[rows, in]`, `[experts, in, out]` to `[rows, out]`.

        `offs[e]` is one past the last row of expert e.
        """
        if rows.dim() != 2 or weights.dim() != 3 or any(v is not None for v in others.values()):
            raise _no_fixed_shape("grouped_mm")
        output = rows.new_zeros(rows.shape[0], weights.shape[2])
        start = 0
        for weight, stop in zip(weights, offs.tolist(), strict=True):
            if start < stop:
                output[start:stop] = self.linear(rows[start:stop], weight.t())
            start = stop
        return output

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        """`torch.matmul`, except of vectors."""
        if left.dim() < 2 or right.dim() < 2:
            raise _no_fixed_shape("matmul")
        if left.shape[-1] <= _FEW_TERMS:
            # As of positions and frequencies, or small matrices of each token.
            terms = (left[..., [term]] * right[..., [term], :] for term in range(left.shape[-1]))
            return reduce(operator.add, terms)
        if right.dim() == 2:
            return self.linear(left, right.t())
        if isinstance(left if left._base is None else left._base, nn.Parameter):
            return self._columns(left, right)
        shape = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])  # type: ignore[no-untyped-call]
        left, right = (each.expand(*shape, -1, -1) for each in (left, right))
        output = self.bmm(left.flatten(0, -3), right.flatten(0, -3))
        return output.view(*shape, *output.shape[-2:])

    def bmm(self, left: Tensor, right: Tensor) -> Tensor:
        """`torch.bmm`, matrix by matrix."""
        pairs = zip(left, right, strict=True)
        return torch.stack([self.linear(rows, matrix.t()) for rows, matrix in pairs])

    def _columns(self, weights: Tensor, columns: Tensor) -> Tensor:
        """Product of weights, `[..., out, in]`, with columns of one token each."""
        shape = torch.broadcast_shapes(weights.shape[:-2], columns.shape[:-2])  # type: ignore[no-untyped-call]
        pairs = zip(
            weights.expand(*shape, -1, -1).flatten(0, -3),
            columns.expand(*shape, -1, -1).flatten(0, -3),
            strict=True,
        )
        found = torch.stack([self.linear(rows.mT, weight).mT for weight, rows in pairs])
        return found.view(*shape, *found.shape[1:])

    def addmm(self, bias: Tensor, rows: Tensor, matrix: Tensor, **others: Any) -> Tensor:
        """`torch.addmm` with a bias `[out]`, GPT-2's form of a linear layer."""
        if bias.dim() != 1 or others:
            raise _no_fixed_shape("addmm")
        return self.linear(rows, matrix.t(), bias)

    # --- inside -------------------------------------------------------------------------------

    def _make_handlers(self) -> dict[Any, Callable[..., Tensor]]:
        handlers: dict[Any, Callable[..., Tensor]] = {
            F.linear: self.linear,
            **dict.fromkeys((torch.matmul, torch.mm), self.matmul),
            **dict.fromkeys((Tensor.matmul, Tensor.__matmul__, Tensor.mm), self.matmul),
            **dict.fromkeys((torch.addmm, Tensor.addmm), self.addmm),
            **dict.fromkeys((torch.bmm, Tensor.bmm), self.bmm),
            torch.polar: _polar,
        }
        for module, name in ((F, "grouped_mm"), (torch, "_grouped_mm")):
            if hasattr(module, name):
                handlers[getattr(module, name)] = self.grouped_mm
        for name in _ELEMENTWISE.split():
            handlers[getattr(F, name)] = partial(elementwise, getattr(F, name))
        for name in _ELEMENTWISE_METHODS.split():
            function = getattr(torch, name)
            handlers[function] = handlers[getattr(Tensor, name)] = partial(elementwise, function)
            for in_place in (getattr(torch, f"{name}_", None), getattr(Tensor, f"{name}_")):
                handlers[in_place] = partial(_in_place, function)
        handlers[torch.rsqrt] = handlers[Tensor.rsqrt] = _rsqrt
        for name in _REFUSED:
            for owner in (torch, Tensor):
                if hasattr(owner, name):
                    handlers[getattr(owner, name)] = partial(_refuse, name)
        handlers[F.scaled_dot_product_attention] = partial(_refuse, "scaled_dot_product_attention")
        return handlers

    def _sizes(self, weight: Tensor, bias: Tensor | None) -> tuple[int, ...]:
        threads = torch.get_num_threads()
        key = (weight.shape, weight.stride(), weight.dtype, bias is None, threads)
        sizes = self._checked.get(key)
        if sizes is None:
            sizes = self._checked[key] = agreeing_sizes(weight, bias)
        return sizes


def agreeing_sizes(weight: Tensor, bias: Tensor | None) -> tuple[int, ...]:
    """Return the tile sizes at which each row of a product has the same bits, largest first.

    They depend on the shape, strides and dtype of the weight, not on its numbers: ranks decide
    alike, and so do weights of one shape.

    Raises:
        ModelError: The rows of a tile of the reference size are not treated alike.
    """
    allowed = max(_MAX_OUTPUTS // weight.shape[0], _REFERENCE)
    sizes = [size for size in TILE_SIZES if size <= allowed]
    count = max(sizes[0], 4 * _REFERENCE)
    generator = torch.Generator().manual_seed(0)
    rows, weight = _cancelling(count, weight, generator)
    bias = None if bias is None else torch.zeros_like(bias)

    def product(rows: Tensor, size: int) -> Tensor:
        return torch.cat([F.linear(part, weight, bias) for part in torch.split(rows, size)])

    wanted = product(rows, _REFERENCE)
    order = torch.randperm(count, generator=generator)
    if not torch.equal(product(rows[order], _REFERENCE), wanted[order]):
        raise ModelError(
            f"deterministic mode is impossible here: a product with a matrix {list(weight.shape)} "
            f"in {weight.dtype} depends on the place of a row; set deterministic to false"
        )
    return tuple(
        size for size in sizes if size == _REFERENCE or torch.equal(product(rows, size), wanted)
    )


def _cancelling(count: int, like: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return rows and a weight whose products are rounding errors alone.

    Each product of two numbers occurs with both signs, at random places, so the exact sum is zero.
    The computed sum is an error that depends on the order of summation. No rounding of a larger
    sum to a short dtype hides the error.

    Args:
        count: The number of rows.
        like: A tensor with the weight's shape, `[out, in]`, strides and dtype.
        generator: For the numbers.
    """
    outputs, inputs = like.shape
    pairs = inputs // 2
    places = torch.randperm(inputs, generator=generator)
    plus, minus = places[:pairs], places[pairs : 2 * pairs]
    rows = torch.zeros(count, inputs, dtype=like.dtype)
    rows[:, plus] = torch.randn(count, pairs, generator=generator).to(like.dtype)
    rows[:, minus] = rows[:, plus]
    # Of several magnitudes, so that small products are rounded beside large ones.
    scales = 2.0 ** torch.randint(_MAGNITUDES, (pairs,), generator=generator)
    numbers = torch.randn(min(outputs, _TRIED_OUTPUTS), pairs, generator=generator) * scales
    some = torch.zeros(len(numbers), inputs, dtype=like.dtype)
    some[:, plus] = numbers.to(like.dtype)
    some[:, minus] = -some[:, plus]
    weight = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    for part in torch.split(weight, _TRIED_OUTPUTS):
        part.copy_(some[: len(part)])
    return rows, weight


def cut_tiles(num_rows: int, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return ranges (start, stop) of these sizes that cover the rows, largest first.

    `num_rows` must be a multiple of the last size, and each size one of the next.
    """
    tiles = []
    start = 0
    for size in sizes:
        while num_rows - start >= size:
            tiles.append((start, start + size))
            start += size
    return tiles


def elementwise(
    function: Callable[..., Tensor], source: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Return `function(source, ...)`, computed by the kernel's vector code only."""
    if kwargs.pop("inplace", False):
        return source.copy_(elementwise(function, source, *args, **kwargs))
    source = source.contiguous()
    count = source.numel()
    if fills_vectors(count):
        return function(source, *args, **kwargs)
    flat = F.pad(source.view(-1), (0, -count % VECTOR))
    if len(flat) <= _PIECE:
        return function(flat, *args, **kwargs)[:count].view(source.shape)
    pieces = [function(piece, *args, **kwargs) for piece in torch.split(flat, _PIECE)]
    return torch.cat(pieces)[:count].view(source.shape)


def fills_vectors(count: int) -> bool:
    """Return whether an elementwise function uses only vector code on so many elements."""
    if count <= _PIECE:
        return count % VECTOR == 0
    # If this divides the size, it divides each thread's share, for any number of threads.
    shares = math.lcm(*range(1, torch.get_num_threads() + 1))
    return count % (VECTOR * shares) == 0


def _rsqrt(source: Tensor) -> Tensor:
    """Called by every norm. Exact in two operations, except for dtypes that round in between."""
    wide = source.dtype in (torch.float32, torch.float64)
    return torch.rsqrt(source) if wide else elementwise(torch.rsqrt, source)


def _polar(sizes: Tensor, angles: Tensor) -> Tensor:
    parts = (elementwise(function, angles) for function in (torch.cos, torch.sin))
    return torch.complex(*(sizes * part for part in parts))


def _in_place(function: Callable[..., Tensor], target: Tensor) -> Tensor:
    return target.copy_(elementwise(function, target))


def _refuse(name: str, *_: object, **__: object) -> Tensor:
    raise _no_fixed_shape(name)


def _no_fixed_shape(name: str) -> ModelError:
    return ModelError(
        f"deterministic mode does not support this model's use of {name}; set deterministic "
        "to false (of a model with experts, try experts_implementation='eager' first)"
    )
