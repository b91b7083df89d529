"""top: what it shows, and its keys."""

from __future__ import annotations

import os
import pty
import sys
import termios
from io import StringIO
from typing import Any

import msgspec
import pytest
from rich.console import Console

from nano_inference.cli.bus_status import BusStatus
from nano_inference.cli.clients import Unreachable
from nano_inference.cli.status import lane_table
from nano_inference.cli.top import History, Screen, view
from nano_inference.config import REPLICATED, STAGES, RequestError, all_roles
from nano_inference.store.board import Restarts

from .test_status import LOADS, look, report, rows


def top_of(found: BusStatus, history: History | None = None) -> str:
    out = StringIO()
    history = History() if history is None else history
    history.add(found)
    Console(file=out, width=80, color_system=None).print(view(found, history))
    assert max(map(len, out.getvalue().splitlines())) <= 80
    return out.getvalue()


def test_top_has_every_number() -> None:
    text = top_of(look())
    assert "47 in flight, 12 waiting, 13 not started, 1 dead letters" in text
    for words in ("1,234", "35.5 ms median, 80.0 ms p95", "7 in fairness, 4 in batching"):
        assert words in text
    for words in ("40 of 64 samples (62%)", "750 of 1,000 used, 300 cached (75%)"):
        assert words in text
    assert all([stage, "ready"] in rows(text) for stage in STAGES)


def test_pinned_blocks_are_shown_if_there_are_any() -> None:
    load = LOADS["batching"] | {"kv_pinned": 96}
    assert "96 pinned by sessions" in top_of(look(report("batching", load)))
    assert "pinned" not in top_of(look(report("batching", LOADS["batching"] | {"kv_pinned": 0})))


def test_state_snapshots_are_shown_for_a_model_with_recurrent_state() -> None:
    load = LOADS["batching"] | {"state_snapshots": 12, "state_snapshots_total": 48}
    found = look(report("batching", load))
    assert "12 of 48 snapshots (25%)" in top_of(found)
    shown = StringIO()
    Console(file=shown, width=200, color_system=None).print(lane_table(found.lanes[0]))
    assert "12 of 48 state snapshots" in shown.getvalue()
    assert "snapshots" not in top_of(look())


def test_the_response_cache_is_shown_where_it_is_on() -> None:
    load = {"responses": 1200, "response_hits": 30, "response_lookups": 4000}
    line = "1,200 cached responses, 30 of 4,000 lookups found one"
    found = look(report("admission", load))
    assert line in top_of(found)
    shown = StringIO()
    Console(file=shown, width=200, color_system=None).print(lane_table(found.lanes[0]))
    assert line in shown.getvalue()
    assert "cached responses" not in top_of(look())


def test_drafts_are_shown_if_the_engine_speculates() -> None:
    def drafting(*loads: dict[str, int]) -> str:
        roles = ("executor", "executor.1")
        return top_of(look(*map(report, roles[: len(loads)], loads)))

    none = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}
    some = {"drafts": 100, "draft_tokens": 400, "accepted_tokens": 250}
    others = {"drafts": 300, "draft_tokens": 1600, "accepted_tokens": 1350}
    assert "drafts" not in top_of(look())
    assert "none yet" in drafting(none)
    assert "62% of their tokens accepted, 3.5 tokens a step" in drafting(some)
    assert "80% of their tokens accepted, 5.0 tokens a step" in drafting(some, others)


def test_restarts_are_shown_with_their_time_and_cause() -> None:
    found = look(report("executor", restarts=Restarts().after("a").after("it was ended")))
    words = "2 restarts, the last 0 s ago: it was ended"
    assert words in " ".join(top_of(found).split())
    shown = StringIO()
    Console(file=shown, width=300, color_system=None).print(lane_table(found.lanes[0]))
    assert words in shown.getvalue()
    assert "restart" not in top_of(look())


def test_top_draws_the_last_rates() -> None:
    history = History()
    for rate in (0, 50, 100):
        text = top_of(look(rate=rate), history)
    assert "100        ▄█" in text
    for _ in range(100):
        top_of(look(rate=100), history)


def test_replicas_are_summed_and_each_has_its_rows() -> None:
    text = top_of(look(*(report(f"{stage}.1", LOADS.get(stage, {})) for stage in REPLICATED)))
    for words in ("80 of 108 samples", "1,500 of 2,000 used", "7 in fairness, 8 in batching"):
        assert words in text
    assert all([role, "ready"] in rows(text) for role in all_roles(2))


def test_a_missing_stage_is_named() -> None:
    text = top_of(look(without="batching"))
    assert "not ready: no process runs batching" in text
    assert "0 of 0 used, 0 cached (0%)" in text


TENANTS = {f"tenant-{number}": (number, 60 - number) for number in range(30)}


def shown(screen: Screen, width: int, height: int) -> list[str]:
    """Return the lines of a frame, each without white space at its end."""
    out = StringIO()
    console = Console(file=out, width=width, height=height, color_system=None)
    console.print(screen.frame(console, width, height))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    return lines


def screen_of(found: BusStatus) -> Screen:
    screen = Screen(lambda: found, 1.0)
    screen.found = found
    return screen


def test_one_lane_and_its_tenants_fit_a_terminal() -> None:
    tenants = msgspec.json.encode({"lab": (40, 2), "x": (0, 7)}).decode()
    used = {"cpu": 1.5, "memory_bytes": 3_000_000_000, "pid": 2}
    found = look(
        report("fairness", LOADS["fairness"] | {"tenants": tenants}), report("executor", **used)
    )
    lines = shown(screen_of(found), 80, 24)
    assert lines[0] == "nano-inference  redis://here:1  ready"
    assert " of " not in lines[-1], "there is more to scroll to"
    assert ["lab", "40", "2"] in [line.split() for line in lines]
    executor = next(line for line in lines if line.startswith("executor"))
    assert executor.split()[-2:] == ["3.0", "GB"]
    assert "150%" in executor


def test_keys_of_a_small_terminal() -> None:
    load = LOADS["fairness"] | {"tenants": msgspec.json.encode(TENANTS).decode()}
    memory = {stage: 10**9 * (1 + number) for number, stage in enumerate(STAGES)}
    others = (report(stage, memory_bytes=memory[stage], pid=memory[stage]) for stage in STAGES)
    found = look(*others, report("fairness", load, memory_bytes=1, pid=2))
    screen = screen_of(found)
    top = shown(screen, 60, 20)
    assert top[-1].split()[-3:-1] == ["1-18", "of"]
    screen.press("end")
    assert any(line.startswith("tenant-9 ") for line in shown(screen, 60, 20))
    screen.press("down")
    screen.press("page up")
    screen.press("up")
    screen.press("home")
    assert shown(screen, 60, 20) == top
    screen.press("sort")
    screen.press("sort")
    stages = [line.partition(" ")[0] for line in shown(screen, 60, 60)]
    assert stages.index("streaming") < stages.index("executor") < stages.index("admission")
    assert stages.index("admission") < stages.index("fairness")
    screen.press("help")
    assert any("scroll by a screen" in line for line in shown(screen, 60, 20))
    screen.press("pause")
    assert shown(screen, 60, 20)[0].startswith("paused")
    screen.press("x")


def test_top_reads_again_until_q(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can't be reached is tried again; the terminal is as before at the end."""
    main, side = pty.openpty()
    away = RequestError("the bus is away", code="unavailable")  # of a gateway
    answers: list[Any] = [Unreachable("can't reach it"), look(rate=77), away, look(rate=78)]

    def read() -> BusStatus:
        last = len(answers) == 1
        answer = answers[0] if last else answers.pop(0)
        if last:  # again, if it reads once more before the key is seen
            os.write(main, b"xq")
        if isinstance(answer, Exception):
            raise answer
        return answer

    before = termios.tcgetattr(side)
    with open(side, "r+b", buffering=0) as terminal, monkeypatch.context() as patch:
        for stream in ("stdin", "stdout"):
            mode = "r" if stream == "stdin" else "w"
            patch.setattr(sys, stream, open(os.dup(terminal.fileno()), mode))  # noqa: SIM115
        patch.setenv("TERM", "xterm")
        Screen(read, 0.0).run()
        assert termios.tcgetattr(side) == before
        sys.stdout.close()
        sys.stdin.close()
        written = os.read(main, 1 << 16).decode()
    os.close(main)
    assert "bus unreachable for 0 s, retrying: can't reach it" in written
