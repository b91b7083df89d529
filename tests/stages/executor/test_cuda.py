"""On CUDA: recorded steps, one step ahead, and that no launch waits for the device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from nano_inference.config import EngineConfig, SamplingParams
from nano_inference.stages.executor import ExecutorCore, LoadedModel, wrap_model
from nano_inference.stages.executor.parts.weights import WeightChanges
from nano_inference.stages.executor.runner.fast_modules.calls import join_weights

from .models import ARCHITECTURES, make_model
from .plans import PROMPT, Generation, new_sequence, step_plan
from .runner.test_graphs import run as run_all

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

SAMPLED = SamplingParams(temperature=1.0, max_tokens=12)


def make_core(model: LoadedModel, *, graphs: bool = True) -> ExecutorCore:
    config = EngineConfig(block_size=4, max_batch_size=12, cuda_graphs="auto" if graphs else "off")
    return ExecutorCore(config, model=model)


def on_cuda(name: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return wrap_model(make_model(name, head_dim=32).to("cuda", dtype), 64)


def run(core: ExecutorCore) -> list[Generation]:
    """No draw of these sequences is so near the edge of a token that rounding decides it."""
    generations = [
        Generation(
            seed,
            PROMPT[: 2 + seed % 7],
            SamplingParams(temperature=(0.0, 1.0)[seed % 2], max_tokens=8 + seed),
            arrives=seed,
            seed=seed,
        )
        for seed in range(1, 10)
    ]
    return run_all(core, generations)


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_tokens_are_those_of_the_cpu(name: str) -> None:
    cpu = run(
        ExecutorCore(
            EngineConfig(block_size=4, max_batch_size=12, kv_cache_bytes=1 << 20),
            model=wrap_model(make_model(name, head_dim=32), 64),
        )
    )
    for graphs in (True, False):
        core = make_core(on_cuda(name), graphs=graphs)
        found = run(core)
        assert core.off.get("kernels", "") == "", core.off.get("kernels", "")
        assert [each.token_ids for each in found] == [each.token_ids for each in cpu]
        for ours, other in zip(found, cpu, strict=True):
            assert ours.logprobs == pytest.approx(other.logprobs, abs=1e-3)
        if graphs and core.state.steps.graphs is not None:
            assert sum(core.state.steps.graphs.replays.values()) > 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_dense_model_s_steps_are_recorded_with_our_kernels(dtype: torch.dtype) -> None:
    core = make_core(on_cuda("qwen2", dtype))
    assert core.off.get("graphs", "") == ""
    assert core.runner.fast_modules is not None
    assert core.runner.fast_modules.refused == {}
    assert core.runner.fast_modules.count["Qwen2DecoderLayer"] == len(core.model.layers)


@pytest.mark.parametrize("graphs", [True, False])
def test_joined_products_keep_the_tokens(graphs: bool) -> None:
    expected = run(make_core(on_cuda("qwen2")))
    model = on_cuda("qwen2")
    join_weights(model.module)
    core = make_core(replace(model, is_shared=False), graphs=graphs)
    assert core.off.get("graphs", "") == ("" if graphs else core.off["graphs"])
    assert [each.token_ids for each in run(core)] == [each.token_ids for each in expected]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_graphs_keep_the_results_in_half_precision(dtype: torch.dtype) -> None:
    """The same kernels on the same numbers, except that padding may choose others."""
    model = on_cuda("qwen2", dtype)
    with_graphs, without = run(make_core(model)), run(make_core(model, graphs=False))
    first = [
        (ours.logprobs[0], other.logprobs[0])
        for ours, other in zip(with_graphs, without, strict=True)
    ]
    assert [a for a, _ in first] == pytest.approx([b for _, b in first], abs=0.1)


@pytest.mark.parametrize("graphs", [True, False])
def test_no_launch_of_a_decode_step_waits(graphs: bool) -> None:
    core = make_core(on_cuda("qwen2"), graphs=graphs)
    new = tuple(new_sequence(i, PROMPT, range(6 * i, 6 * i + 6), SAMPLED, seed=i) for i in range(3))
    plans = [step_plan(1, new=new, rows={0: 9, 1: 9, 2: 9})]
    plans += [step_plan(2 + step, rows={0: 1, 1: 1, 2: 1}) for step in range(11)]
    other = make_core(on_cuda("qwen2"), graphs=False)
    expected = [other.execute(plan).token_ids for plan in plans]
    launched = [core.launch(plan) for plan in plans[:3]]
    with no_waiting():
        launched += [core.launch(plan) for plan in plans[3:]]
    assert [core.finish(step).token_ids for step in launched] == expected


def test_new_weights_reach_the_recorded_steps() -> None:
    core = make_core(on_cuda("qwen2"))
    run(core)
    other = make_model("qwen2", seed=1, head_dim=32)
    core.part(WeightChanges).manager.sync_blocking(other.state_dict())
    core.reset()
    fresh = make_core(wrap_model(copy.deepcopy(other).to("cuda"), 64))
    assert [each.token_ids for each in run(core)] == [each.token_ids for each in run(fresh)]
