"""What a step with adapters computes: together as one by one, and the same bits where promised."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from nano_inference.config import EngineConfig
from nano_inference.stages.batching import BatchingCore
from nano_inference.stages.executor import ExecutorCore, wrap_model
from nano_inference.stages.executor.runner.adapters import AdapterLimits, AdapterTable, read_adapter

from ...lane import Lane
from ...models import VOCAB, make_model
from .making import make_adapter

LIMITS = AdapterLimits()


@pytest.mark.parametrize("slots", [[0, 0, 1, -1, 2, 2, 1], [-1, 2, 0], [1, 1], [0, -1, 0]])
def test_both_ways_agree(tmp_path: Path, slots: list[int]) -> None:
    made = make_model("llama")
    model = wrap_model(copy.deepcopy(made), 64)
    tables = [AdapterTable(model, one_by_one=one_by_one) for one_by_one in (False, True)]
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("deterministic", [True, "auto"])
def test_deterministic_mode_holds(
    tmp_path: Path, dtype: Literal["float32", "bfloat16"], deterministic: Literal["auto", True]
) -> None:
    """Tokens and logprobs are the same bits, whatever adapters others in the batch have; where the
    mode was not demanded, those of requests without one."""
    # With heads of 32 the kernels compute it as a whole.
    made = make_model("qwen2", head_dim=32).to(getattr(torch, dtype))
    made.save_pretrained(str(tmp_path / "model"))
    config = EngineConfig(
        model_path=str(tmp_path / "model"),
        deterministic=deterministic,
        max_batch_size=8,
        kv_cache_bytes=1 << 23,
    )
    executor = ExecutorCore(config)
    if deterministic == "auto" and executor.without_kernels:
        pytest.skip(executor.without_kernels)
    for seed in range(3):
        folder = tmp_path / str(seed)
        make_adapter(made.float(), seed, folder)
        executor.adapters.put(read_adapter(f"a{seed}", 1, str(folder), executor.model, LIMITS))
    lane = Lane.__new__(Lane)
    lane.executor, lane._next_id = executor, 0
    lane._preempt_every = lane._flush_every = 0
    rng = random.Random(0)
    prompts = [[rng.randrange(1, VOCAB) for _ in range(length)] for length in (9, 21, 3, 14)]

    def run(chosen: list[int], ids: list[str]) -> dict[int, tuple[list[int], list[float]]]:
        lane.batching = BatchingCore(config, executor.capacity(), steps_ahead=1)
        answers = lane.run([prompts[index] for index in chosen], 12, ids)
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
