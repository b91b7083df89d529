"""Codes, scales and offsets of quantised weights, and their layout for kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nano_inference.stages.executor.runner.kernels import layout
from nano_inference.stages.executor.runner.kernels.choose import first_usable
from nano_inference.stages.executor.runner.kernels.codes import (
    PANEL,
    Codes,
    PlainCodes,
    Scales,
    pack_plain,
    unpack,
    unpack_plain,
)
from nano_inference.stages.executor.runner.kernels.compile import LAYOUT

FORMS = {
    "int8 by output": {"bits": 8, "group": 1 << 20, "zero": 128},
    "int8 by group": {"bits": 8, "group": 32, "zero": 128},
    "int4": {"bits": 4, "group": 128, "zero": 8},
    "a table": {"bits": 4, "group": 32, "zero": 12, "table": tuple(range(3, 35, 2))},
    "an odd group": {"bits": 4, "group": 24, "zero": 0},
    "float8": {"bits": 8, "group": 1 << 20, "zero": 0, "numbers": "float8_e4m3fn"},
}


def random_codes(form: Codes, seed: int = 0) -> PlainCodes:
    numbers = torch.Generator().manual_seed(seed)

    def rand(*shape: int, high: int = 0) -> Tensor:
        return torch.randint(0, high, shape, generator=numbers, dtype=torch.uint8)

    shape = form.outputs, form.groups
    scales = Scales(torch.rand(shape, generator=numbers) + 0.5)
    offsets = Scales(torch.randn(shape, generator=numbers).half())
    # The last codes of float8 are no numbers.
    codes = 120 if form.numbers == "float8_e4m3fn" else 2**form.bits
    return PlainCodes(rand(form.outputs, form.inputs, high=codes), scales, offsets)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("shape", [(64, 128), (65, 200), (3, 8), (130, 96)])
def test_packed_codes_have_the_same_weights(name: str, shape: tuple[int, int]) -> None:
    settings: Any = FORMS[name]
    form = Codes(*shape, **settings)
    plain = random_codes(form)
    packed = pack_plain(form, plain)
    assert packed["codes"].nbytes == form.panels * PANEL * form.padded_inputs * form.bits // 8
    assert torch.equal(unpack(form, packed), unpack_plain(form, plain))
    if shape[0] > PANEL:
        assert torch.equal(unpack(form, packed, PANEL), unpack_plain(form, plain)[PANEL:])


def _anywhere() -> ctypes.CDLL:
    return first_usable([LAYOUT], layout.SIGNATURES)[1]


@pytest.mark.parametrize("library", [_anywhere, lambda: None], ids=["any processor", "torch"])
@pytest.mark.parametrize("name", FORMS)
def test_codes_have_the_same_layout_on_all_machines(
    name: str, library: Callable[[], ctypes.CDLL | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: Any = FORMS[name]
    form = Codes(70, 200, **settings)
    plain = random_codes(form)
    assert layout.layout_library() is not None, "this machine is to compare both"
    packed = pack_plain(form, plain)
    monkeypatch.setattr(layout, "layout_library", library)
    for key, tensor in pack_plain(form, plain).items():
        assert torch.equal(tensor, packed[key])
    assert torch.equal(unpack(form, packed), unpack_plain(form, plain))


def test_a_weight_is_a_scaled_code_less_an_offset() -> None:
    form = Codes(1, 16, 4, 8, zero=3)
    plain = PlainCodes(
        torch.arange(16, dtype=torch.uint8)[None],
        Scales(torch.tensor([[0.5, 2.0]])),
        Scales(torch.tensor([[1.0, 0.0]])),
    )
    codes = torch.arange(16.0)
    expected = torch.cat([0.5 * (codes[:8] - 3) - 1, 2 * (codes[8:] - 3)])
    assert torch.equal(unpack_plain(form, plain)[0], expected)


def test_scales_are_powers_of_two_or_products() -> None:
    exponents = torch.tensor([[0, 1, 127, 254]], dtype=torch.uint8)
    assert Scales(exponents).wide().tolist() == [[2.0**-127, 2.0**-126, 1.0, 2.0**127]]
    bytes_ = torch.tensor([[1, -2, 3]], dtype=torch.int8)
    factors = torch.tensor([[0.5, 10.0]], dtype=torch.float16)
    assert Scales(bytes_, factors).wide().tolist() == [[0.5, -1.0, 30.0]]


@pytest.mark.parametrize(
    ("group", "inputs", "block"), [(128, 896, 128), (1 << 20, 1000, 128), (1 << 20, 90, 96),
                                   (32, 64, 32), (256, 512, 128), (192, 384, 96)],
)  # fmt: skip
def test_a_block_is_a_part_of_a_group(group: int, inputs: int, block: int) -> None:
    form = Codes(1, inputs, 8, group)
    assert form.block == block
    assert form.padded_inputs % block == 0
    assert form.padded_inputs >= inputs
