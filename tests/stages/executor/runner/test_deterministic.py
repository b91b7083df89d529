"""Deterministic mode: the same bits in any batch, and the refused models."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional as F

from nano_inference.config import EngineConfig, ModelError, SamplingParams
from nano_inference.stages.executor import ExecutorCore, LoadedModel, load_model, wrap_model
from nano_inference.stages.executor.runner import fixed_tiles as tiles_module
from nano_inference.stages.executor.runner.fixed_tiles import (
    TILE_SIZES,
    FixedTiles,
    agreeing_sizes,
    cut_tiles,
)

from ....soaking import in_soak
from ..models import ARCHITECTURES, VOCAB, make_model
from ..plans import Generation, Planner
from ..refusals import needs_kernels
from ..threads import several_threads

CONFIG = EngineConfig(block_size=4, kv_cache_bytes=1 << 22, max_batch_size=16, deterministic=True)
PROMPT_LENGTHS = (1, 3, 8, 19, 70)
ALL_AT_ONCE = 200
SAMPLING = (
    SamplingParams(temperature=0.0, max_tokens=6),
    SamplingParams(temperature=1.0, max_tokens=6),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=50, min_p=0.01, max_tokens=6),
    SamplingParams(temperature=1.0, repetition_penalty=1.2, frequency_penalty=0.3, max_tokens=6),
)

VARIOUS = ("qwen2", "gemma2", "gpt_oss", "qwen3_moe")
"""Architectures with windows, soft caps, sinks and experts."""

Bits = list[tuple[list[int], list[float]]]


@pytest.fixture(params=[1, in_soak(2), 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Three do not divide a power of two: shares of the work then end anywhere."""
    with several_threads(request.param):
        yield request.param


def make_generations() -> list[Generation]:
    rng = random.Random(3)
    return [
        Generation(
            index,
            [rng.randrange(1, VOCAB) for _ in range(length)],
            SAMPLING[index % len(SAMPLING)],
            arrives=index % 3,
            seed=index,
        )
        for index, length in enumerate(PROMPT_LENGTHS)
    ]


def bits_of(core: ExecutorCore, *, alone: bool = False, chunk: int = ALL_AT_ONCE) -> Bits:
    """Tokens and logprobs of all generations; floats are compared as they are."""
    generations = make_generations()
    for group in [[g] for g in generations] if alone else [generations]:
        for generation in group:
            generation.arrives = 0 if alone else generation.arrives
        Planner(core, chunk=chunk, shuffle=chunk).run(group)
        core.reset()
    return [(g.token_ids, g.logprobs) for g in generations]


def assert_arrangements_agree(
    model: LoadedModel, chunks: Sequence[int] = (7, ALL_AT_ONCE), **changes: Any
) -> None:
    config = replace(CONFIG, **changes)
    core = ExecutorCore(config, model=model)
    expected = bits_of(core, alone=True)
    for chunk in chunks:
        assert bits_of(core, chunk=chunk) == expected, f"in chunks of {chunk}"
    blocks_of_one = ExecutorCore(replace(config, block_size=1), model=model)
    assert bits_of(blocks_of_one, chunk=16) == expected


@pytest.mark.soak
@pytest.mark.parametrize(
    "name", [name if name in VARIOUS[:3] else in_soak(name) for name in ARCHITECTURES]
)
def test_arrangements_agree_to_the_bit(name: str, soak: bool) -> None:
    """Prompts token by token, which takes most steps, for one every day."""
    chunks = (1, 7, ALL_AT_ONCE) if soak or name == VARIOUS[0] else (7, ALL_AT_ONCE)
    assert_arrangements_agree(wrap_model(make_model(name), 128), chunks)


@pytest.mark.parametrize(
    "name", [in_soak("qwen2"), in_soak("gemma2"), "gpt_oss", in_soak("qwen3_moe")]
)
def test_arrangements_agree_to_the_bit_in_bfloat16(name: str) -> None:
    assert_arrangements_agree(wrap_model(make_model(name).to(torch.bfloat16), 128))


@pytest.mark.parametrize("name", ["mixtral", in_soak("gpt_oss")])
def test_experts_agree_whichever_way_transformers_runs_them(name: str) -> None:
    module = make_model(name)
    module.set_experts_implementation("eager")
    assert_arrangements_agree(wrap_model(module, 128))


@pytest.mark.parametrize("name", [name if name == "gpt_oss" else in_soak(name) for name in VARIOUS])
def test_arrangements_agree_without_kernels(name: str) -> None:
    needs_kernels(torch.float32)  # without them all models run so
    assert_arrangements_agree(wrap_model(make_model(name), 128), kernels="off")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_kernels_compute_as_a_whole_is_deterministic_by_default(
    dtype: torch.dtype,
) -> None:
    needs_kernels(dtype)
    module = make_model("qwen2", head_dim=32).to(dtype)
    core = core_of(module, "auto")
    assert not core.off.get("deterministic", "")
    core.close()
    assert_arrangements_agree(wrap_model(module, 128), deterministic="auto")


def core_of(module: Any, deterministic: bool | str) -> ExecutorCore:
    config = replace(CONFIG, deterministic=deterministic)
    return ExecutorCore(config, model=wrap_model(module, 128))


def test_deterministic_mode_with_a_cost_is_off_by_default() -> None:
    in_part = core_of(make_model("mixtral"), "auto")
    wanted = in_part.off.get("kernels", "") or "kernels take the model in part"
    assert in_part.off.get("deterministic", "") == wanted
    assert core_of(make_model("mixtral"), True).off.get("deterministic", "") == ""
    off = core_of(make_model("qwen2", head_dim=32), False)
    assert off.off.get("deterministic", "") == "engine.deterministic is false"


def test_a_model_that_fails_the_check_runs_without_deterministic_mode() -> None:
    needs_kernels(torch.float32)
    module = make_model("qwen2", head_dim=32)
    _look_at_neighbours(module)
    core = core_of(module, "auto")
    assert core.off.get("deterministic", "")
    bits_of(core)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_kernels_the_number_of_threads_does_not_matter(dtype: torch.dtype) -> None:
    """Prompts together are long enough for threads to share each product."""
    needs_kernels(dtype)
    core = ExecutorCore(CONFIG, model=wrap_model(make_model("qwen2", head_dim=32).to(dtype), 128))
    found = []
    for number in (1, 2, 3):
        with several_threads(number):
            assert core.runner.determinism is not None
            core.runner.determinism.check()
            found.append(bits_of(core))
    assert found[0] == found[1] == found[2]


def test_without_the_mode_they_differ() -> None:
    config = replace(CONFIG, deterministic=False, kernels="off")
    core = ExecutorCore(config, model=wrap_model(make_model("qwen2"), 128))
    assert bits_of(core, chunk=7) != bits_of(core, alone=True)


def test_tokens_are_those_of_the_usual_mode() -> None:
    model = wrap_model(make_model("qwen2"), 128)
    usual = ExecutorCore(replace(CONFIG, deterministic=False), model=model)
    for (tokens, logprobs), (wanted, wanted_logprobs) in zip(
        bits_of(ExecutorCore(CONFIG, model=model)), bits_of(usual), strict=True
    ):
        assert tokens == wanted
        assert logprobs == pytest.approx(wanted_logprobs, abs=1e-4)


# --- the parts --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(48, 64), (211, 48), (4, 48), (512, 300)])
@pytest.mark.soak
def test_a_row_of_a_product_is_the_same_alone(
    shape: tuple[int, int], dtype: torch.dtype, threads: int, soak: bool
) -> None:
    """The last twenty rows, and every fifth of those before; at full length all of them."""
    out, width = shape
    some = [*range(0, 280, 1 if soak else 5), *range(280, 300)]
    torch.manual_seed(0)
    weight, bias = torch.randn(out, width).to(dtype), torch.randn(out).to(dtype)
    rows = torch.randn(300, width).to(dtype)
    with FixedTiles():
        for bias_or_none in (None, bias):
            alone = {row: F.linear(rows[row, None], weight, bias_or_none)[0] for row in some}
            for count in (2, 15, 16, 17, 63, 81, 300):
                found = F.linear(rows[None, -count:], weight, bias_or_none)[0]
                within = [row for row in some if row >= 300 - count]
                assert len(within) > 1
                assert all(torch.equal(found[row - 300], alone[row]) for row in within)
        assert torch.equal(rows @ weight.t(), rows.matmul(weight.t()))
    wanted = F.linear(rows, weight, bias)
    for row in some:
        assert torch.allclose(alone[row].float(), wanted[row].float(), rtol=0.02, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_grouped_product_is_the_same_alone(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, weights = torch.randn(50, 64).to(dtype), torch.randn(3, 96, 64).to(dtype)
    ends = torch.tensor([17, 17, 50], dtype=torch.int32)
    with FixedTiles():
        found = F.grouped_mm(rows, weights.transpose(-2, -1), offs=ends)
        for row, expert in ((0, 0), (16, 0), (17, 2), (49, 2)):
            assert torch.equal(found[row], F.linear(rows[row], weights[expert]))


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "sigmoid method": lambda x: x.sigmoid(),
    "tanh": torch.tanh,
    "exp in place": lambda x: x.clone().exp_(),
    "rsqrt": lambda x: (x * x + 1).rsqrt(),
    "softplus": F.softplus,
    "cos": lambda x: x.cos(),
    "silu in place": lambda x: F.silu(x.clone(), inplace=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_element_is_the_same_wherever_it_stands(
    name: str, dtype: torch.dtype, threads: int
) -> None:
    function = FUNCTIONS[name]
    torch.manual_seed(0)
    source = (torch.randn(70_001) * 3).to(dtype)
    with FixedTiles():
        whole = function(source)
        for start, stop in ((0, 1), (3, 8), (40, 111), (1, 33_000), (500, 66_100)):
            assert torch.equal(function(source[start:stop]), whole[start:stop])
        strided = source[:70_000].view(7, -1)[:, :5001]
        assert torch.equal(function(strided), whole[:70_000].view(7, -1)[:, :5001])
    assert torch.allclose(whole.float(), function(source).float(), rtol=0.01, atol=0.01)


def test_tiles_cover_the_rows_in_order() -> None:
    assert cut_tiles(16, TILE_SIZES) == [(0, 16)]
    assert cut_tiles(348, TILE_SIZES) == [(0, 256), (256, 320), (320, 336), (336, 344), (344, 348)]
    assert cut_tiles(80, (16,)) == [(start, start + 16) for start in range(0, 80, 16)]


def test_sizes_that_give_other_bits_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends that a kernel for 64 rows exists which rounds otherwise."""
    linear = F.linear

    def other_at_64(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        output = linear(rows, weight, bias)
        return output * (1 + 1e-6) if len(rows) == 64 else output

    monkeypatch.setattr(tiles_module.F, "linear", other_at_64)
    sizes = agreeing_sizes(torch.randn(32, 32), None)
    assert sizes[:2] == (256, 16)
    assert 64 not in sizes


def test_sizes_depend_on_the_shape_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel for 64 rows sums in another order. Sums of whole numbers are exact, and rounding to
    bfloat16 hides most other differences, so some weights would not show it."""
    linear = F.linear

    def other_order_at_64(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if len(rows) == 64:
            rows, weight = rows.flip(-1), weight.flip(-1)
        return linear(rows, weight, bias)

    monkeypatch.setattr(tiles_module.F, "linear", other_order_at_64)
    whole_numbers = torch.arange(32.0).expand(8, 32)
    for dtype in (torch.bfloat16, torch.float32):
        for weight in (whole_numbers.to(dtype).contiguous(), torch.zeros(8, 32, dtype=dtype)):
            sizes = agreeing_sizes(weight, None)
            assert 64 not in sizes
            assert agreeing_sizes(torch.randn(8, 32).to(dtype), None) == sizes
        transposed = torch.zeros(32, 8, dtype=dtype).t()
        assert 64 not in agreeing_sizes(transposed, torch.ones(8, dtype=dtype))


def test_a_machine_whose_products_depend_on_the_row_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    linear = F.linear

    def last_row_differs(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        output = linear(rows, weight, bias)
        output[-1] *= 1 + 1e-6
        return output

    monkeypatch.setattr(tiles_module.F, "linear", last_row_differs)
    with pytest.raises(ModelError, match="place of a row"):
        agreeing_sizes(torch.randn(32, 32), None)


# --- refusals --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda x: torch.baddbmm(x, x, x),
        lambda x: x[0, 0] @ x[0],
        lambda x: torch.einsum("bij,bjk->bik", x, x),
        lambda x: F.scaled_dot_product_attention(x, x, x),
    ],
)
def test_products_without_a_fixed_shape_are_refused(use: Callable[[Tensor], Tensor]) -> None:
    with FixedTiles(), pytest.raises(ModelError, match="deterministic"):
        use(torch.randn(2, 4, 4))


@pytest.mark.parametrize("terms", [3, 40])
def test_products_of_many_matrices_are_those_of_each(terms: int) -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.randn(*shape, generator=generator) for shape in ((1, 5, 7, terms), (2, 1, terms, 16))
    )
    with FixedTiles():
        found = left @ right
        parts = [left[:, part] @ right[0, 0] for part in ([2], [1, 3, 0])]
    assert torch.allclose(found, left @ right, atol=1e-5)
    assert torch.equal(found[0, [2, 1, 3, 0]], torch.cat(parts, 1)[0])


def test_experts_in_batched_products_keep_the_bits() -> None:
    module = make_model("mixtral")
    module.set_experts_implementation("batched_mm")
    assert_arrangements_agree(wrap_model(module, 128))


def test_float16_is_refused() -> None:
    model = wrap_model(make_model("llama").to(torch.float16), 128)
    with pytest.raises(ModelError, match="'bfloat16'"):
        ExecutorCore(CONFIG, model=model)


def test_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ModelError, match="set device to 'cpu'"):
        load_model(EngineConfig(device="cuda", deterministic=True))


def test_a_model_whose_rows_depend_on_each_other_is_refused_at_load() -> None:
    module = make_model("llama")
    _look_at_neighbours(module)
    with pytest.raises(ModelError, match="other bits in a batch"):
        ExecutorCore(CONFIG, model=wrap_model(module, 128))


def _look_at_neighbours(module: Any) -> None:
    def leak(_: object, __: object, output: Tensor) -> Tensor:
        return output + 1e-4 * output.sum(dim=1, keepdim=True)

    module.model.layers[1].mlp.register_forward_hook(leak)
