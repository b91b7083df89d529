"""`top`: what the heartbeats tell, in one view."""

from __future__ import annotations

from io import StringIO

import msgspec
from rich.console import Console

from nano_inference.cli.bus_status import BusStatus
from nano_inference.cli.top import History, view
from nano_inference.config import REPLICATED, STAGES, Config, all_roles
from nano_inference.pipeline.health import lanes_of
from nano_inference.store.board import StageReport

from .conftest import Run
from .test_clients import until_ready

LOADS: dict[str, dict[str, int | float | str]] = {
    "fairness": {"queued": 7, "credits": 20},
    "batching": {"running": 40, "waiting": 4, "kv_free": 250, "kv_total": 1000, "kv_cached": 300},
    "streaming": {"open": 40, "tokens_per_s": 1234, "ttft_ms_p50": 35.5, "ttft_ms_p95": 80.0},
}


def look(rate: int = 1234, *, without: str = "") -> BusStatus:
    reports = [
        StageReport(
            lane="0",
            stage=stage,
            incarnation=stage,
            host="h",
            pid=1,
            epoch=5,
            state="ready",
            load=LOADS.get(stage, {}) | ({"tokens_per_s": rate} if stage == "streaming" else {}),
        )
        for stage in STAGES
        if stage != without
    ]
    lanes = lanes_of(reports)
    return BusStatus(
        ready=lanes[0].ready,
        reason=lanes[0].reason,
        url="redis://here:1",
        server="Valkey",
        prefix="nano",
        waiting=12,
        queue_length=13,
        in_flight=47,
        dead_letters=1,
        last_taken_s=0.1,
        results=0,
        lanes=lanes,
        links={},
        connections={},
    )


def rendered(found: BusStatus, history: History) -> str:
    console = Console(file=StringIO(), width=80, color_system=None)
    console.print(view(found, history))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_a_look_has_every_number() -> None:
    text = rendered(look(), History())
    for words in (
        "12 on the stream, 47 taken, 13 not begun, 1 dead letters",
        "1,234",
        "35.5 ms median, 80.0 ms for 95 of 100",
        "7 in fairness, 4 in batching",
        "40 of 64 samples (62%)",
        "750 of 1,000 used (75%)",
        "300 can be found",
    ):
        assert words in text
    rows = [line.split()[:2] for line in text.splitlines()]
    assert all([stage, "ready"] in rows for stage in STAGES)
    assert max(map(len, text.splitlines())) <= 80


def drafting(*executors: dict[str, int]) -> str:
    """A look at a lane whose replicas tell this of drafts."""
    stages = look().lanes[0].stages
    reports = [report for report in stages.values() if report.stage != "executor"]
    for number, load in enumerate(executors):
        role = f"executor.{number}" if number else "executor"
        reports.append(msgspec.structs.replace(stages["executor"], stage=role, load=load))
    return rendered(msgspec.structs.replace(look(), lanes=lanes_of(reports)), History())


def test_what_becomes_of_drafts_is_shown_where_the_engine_speculates() -> None:
    assert "drafts" not in rendered(look(), History())
    none = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}
    some = {"drafts": 100, "draft_tokens": 400, "accepted_tokens": 250}
    others = {"drafts": 300, "draft_tokens": 1600, "accepted_tokens": 1350}
    assert "none yet" in drafting(none)
    assert "62% of their tokens accepted, 3.5 tokens a step" in drafting(some)
    text = drafting(some, others)
    assert "80% of their tokens accepted, 5.0 tokens a step" in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_rate_leaves_a_track() -> None:
    history = History()
    for rate in (0, 50, 100):
        text = rendered(look(rate), history)
    assert "100        ▄█" in text
    for _ in range(100):
        text = rendered(look(100), history)
    assert max(map(len, text.splitlines())) <= 80, "of the last looks only"


def test_replicas_are_summed_and_each_has_its_rows() -> None:
    one = look()
    further = [
        msgspec.structs.replace(report, stage=f"{report.stage}.1")
        for report in one.lanes[0].stages.values()
        if report.stage in REPLICATED
    ]
    lanes = lanes_of([*one.lanes[0].stages.values(), *further])
    text = rendered(msgspec.structs.replace(one, lanes=lanes), History())
    for words in ("80 of 108 samples", "1,500 of 2,000 used", "7 in fairness, 8 in batching"):
        assert words in text
    rows = [line.split()[:2] for line in text.splitlines()]
    assert all([role, "ready"] in rows for role in all_roles(2))


def test_a_stage_that_is_missing_is_named() -> None:
    text = rendered(look(without="batching"), History())
    assert "not ready: no process runs batching" in text
    assert "0 of 0 used (0%)" in text


def test_one_look_at_a_running_pipeline(run: Run, on_served: Config) -> None:
    run("submit", "98 + 25 =")
    until_ready(run)
    ran = run("top", "--once")
    assert ran.status == 0, ran.stderr
    assert "0 on the stream, 0 taken, 0 not begun, 0 dead letters" in ran.stdout
    assert "KV blocks" in ran.stdout
    assert run("top").status == 0, "on a pipe it is one look, too"


def test_nobody_is_there(run: Run, closed_port: int) -> None:
    ran = run("top", "--once", "--bus", f"redis://127.0.0.1:{closed_port}")
    assert ran.status == 2
    assert "can't reach Redis" in ran.stderr
