"""Multi-head latent attention with the latent in the KV cache."""

from __future__ import annotations

import copy
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nano_inference.config import EngineConfig, ModelError
from nano_inference.stages.executor import ExecutorCore, wrap_model
from nano_inference.stages.executor.parts.memory import MemoryRelease
from nano_inference.stages.executor.runner.adapters.peft import AdapterLimits, read_adapter
from nano_inference.stages.executor.runner.kv_cache import block_bytes
from nano_inference.stages.executor.runner.tiers.layout import BlockLayout

from .....soaking import in_soak
from ...lane import Answer, Lane, lane_of
from ...models import LATENT, VOCAB, make_model
from ...plans import step_plan
from ...references import generate, least_lead
from ..adapters.making import make_adapter, merged

NEW_TOKENS = 8
TOLERANCE = 1e-4
LINEARS = ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]


@cache
def made(name: str) -> Any:
    return make_model(name)


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(1, VOCAB) for _ in range(length)] for length in lengths]


PROMPTS = prompts_of(34, 19, 2)


def assert_answers(answers: list[Answer], model: Any) -> None:
    """The tokens and logprobs are those of Transformers' `generate`."""
    for answer in answers:
        (tokens,), logits = generate(model, [answer.prompt], NEW_TOKENS)
        assert least_lead(logits) > 2 * TOLERANCE
        assert answer.token_ids == tokens.tolist()
        wanted = logits[0].log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        assert (torch.tensor(answer.logprobs) - wanted).abs().max() < TOLERANCE


@pytest.mark.parametrize("settings", [{}, {"kernels": "off"}], ids=["kernels", "gather"])
@pytest.mark.parametrize("name", LATENT)
def test_tokens_are_those_of_generate_in_chunks_mixed_and_warm(
    name: str, settings: dict[str, Any]
) -> None:
    model = wrap_model(copy.deepcopy(made(name)), 256)
    assert model.latent_attention == "in use"
    assert all(spec.is_latent for spec in model.layers)
    lane = lane_of(model, max_tokens_per_batch=9, **settings)
    for _ in range(2):
        assert_answers(lane.run(PROMPTS, NEW_TOKENS), made(name))
    assert lane.part_rows == 0  # warm, but prompts were cut before


def test_a_token_keeps_the_latent_and_the_shared_key_once() -> None:
    widths = {"kv_lora_rank": 32, "qk_rope_head_dim": 16}
    latent = wrap_model(make_model("deepseek_v3", **widths), 64)
    expanded = wrap_model(make_model("deepseek_v3", **widths), 64, latent_attention="off")
    assert block_bytes(latent, 1) == 2 * (32 + 16) * 4
    assert block_bytes(expanded, 1) == 2 * 4 * (32 + 16) * 4
    assert expanded.latent_attention == "engine.latent_attention is off"
    cache = lane_of(latent).core.cache
    assert [tuple(each.shape[2:]) for each in cache.in_blocks] == 2 * [(1, 48)]
    assert cache.token_bytes == block_bytes(latent, 1)
    layouts = {BlockLayout.of(model, cache).digest for model in (latent, expanded)}
    assert len(layouts) == 2


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_bits_do_not_depend_on_chunks_or_neighbours(kernels: str) -> None:
    model = wrap_model(copy.deepcopy(made("deepseek_v2")), 128)
    found = []
    for chunk in (9, 200):
        lane = lane_of(model, deterministic=True, kernels=kernels, max_tokens_per_batch=chunk)
        found.append([(a.token_ids, a.logprobs) for a in lane.run(PROMPTS, NEW_TOKENS)])
        if chunk == 200:
            alone = [lane.run([prompt], NEW_TOKENS)[0] for prompt in PROMPTS]
            found.append([(answer.token_ids, answer.logprobs) for answer in alone])
    assert found[0] == found[1] == found[2]


def test_new_weights_have_effect_on_the_next_step() -> None:
    """Written in place, and put in place of the module's parameters by a trainer."""
    model, other = copy.deepcopy(made("deepseek_v3")), make_model("deepseek_v3", seed=1)
    lane = lane_of(wrap_model(model, 64))
    lane.run(PROMPTS, 1)
    for in_place in (True, False):
        wanted = other if in_place else make_model("deepseek_v3", seed=2)
        with torch.no_grad():
            for name, parameter in wanted.named_parameters():
                if in_place:
                    model.get_parameter(name).copy_(parameter)
                else:
                    owner, _, last = name.rpartition(".")
                    setattr(model.get_submodule(owner), last, nn.Parameter(parameter.clone()))
        lane.batching.cache.flush()
        assert_answers(lane.run(PROMPTS, NEW_TOKENS), wanted)


@pytest.mark.parametrize("settings", [{}, in_soak({"deterministic": True}), {"kernels": "off"}])
def test_adapters_of_kv_b_proj_are_those_of_merged_weights(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Two adapters and none in one batch."""
    model = wrap_model(copy.deepcopy(made("deepseek_v3")), 64)
    lane = lane_of(model, max_tokens_per_batch=30, **settings)
    plain = {"": made("deepseek_v3")}
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        adapted = make_adapter(plain[""], seed, folder, 0.5, r=2 + seed, target_modules=LINEARS)
        adapter = read_adapter(f"a{seed}", 1, str(folder), model, AdapterLimits())
        assert any(name.endswith("kv_b_proj") for name in adapter.pairs)
        lane.core.runner.adapters.put(adapter)
        plain[adapter.id] = merged(adapted)
    adapters = ["a1", "", "a2", "a1"]
    answers = lane.run([*PROMPTS, PROMPTS[1]], NEW_TOKENS, adapters)
    for id, answer in zip(adapters, answers, strict=True):
        assert_answers([answer], plain[id])


def test_released_memory_is_found_again() -> None:
    lane = lane_of(wrap_model(copy.deepcopy(made("deepseek_v3")), 64))
    before = [answer.logprobs for answer in lane.run(PROMPTS, NEW_TOKENS)]
    memory = lane.core.part(MemoryRelease).memory
    memory.begin_release(["kv_cache"])
    lane.core.execute(step_plan(release=("kv_cache",)))
    assert {each.untyped_storage().nbytes() for each in lane.core.cache.values} == {4}
    memory.resume(["kv_cache"])
    lane.batching.cache.flush()
    assert [answer.logprobs for answer in lane.run(PROMPTS, NEW_TOKENS)] == before


def test_other_callers_of_the_model_run_transformers_code() -> None:
    model = copy.deepcopy(made("deepseek_v3"))
    lane = lane_of(wrap_model(model, 64))
    model.set_attn_implementation("eager")
    ids = torch.tensor(PROMPTS[:1])
    for each in (model, copy.deepcopy(model)):
        each.zero_grad()
        logits = each(input_ids=ids, use_cache=False).logits
        assert torch.equal(logits, made("deepseek_v3")(input_ids=ids, use_cache=False).logits)
        logits.sum().backward()
        assert each.model.layers[0].self_attn.kv_b_proj.weight.grad.any()
    model.set_attn_implementation("nano_paged")
    assert_answers(lane.run(PROMPTS, NEW_TOKENS), made("deepseek_v3"))


def test_a_module_that_computes_something_else_keeps_keys_and_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = copy.deepcopy(made("minicpm3"))
    kind = type(model.model.layers[0].self_attn)
    plain = kind.expand_kv

    def doubled(self: Any, latent: Any, rotated: Any) -> Any:
        keys, values = plain(self, latent, rotated)
        return keys, values * 2

    monkeypatch.setattr(kind, "expand_kv", doubled)
    wrapped = wrap_model(model, 64)
    assert not any(spec.is_latent for spec in wrapped.layers)
    assert wrapped.latent_attention == f"expand_kv of {kind.__name__} computes something else"
    assert_answers(lane_of(wrapped).run(PROMPTS, NEW_TOKENS), made("minicpm3"))


def test_a_replaced_projection_is_refused() -> None:
    lane = lane_of(wrap_model(copy.deepcopy(made("minicpm3")), 64))
    attention = lane.core.model.module.model.layers[0].self_attn  # type: ignore[union-attr, index]
    attention.kv_b_proj = nn.Sequential(attention.kv_b_proj)  # type: ignore[union-attr]
    with pytest.raises(ModelError, match="kv_b_proj has become a Sequential"):
        lane.run(PROMPTS, 1)


def test_a_closed_executor_s_model_is_as_transformers_made_it(tmp_path: Path) -> None:
    make_model("minicpm3").save_pretrained(tmp_path)
    config = EngineConfig(model_path=str(tmp_path), kv_cache_bytes=1 << 22)
    core = ExecutorCore(config)
    attention = core.model.module.model.layers[0].self_attn  # type: ignore[union-attr, index]
    assert "expand_kv" in vars(attention)  # type: ignore[arg-type]
    assert Lane(config, core).run(PROMPTS, 2)
    core.runner.close()
    assert "expand_kv" not in vars(attention)  # type: ignore[arg-type]
