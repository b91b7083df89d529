"""The Triton kernel for decode attention against the same in PyTorch.

On CUDA; elsewhere with TRITON_INTERPRET=1, where Triton is installed.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from nano_inference.stages.executor.runner.attention_options import AttentionOptions
from nano_inference.stages.executor.runner.batch import DecodeRows

from ...recorder import PlainPagedAttention

pytest.importorskip("triton", reason="Triton comes with PyTorch's CUDA builds only")

from nano_inference.stages.executor.runner.kernels.triton_decode import (
    TritonPagedAttention,
    count_splits,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (INTERPRETED or torch.cuda.is_available()), reason="there is no CUDA device"
    ),
]

DEVICE = "cpu" if INTERPRETED else "cuda"

SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {"heads": 14, "kv_heads": 2, "widths": (64, 64)},
    "one kv head": {"heads": 4, "kv_heads": 1, "widths": (8, 8), "block_size": 1},
    "odd widths": {"heads": 4, "kv_heads": 4, "widths": (24, 20), "block_size": 3},
    "window": {"heads": 4, "kv_heads": 2, "widths": (16, 16), "window": 9},
    "soft cap": {"heads": 4, "kv_heads": 2, "widths": (32, 32), "softcap": 5.0},
    "sinks": {"heads": 4, "kv_heads": 2, "widths": (32, 32), "sinks": True, "window": 70},
    "wide": {"heads": 8, "kv_heads": 1, "widths": (256, 256)},
}
CONTEXTS = (1, 9, 10, 64, 65, 300)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spare_blocks", [0, 40])
def test_the_kernel_is_attention(name: str, dtype: torch.dtype, spare_blocks: int) -> None:
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 as integers")
    shape = {"block_size": 16, "window": None, "softcap": None, "sinks": False, **SHAPES[name]}
    generator = torch.Generator().manual_seed(1)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(DEVICE, dtype)

    size, heads, kv_heads = shape["block_size"], shape["heads"], shape["kv_heads"]
    # More columns mean more splits, of which some are empty.
    width = -(-max(CONTEXTS) // size) + spare_blocks
    blocks = width * len(CONTEXTS)
    keys, values = (random(blocks + 1, size, kv_heads, each) for each in shape["widths"])
    tables = torch.randperm(blocks, generator=generator).view(-1, width).to(DEVICE)
    rows = DecodeRows(len(CONTEXTS), tables, torch.tensor(CONTEXTS, device=DEVICE))
    scale, sinks = shape["widths"][0] ** -0.5, random(heads) if shape["sinks"] else None
    options = AttentionOptions(scale, shape["window"], shape["softcap"], sinks)
    # Rows that lie apart, as they do where queries, keys and values come from one product.
    queries = random(len(CONTEXTS) + 2, heads + 3, shape["widths"][0])[:, :heads]
    queries_apart = queries.reshape(len(queries), -1).contiguous().view(queries.shape)
    found = TritonPagedAttention(keys, values, heads, options).decode(queries_apart, rows)
    as_float32 = options._replace(sinks=None if sinks is None else sinks.float())
    wanted = PlainPagedAttention(keys.float(), values.float(), heads, as_float32).decode(
        queries_apart.float(), rows
    )
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(found.float(), wanted, atol=tolerance, rtol=tolerance)


def test_keys_and_values_go_to_their_slots() -> None:
    keys, values = (torch.zeros(4, 2, 3, width, device=DEVICE) for width in (8, 4))
    layer = TritonPagedAttention(keys, values, 6, AttentionOptions(1.0))
    new = [torch.randn(2, 3, width, device=DEVICE) for width in (8, 4)]
    layer.store(*new, torch.tensor([5, 0], device=DEVICE))
    for cache, written in zip((keys, values), new, strict=True):
        assert cache[2, 1].equal(written[0])
        assert cache[0, 0].equal(written[1])
        assert int((cache != 0).any(-1).sum()) == 6


def test_small_batches_are_cut_into_more_splits() -> None:
    splits = [count_splits(programs, 8192) for programs in (1, 2, 16, 128, 2048)]
    assert splits == sorted(splits, reverse=True)
    assert splits[0] > 32
    assert splits[-1] == 1
    assert count_splits(1, 100) == 1
