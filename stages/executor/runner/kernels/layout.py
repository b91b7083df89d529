"""The layout of weights' codes for kernels, by `layout.c`: torch alone takes several copies."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .compile import LAYOUT, LAYOUT_AVX2, KernelsUnavailable
from .cpu import first_usable

if TYPE_CHECKING:
    from ..linear.codes import Codes

SIGNATURES = {"pack_codes": "pllllp", "unpack_codes": "pllllpfppllp"}


@cache
def layout_library() -> ctypes.CDLL | None:
    """Return the library; None if there is none on this machine."""
    try:
        return first_usable([LAYOUT_AVX2, LAYOUT], SIGNATURES)[1]
    except KernelsUnavailable:
        return None


def put_codes(form: Codes, codes: Tensor, packed: Tensor) -> bool:
    """Pack codes; see `pack_plain`.

    Args:
        form: The form of the codes.
        codes: `[outputs, inputs]` uint8, one code each.
        packed: The result, `[panels, steps, PANEL, STEP]` uint8.

    Returns:
        False, and nothing is packed, if that is left to torch.
    """
    library = layout_library()
    if library is None or not _is_usable(packed):
        return False
    codes = codes.contiguous()
    library.pack_codes(
        codes.data_ptr(),
        form.outputs,
        form.inputs,
        form.padded_inputs,
        form.bits,
        packed.data_ptr(),
    )
    return True


def unpacked(
    form: Codes, packed: Tensor, values: Tensor | None, scales: Tensor, offsets: Tensor | None
) -> Tensor | None:
    """Return the weights, `[outputs, inputs]` float32, exactly; None if that is left to torch.

    Args:
        form: The form of the codes.
        packed: `[panels, steps, PANEL, STEP]` uint8.
        values: Values of the codes, float32; None for the codes themselves.
        scales: `[outputs, groups]` float32.
        offsets: Likewise, or None.
    """
    library = layout_library()
    if library is None or not _is_usable(packed):
        return None
    weights = torch.empty(form.outputs, form.inputs)
    numbers = [None if each is None else each.contiguous() for each in (values, scales, offsets)]
    values_at, scales_at, offsets_at = (
        None if each is None else each.data_ptr() for each in numbers
    )
    library.unpack_codes(
        packed.data_ptr(),
        form.outputs,
        form.inputs,
        form.padded_inputs,
        form.bits,
        values_at,
        form.zero,
        scales_at,
        offsets_at,
        form.groups,
        form.group,
        weights.data_ptr(),
    )
    return weights


def _is_usable(packed: Tensor) -> bool:
    return packed.device.type == "cpu" and packed.is_contiguous()
