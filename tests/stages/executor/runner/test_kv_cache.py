"""The KV cache's tensors by themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nano_inference.stages.executor import KVCache, LoadedModel
from nano_inference.stages.executor.runner.loaded_model import LayerSpec
from nano_inference.stages.executor.runner.system_memory import why_no_huge_pages, zeros

from ....resident import asks_for_huge_pages, needs_proc, resident_bytes


def make_cache(device: str, num_blocks: int = 5, *, huge_pages: bool = False) -> KVCache:
    spec = LayerSpec(2, 16, 16, None)
    config: Any = None
    layers = (spec, spec)
    model = LoadedModel(nn.Module(), config, torch.device(device), torch.float32, 4096, 16, layers)
    return KVCache(model, num_blocks, block_size=4, huge_pages=huge_pages)


@needs_proc
def test_it_takes_no_memory_before_it_is_written() -> None:
    before = resident_bytes()
    cache = make_cache("cpu", num_blocks=1 << 15)
    tensors = [*cache.keys, *cache.values]
    size = sum(tensor.nbytes for tensor in tensors)
    assert size > 60 << 20
    assert resident_bytes() - before < size / 4
    assert not any(tensor[::100].any() for tensor in tensors)
    cache.clear()
    assert resident_bytes() - before > size / 2
    del cache, tensors
    assert resident_bytes() - before < size / 4


@needs_proc
@pytest.mark.skipif(bool(why_no_huge_pages()), reason="this system has no large pages")
@pytest.mark.parametrize("huge_pages", [True, False])
def test_its_pages_are_large_if_they_are_to_be(huge_pages: bool) -> None:
    cache = make_cache("cpu", num_blocks=1 << 13, huge_pages=huge_pages)
    for tensor in (*cache.keys, *cache.values):
        assert asks_for_huge_pages(tensor) == huge_pages


def test_more_than_there_is() -> None:
    with pytest.raises(RuntimeError, match="can't allocate 1125899906842624 bytes"):
        zeros((1 << 20, 1 << 28), torch.float32, torch.device("cpu"))


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
