"""The layout of weights' codes for kernels, by `layout.c`: torch alone takes several copies."""

from __future__ import annotations

import ctypes
from functools import cache

from torch import Tensor

from .choose import first_usable
from .compile import LAYOUT, LAYOUT_AVX2, KernelsUnavailable

SIGNATURES = {"pack_codes": "pllllp", "unpack_codes": "pllllpfppllp"}


@cache
def layout_library() -> ctypes.CDLL | None:
    """Return the library; None if there is none on this machine."""
    try:
        return first_usable([LAYOUT_AVX2, LAYOUT], SIGNATURES)[1]
    except KernelsUnavailable:
        return None


def put_codes(codes: Tensor, padded_inputs: int, bits: int, packed: Tensor) -> bool:
    """Pack codes; see `codes.pack_plain`.

    Args:
        codes: `[outputs, inputs]` uint8, one code each.
        padded_inputs: Inputs with padding.
        bits: Of a code, 8 or 4.
        packed: The result, `[panels, steps, PANEL, STEP]` uint8.

    Returns:
        False, and nothing is packed, if that is left to torch.
    """
    library = layout_library()
    if library is None or not _is_usable(packed):
        return False
    codes = codes.contiguous()
    library.pack_codes(codes.data_ptr(), *codes.shape, padded_inputs, bits, packed.data_ptr())
    return True


def put_weights(
    packed: Tensor,
    padded_inputs: int,
    bits: int,
    values: Tensor | None,
    zero: int,
    scales: Tensor,
    offsets: Tensor | None,
    group: int,
    weights: Tensor,
) -> bool:
    """Unpack weights exactly.

    Args:
        packed: `[panels, steps, PANEL, STEP]` uint8.
        padded_inputs: Inputs with padding.
        bits: Of a code, 8 or 4.
        values: Values of the codes, float32; None for the codes themselves.
        zero: Subtracted from the values.
        scales: `[outputs, groups]` float32.
        offsets: Likewise, or None.
        group: Inputs that share a scale.
        weights: The result, `[outputs, inputs]` float32.

    Returns:
        False, and nothing is unpacked, if that is left to torch.
    """
    library = layout_library()
    if library is None or not _is_usable(packed):
        return False
    numbers = [None if each is None else each.contiguous() for each in (values, scales, offsets)]
    places = [None if each is None else each.data_ptr() for each in numbers]
    library.unpack_codes(
        packed.data_ptr(),
        *weights.shape,
        padded_inputs,
        bits,
        places[0],
        zero,
        *places[1:],
        scales.shape[1],
        group,
        weights.data_ptr(),
    )
    return True


def _is_usable(packed: Tensor) -> bool:
    return packed.device.type == "cpu" and packed.is_contiguous()
