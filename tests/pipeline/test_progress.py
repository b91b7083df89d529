"""Whether lanes make progress: ok, idle or stalled, and how old the last token is."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from nano_inference import Config, EngineConfig, Pipeline
from nano_inference.config import STAGES
from nano_inference.pipeline.health import lanes_of
from nano_inference.pipeline.progress import Progress, progress_of
from nano_inference.pipeline.status import pipeline_status
from nano_inference.stages.executor.core import ExecutorCore
from nano_inference.store.board import StageReport

from .builders import asking
from .deployments import LIMIT_S, eventually

LIMIT = 60.0


def seen(
    *, without: str = "", starting: str = "", host: str | None = None, **loads: dict[str, Any]
) -> Progress:
    """The progress of a lane with these loads, whose reports are 0.5 s old. Its replica 1, if it
    has one, runs on the host "other"."""
    second = ["batching.1", "executor.1"] if "batching_1" in loads else []
    reports = (
        StageReport(
            lane="0",
            stage=stage,
            incarnation=stage,
            host="other" if stage in second else "h",
            pid=1,
            epoch=1,
            state="starting" if stage == starting else "ready",
            age_s=0.5,
            load=loads.get(stage.replace(".", "_"), {}),
        )
        for stage in (*STAGES, *second)
        if stage != without
    )
    return progress_of(lanes_of(reports), LIMIT, host)


BUSY = {"in_flight": 3, "busy_s": 500.0}
STUCK = {"running": 3, "step_age_s": 70.0}
OLD = {"token_age_s": 70.0}


def test_without_requests_a_lane_is_idle_however_old_its_last_token() -> None:
    found = seen(admission={"in_flight": 0}, streaming={"token_age_s": 9000.0})
    assert (found.status, found.token_age_s, found.reason) == ("idle", 9000.5, "")
    assert progress_of([], LIMIT) == Progress(status="idle")


@pytest.mark.parametrize(
    "loads",
    [
        {"admission": BUSY, "batching": {"step_age_s": 0.1}, "streaming": {"token_age_s": 0.2}},
        # A long prompt: no token for long, but steps.
        {"admission": BUSY, "batching": {"step_age_s": 3.0}, "streaming": OLD},
        # The first request after a long rest.
        {"admission": {"in_flight": 1, "busy_s": 0.4}, "streaming": {"token_age_s": 9000.0}},
    ],
)
def test_tokens_or_steps_are_progress(loads: dict[str, dict[str, Any]]) -> None:
    assert (seen(**loads).status, seen(**loads).reason) == ("ok", "")


def test_neither_for_too_long_is_a_stall() -> None:
    found = seen(admission=BUSY, batching=STUCK, streaming=OLD)
    assert (found.status, found.in_flight, found.step_age_s) == ("stalled", 3, 70.5)
    assert found.reason == "lane 0: no step of batching has ended for 70 s"
    # A queue that no stage serves.
    found = seen(admission=BUSY, streaming=OLD)
    assert (found.status, found.reason) == ("stalled", "lane 0: no token for 70 s with 3 in flight")


def test_a_replica_that_hangs_beside_one_that_works_is_found_on_its_host() -> None:
    works, tokens = {"step_age_s": 0.1}, {"token_age_s": 0.1}
    loads = {"admission": BUSY, "batching": works, "batching_1": STUCK, "streaming": tokens}
    found = {host: seen(host=host, **loads) for host in (None, "h", "other")}
    assert [each.status for each in found.values()] == ["stalled", "ok", "stalled"]
    assert found["other"].reason == "lane 0: no step of batching.1 has ended for 70 s"


@pytest.mark.parametrize("gone", ["executor", "streaming", "admission", "batching"])
def test_a_stage_that_is_gone_is_named(gone: str) -> None:
    found = seen(without=gone, admission=BUSY, batching=STUCK, streaming=OLD)
    assert found.status == "stalled"
    assert f"no process runs {gone}" in found.reason


def test_steps_without_delivered_tokens_are_no_progress() -> None:
    assert seen(without="streaming", admission=BUSY, batching={"step_age_s": 0.1}).status == (
        "stalled"
    )


def test_waiting_requests_are_not_stalled() -> None:
    """A restart would not help: a stage loads, or the lane is paused."""
    found = seen(starting="executor", admission=BUSY, streaming=OLD)
    assert (found.status, found.reason) == ("idle", "lane 0: executor is starting")
    held = {"running": 3, "held": "generation is paused"}
    found = seen(admission=BUSY, batching=held, streaming=OLD)
    assert (found.status, found.reason) == ("idle", "lane 0: generation is paused")
    found = seen(admission=BUSY, batching=held, batching_1=STUCK, streaming=OLD)
    assert (found.status, "batching.1" in found.reason) == ("stalled", True)


async def test_a_step_that_never_ends_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while nothing is wrong with the reports of all stages."""
    hung, go = threading.Event(), threading.Event()
    launch = ExecutorCore.launch

    def hang(core: ExecutorCore, *arguments: Any) -> Any:
        if hung.is_set():
            assert go.wait(LIMIT_S)
        return launch(core, *arguments)

    monkeypatch.setattr(ExecutorCore, "launch", hang)
    async with Pipeline(Config(engine=EngineConfig(dtype="float32"))) as pipeline:

        async def status() -> Progress:
            return (await pipeline_status(pipeline.client, 0.5)).progress

        async def is_(state: str) -> bool:
            return (await status()).status == state

        assert (await pipeline.complete(asking(tokens=3))).status == "done"
        await eventually(lambda: is_("idle"))
        hung.set()
        try:
            request = asyncio.create_task(pipeline.complete(asking(tokens=3)))
            await eventually(lambda: is_("stalled"))
            assert "no step of batching has ended" in (await status()).reason
        finally:
            go.set()
        assert (await request).status == "done"
        await eventually(lambda: is_("idle"))
        paused = pipeline.client
        await paused.pause()
        waiting = asyncio.create_task(pipeline.complete(asking(tokens=3)))
        await eventually(lambda: _held(paused))
        assert await is_("idle")
        await paused.resume()
        assert (await waiting).status == "done"


async def _held(client: Any) -> bool:
    found = (await pipeline_status(client, 0.5)).progress
    return found.in_flight == 1 and found.reason == "lane 0: generation is paused"
