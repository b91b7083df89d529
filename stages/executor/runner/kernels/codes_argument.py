"""The kernels' view of weights that are codes."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import c_long, c_void_p

import torch
from torch import Tensor

from .packed import Packed

_KINDS = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.uint8: 3,
    torch.int8: 4,
}
"""Of scales and factors, numbers as in codes.h."""

NAMES = ("codes", "scales", "scale_factors", "offsets", "offset_factors")
"""The tensors of `pack_plain`."""


class _Scales(ctypes.Structure):
    _fields_ = (
        ("values", c_void_p),
        ("factors", c_void_p),
        ("kind", c_long),
        ("factor_kind", c_long),
        ("repeats", c_long),
        ("count", c_long),
    )


class _Codes(ctypes.Structure):
    _fields_ = (
        ("codes", c_void_p),
        ("table", c_void_p),
        ("scales", _Scales),
        ("offsets", _Scales),
        ("bits", c_long),
        ("inputs", c_long),
        ("block", c_long),
        ("groups", c_long),
        ("repeats", c_long),
        ("zero", c_long),
        ("coarse", c_long),
        ("floats", c_long),
    )


class CodesArgument:
    """The kernels' argument for one layer's codes.

    Attributes:
        argument: Its address.
    """

    def __init__(self, layer: Packed) -> None:
        assert layer.codes is not None
        form, self._parameters = layer.codes, layer.parameters
        self._table = (ctypes.c_uint8 * 16)(*form.table)
        self._arguments = _Codes(
            table=ctypes.addressof(self._table) if form.table else None,
            bits=form.bits,
            inputs=form.padded_inputs,
            block=form.block,
            groups=form.groups,
            repeats=form.padded_inputs // form.block,
            zero=form.zero,
            coarse=layer.activation_bits == 8,
            floats=form.numbers == "float8_e4m3fn",
        )
        if form.groups > 1:
            self._arguments.repeats = form.group // form.block
        self.argument = ctypes.addressof(self._arguments)
        self._addresses: list[int] = []

    def find_weights(self) -> None:
        """Update the tensors' addresses, and their dtypes."""
        tensors = {name: self._parameters.get(name) for name in NAMES}
        addresses = [each.data_ptr() for each in tensors.values() if each is not None]
        if addresses == self._addresses:
            return
        self._addresses = addresses
        self._arguments.codes = addresses[0]
        groups = self._arguments.groups
        self._arguments.scales = _scales(tensors, "scale", groups)
        self._arguments.offsets = _scales(tensors, "offset", groups)


def _scales(tensors: Mapping[str, Tensor | None], name: str, groups: int) -> _Scales:
    values, factors = tensors[f"{name}s"], tensors[f"{name}_factors"]
    if values is None:
        return _Scales(repeats=1)
    found = _Scales(values.data_ptr(), kind=_KINDS[values.dtype], repeats=1)
    if factors is not None:
        found.factors, found.factor_kind = factors.data_ptr(), _KINDS[factors.dtype]
        found.count = factors.shape[1]
        found.repeats = -(-groups // found.count)
    return found
