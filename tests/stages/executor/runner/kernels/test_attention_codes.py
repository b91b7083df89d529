"""Attention over keys and values that are kept as codes, with each library of kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from nano_inference.stages.executor.runner.attention_options import AttentionOptions
from nano_inference.stages.executor.runner.batch import DecodeRows
from nano_inference.stages.executor.runner.kernels.cpu import PagedAttention
from nano_inference.stages.executor.runner.kv_codes import pack, unpack
from nano_inference.stages.executor.runner.loaded_model import SCALES

from .test_cpu import dtype as dtype
from .test_cpu import inference as inference
from .test_cpu import randn

HEADS, GROUP, WIDTH, BLOCKS, SIZE = 2, 3, 48, 30, 8
OPTIONS = AttentionOptions(0.2, softcap=20.0)


@pytest.fixture(params=[torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
def codes(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    return request.param


def kernel_of(
    codes: torch.dtype, dtype: torch.dtype
) -> tuple[PagedAttention, list[Tensor], list[Tensor]]:
    """A kernel, its codes of keys and values, and their scales."""
    kept = [torch.zeros(BLOCKS, SIZE, HEADS, WIDTH, dtype=codes) for _ in range(2)]
    scales = [torch.zeros(BLOCKS, SIZE, HEADS, dtype=SCALES) for _ in range(2)]
    kernel = PagedAttention(*kept, HEADS * GROUP, OPTIONS, scales=scales, dtype=dtype)
    return kernel, kept, scales


def varied(dtype: torch.dtype, seed: int) -> Tensor:
    """Heads of all magnitudes, and in each numbers of many."""
    tokens = BLOCKS * SIZE
    numbers = randn(dtype, tokens, HEADS, WIDTH, seed=seed).float()
    numbers *= torch.exp2(torch.arange(tokens) % 120 - 60.0)[:, None, None]
    numbers[: tokens // 2] *= torch.exp2(-(torch.arange(WIDTH) % 12.0))
    numbers[0] = 0.0
    numbers[1] *= 2.0**-40
    numbers[2] = numbers[2].sign() * torch.finfo(dtype).max
    return numbers.to(dtype)


def test_the_kernel_keeps_the_codes_and_scales_of_torch(
    dtype: torch.dtype, codes: torch.dtype
) -> None:
    kernel, kept, scales = kernel_of(codes, dtype)
    given = varied(dtype, 1), varied(dtype, 2)
    kernel.store(*given, torch.arange(BLOCKS * SIZE))
    for numbers, found, found_scales in zip(given, kept, scales, strict=True):
        wanted, wanted_scales = pack(numbers, codes)
        assert torch.equal(found_scales.view(-1, HEADS), wanted_scales)
        assert torch.equal(found.view(torch.uint8).view_as(wanted), wanted.view(torch.uint8))


def test_attention_over_codes_has_the_bits_of_attention_over_the_numbers_that_they_stand_for(
    dtype: torch.dtype, codes: torch.dtype
) -> None:
    kernel, kept, scales = kernel_of(codes, dtype)
    tokens = BLOCKS * SIZE
    given = [randn(dtype, tokens, HEADS, WIDTH, seed=seed) for seed in (1, 2)]
    kernel.store(given[0], given[1], torch.arange(tokens))
    numbers = [unpack(*each, dtype) for each in zip(kept, scales, strict=True)]
    plain = PagedAttention(numbers[0], numbers[1], HEADS * GROUP, OPTIONS)
    contexts = torch.tensor([200, 131, 64, 17, 1])
    tables = torch.randperm(BLOCKS).repeat(len(contexts), 1)
    rows = DecodeRows(len(contexts), tables, contexts)
    queries = randn(dtype, len(contexts), HEADS * GROUP, WIDTH, seed=3)
    found = kernel.decode(queries, rows)
    assert found.isfinite().all()
    assert torch.equal(found, plain.decode(queries, rows))


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_makes_its_head_nan(
    dtype: torch.dtype, codes: torch.dtype, broken: float
) -> None:
    kernel, kept, scales = kernel_of(codes, dtype)
    numbers = randn(dtype, 3, HEADS, WIDTH)
    numbers[1, 0, 20] = broken
    kernel.store(numbers, numbers, torch.arange(3))
    for own, own_scales in ((kept[0][0, :3], scales[0][0, :3]), pack(numbers, codes)):
        wrong = unpack(own, own_scales, dtype).isnan()
        assert wrong[1, 0].all()
        assert int(wrong.sum()) == WIDTH
