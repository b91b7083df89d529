"""The kernels of `cpu.c` and `sampling.c` as functions of CPU tensors.

Those of `cpu.c` are for bfloat16 and float32: weights, inputs and outputs have one dtype unless
noted.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from ctypes import c_float, c_long, c_void_p
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ..attention_options import AttentionOptions
from ..batch import DecodeRows
from .choose import first_usable
from .compile import (
    BFLOAT16,
    BFLOAT16_AVX2,
    FLOAT32,
    FLOAT32_AVX2,
    SAMPLING,
    SAMPLING_AVX2,
    TILES,
    Library,
    digest_of,
)
from .packed import Packed, PackedSum

if TYPE_CHECKING:
    from .codes_argument import CodesArgument

# The first usable one is taken; the last one's reason is reported.
LIBRARIES: dict[torch.dtype, tuple[Library, ...]] = {
    torch.bfloat16: (TILES, BFLOAT16, BFLOAT16_AVX2),
    torch.float32: (FLOAT32, FLOAT32_AVX2),
}
_SAMPLING_LIBRARIES = (SAMPLING, SAMPLING_AVX2)


class LinearKind(IntEnum):
    """The use of the products; numbers as in cpu.c."""

    PLAIN = 0
    WIDE = 1
    GATED_SILU = 2
    GATED_TANH_GELU = 3
    GATED_SIGMOID = 4


class _Linear(ctypes.Structure):
    _fields_ = (
        ("weight", c_void_p * 4),
        ("bias", c_void_p * 4),
        ("outputs", c_long * 4),
        ("parts", c_long),
        ("inputs", c_long),
        ("kind", c_long),
        ("codes", c_void_p * 4),
    )


class _Sum(ctypes.Structure):
    _fields_ = (("parts", c_void_p * 4), ("count", c_long), ("bias", c_void_p))


class _Attention(ctypes.Structure):
    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("block_size", c_long),
        ("kv_heads", c_long),
        ("group", c_long),
        ("key_width", c_long),
        ("value_width", c_long),
        ("value_stride", c_long),
        ("window", c_long),
        ("own_chunk", c_long),
        ("scale", c_float),
        ("softcap", c_float),
        ("sinks", c_void_p),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
        ("codes", c_long),
    )


_SIGNATURES = {
    "linear": "pplpp",
    "gate": "ppll",
    "rms_norm": "pppllfl",
    "rotate": "plppllll",
    "store": "pplplpl",
    "decode_attention": "pplplplp",
    "head_products": "ppl",
    "decoder_layers": "plppp",
    "normed_linear": "pppplpp",
}
_SAMPLING_SIGNATURES = {"softmax_sums": "pllplpppp", "sample": "pllpplpp", "forbid": "plppl"}


@cache
def library(dtype: torch.dtype = torch.bfloat16) -> ctypes.CDLL:
    """Return the library for models of a dtype, with its functions declared.

    Raises:
        KernelsUnavailable: There is none, or none on this machine.
    """
    return _chosen(dtype)[1]


def instructions(dtype: torch.dtype) -> str:
    """Return the instructions that this library uses.

    Raises:
        KernelsUnavailable: As `library`.
    """
    return _chosen(dtype)[0].instructions


def code(dtype: torch.dtype) -> str:
    """Return a digest of the compiled code of this library and of the one for logits.

    Raises:
        KernelsUnavailable: As `library`.
    """
    digests = (digest_of(each) for each in (library(dtype), sampling_library()))
    return hashlib.sha256(b"".join(digests)).hexdigest()[:16]


@cache
def _chosen(dtype: torch.dtype) -> tuple[Library, ctypes.CDLL]:
    return first_usable(LIBRARIES.get(dtype, ()), _SIGNATURES, f"{dtype} on cpu")


@cache
def sampling_library() -> ctypes.CDLL:
    """Return the library for logits, likewise."""
    return first_usable(_SAMPLING_LIBRARIES, _SAMPLING_SIGNATURES)[1]


class Linear:
    """Linear layers over the same rows, computed together, with outputs side by side.

    A gated kind has two layers, gate and up, and the output act(gate) * up. LinearKind.WIDE returns
    float32 with values rounded to the layers' dtype.

    Attributes:
        parameters: Parameters of each layer.
        dtype: Dtype of layers and rows.
        inputs: Width of a row.
        outputs: Width of an output row.
        output_dtype: Dtype of output rows.
        argument: Address of the kernels' argument, which `find_weights` updates.
    """

    def __init__(self, layers: Sequence[Packed], kind: LinearKind = LinearKind.PLAIN) -> None:
        """Take one to four layers, all with codes or none; their weights are used in place.

        Raises:
            KernelsUnavailable: There are none for the layers' dtype here.
        """
        self.parameters = [layer.parameters for layer in layers]
        self.dtype = layers[0].dtype
        self._run = library(self.dtype).linear
        outputs = [layer.outputs for layer in layers]
        gated = kind >= LinearKind.GATED_SILU
        self.inputs = layers[0].inputs
        self.outputs = outputs[0] if gated else sum(outputs)
        self.output_dtype = torch.float32 if kind == LinearKind.WIDE else self.dtype
        self._arguments = _Linear(parts=len(layers), inputs=self.inputs, kind=kind)
        self._arguments.outputs[: len(layers)] = outputs
        self.argument = ctypes.addressof(self._arguments)
        self._addresses: list[int] = []
        self._name = "weight"
        self._codes: list[CodesArgument] = []
        if layers[0].codes is not None:
            from .codes_argument import CodesArgument

            self._name = "codes"
            self._codes = [CodesArgument(layer) for layer in layers]
            self._arguments.codes[: len(layers)] = [each.argument for each in self._codes]

    def find_weights(self) -> None:
        """Update the weights' addresses: a trainer that shares the model may replace them."""
        addresses = []
        for parameters in self.parameters:
            weight, bias = parameters[self._name], parameters["bias"]
            addresses += [weight.data_ptr(), 0 if bias is None else bias.data_ptr()]  # type: ignore
        if addresses != self._addresses:
            self._addresses = addresses
            self._arguments.weight[: len(self.parameters)] = addresses[0::2]
            self._arguments.bias[: len(self.parameters)] = addresses[1::2]
        for each in self._codes:
            each.find_weights()

    def __call__(self, rows: Tensor, added: Tensor | None = None) -> Tensor:
        """`[rows, inputs]` to `[rows, outputs]`, plus `added` of that shape; all contiguous.

        Raises:
            ValueError: The rows are of another dtype than the layers.
        """
        if rows.dtype is not self.dtype:
            raise ValueError(f"rows of {rows.dtype} for layers of {self.dtype}")
        self.find_weights()
        count = rows.shape[0]
        output = torch.empty(count, self.outputs, dtype=self.output_dtype)
        added_at = None if added is None else added.data_ptr()
        self._run(self.argument, rows.data_ptr(), count, added_at, output.data_ptr())
        return output


class LinearSum:
    """A linear layer, or the sum of four over consecutive inputs, for `decoder_layers`.

    Products are rounded to the layers' dtype, and added as (a + b) + (c + d) in float32.

    Attributes:
        parameters: Parameters of the layers, and of the module with the bias of their sum.
        dtype: Dtype of layers and rows.
        inputs: Features of a row, over all parts.
        scratch: Scratch numbers for each row.
        argument: Address of the kernels' argument, which `find_weights` updates.
    """

    def __init__(self, packed: PackedSum) -> None:
        layers, self._bias = packed
        self._parts = [Linear([layer]) for layer in layers]
        self.parameters = [layer.parameters for layer in layers]
        if self._bias is not None:
            self.parameters.append(self._bias)
        self.dtype = self._parts[0].dtype
        self.inputs = sum(part.inputs for part in self._parts)
        several = len(layers) > 1
        self.scratch = self.inputs + len(layers) * self._parts[0].outputs if several else 0
        self._arguments = _Sum(count=len(layers))
        self._arguments.parts[: len(layers)] = [part.argument for part in self._parts]
        self.argument = ctypes.addressof(self._arguments)

    def find_weights(self) -> None:
        """Update the kernels' argument with the weights' present addresses."""
        for part in self._parts:
            part.find_weights()
        bias = None if self._bias is None else self._bias.get("bias")
        self._arguments.bias = None if bias is None else bias.data_ptr()


def gate(gates: Tensor, ups: Tensor, kind: LinearKind) -> Tensor:
    """act(gates) * ups, written over `gates`; both contiguous."""
    library(gates.dtype).gate(gates.data_ptr(), ups.data_ptr(), gates.numel(), kind)
    return gates


class RMSNorm:
    """RMSNorm over the last dimension.

    Attributes:
        parameters: Parameters of the module.
        epsilon: Added to the mean square.
        shifted: The factor is 1 + weight, applied before rounding.
    """

    def __init__(self, module: nn.Module, epsilon: float, *, shifted: bool) -> None:
        self.parameters = [module._parameters]
        self.epsilon = epsilon
        self.shifted = shifted

    @property
    def weight(self) -> Tensor:
        """The module's present weight, `[width]`."""
        weight = self.parameters[0]["weight"]
        assert weight is not None
        return weight

    def weight_for(self, rows: Tensor) -> Tensor:
        """Return the weight. Raises ValueError if the rows are of another dtype."""
        weight = self.weight
        if rows.dtype is not weight.dtype:
            raise ValueError(f"rows of {rows.dtype} for a weight of {weight.dtype}")
        return weight

    def __call__(self, rows: Tensor) -> Tensor:
        """`[..., width]`, contiguous or made so.

        Raises:
            ValueError: As `weight_for`.
        """
        weight = self.weight_for(rows)
        rows = rows.contiguous()
        output, width = torch.empty_like(rows), rows.shape[-1]
        tensors = rows.data_ptr(), weight.data_ptr(), output.data_ptr()
        shape = rows.numel() // width, width
        library(rows.dtype).rms_norm(*tensors, *shape, self.epsilon, self.shifted)
        return output


def rotate(rows: Tensor, heads: int, cos: Tensor, sin: Tensor, apart: int = 0) -> None:
    """Rotary positions, in place: x * cos + rotate_half(x) * sin in each of the first heads.

    Args:
        rows: `[rows, at least heads * width]`, each row contiguous.
        heads: Number of heads to rotate.
        cos: `[rows, width]`, contiguous; width is a multiple of 32.
        sin: Likewise.
        apart: Width of a head whose first numbers rotate; 0: all do.

    Raises:
        ValueError: The factors are of another dtype than the rows.
    """
    if not rows.dtype is cos.dtype is sin.dtype:
        raise ValueError(f"factors of {cos.dtype} and {sin.dtype} for rows of {rows.dtype}")
    count, width = cos.shape
    tensors = rows.data_ptr(), rows.stride(0), cos.data_ptr(), sin.data_ptr()
    library(rows.dtype).rotate(*tensors, count, heads, apart or width, width)


def _call(function: Any, *arguments: Tensor | int | None) -> None:
    """Call a kernel with the addresses of tensors."""
    function(*(each.data_ptr() if isinstance(each, Tensor) else each for each in arguments))


def softmax_sums(
    logits: Tensor, divisors: Tensor, block: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the sums of a softmax for sampling, in two passes and without storing the weights.

    Args:
        logits: `[batch, vocab]` float32.
        divisors: `[batch]` float32.
        block: Tokens whose weights are summed together.

    Returns:
        The largest logit of each row (NaN if the row has one), `[batch]`; its first token,
        `[batch]` int64; the sums of exp((logits - largest) / divisor) over blocks,
        `[batch, blocks]` float64; and the logarithms of their totals, `[batch]` float64.
    """
    logits, divisors = logits.contiguous(), divisors.contiguous()
    batch, vocab = logits.shape
    largest = torch.empty(batch, dtype=torch.float32)
    places = torch.empty(batch, dtype=torch.int64)
    sums = torch.empty(batch, -(-vocab // block), dtype=torch.float64)
    logs = torch.empty(batch, dtype=torch.float64)
    kernel = sampling_library().softmax_sums
    _call(kernel, logits, batch, vocab, divisors, block, largest, places, sums, logs)
    return largest, places, sums, logs


def sample(
    logits: Tensor, temperatures: Tensor, uniforms: Tensor | None, block: int
) -> tuple[Tensor, Tensor]:
    """Draw a token for each row from the whole vocabulary, with its logprob.

    Args:
        logits: `[batch, vocab]` float32.
        temperatures: `[batch]` float32; at 0 the token is the first of the likeliest, with its
            logprob at 1.
        uniforms: `[batch]` float64 in [0, 1), the share of the total weight at which a token is
            drawn; None if all temperatures are 0.
        block: As in `softmax_sums`.

    Returns:
        `[batch]` int64, and `[batch]` float32, NaN where a row's largest logit is not finite.
    """
    logits, temperatures = logits.contiguous(), temperatures.contiguous()
    uniforms = None if uniforms is None else uniforms.contiguous()
    batch, vocab = logits.shape
    tokens = torch.empty(batch, dtype=torch.int64)
    logprobs = torch.empty(batch, dtype=torch.float32)
    kernel = sampling_library().sample
    _call(kernel, logits, batch, vocab, temperatures, uniforms, block, tokens, logprobs)
    return tokens, logprobs


def forbid(logits: Tensor, places: npt.NDArray[np.int64], allowed: npt.NDArray[np.int32]) -> None:
    """Set forbidden logits to minus infinity, in place.

    Args:
        logits: `[batch, vocab]` float32, contiguous.
        places: `[rows]`, which rows of the logits.
        allowed: `[rows, ceil(vocab / 32)]`, a bit for each token of these, the lowest first.
    """
    assert logits.is_contiguous()
    assert logits.dtype == torch.float32
    places, allowed = np.ascontiguousarray(places), np.ascontiguousarray(allowed)
    vocab = logits.shape[1]
    assert allowed.shape == (len(places), -(-vocab // 32))
    sampling_library().forbid(
        logits.data_ptr(), vocab, places.ctypes.data, allowed.ctypes.data, len(places)
    )


_CODES = {torch.int8: 1, torch.float8_e4m3fn: 2}
"""Numbers of kinds of codes, as in attention_codes.h."""


class PagedAttention:
    """One layer's paged KV cache, for queries of one token each.

    Attributes:
        argument: Address of the kernels' argument.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        heads: int,
        options: AttentionOptions,
        *,
        scales: Sequence[Tensor] = (),
        dtype: torch.dtype | None = None,
    ) -> None:
        """Take a layer's cache and options.

        Args:
            keys: `[blocks, block_size, kv_heads, width]`, numbers or codes (`kv_codes`).
            values: Likewise; or, of one KV head, the first numbers of the keys, in their memory.
            heads: Query heads.
            options: Options of the layer.
            scales: Scales of the codes of keys and of values, `[blocks, block_size, kv_heads]`.
            dtype: Dtype of the numbers; that of the keys if None.
        """
        self._dtype = keys.dtype if dtype is None else dtype
        self._library = library(self._dtype)
        self._shape = (heads, values.shape[3])
        self._kept, self._scales = (keys, values, options.sinks), scales
        self._arguments = _Attention(
            block_size=keys.shape[1],
            kv_heads=keys.shape[2],
            group=heads // keys.shape[2],
            key_width=keys.shape[3],
            value_width=values.shape[3],
            value_stride=values.stride(2),
            window=options.window or 0,
            own_chunk=options.chunk or 0,
            scale=options.scale,
            softcap=options.softcap or 0.0,
            codes=_CODES.get(keys.dtype, 0),
        )
        self.argument = ctypes.addressof(self._arguments)
        self.find_tensors()

    def find_tensors(self) -> None:
        """Update the tensors' addresses after their memory has changed."""
        (keys, values, sinks), scales = self._kept, self._scales
        self._arguments.keys, self._arguments.values = keys.data_ptr(), values.data_ptr()
        self._arguments.sinks = None if sinks is None else sinks.data_ptr()
        if scales:
            self._arguments.key_scales, self._arguments.value_scales = map(Tensor.data_ptr, scales)

    @staticmethod
    def handles(key_width: int, value_width: int) -> bool:
        """Return whether the kernel supports heads of these widths."""
        return key_width % 16 == 0 and value_width % 16 == 0

    def store(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write `[tokens, kv_heads, width]` each, heads contiguous, to `slots`, `[tokens]`."""
        new = keys.data_ptr(), keys.stride(0), values.data_ptr(), values.stride(0)
        self._library.store(self.argument, *new, slots.data_ptr(), slots.shape[0])

    def decode(self, queries: Tensor, rows: DecodeRows) -> Tensor:
        """Attention of one token per row.

        Args:
            queries: `[at least rows.count, heads, key_width]`, heads of a row contiguous.
            rows: The rows, longest context first.

        Returns:
            `[rows.count, heads, value_width]`.
        """
        output = torch.empty(rows.count, *self._shape, dtype=self._dtype)
        tensors = queries.data_ptr(), queries.stride(0), output.data_ptr()
        tables = rows.tables.data_ptr(), rows.tables.shape[1], rows.contexts.data_ptr()
        self._library.decode_attention(self.argument, *tensors, rows.count, *tables)
        return output
