"""Tokens with adapters equal those of Transformers with PEFT's adapters merged, in float32.

Rows of the model alone and of three adapters of different ranks and layers are in every step.
"""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest

from nano_inference.stages.executor import wrap_model
from nano_inference.stages.executor.runner.adapters import AdapterLimits, read_adapter

from ...lane import Lane
from ...models import VOCAB, make_model
from .making import ALL, ATTENTION, greedy, make_adapter, merged

NEW_TOKENS = 24
LENGTHS = (34, 19, 7, 2)


def _settings(first: str) -> tuple[dict[str, Any], ...]:
    """Of the adapters, the first of which has two kinds of layers; `first`: one of them."""
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


@pytest.mark.parametrize("name", TARGETS)
def test_tokens_equal_those_of_merged_weights(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    references: dict[str, Any] = {"": copy.deepcopy(model)}
    for index, settings in enumerate(_settings(TARGETS[name][0])):
        targets = TARGETS[name][: None if index else 2]
        folder = tmp_path / f"a{index}"
        adapted = make_adapter(model, index, folder, target_modules=targets, **settings)
        references[f"a{index}"] = merged(adapted)
    loaded = wrap_model(copy.deepcopy(model), 256)
    lane = Lane(loaded, max_tokens_per_batch=48, max_batch_size=16)
    for id in references:
        if id:
            folder = str(tmp_path / id)
            lane.executor.adapters.put(read_adapter(id, 1, folder, loaded, AdapterLimits()))
    rng = random.Random(name)
    prompts = [[rng.randrange(1, VOCAB) for _ in range(length)] for length in LENGTHS]
    asked = [(prompt, id) for prompt in prompts for id in references]

    answers = lane.run([prompt for prompt, _ in asked], NEW_TOKENS, [id for _, id in asked])

    alone = {}
    for (prompt, id), answer in zip(asked, answers, strict=True):
        wanted, lead = greedy(references[id], prompt, NEW_TOKENS)
        assert answer.token_ids == wanted, f"{id or 'the model'} on {len(prompt)} tokens, {lead=}"
        alone[id, len(prompt)] = tuple(wanted)
    assert len(set(alone.values())) == len(alone), "the adapters change nothing"
