"""The contract of attention: every back end against a float64 reference with an explicit mask.

Ragged batches over a cache full of what earlier sequences left behind. Largest difference allowed:
1e-5 in float32. In bfloat16 the kernel for CPU gets the roundings of its numbers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nano_inference.config import ModelError
from nano_inference.stages.executor import KVCache, LoadedModel
from nano_inference.stages.executor.runner.attention import gather, tiled
from nano_inference.stages.executor.runner.attention.backend import QKV, AttentionBackend
from nano_inference.stages.executor.runner.attention.gather import GatherBackend, cut_chunks
from nano_inference.stages.executor.runner.attention.interface import paged_attention
from nano_inference.stages.executor.runner.attention.paged import CpuBackend, PagedBackend
from nano_inference.stages.executor.runner.attention.tiled import TiledBackend
from nano_inference.stages.executor.runner.attention_options import AttentionOptions
from nano_inference.stages.executor.runner.batch import Rows, order_rows
from nano_inference.stages.executor.runner.kernels.cpu import PagedAttention
from nano_inference.stages.executor.runner.kv_codes import pack, unpack
from nano_inference.stages.executor.runner.loaded_model import Dtypes, LayerSpec

from ...recorder import PlainPagedAttention
from ...refusals import needs_kernels

BF16 = torch.bfloat16

MAX_ERROR = 1e-5


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class Subject:
    """A back end to be held to the contract, and where it runs.

    Attributes:
        rounding: The tolerance in bfloat16, relative to the largest number: the kernel rounds
            its results, PyTorch's products the scores too.
        codes: As of LayerSpec; the reference then takes the numbers that are kept.
    """

    make: Callable[[LoadedModel, int], AttentionBackend[Any]]
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    rounding: float = 0.0
    codes: torch.dtype | None = None

    def as_kept(self, numbers: Tensor) -> Tensor:
        """Keys or values as attention is to read them from the cache."""
        if self.codes is None:
            return numbers
        return unpack(*pack(numbers, self.codes), self.dtype)


def triton_backend(model: LoadedModel, block_size: int) -> AttentionBackend[Any]:
    from nano_inference.stages.executor.runner.kernels.triton_decode import TritonPagedAttention

    return PagedBackend(model, block_size, TritonPagedAttention)


SUBJECTS = {
    "gather": Subject(GatherBackend),
    "gather on CUDA": Subject(GatherBackend, "cuda"),
    "paged": Subject(lambda model, size: PagedBackend(model, size, PlainPagedAttention)),
    "CPU kernel": Subject(CpuBackend),
    "CPU kernel, bfloat16": Subject(CpuBackend, dtype=BF16, rounding=2**-7),
    "Triton": Subject(triton_backend, "cpu" if INTERPRETED else "cuda"),
    "tiled": Subject(lambda model, size: TiledBackend(size)),
    "gather, int8": Subject(GatherBackend, codes=torch.int8),
    "tiled, fp8": Subject(lambda model, size: TiledBackend(size), codes=torch.float8_e4m3fn),
    "CPU kernel, int8": Subject(CpuBackend, codes=torch.int8),
    "CPU kernel, bfloat16, fp8": Subject(
        CpuBackend, dtype=BF16, rounding=2**-7, codes=torch.float8_e4m3fn
    ),
}


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.gpu if subject.device == "cuda" else ())
        for name, subject in SUBJECTS.items()
    ]
)
def subject(request: pytest.FixtureRequest) -> Subject:
    found = SUBJECTS[request.param]
    if request.param == "Triton" and find_spec("triton") is None:
        pytest.skip("Triton comes with PyTorch's CUDA builds only")
    if found.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    if found.make is CpuBackend:
        needs_kernels(found.dtype)
    return found


@dataclass(frozen=True)
class Case:
    """One layer's shape and one batch."""

    query_heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    value_dim: int = 16
    block_size: int = 4
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False
    rows: tuple[tuple[int, int], ...] = ((0, 5), (9, 1), (0, 1), (13, 6), (40, 1), (3, 1))
    """(tokens computed before, tokens of this step) each."""
    padding: int = 0
    """Further rows that belong to no sequence."""


def layer_module(index: int = 0) -> nn.Module:
    module = nn.Module()
    module.layer_idx = index  # type: ignore[assignment]
    return module


def make_model(case: Case, subject: Subject) -> LoadedModel:
    """Two layers of the case's kind; there is no module."""
    shape = case.kv_heads, case.dim, case.value_dim
    spec = LayerSpec(*shape, case.window, case.chunk, codes=subject.codes)
    config: Any = None
    device = torch.device(subject.device)
    return LoadedModel(
        nn.Module(),
        config,
        device,
        Dtypes.of(subject.dtype),
        4096,
        16,
        (spec, spec),
        layer_indices=(0, 1),
    )


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
    if case.chunk is not None:
        mask &= keys // case.chunk == queries // case.chunk
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


def make_data(case: Case, rows: list[tuple[int, int]], seed: int, dtype: torch.dtype) -> Data:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

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


@torch.inference_mode()
def run_case(case: Case, subject: Subject, seed: int = 0) -> float:
    """The largest difference from the reference, as a share of the tolerance."""
    rows = list(case.rows)
    padded = rows + [(0, 1)] * case.padding
    data = make_data(case, padded, seed, subject.dtype)
    tables, num_blocks = deal_tables(case, rows, seed)
    model = make_model(case, subject)
    cache = KVCache(model, num_blocks, case.block_size)
    assert cache.padding_block == num_blocks
    for tensor in cache.in_blocks:  # what earlier sequences left behind
        if tensor.itemsize == 1:
            tensor.view(torch.uint8).random_(0, 127)
        else:
            tensor.normal_()
    for row, (start, _) in enumerate(rows):
        past = Rows(np.array([0]), np.array([start]), tables[row : row + 1], 0)
        slots = torch.from_numpy(past.slots(case.block_size))
        new = (part[row][:start] for part in (data.keys, data.values))
        cache.store(1, *(part.to(subject.device) for part in (*new, slots)))

    starts, counts = np.array(padded).T
    order, num_decodes = order_rows(starts, counts)
    step = Rows(starts[order], counts[order], tables[order], num_decodes)
    output = attend(case, subject.make(model, case.block_size), cache, step, data, order)
    error = 0.0
    for found, row in zip(output, order, strict=True):
        if row < len(rows):
            kept = map(subject.as_kept, (data.keys[row], data.values[row]))
            own = (data.queries[row], *kept)
            expected = reference(case, int(starts[row]), *own, data.sinks)
            allowed = max(MAX_ERROR, subject.rounding * float(expected.abs().max()))
            error = max(error, float((found.double() - expected).abs().max() / allowed))
    return error


def attend(
    case: Case,
    backend: AttentionBackend[Any],
    cache: KVCache,
    rows: Rows,
    data: Data,
    order: np.ndarray,
) -> list[Tensor]:
    """The output of each row, in batch order."""
    device = cache.keys[0].device
    layout = (rows.slots(case.block_size), rows.tables, rows.contexts)

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
        attention_backend=backend,
        attention_batch=backend.prepare(rows, *(torch.from_numpy(a).to(device) for a in layout)),
        kv_cache=cache,
    )
    assert weights is None
    assert output.shape == (1, rows.num_tokens.sum(), case.query_heads, case.value_dim)
    assert output.dtype == data.queries[0].dtype
    return list(output[0].cpu().split(rows.num_tokens.tolist()))


# Beside those that the random batches have.
CASES = {
    "causal": Case(),
    "all_decode": Case(rows=((4, 1), (0, 1), (63, 1), (7, 1), (8, 1))),
    "padding": Case(padding=3),
    "window": Case(window=5),
    "window_wider_than_all": Case(window=500),
    "chunks": Case(chunk=5, rows=((0, 12), (9, 1), (10, 1), (13, 6), (40, 1), (3, 1))),
    "chunk_longer_than_all": Case(chunk=500),
    "sinks_softcap": Case(sinks=True, softcap=3.0),
    "narrow_values": Case(value_dim=8),
    "long": Case(rows=((0, 150), (130, 1), (60, 70), (63, 1), (64, 1))),
    "long_window": Case(window=70, rows=((0, 150), (130, 1), (60, 70), (200, 1))),
    "long_chunks": Case(chunk=70, rows=((0, 150), (139, 1), (140, 1), (60, 70), (200, 1))),
    "many_heads_per_kv_head": Case(query_heads=20, kv_heads=1, rows=((0, 5), (70, 1))),
    "odd_heads_per_kv_head": Case(query_heads=14, kv_heads=2, rows=((0, 5), (70, 1), (3, 2))),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_explicit_mask(name: str, subject: Subject) -> None:
    case = CASES[name]
    if subject.make is CpuBackend and not PagedAttention.handles(case.dim, case.value_dim):
        pytest.skip("not for heads of this width, which get another back end")
    assert run_case(case, subject) < 1


@pytest.mark.soak
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kv_heads=st.sampled_from([1, 2, 4]),
    block_size=st.sampled_from([1, 4, 16]),
    span=st.one_of(
        st.just({}),
        *(st.fixed_dictionaries({each: st.integers(1, 40)}) for each in ("window", "chunk")),
    ),
    softcap=st.sampled_from([None, 1.5]),
    sinks=st.booleans(),
    rows=st.lists(
        st.tuples(st.integers(0, 60), st.one_of(st.just(1), st.integers(1, 20))),
        min_size=1,
        max_size=7,
    ),
    padding=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_random_ragged_batches(
    subject: Subject, rows: list[tuple[int, int]], seed: int, span: dict[str, int], **shape: Any
) -> None:
    assert run_case(Case(rows=tuple(rows), **shape, **span), subject, seed) < 1


def test_bounded_chunks_give_the_same_result(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long batches are cut to bound memory; here the bounds are so low that everything is cut."""
    monkeypatch.setattr(gather, "MAX_GATHERED_TOKENS", 16)
    monkeypatch.setattr(gather, "_SLACK_TOKENS", 0)
    monkeypatch.setattr(gather, "_MAX_SCORES", 64)
    monkeypatch.setattr(tiled, "_MAX_SCORES", 64)
    for name in (
        "causal",
        "all_decode",
        "window",
        "sinks_softcap",
        "padding",
        "long_window",
        "long_chunks",
    ):
        assert run_case(CASES[name], subject) < 1


def test_a_prepared_step_is_good_for_every_layer_and_they_keep_their_own_cache(
    subject: Subject,
) -> None:
    case = Case(rows=((0, 3),))
    model, rows = make_model(case, subject), list(case.rows)
    cache, backend = KVCache(model, 4, case.block_size), subject.make(model, case.block_size)
    data = make_data(case, rows, 0, subject.dtype)
    tables, _ = deal_tables(case, rows, 0)
    step = Rows(np.array([0]), np.array([3]), tables, 0)
    layout = (step.slots(case.block_size), step.tables, step.contexts)
    batch = backend.prepare(step, *(torch.from_numpy(a).to(subject.device) for a in layout))
    qkv = QKV(*(part[0].to(subject.device) for part in (data.queries, data.keys, data.values)))
    options = AttentionOptions(0.3)
    first = backend.forward(batch, cache, 1, qkv, options)
    untouched, written = (keys.view(torch.uint8) for keys in cache.keys)
    assert not untouched.any()
    assert int(written.any(-1).any(-1).sum()) == 3
    assert torch.equal(backend.forward(batch, cache, 0, qkv, options), first)


@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=60))
def test_chunks_cover_all_rows_once_and_are_bounded(lengths: list[int]) -> None:
    ordered = np.array(sorted(lengths, reverse=True))
    chunks = list(cut_chunks(ordered))
    assert [row for start, stop in chunks for row in range(start, stop)] == list(
        range(len(ordered))
    )
    for start, stop in chunks:
        longest, shortest = ordered[start], ordered[stop - 1]
        assert (stop - start) * longest <= gather.MAX_GATHERED_TOKENS or stop - start == 1
        assert longest <= 2 * shortest + 256


def test_a_call_without_a_back_end_is_refused() -> None:
    heads = torch.zeros(1, 1, 1, 4)
    with pytest.raises(ModelError, match="attention_backend"):
        paged_attention(layer_module(), heads, heads, heads, None)
