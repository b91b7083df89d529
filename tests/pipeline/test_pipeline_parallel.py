"""A pipeline of stages whose model is cut into stages of layers, processes of their own."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from nano_inference import Pipeline
from nano_inference.bus.steps import StepPlan, StepResult
from nano_inference.stages.executor.core import ExecutorCore
from nano_inference.stages.executor.driver.step import LaunchedStep

from . import reference, short_model
from .conftest import LIMIT_S, MakeConfig
from .test_ranks import short_bodies as bodies
from .test_ranks import survive_failures, survive_signal
from .test_roles import bits

pytestmark = pytest.mark.slow

FOLDER = short_model.folder((3, 4))
EXACT: dict[str, Any] = {"engine__model_path": str(FOLDER), "engine__deterministic": True}
STAGES: dict[str, Any] = {
    "engine__pipeline_parallel": 2,
    "engine__rank_timeout_s": 1.0,
    "pipeline__restart_backoff_s": 0.01,
}


class Launches:
    """The steps that executors launch.

    Attributes:
        beside: For each the number of launched steps that weren't finished.
    """

    def __init__(self) -> None:
        self.beside: list[int] = []
        self.unfinished: set[int] = set()

    def clear(self) -> None:
        self.beside.clear()
        self.unfinished.clear()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    found = Launches()
    launch, finish = ExecutorCore.launch, ExecutorCore.finish

    def launched(self: ExecutorCore, plan: StepPlan, *more: Any) -> LaunchedStep:
        if plan.seq_ids:
            found.beside.append(len(found.unfinished))
            found.unfinished.add(plan.step_id)
        return launch(self, plan, *more)

    def finished(self: ExecutorCore, step: LaunchedStep) -> StepResult:
        found.unfinished.discard(step.plan.step_id)
        return finish(self, step)

    monkeypatch.setattr(ExecutorCore, "launch", launched)
    monkeypatch.setattr(ExecutorCore, "finish", finished)
    return found


@pytest.mark.soak
async def test_a_stage_that_dies_or_stops_costs_no_token(
    make_config: MakeConfig, launches: Launches, soak: bool
) -> None:
    """Of the second stage. Every answer is that of one rank, bit for bit.

    Every day it dies under load once."""
    async with Pipeline(make_config(**EXACT)) as alone:
        done = await asyncio.gather(*map(alone.complete, bodies("SIGKILL")))
    expected = [bits(each) for each in done]
    assert set(launches.beside) == {0}
    launches.clear()
    async with asyncio.timeout(LIMIT_S), Pipeline(make_config(**EXACT, **STAGES)) as pipeline:
        if soak:
            await survive_failures(pipeline, expected, bodies)
        else:
            await survive_signal(pipeline, expected, signal.SIGKILL, bodies)
        launches.clear()
        found = await asyncio.gather(*map(pipeline.complete, bodies("idle")))
        assert [bits(each) for each in found] == expected
        # The first stage computes while the second one does, nearly always.
        assert max(launches.beside) == 1
        assert launches.beside.count(1) > len(launches.beside) // 2


async def test_what_a_pipeline_does_meanwhile_changes_no_token(make_config: MakeConfig) -> None:
    """Grammars, embeddings, cancellations, a pause, and new weights between plans in flight."""
    state = {
        name: (tensor * 1.01).clone()
        for name, tensor in reference.model(FOLDER).state_dict().items()
    }
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    sampling = {"temperature": 1.0, "seed": 3, "max_tokens": 40}
    constrained = {
        "request_id": "json",
        "prompt": "1 + 1 =",
        "sampling": {**sampling, "constraint": {"json_schema": schema}},
    }
    vector = {"request_id": "vector", "prompt": "a text " * 30, "embed": {}}

    async def run(pipeline: Pipeline) -> list[Any]:
        found = []
        requests = [*bodies("one"), constrained, vector]
        reads = [asyncio.create_task(pipeline.complete(body)) for body in requests]
        cut = [
            asyncio.create_task(pipeline.complete({**body, "request_id": f"cut-{at}"}))
            for at, body in enumerate(bodies("cut"))
        ]
        await pipeline.client.pause("keep")
        await pipeline.client.resume()
        for each in cut:
            each.cancel()
        done = await asyncio.gather(*reads)
        found += [bits(each) for each in done[:-1]]
        found.append([sample.embedding for sample in done[-1].samples])
        running = [asyncio.create_task(pipeline.complete(body)) for body in bodies("two")]
        await pipeline.client.update_weights(state)
        await asyncio.gather(*running)
        done = await asyncio.gather(*map(pipeline.complete, bodies("three")))
        found += [bits(each) for each in done]
        versions = {sample.weight_version for each in done for sample in each.samples}
        assert versions == {1}
        return found

    async with asyncio.timeout(LIMIT_S), Pipeline(make_config(**EXACT)) as alone:
        expected = await run(alone)
    async with asyncio.timeout(LIMIT_S), Pipeline(make_config(**EXACT, **STAGES)) as pipeline:
        assert await run(pipeline) == expected
