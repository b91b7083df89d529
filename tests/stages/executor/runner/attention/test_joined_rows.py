"""Rows that attend in one call: the back ends' contract, with PyTorch's call by its definition."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from nano_inference.stages.executor.runner.attention import joined_rows
from nano_inference.stages.executor.runner.attention.paged import PagedBackend
from nano_inference.stages.executor.runner.batch import Uploader

from ...recorder import PlainPagedAttention
from .test_backends import Case, Subject, run_case

CASES = {
    "whole prompts": Case(rows=((0, 5), (0, 2), (7, 1), (0, 9))),
    "behind prefixes": Case(rows=((9, 5), (4, 2), (7, 1), (16, 3))),
    "both": Case(rows=((0, 5), (9, 4), (0, 3), (3, 1), (13, 6), (8, 2))),
    "one chunk": Case(rows=((9, 5), (7, 1))),
    "window": Case(window=5, rows=((0, 12), (9, 3), (17, 6), (40, 1), (2, 2))),
    "window of one": Case(window=1, rows=((0, 3), (9, 3))),
    "window wider than all": Case(window=500, rows=((0, 12), (9, 3))),
    "shared heads": Case(query_heads=20, kv_heads=1, rows=((0, 5), (70, 9))),
    "own heads": Case(query_heads=3, kv_heads=3, block_size=1, rows=((2, 5), (6, 2))),
    "chunks, one by one": Case(chunk=5, rows=((0, 12), (9, 4), (13, 6))),
}


def defined(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    """`varlen_attn`, one sequence after the other; its masks are aligned at the last key."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert window_size[1] == 0
    key, value = (
        each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value)
    )
    output = torch.empty_like(query)
    limits = (zip(each.tolist(), each.tolist()[1:], strict=False) for each in (cu_seq_q, cu_seq_k))
    for (first, last), (low, high) in zip(*limits, strict=True):
        assert last - first <= max_q
        assert high - low <= max_k
        scores = torch.einsum("qhd,khd->hqk", query[first:last], key[low:high]) * scale
        places = torch.arange(last - first)[:, None] + (high - low) - (last - first)
        keys = torch.arange(high - low)
        hidden = keys > places
        if window_size[0] >= 0:
            hidden |= keys < places - window_size[0]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        output[first:last] = torch.einsum("hqk,khd->qhd", weights, value[low:high])
    return output


@pytest.mark.parametrize("most", [1 << 16, 20])
@pytest.mark.parametrize("name", CASES)
def test_joined_rows_attend_as_each_alone(
    name: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counted(*args: Any, **options: Any) -> Tensor:
        calls.append(len(args[3]) - 1)
        return defined(*args, **options)

    def make(model: Any, block_size: int) -> PagedBackend:
        backend = PagedBackend(model, block_size, PlainPagedAttention)
        backend._lay_out = partial(joined_rows.join_rows, Uploader(model.device))
        return backend

    monkeypatch.setattr(joined_rows, "varlen_attn", counted)
    monkeypatch.setattr(joined_rows, "MAX_GATHERED_TOKENS", most)
    case = CASES[name]
    assert run_case(case, Subject(make)) <= 1
    rows = sum(count > 1 for _, count in case.rows)
    if case.chunk is not None:
        assert not calls
    elif most > 20:
        assert calls == [rows], "one call"
    else:
        assert sum(calls) == rows
