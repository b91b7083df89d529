"""The Triton kernels for codes against the unpacked weights.

On CUDA; elsewhere with TRITON_INTERPRET=1, where Triton is installed (`test_interpreted.py`).
"""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn import functional as F

from nano_inference.stages.executor.runner.kernels.codes import (
    Codes,
    PlainCodes,
    Scales,
    pack_plain,
    unpack_plain,
)
from nano_inference.stages.executor.runner.linear.quantized import QuantizedLinear
from nano_inference.stages.executor.runner.linear.rounding import Rounding, round_weight

pytest.importorskip("triton", reason="Triton comes with PyTorch's CUDA builds only")

from nano_inference.stages.executor.runner.kernels import triton_quantized

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter multiplies the bits of bfloat16 as integers.
DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.bfloat16)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (INTERPRETED or torch.cuda.is_available()), reason="there is no CUDA device"
    ),
]


def random(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def bytes_of(*size: int, most: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, most + 1, size, dtype=torch.uint8, generator=generator)


def rounded(
    bits: int, group: int, outputs: int, inputs: int, *, zero_points: bool
) -> QuantizedLinear:
    rounding = Rounding(bits, group, zero_points)  # type: ignore[arg-type]
    form, tensors = round_weight(random(outputs, inputs, seed=1), rounding)
    return QuantizedLinear(form, tensors, random(outputs, seed=2), dtype=torch.float32).to(DEVICE)


def of_format(name: str) -> QuantizedLinear:
    """A layer in a form that is read from files, of 70 outputs and 256 inputs."""
    outputs, inputs = 70, 256
    halves = (random(outputs, inputs // 32, seed=3).abs() * 0.1 + 0.01).half()
    few = bytes_of(outputs, inputs, most=15)
    if name == "exponents and a table":
        table = (0, 1, 2, 3, 4, 6, 8, 12, 12, 11, 10, 9, 8, 6, 4, 0)
        form = Codes(outputs, inputs, 4, 32, zero=12, table=table)
        scales = Scales(bytes_of(outputs, inputs // 32, most=3) + 121)
        plain = PlainCodes(few, scales)
    elif name == "multiples":
        form = Codes(outputs, inputs, 4, 32)
        factors = halves[:, :1] * 0.1
        scales = Scales(bytes_of(outputs, 8, most=63).to(torch.int8), factors)
        offsets = Scales(bytes_of(outputs, 8, most=63, seed=5).to(torch.int8), factors)
        plain = PlainCodes(few, scales, offsets)
    else:
        form = Codes(outputs, inputs, 8, 16, zero=32)
        factors = halves[:, :1]
        scales = Scales(bytes_of(outputs, 16, most=100).to(torch.int8) - 50, factors)
        plain = PlainCodes(bytes_of(outputs, inputs, most=63), scales)
    assert unpack_plain(form, plain).isfinite().all()
    return QuantizedLinear(form, pack_plain(form, plain), dtype=torch.float32).to(DEVICE)


LAYERS = {
    "int8": lambda: rounded(8, 0, 100, 200, zero_points=False),
    "int8 of odd sizes": lambda: rounded(8, 0, 65, 37, zero_points=False),
    "int8 in groups with zero points": lambda: rounded(8, 64, 64, 192, zero_points=True),
    "int4": lambda: rounded(4, 32, 130, 96, zero_points=False),
    "int4 of odd sizes with zero points": lambda: rounded(4, 64, 3, 150, zero_points=True),
    **{
        name: lambda name=name: of_format(name)
        for name in ("exponents and a table", "multiples", "multiples of 8 bits")
    },
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_the_unpacked_weights(name: str, dtype: torch.dtype) -> None:
    layer = LAYERS[name]()
    layer.dtype = dtype
    if layer.bias is not None:
        layer.bias.data = layer.bias.data.to(dtype)
    packed = layer.pack()
    assert packed is not None
    bias = None if layer.bias is None else layer.bias.float()
    # Few rows and many, and rows that lie apart.
    apart = random(70, layer.inputs + 3).to(DEVICE, dtype)[:, : layer.inputs]
    for rows in (apart[:1], apart[:5], apart):
        wanted = F.linear(rows.float(), layer.unpacked().float(), bias)
        for wide in (False, True):
            found = triton_quantized.Linear(packed, wide=wide)(rows)
            assert found.dtype is (torch.float32 if wide else dtype)
            tolerance = 1e-5 if dtype is torch.float32 else 1e-3 if wide else 1e-2
            near = tolerance * float(wanted.abs().max())
            torch.testing.assert_close(found.float(), wanted, atol=near, rtol=tolerance)


def test_a_residual_is_added() -> None:
    packed = LAYERS["int4"]().pack()
    assert packed is not None
    rows, residual = random(3, packed.inputs).to(DEVICE), random(3, packed.outputs).to(DEVICE)
    product = triton_quantized.Linear(packed)
    assert product(rows, residual).equal(residual + product(rows))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_row_has_the_same_bits_in_any_batch(name: str) -> None:
    packed = LAYERS[name]().pack()
    assert packed is not None
    product, rows = triton_quantized.Linear(packed), random(16, packed.inputs).to(DEVICE)
    together = product(rows)
    for at in (0, 7, 15):
        assert product(rows[at : at + 1]).equal(together[at : at + 1])


@pytest.mark.parametrize("name", LAYERS)
def test_embeddings_are_rows_of_the_unpacked_weights(name: str) -> None:
    layer = LAYERS[name]()
    ids = torch.tensor([[0, 2], [layer.outputs - 1, 1]], device=DEVICE)
    rows = triton_quantized.Embedding(layer._parameters, layer.form, torch.float32)(ids)
    assert rows.equal(layer.unpacked()[ids])
