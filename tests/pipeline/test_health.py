"""What the reports of the stages add up to."""

from __future__ import annotations

from typing import Any

import pytest

from nano_inference import Pipeline
from nano_inference.config import STAGES, Stage
from nano_inference.pipeline.health import lanes_of, verdict
from nano_inference.pipeline.heart import Heart
from nano_inference.pipeline.models import FACTS
from nano_inference.store.board import StageReport

from .conftest import MakeConfig, both_buses


def report(stage: str, **fields: Any) -> StageReport:
    given = {"lane": "0", "incarnation": stage, "host": "h", "pid": 1, "epoch": 5, "state": "ready"}
    return StageReport(stage=stage, **{**given, **fields})


def lane(name: str = "0", **changed: dict[str, Any]) -> list[StageReport]:
    """All five stages, some of them different."""
    return [report(stage, lane=name, **changed.get(stage, {})) for stage in STAGES]


def test_all_stages_ready() -> None:
    (found,) = lanes_of(lane())
    assert (found.ready, found.epoch, list(found.stages)) == (True, 5, list(STAGES))
    assert verdict([found]) == ""


def test_nobody_there() -> None:
    assert "nano-inference up" in verdict(lanes_of([]))


@pytest.mark.parametrize(
    ("reports", "reason"),
    [
        (lane()[:3], "no process runs executor, streaming"),
        (
            lane(batching={"state": "waiting", "reason": "the executor is not ready"}),
            "batching is waiting: the executor is not ready",
        ),
        (lane(executor={"age_s": 6.1}), "executor reported last 6 s ago"),
        (
            lane(executor={"process_state": "stopped", "pid": 7}),
            "executor is stopped; continue it with `kill -CONT 7`",
        ),
        (
            lane(executor={"process_state": "gone", "pid": 7}),
            "executor has ended (process 7)",
        ),
        (lane(streaming={"epoch": 4}), "streaming has not come into the current epoch"),
    ],
)
def test_one_that_is_not_ready(reports: list[StageReport], reason: str) -> None:
    found = lanes_of(reports)
    assert not found[0].ready
    assert verdict(found) == reason


def replica(number: int, **changed: dict[str, Any]) -> list[StageReport]:
    """The stages of a further replica."""
    return [
        report(f"{stage}.{number}", **changed.get(stage, {})) for stage in ("batching", "executor")
    ]


@pytest.mark.parametrize(
    ("reports", "reason"),
    [
        ([*lane(), *replica(1)], ""),
        ([*lane(), *replica(1, executor={"epoch": 4})], ""),
        ([*lane(executor={"state": "starting", "reason": "it is loading"}), *replica(1)], ""),
        ([each for each in lane() if each.stage not in ("batching", "executor")], "0"),
        ([*(each for each in lane() if each.stage != "executor"), *replica(2)], ""),
        ([*lane(streaming={"epoch": 4}), *replica(1)], "streaming has not come into the"),
        ([*lane(executor={"epoch": 4}), *replica(1, batching={"epoch": 4})], "executor has not"),
    ],
)
def test_one_replica_is_enough(reports: list[StageReport], reason: str) -> None:
    (found,) = lanes_of(reports)
    if reason == "0":
        assert found.reason == "no process runs batching, executor"
    else:
        assert found.ready == (not reason)
        assert found.reason.startswith(reason)
    assert {each.stage for each in reports} == set(found.stages)


def test_one_lane_is_enough() -> None:
    found = lanes_of([*lane("a")[1:], *lane("b")])
    assert [each.ready for each in found] == [False, True]
    assert verdict(found) == ""


def test_every_lane_has_its_reason() -> None:
    found = lanes_of([*lane("a")[1:], *lane("b")[:4]])
    assert verdict(found) == (
        "lane a: no process runs admission; lane b: no process runs streaming"
    )


def test_a_successor_counts_and_not_what_was_killed() -> None:
    killed = report("executor", age_s=4.0, pid=1)
    (found,) = lanes_of([*lane(executor={"state": "starting", "pid": 2}), killed])
    assert found.stages["executor"].pid == 2
    assert not found.ready
    assert found.rivals == ()


@pytest.mark.parametrize("state", ["running", "unknown"])
def test_a_process_that_is_late_for_its_heartbeat_is_only_busy(state: str) -> None:
    (found,) = lanes_of(lane(executor={"process_state": state, "age_s": 4.9}))
    assert found.ready


def test_a_successor_counts_though_it_was_heard_of_before_what_has_ended() -> None:
    killed = report("executor", pid=1, process_state="gone")
    (found,) = lanes_of([*lane(executor={"age_s": 0.4, "pid": 2}), killed])
    assert found.stages["executor"].pid == 2
    assert found.ready
    assert found.rivals == ()


def test_two_at_the_same_time_are_rivals() -> None:
    (found,) = lanes_of([*lane(), report("executor", age_s=0.9, pid=2)])
    assert found.rivals == ("executor",)


@both_buses
async def test_a_pipeline_tells_how_its_stages_are(make_config: MakeConfig) -> None:
    async with Pipeline(make_config()) as pipeline:
        await pipeline.complete({"prompt": "12 + 30 =", "sampling": {"temperature": 0}})
        (found,) = lanes_of(pipeline.stages())
        assert found.ready, found.reason
        loads = {stage: set(report.load) for stage, report in found.stages.items()}
        assert loads == {
            "admission": {"in_flight", "recovering", "model"},
            "fairness": {
                *("queued", "credits", "paused", "settings"),
                *("preemptions", "yields", "resumes"),
            },
            "batching": {
                *("running", "waiting", "set_aside"),
                *("kv_free", "kv_total", "kv_cached"),
            },
            "executor": {
                *("plans", "steps", "device", "weight_version", "max_model_len"),
                *("deterministic", *FACTS),
            },
            "streaming": {"open", "tokens_per_s", "ttft_ms_p50", "ttft_ms_p95"},
        }
        assert found.stages["executor"].load["steps"] > 0  # type: ignore[operator]
        assert [each.stage for each in await pipeline.bus.store.board.read()] == sorted(STAGES)


@both_buses
async def test_stages_that_wait_say_for_what(make_config: MakeConfig) -> None:
    config = make_config()
    if config.bus.url == "memory":
        return
    some: tuple[Stage, ...] = ("admission", "batching")
    async with Pipeline(make_config(pipeline__stages=some)) as pipeline:
        reasons: dict[str, str] = {}
        while "has not told" not in reasons.get("batching", ""):
            await pipeline.bus.ping()
            reasons = {report.stage: report.reason for report in pipeline.stages()}
        # Without the executor batching does not know what fits.
        assert reasons["admission"] == "fairness, batching, executor, streaming not ready"
        bus = pipeline.bus
        heart = Heart(config, bus, {})
        assert {report.state for report in heart.reports()} == {"starting"}
