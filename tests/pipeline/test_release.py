"""A trainer on the same device: memory is released and resumed, while requests wait."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from nano_inference import (
    Completion,
    GenerateRequest,
    Pipeline,
    SamplingParams,
    WeightsError,
)
from nano_inference.bus.control import MemoryTag
from nano_inference.bus.steps import StepPlan
from nano_inference.bus.weights import FolderWeights
from nano_inference.stages.batching.core import BatchingCore
from nano_inference.stages.executor.changes.shell import StagedChanges
from nano_inference.stages.executor.core import ExecutorCore
from nano_inference.stages.executor.parts.memory import MemoryRelease
from nano_inference.stages.executor.runner.memory import ReplicaMemory
from nano_inference.stages.executor.stage import ExecutorStage

from .. import oracle
from ..sections import read
from ..soaking import in_soak
from .builders import (
    State,
    break_once,
    check_purity,
    check_stamps,
    greedy,
    raises,
    stage_of,
    until,
    until_batched,
    versions_of,
    whole_stream,
    whole_streams,
)
from .conftest import MakeConfig, both_buses

WEIGHTS: tuple[MemoryTag, ...] = ("weights",)
KV_CACHE: tuple[MemoryTag, ...] = ("kv_cache",)


def executor_of(pipeline: Pipeline) -> ExecutorCore:
    return stage_of(pipeline, ExecutorStage)._core


async def waiting(pipeline: Pipeline, number: int) -> None:
    await until_batched(pipeline, number, "waiting")


@both_buses()
async def test_running_requests_continue_after_a_release(exact: Pipeline) -> None:
    """Its KV is computed again, from the same weights: greedy tokens are the same."""
    streams = asyncio.create_task(whole_streams(exact))
    batching = exact._actors["batching"]
    for _ in range(5):
        await until_batched(exact, 8)
        await exact.client.release_memory(KV_CACHE)
        load = batching.load()
        assert (load["running"], load["waiting"]) == (0, 8)
        assert (load["kv_free"], load["kv_cached"]) == (load["kv_total"], 0)
        await exact.client.resume_memory(KV_CACHE)
    await streams


async def test_no_kv_is_stale_after_new_weights(running: Pipeline, loaded: State) -> None:
    await running.client.update_weights(oracle.remembering(loaded, 1))
    pure = (await running.complete(greedy(1, 1))).samples[0].logprobs[0]
    requests = [asyncio.create_task(running.complete(greedy(n, 120))) for n in range(6)]
    await until_batched(running, 6)
    await running.client.release_memory()
    await running.client.resume_memory()
    await running.client.update_weights(oracle.remembering(loaded, 2))
    spans = [check_purity(each, pure, whole=True) for each in await asyncio.gather(*requests)]
    assert max(spans) == 2
    assert versions_of(await running.complete(greedy(0, 3))) == [2, 2, 2]


async def test_nothing_is_made_by_weights_that_hold_nothing(
    running: Pipeline, loaded: State
) -> None:
    await running.client.release_memory(WEIGHTS)
    await running.client.resume_memory()
    request = asyncio.create_task(running.complete(greedy(0, 4)))
    await waiting(running, 1)
    assert running._actors["executor"].load()["lacks"] == "weights"
    await running.client.update_weights(oracle.announcing(loaded, 1))
    assert check_stamps(await request) == 1
    assert "lacks" not in running._actors["executor"].load()


async def test_word_of_the_weights_before_may_come_late(
    running: Pipeline, loaded: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the plan with the new ones was sent."""
    original = BatchingCore.plan

    def plan(self: BatchingCore, now_ns: int) -> StepPlan | None:
        made = original(self, now_ns)
        if made is not None and read(made).weight_version:
            self.change_memory(WEIGHTS, ())
        return made

    await running.client.release_memory(WEIGHTS)
    await running.client.resume_memory()
    monkeypatch.setattr(BatchingCore, "plan", plan)
    await running.client.update_weights(oracle.announcing(loaded, 1))
    assert check_stamps(await running.complete(greedy(0, 4))) == 1


@both_buses("redis-links")
async def test_a_release_under_load_loses_no_request(exact: Pipeline, loaded: State) -> None:
    """Many at once, in any order, beside updates: each is done or refused with a code."""
    streams = asyncio.create_task(whole_streams(exact))
    client = exact.client
    calls: list[Any] = []
    for number in range(8):
        tags = (KV_CACHE, WEIGHTS)[number % 4 == 3]
        calls += [client.release_memory(tags), client.resume_memory()]
        calls.append(client.update_weights(loaded, in_flight="retract"))
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert {error.code for error in outcomes if isinstance(error, WeightsError)} <= {
        "weights_busy",
        "memory_released",
    }
    assert all(error is None or isinstance(error, int | WeightsError) for error in outcomes)
    await client.resume_memory()
    await client.update_weights(loaded)
    await streams


@pytest.mark.parametrize(
    ("make_config", "broken"),
    [("memory", "change_memory"), in_soak("redis-links", "plan")],
    indirect=["make_config"],
)
async def test_a_release_outlives_the_failure_of_batching(
    exact: Pipeline, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """The executor reports pending and released memory to batching's successor."""
    streams = asyncio.create_task(whole_streams(exact, 3))
    await until_batched(exact, 3)
    break_once(monkeypatch, BatchingCore, broken, after=1)
    await exact.client.release_memory(KV_CACHE)
    assert executor_of(exact).part(MemoryRelease).memory.released == {"kv_cache"}
    await waiting(exact, 3)
    before = exact._actors["batching"]
    with monkeypatch.context() as patch:
        # The executor's first report tells a successor about released memory.
        patch.setattr(StagedChanges, "_send_batching", silence)
        break_once(patch, BatchingCore, "plan", after=1)
        await exact.client.flush_cache()
        await until(lambda: exact._actors["batching"] is not before)
        # After two failures requests come one at a time.
        await until(lambda: bool(exact._actors["batching"].load().get("waiting")))
        assert exact._actors["batching"].load()["running"] == 0
    await exact.client.resume_memory()
    await streams


async def silence(*_: object) -> None:
    pass


async def test_a_failed_executor_restarts_with_all_memory(
    exact: Pipeline, loaded: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the weights of model_path, as version 0; a pending release ends with an error."""
    await exact.client.update_weights(oracle.announcing(loaded, 1))
    break_once(monkeypatch, ReplicaMemory, "release", after=1)
    with raises("weights_interrupted", kind=WeightsError):
        await exact.client.release_memory()
    await whole_stream(exact, 3)
    await exact.client.release_memory()
    stream = asyncio.create_task(whole_stream(exact, 4))
    await waiting(exact, 1)
    break_once(monkeypatch, ReplicaMemory, "resume", after=1)
    with pytest.raises(WeightsError):
        await exact.client.resume_memory()
    await stream
    assert await exact.client.weight_version() == 0
    assert executor_of(exact).capacity().lacks == ()


@both_buses()
async def test_every_replica_releases_its_own(
    make_config: MakeConfig, loaded: State, tmp_path: Path
) -> None:
    save_file(oracle.announcing(loaded, 1), tmp_path / "model.safetensors")
    async with Pipeline(make_config(pipeline__replicas=2)) as pipeline:
        await pipeline.client.release_memory()
        stages = [pipeline._actors[role] for role in ("executor", "executor.1")]
        assert [stage.load()["lacks"] for stage in stages] == ["weights, kv_cache"] * 2
        sampling = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        request = GenerateRequest(prompt_token_ids=(5, 6), sampling=sampling)
        completions = [asyncio.create_task(pipeline.complete(request)) for _ in range(4)]
        await pipeline.client.resume_memory(WEIGHTS)
        await pipeline.client.update_weights(FolderWeights(str(tmp_path)))
        await pipeline.client.resume_memory(KV_CACHE)
        found: list[Completion] = await asyncio.gather(*completions)
        assert [check_stamps(each) for each in found] == [1] * 4
