"""Checks that the numbers of tensors can be read, before the first tensor is written.

torch reports some failures too late, after other tensors have been written, and some not at all: it
reads a view beyond the end of a storage that was made smaller.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .....config import WeightsError, shown

NUMBERS = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.float8_e8m0fnu, torch.bool, torch.uint8, torch.int8),
    *(torch.int16, torch.int32, torch.int64),
)
"""Dtypes that torch can convert to a parameter's, each number by itself."""


def check_stored(tensors: Mapping[str, object]) -> None:
    """Check that the numbers of all tensors can be read. Values of other types are ignored.

    Raises:
        WeightsError: A tensor is sparse, quantised, lazy, on the meta device or a wrapper around
            other tensors, its dtype is unknown, or its storage does not cover it.
    """
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise WeightsError(f"{shown(name)} names no tensor; names are text")
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
    """How much of a tensor its storage lacks; "" if nothing."""
    if not tensor.numel():
        return ""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes)
    needed = (tensor.storage_offset() + last + 1) * tensor.itemsize
    storage = tensor.untyped_storage()
    if storage.nbytes() < needed or not storage.data_ptr():
        held = storage.nbytes() if storage.data_ptr() else 0
        return (
            f"its storage has {held} bytes and {needed} are needed; it was resized or freed, as "
            "FSDP does with gathered parameters, so send it while it is there"
        )
    return ""
