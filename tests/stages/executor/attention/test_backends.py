"""Our attention against a float64 reference with an explicit mask, over ragged batches.

Both algorithms: the usual one, and the tiles of deterministic mode. Largest difference allowed:
1e-5 in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nano_inference.config import ModelError
from nano_inference.stages.executor import KVCache, LoadedModel, batch
from nano_inference.stages.executor.attention import interface, tiled
from nano_inference.stages.executor.attention.interface import paged_attention
from nano_inference.stages.executor.attention.probe import LayerSpec
from nano_inference.stages.executor.attention.tiled import TiledBatch
from nano_inference.stages.executor.batch import (
    AttentionBatch,
    Rows,
    build_attention_batch,
    cut_chunks,
    flatten_rows,
    order_rows,
    slot_mapping,
)

MAX_ERROR = 1e-5


@dataclass(frozen=True)
class Case:
    """One layer's shape and one batch."""

    query_heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    value_dim: int = 16
    block_size: int = 4
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    rows: tuple[tuple[int, int], ...] = ((0, 5), (9, 1), (0, 1), (13, 6), (40, 1), (3, 1))
    """(tokens computed before, tokens of this step) each."""
    padding: int = 0
    """Further rows that belong to no sequence."""
    tiled: bool = False
    """The algorithm of deterministic mode."""


def layer_module(index: int = 0) -> nn.Module:
    module = nn.Module()
    module.layer_idx = index  # type: ignore[assignment]
    return module


def make_cache(case: Case, device: str, num_blocks: int) -> KVCache:
    spec = LayerSpec(case.kv_heads, case.dim, case.value_dim, case.window)
    config: Any = None
    model = LoadedModel(
        nn.Module(), config, torch.device(device), torch.float32, 4096, 16, (spec, spec)
    )
    return KVCache(model, num_blocks, case.block_size)


def reference(
    case: Case, start: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
) -> Tensor:
    """`[tokens, heads, value_dim]` in float64, from `[.., heads, dim]` of one whole sequence."""
    query, key, value = query.double(), key.double(), value.double()
    group = case.query_heads // case.kv_heads
    key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * 0.3
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    queries = torch.arange(start, start + len(query))[:, None]
    keys = torch.arange(len(key))[None]
    mask = keys <= queries
    if case.window is not None:
        mask &= keys > queries - case.window
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat((scores, column), dim=-1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :-1], value)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


@dataclass(frozen=True)
class Data:
    """A case's numbers: per row the queries of the step and the keys and values of all tokens."""

    sinks: Tensor | None
    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]


def make_data(case: Case, rows: list[tuple[int, int]], seed: int) -> Data:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return Data(
        sinks=randn(case.query_heads) if case.sinks else None,
        queries=[randn(count, case.query_heads, case.dim) * 2 for _, count in rows],
        keys=[randn(start + count, case.kv_heads, case.dim) for start, count in rows],
        values=[randn(start + count, case.kv_heads, case.value_dim) for start, count in rows],
    )


def deal_tables(case: Case, rows: list[tuple[int, int]], seed: int) -> tuple[np.ndarray, int]:
    """Block tables with blocks in random order, padding rows last, and the number of blocks."""
    per_row = [-(-(start + count) // case.block_size) for start, count in rows]
    num_blocks = sum(per_row) + 2
    deck = list(np.random.default_rng(seed).permutation(num_blocks))
    tables = np.zeros((len(rows) + case.padding, max(per_row)), np.int64)
    for row, count in enumerate(per_row):
        tables[row, :count] = [deck.pop() for _ in range(count)]
    tables[len(rows) :] = num_blocks
    return tables, num_blocks


def run_case(case: Case, device: str, seed: int = 0) -> float:
    """The largest difference from the reference."""
    rows = list(case.rows)
    padded = rows + [(0, 1)] * case.padding
    data = make_data(case, padded, seed)
    tables, num_blocks = deal_tables(case, rows, seed)
    cache = make_cache(case, device, num_blocks)
    assert cache.padding_block == num_blocks
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()  # what earlier sequences left behind
    for row, (start, _) in enumerate(rows):
        past = np.arange(start)
        slots = slot_mapping(tables, np.full(start, row), past, case.block_size)
        for tensor, source in ((cache.keys[1], data.keys), (cache.values[1], data.values)):
            tensor.view(-1, *tensor.shape[2:])[slots] = source[row][:start].to(device)

    starts, counts = np.array(padded).T
    order, num_decodes = order_rows(starts, counts)
    output = attend(
        case, cache, Rows(starts[order], counts[order], tables[order], num_decodes), data, order
    )
    error = 0.0
    for place, row in enumerate(order):
        if row < len(rows):
            expected = reference(
                case,
                int(starts[row]),
                data.queries[row],
                data.keys[row],
                data.values[row],
                data.sinks,
            )
            error = max(error, float((output[place].double() - expected).abs().max()))
    return error


def attend(case: Case, cache: KVCache, rows: Rows, data: Data, order: np.ndarray) -> list[Tensor]:
    """The output of each row, in batch order."""
    device = cache.keys[0].device
    row_of_token, positions = flatten_rows(rows.starts, rows.num_tokens)
    slots = slot_mapping(rows.tables, row_of_token, positions, case.block_size)
    step: AttentionBatch | TiledBatch
    if case.tiled:
        step = TiledBatch(torch.from_numpy(slots), rows, case.block_size)
    else:
        step = build_attention_batch(
            rows,
            *(torch.from_numpy(a).to(device) for a in (slots, rows.tables, rows.contexts)),
            block_size=case.block_size,
            kinds=[(case.window, case.kv_heads)],
            dtype=torch.float32,
        )

    def flat(parts: list[Tensor]) -> Tensor:
        cut = [parts[row][-count:] for row, count in zip(order, rows.num_tokens, strict=True)]
        return torch.cat(cut).transpose(0, 1)[None].to(device)

    output, weights = paged_attention(
        layer_module(1),
        flat(data.queries),
        flat(data.keys),
        flat(data.values),
        None,
        scaling=0.3,
        sliding_window=case.window,
        softcap=case.softcap,
        s_aux=None if data.sinks is None else data.sinks.to(device),
        attention_batch=step,
        kv_cache=cache,
    )
    assert weights is None
    assert output.shape == (1, len(positions), case.query_heads, case.value_dim)
    return list(output[0].cpu().split(rows.num_tokens.tolist()))


CASES = {
    "causal": Case(),
    "all_decode": Case(rows=((4, 1), (0, 1), (63, 1), (7, 1), (8, 1))),
    "all_prefill": Case(rows=((0, 9), (0, 2), (0, 4))),
    "chunks_behind_others": Case(rows=((7, 7), (14, 7), (1, 2), (3, 9))),
    "one_row": Case(rows=((5, 1),)),
    "padding": Case(padding=3),
    "window": Case(window=5),
    "window_wider_than_all": Case(window=500),
    "window_of_one": Case(window=1),
    "window_prefill": Case(window=3, rows=((0, 20), (6, 9), (2, 1), (31, 1))),
    "softcap": Case(softcap=2.0),
    "softcap_window": Case(softcap=2.0, window=6),
    "sinks": Case(sinks=True),
    "sinks_window": Case(sinks=True, window=6),
    "sinks_softcap": Case(sinks=True, softcap=3.0),
    "one_kv_head": Case(kv_heads=1),
    "as_many_kv_heads": Case(kv_heads=4),
    "blocks_of_one": Case(block_size=1),
    "blocks_of_sixteen": Case(block_size=16),
    "blocks_of_sixteen_window": Case(block_size=16, window=7),
    "narrow_values": Case(value_dim=8),
    "long": Case(rows=((0, 150), (130, 1), (60, 70), (63, 1), (64, 1))),
    "long_window": Case(window=70, rows=((0, 150), (130, 1), (60, 70), (200, 1))),
    "many_heads_per_kv_head": Case(query_heads=20, kv_heads=1, rows=((0, 5), (70, 1))),
    "odd_heads_per_kv_head": Case(query_heads=14, kv_heads=2, rows=((0, 5), (70, 1), (3, 2))),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_explicit_mask(name: str, device: str) -> None:
    assert run_case(CASES[name], device) < MAX_ERROR


@pytest.mark.parametrize("name", CASES)
def test_tiles_equal_the_explicit_mask(name: str) -> None:
    assert run_case(replace(CASES[name], tiled=True), "cpu") < MAX_ERROR


@settings(max_examples=60, deadline=None)
@given(
    kv_heads=st.sampled_from([1, 2, 4]),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.one_of(st.none(), st.integers(1, 40)),
    softcap=st.sampled_from([None, 1.5]),
    sinks=st.booleans(),
    rows=st.lists(
        st.tuples(st.integers(0, 60), st.one_of(st.just(1), st.integers(1, 20))),
        min_size=1,
        max_size=7,
    ),
    padding=st.integers(0, 2),
    tiled=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_random_ragged_batches(rows: list[tuple[int, int]], seed: int, **shape: Any) -> None:
    assert run_case(Case(rows=tuple(rows), **shape), "cpu", seed) < MAX_ERROR


def test_bounded_pieces_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long batches are cut to bound memory; here the bounds are so low that everything is cut."""
    monkeypatch.setattr(batch, "MAX_GATHERED_TOKENS", 16)
    monkeypatch.setattr(batch, "_SLACK_TOKENS", 0)
    monkeypatch.setattr(interface, "_MAX_SCORES", 64)
    monkeypatch.setattr(tiled, "_MAX_SCORES", 64)
    for name in ("causal", "all_decode", "window", "sinks_softcap", "padding", "long_window"):
        assert run_case(CASES[name], "cpu") < MAX_ERROR
        assert run_case(replace(CASES[name], tiled=True), "cpu") < MAX_ERROR


@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=60))
def test_chunks_cover_all_rows_once_and_are_bounded(lengths: list[int]) -> None:
    ordered = np.array(sorted(lengths, reverse=True))
    chunks = list(cut_chunks(ordered))
    assert [row for start, stop in chunks for row in range(start, stop)] == list(
        range(len(ordered))
    )
    for start, stop in chunks:
        longest, shortest = ordered[start], ordered[stop - 1]
        assert (stop - start) * longest <= batch.MAX_GATHERED_TOKENS or stop - start == 1
        assert longest <= 2 * shortest + 256


def test_layers_keep_their_own_cache(device: str) -> None:
    case = Case(rows=((0, 3),))
    cache = make_cache(case, device, 4)
    data = make_data(case, list(case.rows), 0)
    tables, _ = deal_tables(case, list(case.rows), 0)
    attend(case, cache, Rows(*np.array(case.rows).T, tables, 0), data, np.array([0]))
    assert not cache.keys[0].any()
    assert int(cache.keys[1].any(-1).any(-1).sum()) == 3


def test_copy_blocks_reads_all_sources_first(device: str) -> None:
    cache = make_cache(Case(), device, 5)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    before = [tensor.clone() for tensor in (*cache.keys, *cache.values)]
    cache.copy_blocks([(0, 3), (3, 4)])
    for tensor, old in zip((*cache.keys, *cache.values), before, strict=True):
        assert torch.equal(tensor, old[[0, 1, 2, 0, 3, 5]])
    cache.copy_blocks([])
    with pytest.raises(ValueError, match="out of range"):
        cache.copy_blocks([(0, 5)])


def test_a_call_without_a_batch_is_refused() -> None:
    heads = torch.zeros(1, 1, 1, 4)
    with pytest.raises(ModelError, match="attention_batch"):
        paged_attention(layer_module(), heads, heads, heads, None)
