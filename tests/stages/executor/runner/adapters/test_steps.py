"""Steps with adapters: together as one by one, and the same bits where promised."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.stages.executor import ExecutorCore, wrap_model
from nano_inference.stages.executor.runner.adapters.peft import AdapterLimits, read_adapter
from nano_inference.stages.executor.runner.adapters.table import AdapterTable

from .....soaking import in_soak
from ...lane import Lane, lane_of
from ...models import VOCAB, make_model
from ...references import generate, least_lead
from ..weights.codes import quantized
from .making import ALL, ATTENTION, make_adapter, merged

LIMITS = AdapterLimits()


@pytest.mark.parametrize("slots", [[0, 0, 1, -1, 2, 2, 1], [-1, 2, 0], [1, 1], [0, -1, 0]])
def test_one_by_one_and_together_agree(tmp_path: Path, slots: list[int]) -> None:
    made = make_model("llama")
    model = wrap_model(copy.deepcopy(made), 64)
    tables = [AdapterTable(model, AdapterLimits(), one_by_one) for one_by_one in (False, True)]
    for seed in range(3):
        targets = ["q_proj", "up_proj"] if seed else ["q_proj"]
        folder = tmp_path / str(seed)
        make_adapter(made, seed, folder, r=seed + 2, target_modules=targets)
        for table in tables:
            table.put(read_adapter(f"a{seed}", 1, str(folder), model, LIMITS))
    layer = model.module.get_submodule("model.layers.1")
    x = torch.randn(1, len(slots), 48, generator=torch.Generator().manual_seed(0))
    for module in (layer.self_attn.q_proj, layer.mlp.up_proj):
        plain = module(x)
        outputs = []
        for table in tables:
            step = table.step(np.array(slots))
            assert step.together == (table is tables[0] and len({*slots} - {-1}) > 1)
            with table.applied(step):
                outputs.append(module(x))
        torch.testing.assert_close(*outputs)
        # The first adapter has but one of the two.
        without = [slot < (module is layer.mlp.up_proj) for slot in slots]
        for output in outputs:
            assert torch.equal(output[0, without], plain[0, without])
            changed = (output[0] != plain[0]).any(-1)
            assert changed.tolist() == [not each for each in without]


def test_an_adapter_of_quantised_layers_adds_to_their_codes(tmp_path: Path) -> None:
    made = make_model("llama")
    quantised = wrap_model(quantized(copy.deepcopy(made)), 64)
    assert quantised.shards is not None
    plain = copy.deepcopy(made)
    plain.load_state_dict(quantised.shards.read())
    make_adapter(made, 0, tmp_path)
    outputs = []
    for model in (quantised, wrap_model(plain, 64)):
        table = AdapterTable(model, LIMITS)
        table.put(read_adapter("a", 1, str(tmp_path), model, LIMITS))
        slots = np.array([0, -1, 0])
        x = torch.randn(1, 3, 48, generator=torch.Generator().manual_seed(0))
        layer = model.module.get_submodule("model.layers.1")
        with table.applied(table.step(slots)):
            outputs.append([layer.self_attn.q_proj(x), layer.mlp.up_proj(x)])
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize(
    ("dtype", "deterministic", "quantization"),
    [
        in_soak("float32", True, "auto"),
        ("bfloat16", "auto", "auto"),
        ("bfloat16", True, "int8"),
        in_soak("bfloat16", True, "auto"),
        in_soak("float32", "auto", "auto"),
        in_soak("float32", "auto", "int4"),
    ],
)
def test_deterministic_mode_holds(
    tmp_path: Path,
    dtype: Literal["float32", "bfloat16"],
    deterministic: Literal["auto", True],
    quantization: Literal["auto", "int8", "int4"],
) -> None:
    """Tokens and logprobs are the same bits, whatever adapters others in the batch have; where the
    mode was not demanded, those of requests without one."""
    # With heads of 32 the kernels compute it as a whole.
    made = make_model("qwen2", head_dim=32).to(getattr(torch, dtype))
    made.save_pretrained(str(tmp_path / "model"))
    config = EngineConfig(
        model_path=str(tmp_path / "model"),
        deterministic=deterministic,
        quantization=quantization,
        max_batch_size=8,
        kv_cache_bytes=1 << 23,
    )
    executor = ExecutorCore(config)
    if deterministic == "auto" and executor.off.get("kernels", ""):
        pytest.skip(executor.off.get("kernels", ""))
    for seed in range(3):
        folder = tmp_path / str(seed)
        make_adapter(made.float(), seed, folder)
        executor.runner.adapters.put(
            read_adapter(f"a{seed}", 1, str(folder), executor.model, LIMITS)
        )
    rng = random.Random(0)
    prompts = [[rng.randrange(1, VOCAB) for _ in range(length)] for length in (9, 21, 3, 14)]

    def run(chosen: list[int], ids: list[str]) -> dict[int, tuple[list[int], list[float]]]:
        answers = Lane(config, executor).run([prompts[index] for index in chosen], 12, ids)
        return {
            index: (answer.token_ids, answer.logprobs)
            for index, answer in zip(chosen, answers, strict=True)
        }

    together = run([0, 1, 2, 3], ["a0", "a1", "", "a0"])
    assert run([2, 0, 1], ["", "a0", "a2"])[2] == run([2], [""])[2] == together[2]
    if deterministic == "auto":
        return
    for index, id in enumerate(["a0", "a1", "", "a0"]):
        assert run([index], [id])[index] == together[index]
    assert run([3, 0], ["a0", "a0"]) == {index: together[index] for index in (3, 0)}
    assert run([2, 0, 1], ["", "a0", "a2"])[0] == together[0]


NEW_TOKENS = 12
LENGTHS = (34, 19, 7, 2)
# Every day two of them: the sequences are still cut, and of several adapters in a step.
SHORT = LENGTHS[::2]


def _settings(first: str) -> tuple[dict[str, Any], ...]:
    """Return the settings of the adapters, the first of which has two kinds of layers; `first`: one
    of them.
    """
    patterns = {"rank_pattern": {first: 5}, "alpha_pattern": {f"layers.1.self_attn.{first}": 20}}
    return {"r": 4}, {"r": 8, "use_rslora": True, "lora_alpha": 3}, {"r": 2, **patterns}


TARGETS = {
    "llama": ALL,
    "qwen2": ALL,
    "gemma2": ALL,
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "mixtral": ATTENTION,
    "qwen3_moe": ATTENTION,
}


@pytest.mark.parametrize(
    "name",
    [name if name in ("phi3", "qwen3_moe") else in_soak(name) for name in TARGETS],
)
@pytest.mark.soak
def test_tokens_equal_those_of_merged_weights(name: str, tmp_path: Path, soak: bool) -> None:
    model = make_model(name)
    references: dict[str, Any] = {"": copy.deepcopy(model)}
    for index, settings in enumerate(_settings(TARGETS[name][0])):
        targets = TARGETS[name][: None if index else 2]
        folder = tmp_path / f"a{index}"
        adapted = make_adapter(model, index, folder, target_modules=targets, **settings)
        references[f"a{index}"] = merged(adapted)
    loaded = wrap_model(copy.deepcopy(model), 256)
    lane = lane_of(loaded, max_tokens_per_batch=48, max_batch_size=16)
    for id in references:
        if id:
            folder = str(tmp_path / id)
            lane.core.runner.adapters.put(read_adapter(id, 1, folder, loaded, AdapterLimits()))
    rng = random.Random(name)
    prompts = [
        [rng.randrange(1, VOCAB) for _ in range(length)] for length in (LENGTHS if soak else SHORT)
    ]
    asked = [(prompt, id) for prompt in prompts for id in references]

    answers = lane.run([prompt for prompt, _ in asked], NEW_TOKENS, [id for _, id in asked])

    alone = {}
    for (prompt, id), answer in zip(asked, answers, strict=True):
        tokens, logits = generate(references[id], [prompt], NEW_TOKENS)
        where = f"{id or 'the model'} on {len(prompt)} tokens, lead={least_lead(logits)}"
        assert answer.token_ids == tokens[0].tolist(), where
        alone[id, len(prompt)] = tuple(answer.token_ids)
    assert len(set(alone.values())) == len(alone), "the adapters change nothing"


PROMPTS = ["12 + 30 =", "98 + 25 ="]
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)


def test_logprobs_are_near_those_without_kernels(tmp_path: Path) -> None:
    config = EngineConfig(dtype="bfloat16", device="cpu")
    make_adapter(AutoModelForCausalLM.from_pretrained(config.model_folder), 0, tmp_path)
    found = {}
    for kernels in ("auto", "off"):
        settings = EngineConfig(dtype="bfloat16", device="cpu", kernels=kernels)
        with InferenceEngine(settings) as engine:
            if kernels == "auto" and engine._executor.runner.fast_modules is None:
                pytest.skip(f"no kernels here: {engine._executor.off.get('kernels', '')}")
            engine.load_adapter("a", tmp_path)
            base = engine.generate(PROMPTS, PARAMS)
            adapted = engine.generate(PROMPTS, PARAMS, adapter="a")
            assert engine.generate(PROMPTS, PARAMS) == base
            assert [each.completion_tokens for each in adapted] != [
                each.completion_tokens for each in base
            ]
            found[kernels] = [each.prompt_logprobs[1:] for each in adapted]
    for own, wanted in zip(*found.values(), strict=True):
        assert own == pytest.approx(wanted, abs=0.5)
