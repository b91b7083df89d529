"""Products with codes: bits equal to their definition, on every instruction set."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nano_inference.stages.executor.runner.kernels import compile, cpu
from nano_inference.stages.executor.runner.kernels.codes import (
    Codes,
    PlainCodes,
    Scales,
    pack_plain,
    unpack_plain,
)
from nano_inference.stages.executor.runner.kernels.compile import (
    BFLOAT16,
    BFLOAT16_AVX2,
    FLOAT32,
    FLOAT32_AVX2,
    Library,
)
from nano_inference.stages.executor.runner.kernels.cpu import Linear, LinearKind
from nano_inference.stages.executor.runner.kernels.packed import Packed

from ...refusals import needs_kernels
from ...threads import several_threads
from .codes_reference import Case, random_layer

TILES_HEADER = Path(__file__).with_name("emulated_tiles.h")
_DIGEST = hashlib.sha256(TILES_HEADER.read_bytes()).hexdigest()
EMULATED_TILES = Library(
    BFLOAT16.source, BFLOAT16.processor, BFLOAT16.instructions, f"TILES EMULATED={_DIGEST}"
)
"""AMX's kernels, whose own instructions are loops here. The digest names the library's file."""


@pytest.fixture(
    params=[
        (torch.bfloat16, BFLOAT16),
        (torch.bfloat16, BFLOAT16_AVX2),
        (torch.float32, FLOAT32),
        (torch.float32, FLOAT32_AVX2),
        (torch.bfloat16, EMULATED_TILES),
    ],
    ids=lambda param: param[1].define.partition("=")[0].lower().replace(" ", "-"),
)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.dtype]:
    """That of one of the libraries, which is used then."""
    found, one = request.param
    if one is EMULATED_TILES:
        flags = f"{compile._KERNEL_FLAGS} -include {TILES_HEADER}"
        monkeypatch.setattr(compile, "_KERNEL_FLAGS", flags)
    monkeypatch.setitem(cpu.LIBRARIES, found, (one,))
    cpu.library.cache_clear()
    cpu._chosen.cache_clear()
    try:
        needs_kernels(found)
        with torch.inference_mode():
            yield found
    finally:
        cpu.library.cache_clear()
        cpu._chosen.cache_clear()


CASES = [
    Case(70, 100, 8, 1000, zero=128),
    Case(130, 256, 4, 32, zero=8, scales="bfloat16"),
    Case(65, 1000, 4, 128, zero=8, scales="float16", offsets="float16"),
    Case(200, 304, 8, 16, zero=32, scales="int8 float16"),
    Case(64, 512, 4, 32, scales="int8 float32", offsets="int8 float16"),
    Case(64, 192, 4, 64, zero=12, table=tuple(range(0, 48, 3)), scales="uint8"),
    Case(30, 5, 8, 8, zero=3),
    Case(3, 70, 4, 24, zero=8, offsets="float32"),
    Case(1, 1000, 4, 1000, zero=255, table=tuple(range(255, 0, -16))),
]
FLOATS = [
    Case(130, 304, 8, 304, numbers="float8_e4m3fn"),
    Case(70, 100, 8, 40, scales="bfloat16", numbers="float8_e4m3fn"),
]


def randn(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(9)).to(dtype)


def rows_of(dtype: torch.dtype, inputs: int) -> Tensor:
    """70 rows, some of extreme numbers."""
    x = randn(dtype, 70, inputs)
    x[1:8] *= torch.tensor([0, 1e-39, 1e-35, 1e-20, 1e20, 1e30, 1e38], dtype=dtype)[:, None]
    x[8, inputs // 2] = 300.0
    x[9, inputs // 2] = torch.nan
    x[10, inputs // 2] = torch.inf
    x[11, -1] = -torch.inf
    x[12, : inputs // 2] = 0
    return x


def assert_same(found: Tensor, wanted: Tensor) -> None:
    """Bits, except those of NaN."""
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(3), wanted.nan_to_num(3))


@pytest.mark.parametrize("activation_bits", [16, 8])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_are_those_of_the_definition(
    dtype: torch.dtype, case: Case, activation_bits: int
) -> None:
    layer = random_layer(case, dtype, activation_bits=activation_bits)
    x = rows_of(dtype, case.inputs)
    wide = layer.products(x)
    assert_same(Linear([layer.packed])(x), wide.to(dtype))
    assert wide[9:12].isnan().all()
    assert wide[12:].isfinite().all()


@pytest.mark.parametrize("activation_bits", [16, 8])
@pytest.mark.parametrize("case", [CASES[2], CASES[3], FLOATS[1]], ids=str)
def test_a_row_does_not_depend_on_its_neighbours_or_threads(
    dtype: torch.dtype, case: Case, activation_bits: int
) -> None:
    layer = random_layer(case, dtype, activation_bits=activation_bits)
    if case in FLOATS:
        layer.packed.parameters["codes"].remainder_(127)  # type: ignore[union-attr]
    product, x = Linear([layer.packed]), randn(dtype, 600, case.inputs)
    whole = product(x)
    for threads in (1, 2):
        with several_threads(threads):
            for count in (*range(1, 14), 63, 64, 65, 257):
                assert torch.equal(product(x[-count:]), whole[-count:]), (threads, count)


def test_layers_of_several_forms_side_by_side(dtype: torch.dtype) -> None:
    """With biases and an added residual; outputs that fill no panel."""
    cases = [
        Case(70, 96, 4, 32, zero=8),
        Case(3, 96, 8, 96, zero=128),
        Case(130, 96, 8, 16, zero=32, scales="int8 float16"),
        Case(64, 96, 4, 32, offsets="float16"),
    ]
    layers = [
        random_layer(case, dtype, bias=seed != 1, seed=seed) for seed, case in enumerate(cases)
    ]
    joined = Linear([layer.packed for layer in layers])
    for count in (1, 2, 5, 70):
        x, parts = randn(dtype, count, 96), []
        for layer in layers:
            bias = layer.packed.parameters["bias"]
            wide = layer.products(x)
            parts.append((wide if bias is None else wide + bias.float()).to(dtype))
        wanted = torch.cat(parts, dim=1)
        assert torch.equal(joined(x), wanted)
        residual = randn(dtype, *wanted.shape)
        assert torch.equal(joined(x, residual), residual + wanted)


@pytest.mark.parametrize("kind", [k for k in LinearKind if k >= LinearKind.GATED_SILU])
def test_gated_layers(dtype: torch.dtype, kind: LinearKind) -> None:
    cases = [Case(70, 96, 4, 32, zero=8), Case(70, 96, 8, 96, zero=128)]
    layers = [random_layer(case, dtype, seed=seed) for seed, case in enumerate(cases)]
    for count in (1, 5, 66):
        x = randn(dtype, count, 96)
        gates, ups = (layer.products(x).to(dtype) for layer in layers)
        wanted = cpu.gate(gates, ups, kind)
        assert torch.equal(Linear([layer.packed for layer in layers], kind)(x), wanted)


def test_wide_outputs_are_the_rounded_numbers_in_float32(dtype: torch.dtype) -> None:
    layer = random_layer(CASES[0], dtype, bias=True)
    x = rows_of(dtype, 100)
    assert_same(Linear([layer.packed], LinearKind.WIDE)(x), Linear([layer.packed])(x).float())


def test_new_weights_are_used_wherever_they_are(dtype: torch.dtype) -> None:
    first, second = (random_layer(CASES[4], dtype, bias=True, seed=seed) for seed in (1, 2))
    product, x = Linear([first.packed]), randn(dtype, 2, 512)
    before = product(x)
    first.packed.parameters.update(second.packed.parameters)
    assert torch.equal(product(x), Linear([second.packed])(x))
    assert not torch.equal(product(x), before)


def test_products_are_near_those_of_the_unpacked_weight(dtype: torch.dtype) -> None:
    for case in [*CASES, *FLOATS]:
        layer, x = random_layer(case, dtype), randn(dtype, 5, case.inputs)
        # 127 and 255 are no numbers in e4m3.
        if case in FLOATS:
            layer.plain.codes.remainder_(127)
            layer.packed.parameters.update(pack_plain(case.form, layer.plain))  # type: ignore[arg-type]
        wanted = F.linear(x.double(), unpack_plain(case.form, layer.plain).double())
        bound = (2.0**-7 if dtype is torch.bfloat16 else 2.0**-19) * wanted.abs().max()
        assert (Linear([layer.packed])(x) - wanted).abs().max() <= bound, case


def test_each_floating_point_code_has_its_value(dtype: torch.dtype) -> None:
    """Those below the least normal number, zeros with sign and NaN too."""
    codes = torch.arange(256, dtype=torch.uint8).view(256, 1).repeat(1, 8)
    form = Codes(256, 8, 8, 8, numbers="float8_e4m3fn")
    plain = PlainCodes(codes, Scales(torch.ones(256, 1)))
    parameters = {**pack_plain(form, plain), "bias": None}
    product = Linear([Packed(parameters, 8, 256, form, dtype)])  # type: ignore[arg-type]
    for at in range(8):
        x = torch.zeros(1, 8, dtype=dtype)
        x[0, at] = 1
        wanted = codes[:, 0].view(torch.float8_e4m3fn).to(dtype)
        assert_same(product(x)[0], wanted)
