"""Rates are of the time since they were last told; waits are those of the last requests."""

from __future__ import annotations

from nano_inference.stages.streaming.throughput import Throughput

SECOND = 1_000_000_000


def test_a_rate_is_of_the_time_since_the_last_call() -> None:
    pace = Throughput(0)
    pace.add(30)
    pace.add(70)
    assert pace.load(2 * SECOND) == {"tokens_per_s": 50}
    assert pace.load(3 * SECOND) == {"tokens_per_s": 0}


def test_who_asks_twice_in_a_moment_is_told_the_same() -> None:
    pace = Throughput(0)
    pace.add(100)
    assert pace.load(SECOND) == pace.load(SECOND + 1) == {"tokens_per_s": 100}


def test_waits_are_those_of_the_last_requests() -> None:
    pace = Throughput(0)
    for milliseconds in (9000, *range(100)):
        pace.first_token(milliseconds * 1_000_000)
    told = pace.load(0)
    assert (told["ttft_ms_p50"], told["ttft_ms_p95"]) == (49, 94), "the oldest is forgotten"
