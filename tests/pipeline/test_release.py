"""A trainer on the same device: memory is released and resumed, while requests wait."""

from __future__ import annotations

import asyncio

import pytest

from nano_inference import (
    Pipeline,
    WeightsError,
)
from nano_inference.bus.control import MemoryState, MemoryTag
from nano_inference.bus.steps import StepPlan
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
    check_stamps,
    greedy,
    raises,
    stage_of,
    until,
    until_batched,
    whole_stream,
    whole_streams,
)

WEIGHTS: tuple[MemoryTag, ...] = ("weights",)
KV_CACHE: tuple[MemoryTag, ...] = ("kv_cache",)


def executor_of(pipeline: Pipeline) -> ExecutorCore:
    return stage_of(pipeline, ExecutorStage)._core


async def waiting(pipeline: Pipeline, number: int) -> None:
    await until_batched(pipeline, number, "waiting")


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
            self.receive(MemoryState(WEIGHTS, ()), now_ns)
        return made

    await running.client.release_memory(WEIGHTS)
    await running.client.resume_memory()
    monkeypatch.setattr(BatchingCore, "plan", plan)
    await running.client.update_weights(oracle.announcing(loaded, 1))
    assert check_stamps(await running.complete(greedy(0, 4))) == 1


@pytest.mark.parametrize(
    ("make_config", "broken"),
    [("memory", "receive"), in_soak("redis-links", "plan")],
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
