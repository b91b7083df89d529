"""The waterfall's exact text, from hand-made times."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from nano_inference.bus.public import Completion, ErrorInfo, StageTime, Timings
from nano_inference.cli.trace import Waterfall

BEGIN_NS = 1_763_645_212_345_000_000


def at(milliseconds: float) -> int:
    return BEGIN_NS + round(milliseconds * 1e6)


def completion(*stages: tuple[str, float, float], first: float, end: float) -> Completion:
    return Completion(
        request_id="1763645212345-0",
        entry_id="1763645212345-0",
        status="done",
        timings=Timings(
            received_ns=BEGIN_NS,
            first_token_ns=at(first),
            finished_ns=at(end),
            stages=tuple(
                StageTime(stage=name, start_ns=at(start), end_ns=at(stop))
                for name, start, stop in stages
            ),
        ),
        trace_id="4bf92f3577b34da6a3ce929d0e0e4736",
    )


ORDINARY = completion(
    ("admission", 0, 0.42),
    ("fairness", 0.42, 0.47),
    ("batching", 0.47, 0.93),
    ("executor", 0.93, 11.8),
    ("streaming", 2.2, 12.34),
    first=4.1,
    end=12.34,
)


def drawn(shown: Completion, width: int = 80, encoding: str = "utf-8") -> list[str]:
    class Pipe(StringIO):
        @property
        def encoding(self) -> str:  # type: ignore[override]
            return encoding

    out = Pipe()
    Console(file=out, width=width, color_system=None).print(Waterfall(shown))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_at_80_columns() -> None:
    assert drawn(ORDINARY) == [
        "request 1763645212345-0 done   total 12.34 ms   first token 4.10 ms",
        "trace   4bf92f3577b34da6a3ce929d0e0e4736",
        "                                                               start ms  took ms",
        "admission    █▋                                                    0.00     0.42",
        "fairness      ▕                                                    0.42     0.05",
        "batching      ▕█▋                                                  0.47     0.46",
        "executor        ▐█████████████████████████████████████████▉        0.93    10.87",
        "streaming            ▐███████████████████████████████████████      2.20    10.14",
        "first token                 ▲                                      4.10",
    ]


def test_narrow() -> None:
    lines = drawn(ORDINARY, width=50)
    assert lines[:2] == ["request 1763645212345-0 done", "total 12.34 ms   first token 4.10 ms"]
    assert max(map(len, lines)) <= 50


def test_ascii() -> None:
    lines = drawn(ORDINARY, encoding="ascii")
    assert all(line.isascii() for line in lines)
    assert lines[3].split() == ["admission", "##", "0.00", "0.42"]
    assert lines[-1].split() == ["first", "token", "^", "4.10"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_every_stage_shows_however_short(width: int) -> None:
    shown = completion(
        ("admission", 0, 0),
        ("fairness", 5_000, 5_000.001),
        ("batching", 99_999.999, 100_000),
        ("executor", 100_000, 100_000),
        first=100_000,
        end=100_000,
    )
    rows = drawn(shown, width=width)[3:]
    assert [len(row.split()) for row in rows[:4]] == [4, 4, 4, 4]
    assert max(map(len, rows)) <= width


@pytest.mark.parametrize(("encoding", "mark"), [("utf-8", "▏"), ("ascii", "|")])
def test_times_that_are_all_the_same(encoding: str, mark: str) -> None:
    rows = drawn(completion(("admission", 0, 0), first=0, end=0), encoding=encoding)[3:]
    assert rows[0].split() == ["admission", mark, "0.00", "0.00"]


def test_clocks_that_disagree_stay_within_the_line() -> None:
    rows = drawn(completion(("admission", -5, 1), ("executor", 3, 2), first=1, end=2))[3:]
    assert max(map(len, rows)) <= 80
    assert rows[1].split()[-2:] == ["8.00", "-1.00"]


def test_refused_request_has_no_stages() -> None:
    refused = Completion(
        request_id="a",
        entry_id="1-0",
        status="error",
        error=ErrorInfo(code="invalid_n", message="n is 0"),
        timings=Timings(finished_ns=BEGIN_NS),
    )
    assert drawn(refused) == ["request a error", "no stage has recorded a time"]
