"""The ledger of requests, and hints to retry."""

from __future__ import annotations

from nano_inference.bus.control import Cancel
from nano_inference.bus.entries import RequestEntry
from nano_inference.bus.public import GenerateRequest
from nano_inference.stages.admission.refusals import (
    LONGEST_RETRY_S,
    SHORTEST_RETRY_S,
    WINDOW_S,
    FinishRate,
    overloaded,
)
from nano_inference.stages.admission.requests import Ledger, Unanswered

from .made import accepted

S = 1_000_000_000


def unanswered(entry_id: str, request_id: str = "", *, is_accepted: bool = True) -> Unanswered:
    entry = RequestEntry(entry_id, GenerateRequest(request_id=request_id))
    return Unanswered(entry, accepted(request_id, entry_id) if is_accepted else None)


def found(ledger: Ledger, request_id: str) -> str | None:
    item = ledger.accepted(request_id)
    return None if item is None else item.entry_id


def test_an_accepted_request_is_found_by_its_id_until_it_is_answered() -> None:
    ledger = Ledger(3)
    for n in range(3):
        ledger.add(unanswered(f"{n}-0", f"r{n}"))
    assert [found(ledger, f"r{n}") for n in range(4)] == ["0-0", "1-0", "2-0", None]
    item = ledger.get("1-0 r1")
    assert item is not None
    assert ledger.remove("1-0 r1") is item
    assert ledger.remove("1-0 r1") is None
    assert [found(ledger, f"r{n}") for n in range(3)] == ["0-0", None, "2-0"]
    assert [each.entry_id for each in ledger] == ["0-0", "2-0"]
    ledger.add(unanswered("5-0", "r1"))
    assert found(ledger, "r1") == "5-0"


def test_a_refused_duplicate_leaves_the_id_to_the_request_that_has_it() -> None:
    ledger = Ledger(3)
    ledger.add(unanswered("1-0", "mine"))
    ledger.add(unanswered("2-0", "mine", is_accepted=False))
    assert found(ledger, "mine") == "1-0"
    assert ledger.remove("2-0 mine") is not None
    assert found(ledger, "mine") == "1-0"


def test_requests_outside_the_lane_are_not_suspected() -> None:
    ledger = Ledger(3)
    items = [unanswered(f"{i}-0") for i in range(3)]
    for item in items:
        ledger.add(item)
    items[2].end = Cancel("", "2-0", "expired", "expired", "")
    ledger.suspect(outside={"1-0"})
    assert [item.suspected for item in items] == [True, False, False]


def test_the_retry_hint_is_waiting_requests_over_the_rate() -> None:
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
    assert not rate._counts, "what is too old is forgotten"


def test_a_shed_request_has_a_retry_hint() -> None:
    entry = RequestEntry("7-0", GenerateRequest(request_id="r", prompt="x"))
    completion = overloaded(entry, 25.0, "tiny", 5)
    assert (completion.request_id, completion.entry_id) == ("r", "7-0")
    assert completion.status == "error"
    assert completion.error is not None
    assert (completion.error.code, completion.error.retry_after_s) == ("overloaded", 25.0)
    assert "25 s" in completion.error.message
