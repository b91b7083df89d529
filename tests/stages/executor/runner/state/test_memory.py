"""A second kind of state, kept per sequence, in the same memory as keys and values.

The kind is a toy of these tests: a recurrent sum over a sequence's tokens, and a window of the last
ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from nano_inference.config import EngineConfig, ModelError
from nano_inference.stages.executor import KVCache, LoadedModel, wrap_model
from nano_inference.stages.executor.runner.interface import make_runner
from nano_inference.stages.executor.runner.kv_cache import (
    block_bytes,
    count_blocks,
    count_slots,
    slot_bytes,
)
from nano_inference.stages.executor.runner.loaded_model import Dtypes, LayerSpec
from nano_inference.stages.executor.runner.memory import ReplicaMemory
from nano_inference.stages.executor.runner.state.kinds import (
    StateTensor,
    sequence_bytes,
    token_bytes,
)
from nano_inference.stages.executor.runner.weights.sync_manager import WeightSyncManager

from ...models import make_model

WIDTH, WINDOW = 6, 3
BLOCKS, SLOTS = 5, 4


class Recurrent:
    """A sum in float32 and a window of the last tokens."""

    def tensors(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        return StateTensor((WIDTH,), torch.float32), StateTensor((WINDOW, WIDTH), dtype)


PER_SEQUENCE = WIDTH * 4 + WINDOW * WIDTH * 2
PER_TOKEN = 2 * (16 + 8) * 2
"""Bytes per token of one attention layer in bfloat16."""


def hybrid() -> LoadedModel:
    """One attention layer, and two that are recurrent."""
    config: Any = None
    return LoadedModel(
        nn.Linear(2, 2),
        config,
        torch.device("cpu"),
        Dtypes.of(torch.bfloat16),
        64,
        16,
        (LayerSpec(2, 16, 8, None),),
        other_states=(Recurrent(), Recurrent()),
    )


@pytest.fixture
def cache() -> KVCache:
    cache = KVCache(hybrid(), BLOCKS, 4, num_slots=SLOTS)
    for tensor in cache.tensors:
        tensor.normal_(generator=torch.Generator().manual_seed(0))
    return cache


def step(cache: KVCache, slot: int, rows: Sequence[Tensor]) -> Tensor:
    """One toy layer over tokens of a sequence; what it returns depends on all tokens so far."""
    total, window = cache.layers[1]
    for row in rows:
        total[slot] += row * window[slot].float().sum(0)
        window[slot] = torch.cat((window[slot, 1:], row[None].to(window.dtype)))
    return torch.cat((total[slot], window[slot].flatten().float()))


def test_bytes_are_those_of_the_tensors(cache: KVCache) -> None:
    model = hybrid()
    tensors = [each for state in model.states for each in state.tensors(torch.bfloat16)]
    assert token_bytes(tensors) == PER_TOKEN
    assert sequence_bytes(tensors) == 2 * PER_SEQUENCE
    assert block_bytes(model, 4) == 4 * PER_TOKEN
    assert slot_bytes(model) == 2 * PER_SEQUENCE
    assert cache.num_bytes == (BLOCKS + 1) * 4 * PER_TOKEN + SLOTS * 2 * PER_SEQUENCE
    assert cache.num_bytes == sum(tensor.nbytes for tensor in cache.tensors)


def test_each_kind_has_its_tensors(cache: KVCache) -> None:
    assert [tuple(each.shape) for each in cache.in_blocks] == [(6, 4, 2, 16), (6, 4, 2, 8)]
    assert cache.in_blocks[0] is cache.keys[0]
    assert cache.in_blocks[1] is cache.values[0]
    assert [tuple(each.shape) for each in cache.in_slots] == 2 * [(4, 6), (4, 3, 6)]
    assert [each.dtype for each in cache.in_slots] == 2 * [torch.float32, torch.bfloat16]


def test_new_memory_is_zero() -> None:
    assert not any(tensor.any() for tensor in KVCache(hybrid(), 2, 4, num_slots=2).tensors)


def test_sequences_that_share_a_prompt_go_on_from_copies_of_its_state(cache: KVCache) -> None:
    prompt, first, second = torch.randn(3, 7, WIDTH, generator=torch.Generator().manual_seed(1))
    blocks = [each.clone() for each in cache.in_blocks]
    cache.drop(0)
    step(cache, 0, prompt)
    cache.copy_slots([(0, 2)])
    found = step(cache, 0, first), step(cache, 2, second)
    for slot, others in ((1, first), (3, second)):
        cache.drop(slot)
        step(cache, slot, prompt)
        assert torch.equal(step(cache, slot, others), found[slot // 2])
    assert all(map(torch.equal, cache.in_blocks, blocks))


def test_slots_are_read_before_they_are_overwritten(cache: KVCache) -> None:
    before = [each.clone() for each in cache.in_slots]
    cache.copy_slots([(0, 1), (1, 0), (3, 2)])
    for tensor, old in zip(cache.in_slots, before, strict=True):
        assert torch.equal(tensor, old[[1, 0, 3, 3]])
    cache.copy_slots([])
    with pytest.raises(ValueError, match=r"slots to copy are out of range 0\.\.3"):
        cache.copy_slots([(0, 4)])


def test_a_dropped_slot_shows_nothing_of_its_sequence(cache: KVCache) -> None:
    others = [each[[0, 1, 3]].clone() for each in cache.in_slots]
    cache.drop(2)
    assert not any(each[2].any() for each in cache.in_slots)
    assert all(
        torch.equal(each[[0, 1, 3]], old) for each, old in zip(cache.in_slots, others, strict=True)
    )


def test_blocks_are_copied_without_slots(cache: KVCache) -> None:
    slots = [each.clone() for each in cache.in_slots]
    cache.copy_blocks([(0, 4)])
    assert torch.equal(cache.keys[0][4], cache.keys[0][0])
    assert all(map(torch.equal, cache.in_slots, slots))
    cache.clear()
    assert not any(each.any() for each in cache.tensors)


def test_the_memory_plan_counts_a_slot_for_each_sequence() -> None:
    plain = wrap_model(make_model("qwen2"), 64)
    model = replace(plain, other_states=(Recurrent(),))
    config = EngineConfig(max_model_len=64, max_batch_size=8, block_size=4, kv_cache_bytes=200_000)
    slots = count_slots(config, model) * slot_bytes(model)
    assert slots == 24 * (WIDTH + WINDOW * WIDTH) * 4
    assert count_blocks(config, model) == (200_000 - slots) // block_bytes(model, 4)
    assert count_blocks(config, model) < count_blocks(config, plain)
    scarce = slots + 16 * block_bytes(model, 4) - 1
    with pytest.raises(ModelError, match="max_model_len 64 needs"):
        count_blocks(msgspec.structs.replace(config, kv_cache_bytes=scarce), model)


def test_the_runner_allocates_slots_and_memory_release_frees_them() -> None:
    model = replace(wrap_model(make_model("qwen2"), 64), other_states=(Recurrent(),))
    config = EngineConfig(max_model_len=64, max_batch_size=8, block_size=4, kernels="off")
    cache = make_runner(config, model, 16).cache
    assert cache.num_slots == count_slots(config, model)
    assert cache.num_bytes == 17 * block_bytes(model, 4) + 24 * slot_bytes(model)
    memory = ReplicaMemory([cache], WeightSyncManager(model.module))
    cache.in_slots[0].fill_(7)
    memory.begin_release(["kv_cache"])
    memory.release(["kv_cache"])
    assert {each.untyped_storage().nbytes() for each in cache.in_slots} <= {4}
    memory.resume(["kv_cache"])
    assert not any(each.any() for each in cache.in_slots)
    cache.in_slots[0].fill_(7)
