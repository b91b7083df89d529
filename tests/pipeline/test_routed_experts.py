"""Routed experts: those of Transformers' routers, however the tokens are computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.pipeline.rollouts import TrainingSample

LAYERS, TOP_K, WITHOUT_EXPERTS = 3, 2, 1
PROMPTS = [tuple((7 * place + 5 * number) % 60 for place in range(40)) for number in range(4)]
ASKED = SamplingParams(max_tokens=24, temperature=0.7, seed=3, return_routed_experts=True)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=16,
        mlp_only_layers=[WITHOUT_EXPERTS],
        max_position_embeddings=256,
    )
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for weight in made.parameters():
        weight.data *= 4 if weight.dim() > 1 else 1
    return made


@pytest.fixture(scope="module")
def engine(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceEngine]:
    """With chunks, and room for less than four of eight sequences."""
    folder: Path = tmp_path_factory.mktemp("mixture")
    model.save_pretrained(folder)
    config = EngineConfig(
        model_path=str(folder),
        dtype="float32",
        deterministic=True,
        max_model_len=128,
        block_size=8,
        max_tokens_per_batch=32,
        kv_cache_bytes=26 * 8 * LAYERS * 2 * 16 * 4,
        speculation="auto",
        max_draft_tokens=4,
    )
    with InferenceEngine(config) as engine:
        yield engine


@pytest.fixture(scope="module")
def cold(engine: InferenceEngine) -> list[TrainingSample]:
    """Each prompt alone."""
    samples = []
    for prompt in PROMPTS:
        engine.flush_cache()
        samples += engine.generate([prompt], ASKED, 2)
    return samples


def same(found: Sequence[TrainingSample], expected: Sequence[TrainingSample]) -> bool:
    return all(
        each.completion_tokens == other.completion_tokens
        and each.logprobs == other.logprobs
        and np.array_equal(each.routed_experts, other.routed_experts)
        for each, other in zip(found, expected, strict=True)
    )


def test_they_are_those_of_the_routers(cold: list[TrainingSample], model: Any) -> None:
    for sample in cold:
        tokens = sample.prompt_tokens + sample.completion_tokens
        with torch.inference_mode():
            routed = model(torch.tensor([tokens[:-1]]), output_router_logits=True).router_logits
        expected = np.zeros((len(tokens) - 1, LAYERS, TOP_K), np.int64)
        for layer, logits in zip((0, 2), routed, strict=True):
            expected[:, layer] = logits.topk(TOP_K, dim=-1).indices
        assert sample.routed_experts is not None
        assert sample.routed_experts.shape == expected.shape
        assert (np.sort(sample.routed_experts) == np.sort(expected)).all()
        assert len(np.unique(expected)) > TOP_K


def test_another_turn_needs_the_experts_of_new_tokens_only(
    engine: InferenceEngine, cold: list[TrainingSample]
) -> None:
    turn = SamplingParams(max_tokens=1, return_routed_experts=True, routed_experts_prompt_start=17)
    prompts = [each.prompt_tokens + each.completion_tokens[:-1] for each in cold]
    for later, first in zip(engine.generate(prompts, turn), cold, strict=True):
        assert later.routed_experts is not None
        assert first.routed_experts is not None
        assert np.array_equal(later.routed_experts, first.routed_experts[17:])


def test_preemption_and_a_warm_cache_change_nothing(
    engine: InferenceEngine, cold: list[TrainingSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, table = [], engine._executor._table
    add = table.add
    monkeypatch.setattr(table, "add", lambda new, *more: starts.append(new) or add(new, *more))
    assert same(engine.generate(PROMPTS, ASKED, 2), cold)
    assert any(new.num_generated for new in starts), "none was preempted"


def test_accepted_drafts_count_and_rejected_ones_do_not(engine: InferenceEngine) -> None:
    """Drafts are of greedy samples, which the sampled ones follow in part."""
    predictions = [
        each.completion_tokens for each in engine.generate(PROMPTS, replace(ASKED, temperature=0))
    ]
    drafted = replace(ASKED, temperature=0.4, seed=9)
    found = engine.generate(PROMPTS, drafted, predictions=predictions)
    assert same(found, engine.generate(PROMPTS, replace(drafted, max_draft_tokens=0)))
    accepted = sum(each.num_accepted_draft_tokens for each in found)
    assert 0 < accepted < sum(each.num_draft_tokens for each in found)


def test_a_replay_compares_them(engine: InferenceEngine, cold: list[TrainingSample]) -> None:
    assert engine.replay(cold[0]).verdict == "equal"
    assert cold[0].routed_experts is not None
    other = cold[0].routed_experts.copy()
    other[50] = 5 - other[50]
    values = {name: getattr(cold[0], name) for name in cold[0].__struct_fields__}
    wrong = TrainingSample(**values | {"routed_experts": other})
    assert engine.replay(wrong).verdict == "different"
