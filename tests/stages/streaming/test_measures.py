"""Durations of a request's phases, intervals between tokens, and throughput."""

from __future__ import annotations

import pytest

from nano_inference.bus.messages import StoredResponse, StoredSample
from nano_inference.bus.public import CompletionChunk
from nano_inference.bus.recovery import RecoveryItem
from nano_inference.stages.streaming.measures import Throughput, TokenIntervals, measure_end
from nano_inference.telemetry.instruments import (
    DECODE_DURATION,
    PREFILL_DURATION,
    QUEUE_DURATION,
    REQUEST_DURATION,
    REQUESTS,
    TIME_PER_OUTPUT_TOKEN,
    TIME_TO_FIRST_TOKEN,
    WEIGHT_STALENESS,
)

from ...measured import Measured
from .client import Client, cancel_of, request_of, started

S = 10**9

PHASES = (QUEUE_DURATION, PREFILL_DURATION, DECODE_DURATION)


def test_each_phase_has_its_time(client: Client) -> None:
    """Two samples: the first to begin ends the waiting, the last token of either the decoding."""
    measured = Measured()
    request = request_of(n=2, received_ns=10 * S, priority=3)
    first, second = (started(i, request, i, executed_ns=(12 + i) * S) for i in range(2))
    client.step(new=[first], end_ns=13 * S, now_ns=13 * S)
    client.step([(0, 30, "")], new=[second], end_ns=17 * S, now_ns=17 * S + S // 2)
    rows = [(0, 31, "length"), (1, 30, "")]
    client.step(rows, end_ns=20 * S, weight_version=2, now_ns=20 * S)
    rows = [(1, 31, "length")]
    (ended,) = client.step(rows, end_ns=25 * S, weight_version=2, now_ns=26 * S).ended
    measure_end(measured.metrics, ended, 5)
    assert measured.values(REQUESTS) == {("done", ""): 1}
    for instrument, seconds in zip(PHASES, (2.0, 5.0, 8.0), strict=True):
        assert measured.values(instrument) == {("3",): 1}
        assert measured.sums(instrument) == {("3",): seconds}
    model = ("text_completion", "nano-inference", "tiny")
    assert measured.sums(TIME_TO_FIRST_TOKEN) == {(*model, "3"): 7.5}
    assert measured.sums(TIME_PER_OUTPUT_TOKEN) == {model: 8.5}
    assert measured.sums(REQUEST_DURATION) == {(*model, ""): 16.0}
    assert measured.sums(WEIGHT_STALENESS) == {(): 5 + 3}


@pytest.mark.parametrize(
    ("priority", "label"),
    [(0, "0"), (-8, "-8"), (8, "8"), (9, ">8"), (1000, ">8"), (-9, "<-8"), (-1000, "<-8")],
)
def test_priorities_have_few_labels(client: Client, priority: int, label: str) -> None:
    measured = Measured()
    request = request_of(priority=priority)
    (ended,) = client.step([(0, 30, "length")], new=[started(0, request)]).ended
    measure_end(measured.metrics, ended, 0)
    for instrument in PHASES:
        assert measured.values(instrument) == {(label,): 1}


def test_a_request_without_a_token_has_only_waited(client: Client) -> None:
    measured = Measured()
    client.step(new=[started(0, request_of(received_ns=60, priority=1))])
    (ended,) = client.end(cancel_of()).ended
    measure_end(measured.metrics, ended, 0)
    assert measured.values(REQUESTS) == {("cancelled", "cancelled"): 1}
    assert measured.sums(QUEUE_DURATION) == {("1",): pytest.approx(100e-9)}
    for instrument in (PREFILL_DURATION, DECODE_DURATION, TIME_TO_FIRST_TOKEN):
        assert measured.values(instrument) == {}


def test_a_request_that_never_ran_is_only_counted(client: Client) -> None:
    measured = Measured()
    (ended,) = client.end(cancel_of(unstarted=True)).ended
    measure_end(measured.metrics, ended, 0)
    assert measured.values(REQUESTS) == {("cancelled", "cancelled"): 1}
    assert measured.values(QUEUE_DURATION) == {}


def test_a_successor_records_no_unknown_times(client: Client) -> None:
    measured = Measured()
    request = request_of()
    chunk = CompletionChunk(
        request_id="r",
        entry_id="entry-r",
        sample_index=0,
        token_offset=0,
        token_ids=(30,),
        logprobs=(-30.0,),
        text="?",
    )
    client.open(request)
    client.core.restore(RecoveryItem("r", request.entry_id, "r"), [chunk], 500)
    again = started(5, request, num_generated=1, executed_ns=500)
    (ended,) = client.step([(5, 31, "length")], new=[again], end_ns=600).ended
    measure_end(measured.metrics, ended, 0)
    assert measured.values(REQUESTS) == {("done", ""): 1}
    assert sum(measured.values(REQUEST_DURATION).values()) == 1
    for instrument in (*PHASES, TIME_TO_FIRST_TOKEN, TIME_PER_OUTPUT_TOKEN):
        assert measured.values(instrument) == {}


def test_intervals_are_distinct_times_since_the_last_token() -> None:
    intervals = TokenIntervals()
    assert intervals.step((1, 2), 100) == [], "first tokens have none"
    assert intervals.step((1, 2), 130) == [30]
    intervals.step((1,), 140)
    assert intervals.step((1, 2, 3), 155) == [15, 25]
    intervals.clear()
    assert intervals.step((1,), 500) == [], "a new epoch begins"


def test_ended_sequences_are_dropped_now_and_then() -> None:
    intervals = TokenIntervals()
    for seq_id in range(5000):
        intervals.step((seq_id,), seq_id)
    assert len(intervals._last_ns) < 1000


def test_a_rate_is_measured_since_the_last_call_and_not_over_a_moment() -> None:
    throughput = Throughput(0)
    assert throughput.load(1) == {"tokens_per_s": 0}
    throughput.add(30, 1)
    throughput.add(70, S)
    assert throughput.load(2 * S) == {"tokens_per_s": 50, "token_age_s": 1.0}
    assert throughput.load(2 * S + 1) == {"tokens_per_s": 50, "token_age_s": 1.0}
    assert throughput.load(3 * S) == {"tokens_per_s": 0, "token_age_s": 2.0}


def test_times_to_the_first_token_are_of_the_last_requests() -> None:
    throughput = Throughput(0)
    for milliseconds in (9000, *range(100)):
        throughput.first_token(milliseconds * 1_000_000)
    load = throughput.load(0)
    assert (load["ttft_ms_p50"], load["ttft_ms_p95"]) == (49, 94), "the oldest is forgotten"


def test_a_served_response_has_a_duration_and_no_phases(client: Client) -> None:
    measured = Measured()
    samples = (StoredSample((30, 31), (-1.0, -1.0), (), "stop"),)
    client.now_ns = 12 * S
    request = request_of(received_ns=10 * S, response=StoredResponse(samples, 0, 0, 0))
    (deliveries,) = client.open(request)
    measure_end(measured.metrics, deliveries.ended[0], 0)
    assert measured.values(REQUESTS) == {("done", ""): 1}
    model = ("text_completion", "nano-inference", "tiny")
    assert measured.sums(REQUEST_DURATION) == {(*model, ""): 2.0}
    for instrument in (*PHASES, TIME_TO_FIRST_TOKEN, TIME_PER_OUTPUT_TOKEN):
        assert measured.values(instrument) == {}
