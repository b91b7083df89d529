"""Layers whose indexer chooses the tokens that a query sees."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor

from nano_inference.config import ModelError
from nano_inference.pipeline.exact_forward import ExactForward
from nano_inference.stages.executor import KVCache, LoadedModel, Rows, wrap_model
from nano_inference.stages.executor.runner.inputs import InputBuilder, model_forward

from ...models import make_model

LENGTH = 30
IDS = np.random.default_rng(1).integers(1, 200, LENGTH)


def logits(model: LoadedModel, cache: KVCache, counts: list[int]) -> Tensor:
    """Of a sequence in chunks, beside another one of a token each."""
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


@pytest.mark.parametrize(("heads", "equal"), [(32, True), (2, False)])
def test_choices_are_those_of_transformers_unless_scores_are_equal(heads: int, equal: bool) -> None:
    """Sums over two heads are often zero; of equal ones the earliest are chosen, in any chunks."""
    module = make_model("deepseek_v32", index_n_heads=heads)
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
