"""Checks of new weights before the first tensor is written: their amount, and their storage."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor, nn

from .....config import WeightsError, shown
from ..shards import NewShard, Shard

LARGEST_VERSION = 1 << 62
"""The largest version that a message may name; counting from there still fits 64 bits."""

DELTA_HEAD = "__delta__"
"""The name of the tensor that describes a delta, which makes a set of tensors one."""

_TIMES_THE_MODEL = 10
"""A checkpoint has more tensors than a model that fuses them: separate queries, keys and values,
separate gates and projections, scales, parts that Transformers ignores."""

_MORE_TENSORS = 10_000
_MORE_BYTES = 1 << 30

_WIDEST_BYTES = 8
"""Bytes of the widest number, float64."""

_NAMED = 3
"""The most tensors that an error names."""

_ENTRY_BYTES = 256
"""Bytes of a tensor's entry in a header or an index; about 130 with long names."""

_METADATA_BYTES = 4 << 20
"""Bytes of other metadata in a header."""


class WeightLimits(NamedTuple):
    """Limits of one source of weights: a message, all files of a folder, all parts of an update.

    Attributes:
        tensors: The most tensors.
        num_bytes: Their most bytes in total.
    """

    tensors: int = 1 << 62
    num_bytes: int = 1 << 62

    @property
    def header_bytes(self) -> int:
        """The most bytes of a list of this number of tensors."""
        return _METADATA_BYTES + _ENTRY_BYTES * self.tensors

    def check_tensors(self, number: int) -> None:
        """Raises WeightsError for more tensors."""
        if number > self.tensors:
            raise WeightsError(
                f"{number} tensors are more than this model can take, {self.tensors}; send those "
                "of its architecture, or raise engine.max_weight_tensors"
            )

    def check_bytes(self, number: int) -> None:
        """Raises WeightsError for more bytes."""
        if number > self.num_bytes:
            raise WeightsError(
                f"{number} bytes of new weights are more than this model can take, "
                f"{self.num_bytes}; send those of its architecture, or raise "
                "engine.max_weight_bytes"
            )


UNLIMITED = WeightLimits()


def limits_of(module: nn.Module, tensors: int = 0, num_bytes: int = 0) -> WeightLimits:
    """Return the limits of a model; an argument above 0 overrides the derived limit.

    A parameter of three dimensions holds fused experts and counts once per expert, as in
    checkpoints.
    """
    parameters = list(module.parameters())
    counted = sum(tensor.shape[0] if tensor.dim() > 2 else 1 for tensor in parameters)
    numbers = sum(tensor.numel() for tensor in parameters)
    return WeightLimits(
        tensors or _TIMES_THE_MODEL * counted + _MORE_TENSORS,
        num_bytes or _WIDEST_BYTES * numbers + _MORE_BYTES,
    )


def busy() -> WeightsError:
    """Return the error for an update while another one is in progress."""
    return WeightsError(
        "a weight update is under way already; wait until it is in place", code="weights_busy"
    )


def not_finite(names: Sequence[str]) -> WeightsError:
    """Return the error for new parameters that are not finite."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return WeightsError(
        "the new weights have NaN or infinity, in the model's dtype, in "
        f"{', '.join(names[:_NAMED])}{more}; the trainer has diverged, or sent them "
        "before they were computed",
        code="weights_not_finite",
    )


def digest_of(tensor: Tensor) -> int:
    """Return a checksum of a tensor's bytes."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_64_intdigest(data.cpu().numpy().data)


def is_finite(tensor: object) -> bool:
    """Return whether all numbers are finite, in one pass without allocation: the extremes of
    a tensor with NaN are NaN."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or not tensor.numel():
        return True  # `check_fits` refuses other types
    return bool(torch.stack(torch.aminmax(tensor.detach())).isfinite().all())


def check_open(name: str, shard: Shard) -> None:
    """Raises WeightsError for a weight whose codes can't be made anew."""
    if why := shard.fixed:
        raise WeightsError(
            f"{shown(name)} can't be replaced: {why}, so no rule makes codes of new weights; serve "
            "the unquantised checkpoint, with engine.quantization int8 or int4 for codes of its "
            "weights",
            code="weights_quantized",
        )


def number_of(number: int) -> str:
    """Return a number of tensors in words."""
    return "1 tensor" if number == 1 else f"{number} tensors"


def remedy_for(given: Collection[str], own: Collection[str]) -> str:
    """Return what to do about names that are not the model's own."""
    for name in given:
        rest = name
        while name not in own and "." in rest:
            rest = rest.partition(".")[2]
            if rest in own:
                return f"remove the prefix {shown(name.removesuffix(rest))} of the names"
    return "pass the state_dict of the same architecture"


def check_fits(name: str, tensor: object, own: Tensor | Shard) -> None:
    """Raises WeightsError for another shape or kind of number than the module's."""
    if not isinstance(tensor, Tensor | NewShard) or tuple(tensor.shape) != tuple(own.shape):
        if (kind := type(tensor)).__module__ == "numpy":
            raise WeightsError(
                f"the new weights don't fit: {shown(name)} is a numpy array",
                remedy="pass a torch tensor (torch.from_numpy)",
            )
        shape = tuple(getattr(tensor, "shape", ())) or kind.__name__
        raise WeightsError(
            f"the new weights don't fit: {name!r} is {shape}, and the model's is "
            f"{tuple(own.shape)}",
            remedy="send those of the same architecture",
        )
    if tensor.dtype.is_floating_point != own.dtype.is_floating_point:
        raise WeightsError(
            f"the new weights don't fit: {name!r} is {tensor.dtype}, and the model's is "
            f"{own.dtype}; send a dtype of the same kind"
        )


_NUMBERS = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz "
    "float8_e8m0fnu bool uint8 int8 int16 int32 int64"
)
NUMBERS = tuple(getattr(torch, name) for name in _NUMBERS.split())
"""Dtypes that torch can convert to a parameter's elementwise."""


def check_stored(tensors: Mapping[str, object]) -> None:
    """Check that the numbers of all tensors can be read. Values of other types are ignored.

    Raises:
        WeightsError: A tensor is sparse, quantised, lazy, on the meta device or a wrapper around
            other tensors, its dtype is unknown, or its storage does not cover it.
    """
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise WeightsError(f"{shown(name)} is no name of a tensor; names are text")
        if isinstance(tensor, Tensor) and (trouble := _trouble(tensor)):
            raise WeightsError(f"the numbers of {shown(name)} can't be read: {trouble}")


def _trouble(tensor: Tensor) -> str:
    """Why the numbers of a tensor can't be read; "" if they can."""
    kind = type(tensor)
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"it is a {kind.__name__}; send a plain tensor (of a DTensor its full_tensor())"
    if tensor.is_nested or tensor.layout is not torch.strided:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        return f"its layout is {layout}; send a dense tensor"
    if tensor.is_quantized or tensor.dtype not in NUMBERS:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return f"its dtype is {dtype}; send float32 or the model's dtype"
    if tensor.is_meta:
        return "it is on the meta device, where there are none; load it first"
    try:
        return _uncovered(tensor)
    except (RuntimeError, ValueError):  # torch's, of lazy parameters and zero tensors
        return f"this {kind.__name__} has no storage yet; send a tensor with numbers"


def _uncovered(tensor: Tensor) -> str:
    """Describe the part of a tensor that its storage lacks; "" if none."""
    if not tensor.numel():
        return ""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes)
    needed = (tensor.storage_offset() + last + 1) * tensor.itemsize
    storage = tensor.untyped_storage()
    if storage.nbytes() < needed or not storage.data_ptr():
        held = storage.nbytes() if storage.data_ptr() else 0
        return (
            f"its storage has {held} bytes and {needed} are needed; it was resized or freed, "
            "as FSDP does with gathered parameters, so send it before that"
        )
    return ""
