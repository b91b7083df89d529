"""Keys and values that are kept as int8 or fp8."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest
import torch

from nano_inference.config import EngineConfig, ModelError, SamplingParams
from nano_inference.stages.executor import ExecutorCore, KVCache, wrap_model
from nano_inference.stages.executor.facts import facts_of_model
from nano_inference.stages.executor.runner.interface import count_blocks, with_kv_dtype
from nano_inference.stages.executor.runner.kv_codes import keep_codes, pack, unpack
from nano_inference.stages.executor.runner.state.kinds import IndexKeys

from ....soaking import in_soak
from ..models import make_model
from ..plans import Generation, Planner
from .test_deterministic import assert_arrangements_agree

INT8, FP8 = torch.int8, torch.float8_e4m3fn
KVDtype = Literal["int8", "fp8"]


@pytest.mark.parametrize("codes", [INT8, FP8])
def test_a_number_is_kept_within_half_a_step(codes: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = (
        torch.randn(200, 3, 64, generator=generator) * torch.logspace(-9, 9, 200)[:, None, None]
    )
    kept, scales = pack(numbers, codes)
    difference = (unpack(kept, scales, torch.float32) - numbers).abs()
    most = numbers.abs().amax(-1, keepdim=True)
    if codes is INT8:
        assert (difference <= most / 127 * 0.504).all()
    else:
        assert (difference <= numbers.abs() / 16 + most * 2.0**-18).all()
    # What is kept of a head depends on no other.
    again = pack(numbers[7:8, 1:2].clone(), codes)
    assert torch.equal(again[0].view(torch.uint8), kept[7:8, 1:2].view(torch.uint8))
    assert torch.equal(again[1], scales[7:8, 1:2])


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "kv_dtype", "kernels"),
    [
        ("qwen2", "int8", "auto"),
        ("gemma2", "fp8", "auto"),
        ("gemma3n_text", "int8", "auto"),
        *(
            in_soak(name, kv_dtype, kernels)
            for name in ("qwen3_moe", "llama4_text", "gpt_oss", "gemma2", "gemma3n_text")
            for kv_dtype in ("int8", "fp8")
            for kernels in ("auto", "off")
        ),
    ],
)
def test_arrangements_agree_to_the_bit(name: str, kv_dtype: str, kernels: str) -> None:
    """Windows, soft caps, sinks, shared keys and values, chunks; kernels, and fixed tiles."""
    changes = {"head_dim": 32} if name == "qwen2" else {}
    model = wrap_model(make_model(name, **changes), 128)
    assert_arrangements_agree(model, kv_dtype=kv_dtype, kernels=kernels)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_kernels_compute_the_whole_model_as_with_numbers(kv_dtype: KVDtype) -> None:
    """A number that the check at load rounds in another way may get another code."""
    model = wrap_model(make_model("qwen2", head_dim=32), 64)
    core = ExecutorCore(EngineConfig(max_model_len=64, kv_dtype=kv_dtype), model=model)
    plain = ExecutorCore(EngineConfig(max_model_len=64), model=model)
    assert core.off == plain.off
    assert facts_of_model(core)["kv_token_bytes"] < facts_of_model(plain)["kv_token_bytes"]
    for each in (plain, core):
        each.close()


def test_without_kernels_a_prompt_sees_the_numbers_that_are_kept() -> None:
    """Not its own keys and values of the step."""
    config = EngineConfig(
        max_model_len=64, block_size=4, kernels="off", deterministic=False, kv_dtype="int8"
    )
    core = ExecutorCore(config, model=wrap_model(make_model("qwen2"), 64))
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    found = []
    for chunk in (40, 7):
        one = Generation(0, list(range(3, 36)), greedy)
        Planner(core, chunk=chunk).run([one])
        core.reset()
        found.append(torch.tensor(one.logprobs))
    assert torch.allclose(*found, atol=1e-4)
    assert (found[0] - found[1]).abs().max() < 1e-4


@pytest.mark.parametrize("codes", [INT8, FP8])
def test_copies_of_blocks_have_the_scales(codes: torch.dtype) -> None:
    kv_dtype: KVDtype = "int8" if codes is INT8 else "fp8"
    cache = KVCache(keep_codes(wrap_model(make_model("qwen2"), 64), kv_dtype), 3, 4)
    heads, width = cache.keys[1].shape[2:]
    numbers = [torch.randn(4, heads, width) for _ in range(2)]
    cache.store(1, numbers[0], numbers[1], torch.arange(4))
    cache.copy_blocks([(0, 2)])
    places = torch.arange(8 * heads, 12 * heads)
    for found, wanted in zip(cache.gather(1, places), cache.as_kept(1, *numbers), strict=True):
        assert torch.equal(found.view(4, heads, width), wanted)


def test_the_same_memory_has_nearly_twice_the_blocks() -> None:
    """And the state of indexers and mixers stays as it is."""
    module = make_model("qwen2", head_dim=64).to(torch.bfloat16)
    model = dataclasses.replace(wrap_model(module, 64), index_keys=(IndexKeys(0, 16),))
    config = EngineConfig(max_model_len=64, kv_cache_bytes=1 << 20)
    counts = []
    for settings in (
        config,
        EngineConfig(max_model_len=64, kv_cache_bytes=1 << 20, kv_dtype="int8"),
    ):
        changed = with_kv_dtype(settings, model)
        blocks = count_blocks(settings, changed)
        cache = KVCache(changed, blocks, settings.block_size)
        assert cache.token_bytes * settings.block_size * blocks <= 1 << 20
        assert cache.index_keys[0].dtype is torch.bfloat16
        counts.append((blocks, cache.token_bytes - 16 * 2))
    (before, plain_bytes), (after, bytes_of_codes) = counts
    assert bytes_of_codes * 128 == plain_bytes * 66
    assert after > 1.8 * before


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"device": torch.device("cuda")}, "for CPU, and this is cuda; set it to 'auto'"),
        ({"latent": True}, "not for latents.*engine.latent_attention to 'off'"),
    ],
)
def test_what_codes_are_not_for_is_refused(change: dict[str, Any], why: str) -> None:
    latent = change.pop("latent", False)
    model = wrap_model(make_model("deepseek_v3" if latent else "qwen2"), 64)
    with pytest.raises(ModelError, match=f"engine.kv_dtype is 'int8', which is {why}"):
        keep_codes(dataclasses.replace(model, **change), "int8")


@pytest.mark.parametrize("name", ["deepseek_v32", "qwen3_5_text"])
def test_indexers_and_recurrent_states_work_beside_codes(name: str) -> None:
    """The same bits in other chunks."""
    model = wrap_model(make_model(name), 96, latent_attention="off")
    assert_arrangements_agree_in_chunks(model)


def assert_arrangements_agree_in_chunks(model: Any) -> None:
    config = EngineConfig(
        max_model_len=96, block_size=4, max_batch_size=4, kv_dtype="int8", deterministic=True
    )
    core = ExecutorCore(config, model=model)
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    found = []
    for chunk in (60, 9):
        ones = [
            Generation(index, list(range(3 + index, 44 - 9 * index)), greedy) for index in range(2)
        ]
        Planner(core, chunk=chunk).run(ones)
        core.reset()
        found.append([(one.token_ids, one.logprobs) for one in ones])
    assert found[0] == found[1]
    core.close()
