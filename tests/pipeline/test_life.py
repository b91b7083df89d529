"""Starting, failing, restarting, cancelling, draining: nothing hangs, and all end exactly once."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from nano_inference import BusClient, Completion, Pipeline
from nano_inference.bus.messages import StepPlan, StepResult
from nano_inference.config import STAGES, ConfigError, ModelError
from nano_inference.pipeline.supervisor import RestartBudget, StageFailed
from nano_inference.stages.batching.core import BatchingCore
from nano_inference.stages.executor.core import ExecutorCore
from nano_inference.stages.streaming.core import StreamingCore

from .conftest import MakeConfig

LIMIT_S = 90
GOOD = {"prompt": "12 + 30 =", "sampling": {"temperature": 0}}
LONG = {"prompt": "12 + 30 =", "sampling": {"max_tokens": 1500, "ignore_eos": True}}


class Boom(Exception):
    """What a broken stage raises."""


def break_once(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, after: int) -> None:
    """Makes the given call of a method fail, and only that one."""
    original = getattr(owner, method)
    calls = 0

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == after:
            raise Boom(f"{method} was told to fail")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, method, wrapper)


@pytest.mark.parametrize(
    ("owner", "method"),
    [(ExecutorCore, "execute"), (BatchingCore, "absorb"), (StreamingCore, "absorb")],
)
async def test_a_failed_stage_is_restarted_and_what_it_hit_ends_with_an_error(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    config = make_config(pipeline__restart_backoff_s=0.01)
    async with asyncio.timeout(LIMIT_S), Pipeline(config) as pipeline:
        break_once(monkeypatch, owner, method, after=5)
        hit = await asyncio.gather(*(pipeline.complete(LONG) for _ in range(8)))
        assert {completion.status for completion in hit} == {"error"}
        assert {completion.error.code for completion in hit if completion.error} == {"lane_failed"}
        after = await asyncio.gather(*(pipeline.complete(GOOD) for _ in range(8)))
        assert {completion.status for completion in after} == {"done"}


async def test_a_failed_admission_finds_its_requests_again(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nano_inference.stages.admission.core import AdmissionCore

    config = make_config(pipeline__restart_backoff_s=0.01)
    async with asyncio.timeout(LIMIT_S), Pipeline(config) as pipeline:
        running = [asyncio.create_task(pipeline.complete(LONG)) for _ in range(3)]
        async with aclosing(pipeline.submit(LONG)) as outputs:
            await anext(outputs)
            break_once(monkeypatch, AdmissionCore, "admit", after=1)
            poison = await pipeline.complete(GOOD)
        assert poison.error is not None
        assert poison.error.code == "lane_failed"
        for completion in await asyncio.gather(*running):
            assert completion.status == "error"
        assert (await pipeline.complete(GOOD)).status == "done"


async def test_a_stage_that_keeps_failing_ends_the_pipeline(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def execute(self: ExecutorCore, plan: StepPlan) -> StepResult:
        raise Boom("always")

    config = make_config(pipeline__max_restarts=1, pipeline__restart_backoff_s=0.01)
    with pytest.raises(StageFailed, match="executor stage failed 2 times"):
        async with asyncio.timeout(LIMIT_S), Pipeline(config) as pipeline:
            monkeypatch.setattr(ExecutorCore, "execute", execute)
            while True:
                await pipeline.complete(GOOD)


async def test_a_missing_model_is_said_at_once(make_config: MakeConfig) -> None:
    with pytest.raises(ModelError, match="no model folder"):
        async with Pipeline(make_config(engine__model_path="/nowhere/model")):
            raise AssertionError("it must not start")


async def test_leaving_the_stream_early_cancels_the_request(pipeline: Pipeline) -> None:
    tail = await pipeline.bus.results.tail()
    async with asyncio.timeout(LIMIT_S), aclosing(tail):
        async with aclosing(pipeline.submit({**LONG, "request_id": "left"})) as outputs:
            await anext(outputs)
        completion = await anext(tail)
        assert (completion.request_id, completion.status) == ("left", "cancelled")
        assert completion.usage.completion_tokens < 1500


async def test_cancel_by_another_client(make_config: MakeConfig) -> None:
    config = make_config()
    async with asyncio.timeout(LIMIT_S), Pipeline(config) as pipeline:
        outputs = pipeline.submit({**LONG, "request_id": "mine", "n": 4})
        async with aclosing(outputs):
            await anext(outputs)
            await pipeline.client.cancel("mine")
            completion = [output async for output in outputs][-1]
        assert isinstance(completion, Completion)
        assert completion.status == "cancelled"
        assert {sample.finish_reason for sample in completion.samples} == {"abort"}


async def test_cancel_right_behind_the_request(pipeline: Pipeline) -> None:
    """The cancellation travels on another link, and may be there before the request is let in."""
    client = pipeline.client
    async with asyncio.timeout(LIMIT_S):
        for index in range(20):
            entry_id = await client.publish({**LONG, "request_id": f"r{index}"})
            await client.cancel(f"r{index}", entry_id)
            outputs = pipeline.bus.results.follow(f"r{index}", entry_id)
            completion = [output async for output in outputs][-1]
            assert isinstance(completion, Completion)
            assert completion.status == "cancelled"


async def test_cancel_of_an_unknown_request_changes_nothing(pipeline: Pipeline) -> None:
    await pipeline.client.cancel("nobody")
    assert (await pipeline.complete(GOOD)).status == "done"


async def test_drain_finishes_what_is_in_flight(pipeline: Pipeline) -> None:
    request = {"prompt": "1 + 1 =", "sampling": {"max_tokens": 100, "ignore_eos": True}}
    async with asyncio.timeout(LIMIT_S):
        streams = [pipeline.submit(request) for _ in range(10)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        drained = asyncio.create_task(pipeline.drain(60))
        for stream in streams:
            completion = [output async for output in stream][-1]
            assert isinstance(completion, Completion)
            assert completion.status == "done"
        assert await drained


async def test_drain_ends_the_overdue_with_an_error(pipeline: Pipeline) -> None:
    async with asyncio.timeout(LIMIT_S):
        stream = pipeline.submit(LONG)
        await anext(stream)
        assert await pipeline.drain(0.0)
        completion = [output async for output in stream][-1]
    assert isinstance(completion, Completion)
    assert completion.error is not None
    assert completion.error.code == "shutting_down"


async def test_memory_pipeline_refuses_what_comes_while_it_drains() -> None:
    async with asyncio.timeout(LIMIT_S), Pipeline() as pipeline:
        assert await pipeline.drain(1.0)
        late = await pipeline.complete(GOOD)
        assert late.error is not None
        assert late.error.code == "shutting_down"


async def test_more_requests_than_fit_wait_and_all_end(make_config: MakeConfig) -> None:
    config = make_config(admission__max_in_flight=4, engine__max_batch_size=3)
    async with asyncio.timeout(LIMIT_S), Pipeline(config) as pipeline:
        completions = await asyncio.gather(*(pipeline.complete(GOOD) for _ in range(40)))
    assert [completion.status for completion in completions] == ["done"] * 40


async def test_pause_and_resume(pipeline: Pipeline) -> None:
    async with asyncio.timeout(LIMIT_S):
        await pipeline.client.pause()
        waiting = asyncio.create_task(pipeline.complete(GOOD))
        await pipeline.client.flush_cache()
        done, _ = await asyncio.wait([waiting], timeout=0.2)
        assert not done
        await pipeline.client.resume()
        assert (await waiting).status == "done"


async def test_stages_in_two_processes_worth_of_pipelines(
    make_config: MakeConfig, redis_url: str
) -> None:
    """Two pipelines with some of the stages each, as in two processes, and a client."""
    config = make_config()
    if config.bus.url == "memory":
        with pytest.raises(ConfigError, match="memory bus stays within one process"):
            make_config(pipeline__stages=["executor"])
        return
    front = make_config(pipeline__stages=["admission", "fairness", "streaming"])
    back = make_config(pipeline__stages=["batching", "executor"])
    async with (
        asyncio.timeout(LIMIT_S),
        BusClient.connect(config.bus) as client,
        Pipeline(front) as first,
    ):
        async with Pipeline(back):
            await first.ready()
            completions = await asyncio.gather(*(client.complete(GOOD) for _ in range(20)))
            assert {completion.status for completion in completions} == {"done"}
            hit = client.submit(LONG)
            await anext(hit)
        # The back end has left in good order: what it held ends, and does not hang.
        completion = [output async for output in hit][-1]
        assert isinstance(completion, Completion)
        assert completion.error is not None
        assert completion.error.code == "lane_failed"


def test_restart_budget_doubles_its_waits_and_forgets_old_failures() -> None:
    config = make_budget_config()
    budget = RestartBudget("executor", config)
    assert [budget.failed(0.0), budget.failed(1.0), budget.failed(2.0)] == [0.5, 1.0, 2.0]
    assert budget.failed(100.0) == 0.5
    budget.failed(100.0)
    budget.failed(100.0)
    with pytest.raises(StageFailed):
        budget.failed(100.0)


def make_budget_config() -> Any:
    from nano_inference.config import PipelineConfig

    return PipelineConfig(stages=STAGES, max_restarts=3, restart_window_s=10, restart_backoff_s=0.5)
