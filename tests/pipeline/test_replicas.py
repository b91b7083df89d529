"""Several replicas of batching and executor behind one queue: they share it, come and go."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nano_inference import Completion, Config, Pipeline
from nano_inference.bus.steps import StepPlan, StepResult
from nano_inference.stages.batching.core import BatchingCore
from nano_inference.stages.batching.stage import BatchingStage
from nano_inference.stages.executor.core import ExecutorCore
from nano_inference.stages.executor.stage import ExecutorStage
from nano_inference.stages.fairness.stage import FairnessStage

from .builders import (
    GOOD,
    LONG,
    asking,
    break_once,
    stage_of,
    until,
)
from .conftest import MakeConfig

SHORT_MODEL = True
FRONT = ["admission", "fairness", "streaming"]
REPLICA = ["batching", "executor"]


def replicated(make_config: MakeConfig, **settings: Any) -> Config:
    return make_config(pipeline__replicas=2, pipeline__restart_backoff_s=0.01, **settings)


def batching_of(pipeline: Pipeline, replica: int) -> BatchingCore:
    core = stage_of(pipeline, BatchingStage, replica)._core
    assert core is not None
    return core


def fairness_of(pipeline: Pipeline) -> FairnessStage:
    return stage_of(pipeline, FairnessStage)


def lanes_of(pipeline: Pipeline) -> list[str]:
    return sorted(fairness_of(pipeline)._core.replicas)


def epoch_of(pipeline: Pipeline) -> int:
    return pipeline._actors["admission"].epoch


async def check_at_rest(pipeline: Pipeline) -> None:
    """Nothing is lost: every place is free again, and every block is accounted for."""
    places = 2 * pipeline.config.engine.batch_size_on("cpu")
    await until(lambda: fairness_of(pipeline)._core.credits == places)
    for replica in range(2):
        await until(lambda replica=replica: batching_of(pipeline, replica).idle)  # type: ignore[misc]
        batching_of(pipeline, replica).check()


# --- shared work ------------------------------------------------------------------------------


async def test_a_request_spans_two_replicas(make_config: MakeConfig) -> None:
    """It has more samples than either has places; a stop string ends some in each of them."""
    config = replicated(make_config, engine__max_batch_size=4)
    body = {
        "prompt": "Story about Ana, a cat and 3 balls:",
        "n": 8,
        "sampling": {"temperature": 1.0, "seed": 3, "max_tokens": 60, "ignore_eos": True},
    }
    stopped = {**body, "sampling": {**body["sampling"], "stop": ["a"]}}  # type: ignore[dict-item]
    async with Pipeline(make_config()) as alone:
        expected = [await alone.complete(each) for each in (body, stopped)]
    async with Pipeline(config) as pipeline:
        for each, undisturbed in zip((body, stopped), expected, strict=True):
            completion = await pipeline.complete(each)
            tokens = [sample.token_ids for sample in completion.samples]
            assert tokens == [sample.token_ids for sample in undisturbed.samples]
            await check_at_rest(pipeline)
        for attempt in range(2):
            long = {**LONG, "n": 8, "request_id": f"long-{attempt}"}
            stream = pipeline.submit(long)
            await anext(stream)
            if attempt % 2:  # also while it runs in both for sure
                busy = lambda: all(batching_of(pipeline, i).load()["running"] for i in (0, 1))  # noqa: E731
                await until(busy)
            await pipeline.client.cancel(f"long-{attempt}")
            last = [output async for output in stream]
            assert isinstance(last[-1], Completion)
            assert last[-1].status == "cancelled"
            await check_at_rest(pipeline)
        tail = await pipeline.complete(GOOD)
        assert tail.status == "done"


# --- replicas come and go ---------------------------------------------------------------------


def core_of(pipeline: Pipeline, role: str) -> Any:
    stage = pipeline._actors[role]
    assert isinstance(stage, ExecutorStage | BatchingStage)
    return stage._core


async def test_surviving_replicas_keep_their_prefix_cache(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All requests in flight are sent again, but only lost KV is computed again."""
    first: dict[str, int] = {}
    again: dict[str, int] = {}
    async with Pipeline(replicated(make_config)) as pipeline:
        await until(lambda: len(lanes_of(pipeline)) == 2)
        cores = [core_of(pipeline, role) for role in ("executor", "executor.1")]
        execute = ExecutorCore.execute

        def watched(self: ExecutorCore, plan: StepPlan) -> StepResult:
            for new in plan.new:
                name = new.info.request_id
                if name in first:
                    again[name] = len(new.token_ids) - new.num_cached
                else:
                    first[name] = cores.index(self)
            return execute(self, plan)

        async def never(self: ExecutorStage) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(ExecutorCore, "execute", watched)
        monkeypatch.setattr(ExecutorStage, "open", never)
        bodies = [asking(f"{i} + {i} =", 150) for i in range(8)]
        tasks = [asyncio.create_task(pipeline.complete(body)) for body in bodies]
        await until(lambda: len(first) == 8)
        break_once(monkeypatch, cores[1], "execute", after=20)
        assert {(await task).status for task in tasks} == {"done"}
    kept, lost = ([again[name] for name in first if first[name] == each] for each in (0, 1))
    assert kept == [1] * 4, "the last token, for the next one"
    assert min(lost) > 10
    assert len(lost) == 4


# --- replicas in processes of their own -------------------------------------------------------


def parts(make_config: MakeConfig) -> tuple[Config, Config, Config]:
    """Settings of one pipeline in three processes: the single stages, and two replicas."""
    front = replicated(make_config, pipeline__stages=FRONT)

    def replica(number: int) -> Config:
        stages = {"stages": REPLICA, "replica": number}
        settings = {f"pipeline__{name}": value for name, value in stages.items()}
        return replicated(make_config, bus__prefix=front.bus.prefix, **settings)

    return front, replica(0), replica(1)
