"""The KV cache's tensors by themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nano_inference.stages.executor import KVCache, LoadedModel
from nano_inference.stages.executor.loaded_model import LayerSpec


def make_cache(device: str) -> KVCache:
    spec = LayerSpec(2, 16, 16, None)
    config: Any = None
    layers = (spec, spec)
    model = LoadedModel(nn.Module(), config, torch.device(device), torch.float32, 4096, 16, layers)
    return KVCache(model, num_blocks=5, block_size=4)


def test_copy_blocks_reads_all_sources_first(device: str) -> None:
    cache = make_cache(device)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    before = [tensor.clone() for tensor in (*cache.keys, *cache.values)]
    cache.copy_blocks([(0, 3), (3, 4)])
    for tensor, old in zip((*cache.keys, *cache.values), before, strict=True):
        assert torch.equal(tensor, old[[0, 1, 2, 0, 3, 5]])
    cache.copy_blocks([])
    with pytest.raises(ValueError, match="out of range"):
        cache.copy_blocks([(0, 5)])
