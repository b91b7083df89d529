"""The executor stage launches a plan while the step before it is still being computed."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from nano_inference import Config, EngineConfig, InferenceEngine, Pipeline, SamplingParams
from nano_inference.bus.public import GenerateRequest
from nano_inference.bus.steps import StepPlan, StepResult
from nano_inference.stages.executor import stage as executor_stage
from nano_inference.stages.executor.core import ExecutorCore
from nano_inference.stages.executor.driver.step import LaunchedStep

ENGINE = EngineConfig(dtype="float32", max_batch_size=8)


class SlowCore(ExecutorCore):
    """Like a core on CUDA: a launched step is done some time later."""

    order: list[tuple[str, int]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, runs_ahead=True, **kwargs)
        self.order = []
        self.next_launched = threading.Event()
        made.append(self)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        self.order.append(("launch", plan.step_id))
        step = super().launch(plan)
        self.next_launched.set()
        return step

    def finish(self, step: LaunchedStep) -> StepResult:
        self.order.append(("finish", step.plan.step_id))
        return super().finish(step)


made: list[SlowCore] = []


def wait_for_the_next(step: LaunchedStep) -> None:
    """Lets the step take until the next one is launched, if there is one."""
    core = made[-1]
    core.next_launched.clear()
    if core.order[-1] == ("launch", step.plan.step_id):
        core.next_launched.wait(timeout=0.5)


async def test_steps_overlap_and_tokens_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [f"{number} + 7 =" for number in range(11, 19)]
    sampling = SamplingParams(temperature=1.0, max_tokens=16, seed=5, ignore_eos=True)
    with InferenceEngine(ENGINE) as engine:
        expected = [s.completion_tokens for s in engine.generate(prompts, sampling)]
    monkeypatch.setattr(executor_stage, "ExecutorCore", SlowCore)
    monkeypatch.setattr(LaunchedStep, "wait", wait_for_the_next)
    async with Pipeline(Config(engine=ENGINE)) as pipeline:
        requests = [GenerateRequest(prompt=prompt, sampling=sampling) for prompt in prompts]
        completions = await asyncio.gather(*map(pipeline.complete, requests))
    assert [completion.samples[0].token_ids for completion in completions] == expected
    order = made[-1].order
    places = {event: place for place, event in enumerate(order)}
    ahead = [
        step
        for what, step in order
        if what == "launch" and places["launch", step] < places.get(("finish", step - 1), -1)
    ]
    assert len(ahead) >= 5, "few steps were launched before the one before was read"
    finished = [step for what, step in order if what == "finish"]
    assert finished == sorted(finished)
