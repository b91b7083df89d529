"""The Triton kernels for parts of decoder layers against the same in PyTorch.

On CUDA; elsewhere with TRITON_INTERPRET=1, where Triton is installed.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nano_inference.stages.executor.runner.kernels.cpu import LinearKind

pytest.importorskip("triton", reason="Triton comes with PyTorch's CUDA builds only")

from nano_inference.stages.executor.runner.kernels import triton_modules

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.bfloat16)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (INTERPRETED or torch.cuda.is_available()), reason="there is no CUDA device"
    ),
]


def random(*size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator).to(DEVICE, dtype)


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """`wanted` is in float32."""
    tolerance = 1e-5 if found.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.float(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("shape", [(5, 96), (1, 3, 64), (7, 4, 32)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...], shifted: bool) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(random(shape[-1], dtype=dtype, seed=1))
    # Rows that lie apart, as the heads of queries beside keys and values.
    apart = random(*shape[:-2], shape[-2] + 2, shape[-1], dtype=dtype)
    for rows in (apart[..., : shape[-2], :], random(*shape, dtype=dtype)):
        wanted = F.rms_norm(rows.float(), shape[-1:], eps=1e-6)
        factor = module.weight.detach().float()
        found = triton_modules.RMSNorm(module, 1e-6, shifted=shifted)(rows)
        assert_near(found, wanted * (1 + factor if shifted else factor))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 3, 14])
def test_rotate(dtype: torch.dtype, heads: int) -> None:
    width = 96
    rows = random(5, (heads + 1) * width, dtype=dtype)
    angles = random(5, width, dtype=torch.float32, seed=1)
    cos, sin = (each.to(dtype) for each in (angles.cos(), angles.sin()))
    x = rows.float().view(5, heads + 1, width)
    low, high = x.chunk(2, -1)
    turned = x * cos[:, None].float() + torch.cat((-high, low), -1) * sin[:, None].float()
    wanted = torch.cat((turned[:, :heads], x[:, heads:]), 1)
    triton_modules.rotate(rows, heads, cos, sin)
    assert_near(rows, wanted.view(5, -1))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [LinearKind.GATED_SILU, LinearKind.GATED_TANH_GELU])
def test_gate(dtype: torch.dtype, kind: LinearKind) -> None:
    # Rows of more than one block, beside one another.
    gates, ups = (3 * random(7, 2600, dtype=dtype)).chunk(2, 1)
    x = gates.float()
    activated = F.silu(x) if kind == LinearKind.GATED_SILU else F.gelu(x, approximate="tanh")
    wanted = activated * ups.float()
    found = triton_modules.gate(gates, ups, kind)
    torch.testing.assert_close(
        found.float(), wanted, atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 2e-2
    )
