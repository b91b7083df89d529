"""Starting, failing, cancelling, draining, closing: nothing hangs, and all end exactly once."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from torch import Tensor

from nano_inference import BusClient, Completion, EngineConfig, InferenceEngine, Pipeline
from nano_inference.bus.steps import StepPlan, StepResult
from nano_inference.config import ConfigError, ModelError, PipelineConfig, load_config
from nano_inference.pipeline.supervisor import RestartBudget, StageFailed
from nano_inference.stages.admission.requests import Requests
from nano_inference.stages.batching.core import BatchingCore
from nano_inference.stages.executor.core import ExecutorCore
from nano_inference.stages.fairness.core import FairnessCore
from nano_inference.stages.streaming.core import StreamingCore

from ..soaking import in_soak
from .builders import (
    GOOD,
    LONG,
    Boom,
    asking,
    break_once,
    check_stream,
    end_of,
    error_code,
    stream_request,
    until,
    whole_stream,
    whole_streams,
)
from .conftest import MakeConfig, both_buses

SHORT_MODEL = True


# All stages fail over Redis below; keeping requests from the dead letters is admission's task.
@pytest.mark.parametrize(
    ("make_config", "owner", "method", "after"),
    [
        ("memory", ExecutorCore, "execute", 20),
        ("memory", BatchingCore, "absorb", 20),
        in_soak("redis-links", BatchingCore, "absorb", 20),
        ("memory", StreamingCore, "absorb", 20),
        ("memory", Requests, "room", 6),
        in_soak("redis-links", Requests, "room", 6),
    ],
    indirect=["make_config"],
)
async def test_a_failed_stage_is_replaced_and_every_stream_goes_on(
    exact: Pipeline, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, after: int
) -> None:
    break_once(monkeypatch, owner, method, after)
    await whole_streams(exact)
    assert not await exact.bus.requests.dead_letters()


async def test_a_pause_outlasts_a_failure(exact: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    running = asyncio.create_task(whole_stream(exact, 0))
    await exact.client.pause()
    admission = exact._actors["admission"]
    epoch = admission.epoch
    break_once(monkeypatch, FairnessCore, "push", after=1)
    other = asyncio.create_task(whole_stream(exact, 1))
    await until(lambda: admission.epoch > epoch and admission.condition()[0] == "ready")
    done, _ = await asyncio.wait([other], timeout=0.2)
    assert not done
    await exact.client.resume()
    await asyncio.gather(running, other)


async def test_a_stage_that_keeps_failing_ends_the_pipeline(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def execute(self: ExecutorCore, plan: StepPlan) -> StepResult:
        raise Boom("always")

    config = make_config(pipeline__max_restarts=1, pipeline__restart_backoff_s=0.01)
    with pytest.raises(StageFailed, match="executor stage failed 2 times"):
        async with Pipeline(config) as pipeline:
            monkeypatch.setattr(ExecutorCore, "execute", execute)
            while True:
                await pipeline.complete(GOOD)


async def test_a_missing_model_is_said_at_once(make_config: MakeConfig) -> None:
    with pytest.raises(ModelError, match="no model folder"):
        async with Pipeline(make_config(engine__model_path="/nowhere/model")):
            raise AssertionError("it must not start")


@both_buses("redis-links")
async def test_leaving_the_stream_early_cancels_the_request(pipeline: Pipeline) -> None:
    tail = await pipeline.bus.results.tail()
    async with aclosing(tail):
        async with aclosing(pipeline.submit({**LONG, "request_id": "left"})) as outputs:
            await anext(outputs)
        completion = await anext(tail)
        assert (completion.request_id, completion.status) == ("left", "cancelled")
        assert completion.usage.completion_tokens < 1500


@both_buses("redis-links")
async def test_a_cancellation_right_after_its_request_counts(pipeline: Pipeline) -> None:
    """The cancellation travels on another link, and may be there before the request is let in."""
    client = pipeline.client
    for index in range(8):
        entry_id = await client.publish({**LONG, "request_id": f"r{index}"})
        await client.cancel(f"r{index}", entry_id)
        outputs = pipeline.bus.results.follow(f"r{index}", entry_id)
        completion = await end_of(outputs)
        assert completion.status == "cancelled"


@both_buses()
async def test_drain_finishes_requests_in_flight(pipeline: Pipeline) -> None:
    streams = [pipeline.submit(asking("1 + 1 =", 40)) for _ in range(6)]
    await asyncio.gather(*(anext(stream) for stream in streams))
    drained = asyncio.create_task(pipeline.drain(60))
    for stream in streams:
        completion = await end_of(stream)
        assert completion.status == "done"
    assert await drained


async def test_drain_ends_the_overdue_with_an_error(pipeline: Pipeline) -> None:
    stream = pipeline.submit(LONG)
    await anext(stream)
    assert await pipeline.drain(0.0)
    completion = await end_of(stream)
    assert isinstance(completion, Completion)
    assert error_code(completion) == "shutting_down"


def test_on_a_memory_bus_all_stages_are_in_one_process(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="memory bus stays within one process"):
        make_config(pipeline__stages=["executor"])


# Where links are on Redis if need be, some are in memory.
@pytest.mark.parametrize("make_config", ["redis", in_soak("cluster")], indirect=True)
async def test_two_pipelines_can_share_the_stages_of_a_lane(make_config: MakeConfig) -> None:
    """Two pipelines with some of the stages each, as in two processes, and a client."""
    config = make_config()
    front = make_config(pipeline__stages=["admission", "fairness", "streaming"])
    back = make_config(pipeline__stages=["batching", "executor"])
    async with BusClient.connect(config.bus) as client, Pipeline(front) as first:
        async with Pipeline(back):
            await first.ready()
            completions = await asyncio.gather(*(client.complete(GOOD) for _ in range(6)))
            assert {completion.status for completion in completions} == {"done"}
            hit = client.submit(stream_request(0))
            outputs = [await anext(hit)]
        # The back end has left in good order: its requests go on with the next one.
        async with Pipeline(back):
            outputs += [output async for output in hit]
        check_stream(0, outputs, folder=config.engine.model_folder)


BUDGET = PipelineConfig(max_restarts=3, restart_window_s=10, restart_backoff_s=0.5)


def test_restart_budget_doubles_its_waits_and_forgets_old_failures() -> None:
    budget = RestartBudget("executor", BUDGET)
    assert [budget.failed(0.0), budget.failed(1.0), budget.failed(2.0)] == [0.0, 0.5, 1.0]
    assert budget.failed(100.0) == 0.0
    budget.failed(100.0)
    budget.failed(100.0)
    with pytest.raises(StageFailed):
        budget.failed(100.0)


def test_restart_budget_waits_no_longer_than_is_sensible() -> None:
    """However many restarts are allowed: 0.5 s doubled two thousand times is no number any more."""
    budget = RestartBudget("executor", msgspec.structs.replace(BUDGET, max_restarts=3000))
    assert max(budget.failed(0.0) for _ in range(2500)) == 10.0


# --- memory after the end --------------------------------------------------------------------


class Kept:
    """The tensors of all executors so far that are still referenced."""

    def __init__(self) -> None:
        self._tensors: list[weakref.ref[Tensor]] = []
        self.when_made: list[int] = []

    def __len__(self) -> int:
        return sum(ref() is not None for ref in self._tensors)

    def watch(self, core: ExecutorCore) -> None:
        tensors = (*core.cache.keys, *core.cache.values, *core.model.module.parameters())
        self._tensors += map(weakref.ref, tensors)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    """With the garbage collector off."""
    found = Kept()
    load = ExecutorCore.__init__

    def watched(self: ExecutorCore, *args: Any, **kwargs: Any) -> None:
        found.when_made.append(len(found))
        load(self, *args, **kwargs)
        found.watch(self)

    monkeypatch.setattr(ExecutorCore, "__init__", watched)
    gc.collect()
    gc.disable()
    try:
        yield found
    finally:
        gc.enable()


# Where there are kernels for bfloat16, they are woven into the model.
@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(dtype="float32"),
        EngineConfig(dtype="bfloat16"),
        EngineConfig(dtype="float32", deterministic=True),
    ],
    ids=["float32", "bfloat16", "deterministic"],
)
def test_an_engine_frees_its_tensors(kept: Kept, config: EngineConfig) -> None:
    with InferenceEngine(config, reference=config) as engine:
        engine.generate(["98 + 25 ="])
        assert len(kept)
    assert not len(kept)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_pipeline_frees_its_tensors_while_requests_run(kept: Kept, dtype: str) -> None:
    async with Pipeline(load_config(env={}, overrides={"engine.dtype": dtype})) as pipeline:
        await pipeline.complete(GOOD)
        endless = pipeline.submit({**LONG, "stream": True})
        await anext(endless)
        assert len(kept)
    assert not len(kept)
    # The pipeline has ended, so closing the stream sends no cancellation.
    await endless.aclose()


async def test_a_failed_executor_s_tensors_are_freed_before_its_successor_loads(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(
        env={}, overrides={"engine.dtype": "float32", "pipeline.restart_backoff_s": 0.01}
    )
    async with Pipeline(config) as pipeline:
        break_once(monkeypatch, ExecutorCore, "execute", after=20)
        await whole_streams(pipeline)
    assert kept.when_made == [0, 0]
    assert not len(kept)
