"""Layers whose indexer chooses the tokens that a query sees."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nano_inference.config import ModelError
from nano_inference.pipeline.exact_forward import ExactForward
from nano_inference.stages.executor import KVCache, LoadedModel, Rows, wrap_model
from nano_inference.stages.executor.runner.inputs import InputBuilder, model_forward

from .....soaking import in_soak
from ...models import make_model
from ...test_parity import RUNS, Run, run_and_compare, served

LENGTH = 30
IDS = np.random.default_rng(1).integers(1, 200, LENGTH)

BLOCKS = {
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense"] * 3,
    "dense_intermediate_size": 64,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_block_size": 4,
    "index_topk_blocks": 3,
}


def logits(model: LoadedModel, cache: KVCache, counts: list[int]) -> Tensor:
    """Return those of a sequence in chunks, beside another one of a token each."""
    builder, found, start = InputBuilder(model, cache.block_size), [], 0
    tables = np.arange(16).reshape(2, 8)
    for step, count in enumerate(counts):
        rows = Rows(np.array([step, start]), np.array([1, count]), tables, 1 + (count == 1))
        ids = np.concatenate((IDS[step : step + 1], IDS[start : start + count]))
        found.append(
            model_forward(model.module, builder.build(rows, ids, np.arange(1, count + 1)), cache)
        )
        start += count
    return torch.cat(found)


def distance(found: Tensor, wanted: Tensor) -> float:
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


@pytest.mark.parametrize(
    ("name", "changes", "equal"),
    [
        ("deepseek_v32", {}, True),
        ("deepseek_v32", {"index_n_heads": 2}, False),
        ("minimax_m3_vl_text", BLOCKS, True),
    ],
)
def test_choices_are_those_of_transformers_unless_scores_are_equal(
    name: str, changes: dict[str, Any], equal: bool
) -> None:
    """Sums over two heads are often zero; of equal ones the earliest are chosen, in any chunks."""
    module = make_model(name, **changes)
    with torch.inference_mode():
        own = copy.deepcopy(module)(input_ids=torch.from_numpy(IDS)[None], use_cache=False).logits[
            0
        ]
    model = wrap_model(module, 64)
    cache = KVCache(model, 16, 4)
    for tensor in cache.in_blocks:
        tensor.normal_()
    whole = logits(model, cache, [LENGTH])
    assert (distance(whole, own) < 1e-4) == equal
    for counts in ([10, 1, 1, 18], [1] * LENGTH):
        assert distance(logits(model, cache, counts), whole) < 1e-4


@pytest.mark.parametrize("run", [run if run is RUNS[1] else in_soak(run) for run in RUNS], ids=str)
def test_tokens_and_logprobs_equal_generate(run: Run) -> None:
    run_and_compare("deepseek_v32", run, served("deepseek_v32"), 8)


def test_the_cache_keeps_the_keys_of_indexers() -> None:
    model = wrap_model(make_model("deepseek_v32"), 64)
    cache = KVCache(model, 3, 4)
    assert {layer: tuple(keys.shape) for layer, keys in cache.index_keys.items()} == dict.fromkeys(
        range(3), (4, 4, 16)
    )
    assert all(any(keys is each for each in cache.in_blocks) for keys in cache.index_keys.values())


def test_there_is_no_exact_training_pass_for_them() -> None:
    with pytest.raises(ModelError, match="indexer"):
        ExactForward(make_model("deepseek_v32"))
