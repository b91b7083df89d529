"""Memory of recurrent states, and settings that exclude them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from nano_inference.bus.parts.states import StateCapacity
from nano_inference.config import EngineConfig, ModelError
from nano_inference.stages.executor import ExecutorCore, LoadedModel, wrap_model
from nano_inference.stages.executor.facts import facts_of_model
from nano_inference.stages.executor.runner.interface import (
    count_blocks,
    count_slots,
    fit_batch_size,
    slot_bytes,
)
from nano_inference.stages.executor.runner.kv_cache import block_bytes
from nano_inference.stages.executor.runner.ranks.group import OneRank
from nano_inference.stages.executor.runner.sharded_model import load_sharded

from ...models import make_model, save


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return wrap_model(make_model("bamba"), 64)


def test_slots_take_at_most_half_of_the_memory_by_default(model: LoadedModel) -> None:
    config = EngineConfig(max_model_len=64, block_size=4, kv_cache_bytes=20 * slot_bytes(model))
    most = fit_batch_size(config, model)
    assert most == 8  # and two slots beside them
    config = msgspec.structs.replace(config, max_batch_size=most)
    assert count_slots(config, model) == 10
    per_block = block_bytes(model, 4)
    assert count_blocks(config, model) == min(10 * slot_bytes(model) // per_block, most * 16)
    wanted = msgspec.structs.replace(config, max_batch_size=19)
    assert fit_batch_size(wanted, model) == 19
    with pytest.raises(ModelError, match="raise kv_cache_bytes, or lower max_batch_size"):
        count_blocks(wanted, model)


def test_snapshots_have_memory_of_their_own(model: LoadedModel) -> None:
    size = slot_bytes(model)
    config = EngineConfig(
        max_model_len=64, block_size=4, max_batch_size=4, state_snapshots_bytes=3 * size + 1
    )
    core = ExecutorCore(config, model=model, num_blocks=16)
    assert StateCapacity.find(core.capacity().parts) == StateCapacity(3, size)
    assert facts_of_model(core)["state_bytes"] == size
    assert core.cache.num_slots == 6
    assert all(len(each) == 9 for each in core.cache.in_slots)
    assert core.off["speculation"]
    core.close()


def test_a_model_of_mixers_alone_has_blocks_that_hold_nothing() -> None:
    model = wrap_model(make_model("mamba2"), 64)
    config = EngineConfig(max_model_len=64, block_size=4, max_batch_size=4)
    assert block_bytes(model, 4) == 0
    assert count_blocks(config, model) == 4 * 16


def test_ranks_are_refused(tmp_path: Path) -> None:
    folder = save(make_model("lfm2"), tmp_path)
    config = EngineConfig(model_path=str(folder), device="cpu")
    with pytest.raises(ModelError, match="2 layers with recurrent state, which can't be shared"):
        load_sharded(config, OneRank())
