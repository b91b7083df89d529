"""Time of a call, beside that of its requests in the pipeline."""

from __future__ import annotations

import pytest

from nano_inference.bus.public import Completion, Timings, Usage
from nano_inference.gateway.call import Account
from nano_inference.gateway.serving import times
from nano_inference.gateway.serving.times import call_usage, time_usage, with_http

IN_PIPELINE = {"queue": 20, "own_decode": 300, "delivery": 10}


def completion(time: dict[str, int] | None, finished_ns: int = 1_400) -> Completion:
    usage, timings = Usage(time=time, billed_ns=7), Timings(finished_ns=finished_ns)
    return Completion(request_id="r", entry_id="e", status="done", usage=usage, timings=timings)


@pytest.mark.parametrize(
    ("arrived_ns", "wanted"),
    [
        (1_000, {"http": 70, "queue": 20, "own_decode": 300, "delivery": 110}),
        # The pipeline's clocks are fast, or slow.
        (1_160, {"queue": 20, "own_decode": 300, "delivery": 20}),
        (1_175, {"queue": 15, "own_decode": 300, "delivery": 10}),
        (1_300, {"own_decode": 190, "delivery": 10}),
    ],
)
def test_causes_add_up_to_the_call(
    monkeypatch: pytest.MonkeyPatch, arrived_ns: int, wanted: dict[str, int]
) -> None:
    monkeypatch.setattr(times, "now_ns", lambda: 1_500)
    found = with_http(completion(IN_PIPELINE), Account(arrived_ns=arrived_ns)).usage.time
    assert found == wanted
    assert sum(wanted.values()) == 1_500 - arrived_ns


def test_a_slow_client_is_that_with_which_writing_was_paused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_ns, unread_ns = 1_500, 40
    monkeypatch.setattr(times, "now_ns", lambda: now_ns)
    account = Account(arrived_ns=1_000, unread_ns=lambda: unread_ns)
    short, long = (with_http(completion(time), account) for time in ({"queue": 5}, IN_PIPELINE))
    now_ns, unread_ns = 1_600, 120
    usage = time_usage([short, long], account)
    assert sum(usage["time"].values()) == 600
    assert (usage["time"]["slow_client"], usage["time"]["http"]) == (80, 395)
    assert usage["billed_ns"] == 14
    assert time_usage([short, completion(None)], account) == {}
    account.left["r"] = None
    assert call_usage(account) == {}, "a request has not ended"
    del account.left["r"]
    assert call_usage(account) == {}, "of no request is the time known"
    for each in (short, long):
        account.add(each.usage)
    assert call_usage(account) == usage
