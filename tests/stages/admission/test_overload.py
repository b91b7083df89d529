from __future__ import annotations

from nano_inference.bus.channel import RequestEntry
from nano_inference.bus.public import GenerateRequest
from nano_inference.stages.admission.refusals import (
    LONGEST_RETRY_S,
    SHORTEST_RETRY_S,
    WINDOW_S,
    FinishRate,
    overloaded,
)

S = 1_000_000_000


def test_the_hint_is_what_waits_over_the_rate_within_bounds() -> None:
    rate = FinishRate()
    assert rate.retry_after_s(10, 0) == LONGEST_RETRY_S, "nothing is known yet"
    for second in range(WINDOW_S):
        for _ in range(4):
            rate.finished(second * S)
    now = (WINDOW_S - 1) * S
    assert rate.per_s(now) == 4
    assert rate.retry_after_s(100, now) == 25
    assert rate.retry_after_s(1, now) == SHORTEST_RETRY_S
    assert rate.retry_after_s(10**9, now) == LONGEST_RETRY_S
    assert rate.per_s(now + 15 * S) == 2, "half of the window has passed without any"
    assert rate.per_s(now + WINDOW_S * S) == 0
    assert not len(rate), "what is too old is forgotten"


def test_the_answer_says_when_to_try_again() -> None:
    entry = RequestEntry("7-0", GenerateRequest(request_id="r", prompt="x"))
    completion = overloaded(entry, 25.0, "tiny", 5)
    assert (completion.request_id, completion.entry_id) == ("r", "7-0")
    assert completion.status == "error"
    assert completion.error is not None
    assert (completion.error.code, completion.error.retry_after_s) == ("overloaded", 25.0)
    assert "25 s" in completion.error.message
