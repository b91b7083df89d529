"""Each kernel against torch, on shapes that leave a rest in every loop."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nano_inference.stages.executor.driver.grammar_masks import TokenMasks
from nano_inference.stages.executor.runner.attention_options import AttentionOptions
from nano_inference.stages.executor.runner.batch import DecodeRows, IntArray
from nano_inference.stages.executor.runner.kernels import cpu
from nano_inference.stages.executor.runner.kernels.compile import (
    BFLOAT16,
    BFLOAT16_AVX2,
    FLOAT32,
    FLOAT32_AVX2,
    TILES,
)
from nano_inference.stages.executor.runner.kernels.cpu import Linear, LinearKind, PagedAttention
from nano_inference.stages.executor.runner.kernels.heads import head_products
from nano_inference.stages.executor.runner.linear.dense import pack_dense

from .....soaking import in_soak
from ...recorder import PlainPagedAttention
from ...refusals import needs_kernels
from ...threads import several_threads

ROUNDING = {torch.bfloat16: 2.0**-7, torch.float32: 2.0**-19}
"""Relative to the largest number: two roundings to bfloat16, and what sums in another order make of
float32."""


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    needs_kernels()
    with torch.inference_mode():
        yield


@pytest.fixture(
    params=[
        (torch.bfloat16, TILES),
        (torch.bfloat16, BFLOAT16),
        (torch.bfloat16, BFLOAT16_AVX2),
        (torch.float32, FLOAT32),
        (torch.float32, FLOAT32_AVX2),
    ],
    ids=lambda param: param[1].define.lower().replace(" ", "-"),
)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.dtype]:
    """That of one of the libraries, which is used then."""
    found, one = request.param
    monkeypatch.setitem(cpu.LIBRARIES, found, (one,))
    cpu.library.cache_clear()
    cpu._chosen.cache_clear()
    try:
        needs_kernels(found)
        yield found
    finally:
        cpu.library.cache_clear()
        cpu._chosen.cache_clear()


def randn(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer(dtype: torch.dtype, inputs: int, outputs: int, *, bias: bool, seed: int) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    made.weight.data = randn(dtype, outputs, inputs, seed=seed) / inputs**0.5
    if bias:
        made.bias.data = randn(dtype, outputs, seed=seed + 1)
    return made


def joined(layers: Sequence[nn.Linear], kind: LinearKind = LinearKind.PLAIN) -> Linear:
    packed = [pack_dense(each) for each in layers]
    return Linear([each for each in packed if each is not None], kind)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    bound = ROUNDING[found.dtype] * wanted.abs().max()
    assert (found.float() - wanted.float()).abs().max() <= bound


SIZES = [(896, 1152), (100, 37), (33, 16), (31, 5), (1, 1), (4864, 50)]
ROWS = (1, 2, 3, 4, 5, 6, 7, 16, 18, 33, 64, 155)
# Every day one size with a rest in every loop has nearly all numbers of rows, and the others two.
EVERY_DAY = {(100, 37): {1, 2, 3, 5, 7, 16, 33, 155}}
CASES = [
    (size, rows) if rows in EVERY_DAY.get(size, (1, 33)) else in_soak(size, rows)
    for size in SIZES
    for rows in ROWS
]


@pytest.mark.parametrize(("size", "rows"), [((100, 37), 0), *CASES])
def test_linear_layers_side_by_side(dtype: torch.dtype, size: tuple[int, int], rows: int) -> None:
    inputs, outputs = size
    layers = [
        layer(dtype, inputs, outputs, bias=True, seed=1),
        layer(dtype, inputs, 3, bias=False, seed=3),
        layer(dtype, inputs, outputs + 20, bias=True, seed=5),
    ]
    x = randn(dtype, rows, inputs, seed=7)
    wanted = torch.cat([F.linear(x.float(), each.weight.float()) for each in layers], dim=1)
    wanted[:, :outputs] += layers[0].bias
    wanted[:, outputs + 3 :] += layers[2].bias
    if rows:
        assert_close(joined(layers)(x), wanted)
    else:
        assert joined(layers)(x).shape == wanted.shape


@pytest.mark.parametrize(("size", "rows"), CASES)
def test_gated_layers(dtype: torch.dtype, size: tuple[int, int], rows: int) -> None:
    inputs, outputs = size
    gate, up = (layer(dtype, inputs, outputs, bias=False, seed=seed) for seed in (1, 2))
    x = randn(dtype, rows, inputs, seed=3) * 3
    for kind, activated in (
        (LinearKind.GATED_SILU, F.silu(gate(x))),
        (LinearKind.GATED_TANH_GELU, F.gelu(gate(x), approximate="tanh")),
    ):
        assert_close(joined([gate, up], kind)(x), activated * up(x))
        assert_close(cpu.gate(gate(x), up(x), kind), activated * up(x))


def test_a_residual_is_added_after_rounding(dtype: torch.dtype) -> None:
    made = layer(dtype, 96, 50, bias=True, seed=1)
    for rows in ROWS:
        x, residual = randn(dtype, rows, 96, seed=2), randn(dtype, rows, 50, seed=3)
        plain = joined([made])(x)
        assert torch.equal(joined([made])(x, residual), residual + plain), rows


@pytest.mark.parametrize("kind", list(LinearKind))
@pytest.mark.parametrize("inputs", [64, 70, 896])
def test_a_row_of_a_product_does_not_depend_on_its_neighbours(
    dtype: torch.dtype, kind: LinearKind, inputs: int
) -> None:
    layers = [layer(dtype, inputs, 45, bias=False, seed=seed) for seed in (1, 2)]
    fast = joined(layers, kind)
    x = randn(dtype, 640, inputs, seed=3)
    picked = [*range(12), *range(12, 640, 17)]
    alone = torch.cat([fast(x[row : row + 1]) for row in picked])
    for count in (2, 3, 4, 6, 11, 64, 67, 640):
        compared = [row for row in picked if row < count]
        assert torch.equal(fast(x[:count])[compared], alone[: len(compared)]), count


def test_wide_outputs_are_the_rounded_numbers_in_float32(dtype: torch.dtype) -> None:
    made = layer(dtype, 100, 70, bias=False, seed=1)
    x = randn(dtype, 5, 100, seed=2)
    wide = joined([made], LinearKind.WIDE)(x)
    assert wide.dtype == torch.float32
    assert torch.equal(wide, joined([made])(x).float())


def test_new_weights_are_used_wherever_they_are(dtype: torch.dtype) -> None:
    made = layer(dtype, 64, 32, bias=True, seed=1)
    fast = joined([made])
    x = randn(dtype, 2, 64, seed=2)
    fast(x)
    made.weight.data.copy_(randn(dtype, 32, 64, seed=3) / 8)
    assert_close(fast(x), made(x))
    made.weight = nn.Parameter(randn(dtype, 32, 64, seed=4) / 8)
    made.bias.data = randn(dtype, 32, seed=5)
    assert_close(fast(x), made(x))


def test_nan_and_infinity_are_copied(dtype: torch.dtype) -> None:
    made = layer(dtype, 64, 8, bias=False, seed=1)
    made.weight.data[3, 5] = float("nan")
    assert joined([made])(randn(dtype, 1, 64))[0].isnan().tolist() == [i == 3 for i in range(8)]
    broken = torch.full((1, 32), float("nan"), dtype=dtype)
    assert cpu.gate(broken, torch.ones_like(broken), LinearKind.GATED_SILU).isnan().all()


@pytest.mark.parametrize("shape", [(1, 896), (3, 5, 48), (2, 7), (70, 1000)])
@pytest.mark.parametrize("shifted", [False, True])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...], shifted: bool) -> None:
    x, weight = randn(dtype, *shape) * 3, randn(dtype, shape[-1], seed=1)
    wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    wanted = (wide * (1 + weight.float())).to(dtype) if shifted else weight * wide.to(dtype)
    module = nn.Module()
    module.weight = nn.Parameter(weight, requires_grad=False)
    assert_close(cpu.RMSNorm(module, 1e-6, shifted=shifted)(x), wanted)


@pytest.mark.parametrize("width", [32, 64, 96, 256])
def test_rotation_has_the_bits_of_transformers_own(dtype: torch.dtype, width: int) -> None:
    rows, heads = 9, 5
    x = randn(dtype, rows, (heads + 2) * width)
    angles = torch.rand(rows, width // 2, generator=torch.Generator().manual_seed(1)) * 100
    cos, sin = (f(angles).repeat(1, 2).to(dtype) for f in (torch.cos, torch.sin))
    by_head = x.view(rows, -1, width)[:, :heads]
    halves = by_head.chunk(2, dim=-1)
    turned = torch.cat((-halves[1], halves[0]), dim=-1)
    wanted = by_head * cos[:, None] + turned * sin[:, None]
    rest = x[:, heads * width :].clone()
    cpu.rotate(x, heads, cos, sin)
    assert torch.equal(x[:, : heads * width].view(rows, heads, width), wanted)
    assert torch.equal(x[:, heads * width :], rest), "the values after them stay"


SHAPES = [(4, 2, 32, 32), (14, 2, 64, 64), (3, 3, 80, 48), (8, 1, 256, 16)]
OPTIONS = [(None, None, False), (20, None, True), (7, 5.0, False)]
RAGGED = (40, 33, 17, 16, 15, 2)
BLOCKS = [((1,), 16), (RAGGED, 1), (RAGGED, 16), ((300,) * 5, 5), ((300,) * 5, 32)]
OTHER_BLOCKS = [((1,), 1), ((1,), 5), ((1,), 32), ((300,) * 5, 1), ((300,) * 5, 16)]
# Every day each shape meets each option, and each option each way to lay out blocks.
ATTENTION = [
    (shape, options, blocks)
    if blocks in BLOCKS and (place + 1) % len(OPTIONS) == (number + BLOCKS.index(blocks)) % 3
    else in_soak(shape, options, blocks)
    for number, shape in enumerate(SHAPES)
    for place, options in enumerate(OPTIONS)
    for blocks in (*BLOCKS, *OTHER_BLOCKS)
]


@pytest.mark.parametrize(("shape", "options", "blocks"), ATTENTION)
def test_decode_attention(
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    options: tuple[int | None, float | None, bool],
    blocks: tuple[tuple[int, ...], int],
) -> None:
    (window, softcap, sinks), (contexts, block_size) = options, blocks
    heads, kv_heads, key_width, value_width = shape
    count = len(contexts)
    each = -(-max(contexts) // block_size)
    order = torch.randperm(count * each, generator=torch.Generator().manual_seed(0))
    tables = order.view(count, each)
    cache = [
        randn(dtype, count * each, block_size, kv_heads, width, seed=width)
        for width in (key_width, value_width)
    ]
    sink = randn(dtype, heads, seed=5) if sinks else None
    queries = randn(dtype, count, heads, key_width, seed=6)
    set_up = AttentionOptions(0.2, window, softcap, sink)
    paged = PagedAttention(*cache, heads, set_up)
    rows = DecodeRows(count, tables, torch.tensor(contexts))
    found = paged.decode(queries, rows)
    plain = PlainPagedAttention(*(part.double() for part in cache), heads, set_up)
    wanted = plain.decode(queries.double(), rows)
    for row in range(count):
        assert_close(found[row], wanted[row])


def test_a_row_of_attention_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    keys, values = randn(dtype, 30, 16, 2, 64, seed=1), randn(dtype, 30, 16, 2, 64, seed=2)
    paged = PagedAttention(keys, values, 14, AttentionOptions(0.1))
    queries = randn(dtype, 3, 14, 64, seed=3)
    tables = torch.arange(30).view(3, 10)
    contexts = torch.tensor([150, 77, 12])
    together = paged.decode(queries, DecodeRows(3, tables, contexts))
    for row in range(3):
        part = slice(row, row + 1)
        rows = DecodeRows(1, tables[part].contiguous(), contexts[part])
        assert torch.equal(paged.decode(queries[part], rows), together[part])


@pytest.mark.parametrize(
    ("window", "softcap", "sinks"), [(None, None, False), (70, None, False), (None, 5.0, True)]
)
@pytest.mark.parametrize(("heads", "width"), [(2, 32), (6, 48), (14, 64)])
def test_tokens_of_one_sequence_have_the_bits_that_each_has_alone(
    dtype: torch.dtype,
    heads: int,
    width: int,
    window: int | None,
    softcap: float | None,
    sinks: bool,
) -> None:
    """A prompt from its first token on, one after a cached context, drafted tokens (their contexts
    falling), and two sequences whose first blocks are the same."""
    keys, values = randn(dtype, 40, 16, 2, width, seed=1), randn(dtype, 40, 16, 2, width, seed=2)
    sink = randn(dtype, heads, seed=5) if sinks else None
    paged = PagedAttention(keys, values, heads, AttentionOptions(0.1, window, softcap, sink))
    first, second = torch.arange(20), torch.arange(20, 40)
    forked = torch.cat((first[:8], second[:12]))
    parts = [
        (first, range(1, 71)),
        (second, range(121, 150)),
        (first, range(210, 200, -1)),
        (forked, range(126, 140)),
        (first, range(126, 140)),
    ]
    tables = torch.stack([table for table, contexts in parts for _ in contexts])
    contexts = torch.tensor([context for _, contexts in parts for context in contexts])
    queries = randn(dtype, len(contexts), heads, width, seed=3)
    together = paged.decode(queries, DecodeRows(len(contexts), tables, contexts))
    for row in range(len(contexts)):
        part = slice(row, row + 1)
        rows = DecodeRows(1, tables[part].contiguous(), contexts[part])
        assert torch.equal(paged.decode(queries[part], rows), together[part])


@pytest.mark.parametrize("heads", [20, 1])
def test_values_within_keys(dtype: torch.dtype, heads: int) -> None:
    """The latent of multi-head latent attention: stored once, by any number of threads."""
    keys = torch.zeros(20, 16, 1, 96, dtype=dtype)
    paged = PagedAttention(keys, keys[..., :64], heads, AttentionOptions(0.1))
    new = randn(dtype, 320, 1, 96, seed=1)
    paged.store(new, new[..., :64], torch.arange(320))
    assert torch.equal(keys.view(320, 1, 96), new)
    queries, rows = randn(dtype, 1, heads, 96, seed=2), torch.arange(20)[None]
    step = DecodeRows(1, rows, torch.tensor([310]))
    found = paged.decode(queries, step)
    plain = PlainPagedAttention(
        keys.double(), keys[..., :64].double(), heads, AttentionOptions(0.1)
    )
    assert_close(found, plain.decode(queries.double(), step))
    for threads in (1, 3):
        with several_threads(threads):
            assert torch.equal(paged.decode(queries, step), found)


@pytest.mark.parametrize(("inputs", "outputs"), [(192, 512), (12, 33), (40, 6), (1, 1)])
@pytest.mark.parametrize("across", [False, True])
def test_each_head_s_products(dtype: torch.dtype, inputs: int, outputs: int, across: bool) -> None:
    """With matrices that lie among others, and rows that do; each row as alone."""
    shape = (3, 5 + outputs, inputs) if across else (3, 5 + inputs, outputs)
    matrices = randn(dtype, *shape, seed=1)[:, 5:]
    matrices = matrices.mT if across else matrices
    for count in (1, 2, 3, 7, 70):
        rows = randn(dtype, count, 3, inputs + 2, seed=2)[..., 2:]
        out = torch.zeros(count, 3, outputs + 4, dtype=dtype)
        head_products(rows, matrices, out[..., 4:])
        wanted = torch.einsum("thi,hio->tho", rows.double(), matrices.double())
        assert_close(out[..., 4:], wanted)
        assert not out[..., :4].any()
        alone = torch.empty(1, 3, outputs, dtype=dtype)
        head_products(rows[-1:], matrices, alone)
        assert torch.equal(alone[0], out[-1, :, 4:])


def test_products_of_another_layout_or_dtype_are_refused(dtype: torch.dtype) -> None:
    rows, out = torch.zeros(2, 3, 4, dtype=dtype), torch.zeros(2, 3, 4, dtype=dtype)
    matrices = torch.zeros(3, 4, 8, dtype=dtype)
    with pytest.raises(ValueError, match="matrices of"):
        head_products(rows, matrices[..., ::2], out)
    with pytest.raises(ValueError, match="rows and"):
        head_products(rows.double(), matrices[..., :4].contiguous(), out)


def test_stored_keys_and_values_lie_in_their_slots(dtype: torch.dtype) -> None:
    keys, values = torch.zeros(4, 4, 2, 16, dtype=dtype), torch.zeros(4, 4, 2, 32, dtype=dtype)
    paged = PagedAttention(keys, values, 2, AttentionOptions(1.0))
    both = randn(dtype, 3, 2 * 16 + 2 * 32)
    new_keys = both[:, :32].unflatten(1, (2, 16))
    new_values = both[:, 32:].unflatten(1, (2, 32))
    slots = torch.tensor([5, 0, 15])
    paged.store(new_keys, new_values, slots)
    assert torch.equal(keys.view(16, 2, 16)[slots], new_keys)
    assert torch.equal(values.view(16, 2, 32)[slots], new_values)
    assert keys.count_nonzero() == new_keys.count_nonzero()


@pytest.mark.parametrize("vocab", [1, 16, 511, 512, 513, 40_000])
def test_softmax_sums(vocab: int) -> None:
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab)) * 8
    logits[0, -1] = float("-inf")
    logits[1, vocab // 2] = logits[1, vocab // 3] = 100.0
    divisors = torch.tensor([1.0, 0.5, 1e-6, 3.0, 1e6])
    largest, places, sums, logs = cpu.softmax_sums(logits, divisors, 512)
    if vocab > 1:
        assert torch.equal(largest, logits.amax(dim=1))
        assert torch.equal(places, logits.argmax(dim=1))
        weights = ((logits - largest[:, None]) / divisors[:, None]).double().exp()
        wanted = torch.stack([part.sum(dim=1) for part in weights.split(512, dim=1)], dim=1)
        assert torch.allclose(sums, wanted, rtol=1e-5)
        assert torch.allclose(logs, sums.sum(dim=1).log(), rtol=1e-14)


@pytest.mark.parametrize("vocab", [1, 16, 17, 31, 32, 33, 600, 40_000])
def test_forbidden_logits_become_minus_infinity(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(6, vocab, generator=generator)
    places = np.array([4, 0, 3])
    wanted = logits.clone()
    padded = torch.zeros(len(places), -(-vocab // 32) * 32, dtype=torch.bool)
    for row, share in enumerate((0.0, 0.5, 1.0)):
        # Bits beyond the vocabulary may have any value.
        padded[row] = torch.rand(padded.shape[1], generator=generator) < share
        wanted[places[row], ~padded[row, :vocab]] = float("-inf")
    allowed = np.packbits(padded.numpy(), axis=1, bitorder="little").view(np.int32)
    behind = torch.ones(6 * vocab + 32)
    behind[: 6 * vocab] = logits.flatten()
    cpu.forbid(behind[: 6 * vocab].view(6, vocab), places, allowed)
    assert torch.equal(behind[: 6 * vocab].view(6, vocab), wanted)
    assert torch.equal(behind[6 * vocab :], torch.ones(32))
    assert torch.equal(plainly(logits, places, allowed), wanted)


def plainly(logits: Tensor, places: IntArray, allowed: npt.NDArray[np.int32]) -> Tensor:
    """The same by torch."""
    masked = logits.clone()
    TokenMasks(places, allowed, np.zeros(len(places), bool)).apply(masked)
    return masked


@pytest.mark.parametrize("place", [0, 17, 511, 512, 999])
def test_one_logit_that_is_no_number_is_seen(place: int) -> None:
    logits = torch.zeros(2, 1000)
    logits[1, place] = float("nan")
    largest, *_ = cpu.softmax_sums(logits, torch.ones(2), 512)
    assert largest[0] == 0
    assert largest[1].isnan()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [[math.nan] * 600, [0.0] * 599 + [math.inf], [-math.inf] * 600])
def test_rows_without_a_largest_logit_have_nan_logprobs(
    broken: list[float], temperature: float
) -> None:
    logits = torch.tensor([[0.0] * 600, broken])
    numbers = torch.full((2,), 0.5, dtype=torch.float64)
    tokens, logprobs = cpu.sample(logits, torch.full((2,), temperature), numbers, 512)
    assert tokens[1] == 0
    assert logprobs[1].isnan()
    assert logprobs[0] == pytest.approx(-math.log(600))


@pytest.mark.parametrize("vocab", [5, 512, 700, 5000])
def test_a_sampled_token_is_the_one_that_the_running_sum_reaches(vocab: int) -> None:
    """In float64; the ends of the range, tokens that can't be, and some whose weight is almost
    nothing."""
    generator = torch.Generator().manual_seed(vocab)
    logits = 4 * torch.randn(64, vocab, generator=generator)
    logits[:, 1::3] = -torch.inf
    logits[5] = -60.0
    logits[5, vocab - 1] = 10.0
    temperatures = torch.rand(64, generator=generator) + 0.2
    uniforms = torch.rand(64, generator=generator, dtype=torch.float64)
    uniforms[0], uniforms[1] = 0.0, 1 - 2.0**-53
    drawn, logprobs = cpu.sample(logits, temperatures, uniforms, 512)
    weights = ((logits - logits.amax(1, True)).double() / temperatures[:, None]).exp()
    running = weights.cumsum(1) / weights.sum(1, keepdim=True)
    reached = running.gather(1, drawn[:, None])[:, 0]
    before = reached - (weights / weights.sum(1, keepdim=True)).gather(1, drawn[:, None])[:, 0]
    assert (before - 1e-6 <= uniforms).all()
    assert (uniforms <= reached + 1e-6).all()
    assert (weights.gather(1, drawn[:, None]) > 0).all()
    assert drawn[0] == 0
    chosen = (weights.gather(1, drawn[:, None]) / weights.sum(1, keepdim=True))[:, 0].log()
    assert torch.allclose(logprobs.double(), chosen, atol=1e-5)


def test_at_temperature_0_it_is_the_first_of_the_likeliest() -> None:
    """With the logprob that it has at 1, whatever the rows beside it."""
    logits = torch.randn(40, 3000, generator=torch.Generator().manual_seed(0))
    logits[3, 1234] = logits[3, 77] = 50.0
    temperatures, uniforms = torch.zeros(40), torch.full((40,), 0.5, dtype=torch.float64)
    tokens, logprobs = cpu.sample(logits, temperatures, None, 512)
    assert torch.equal(tokens, logits.argmax(1))
    assert torch.allclose(logprobs, logits.log_softmax(1).amax(1), atol=1e-6)
    temperatures[1::2] = 0.7
    beside = cpu.sample(logits, temperatures, uniforms, 512)
    for here, alone in zip(beside, (tokens, logprobs), strict=True):
        assert torch.equal(here[::2], alone[::2])
