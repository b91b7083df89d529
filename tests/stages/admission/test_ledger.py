from __future__ import annotations

from nano_inference.bus.channel import RequestEntry
from nano_inference.bus.control import Cancel
from nano_inference.bus.messages import AdmittedRequest, RequestInfo, RequestOpened
from nano_inference.bus.public import GenerateRequest
from nano_inference.config import SamplingParams
from nano_inference.stages.admission.events import Accepted
from nano_inference.stages.admission.requests import Ledger, Unanswered


def unanswered(entry_id: str, request_id: str = "", *, let_in: bool = True) -> Unanswered:
    item = Unanswered(RequestEntry(entry_id, GenerateRequest(request_id=request_id)))
    if let_in:
        ids = request_id, entry_id
        admitted = AdmittedRequest(RequestInfo(*ids), (1,), SamplingParams(), (), "", 0)
        item.accepted = Accepted(RequestOpened(*ids, "m", 1, True, (), (1,)), admitted)
    return item


def test_a_request_that_was_let_in_is_found_by_its_id_until_it_is_answered() -> None:
    ledger = Ledger(3)
    for n in range(3):
        ledger.add(unanswered(f"{n}-0", f"r{n}"))
    assert [ledger.entry_of(f"r{n}") for n in range(4)] == ["0-0", "1-0", "2-0", None]
    item = ledger.get("1-0")
    assert ledger.remove("1-0") is item
    assert ledger.remove("1-0") is None
    assert [ledger.entry_of(f"r{n}") for n in range(3)] == ["0-0", None, "2-0"]
    assert [each.entry_id for each in ledger] == ["0-0", "2-0"]
    ledger.add(unanswered("5-0", "r1"))
    assert ledger.entry_of("r1") == "5-0"


def test_a_refused_duplicate_leaves_the_id_to_the_request_that_has_it() -> None:
    ledger = Ledger(3)
    ledger.add(unanswered("1-0", "mine"))
    ledger.add(unanswered("2-0", "mine", let_in=False))
    assert ledger.entry_of("mine") == "1-0"
    ledger.remove("2-0")
    assert ledger.entry_of("mine") == "1-0"


def test_who_is_not_in_the_lane_is_not_suspected() -> None:
    ledger = Ledger(3)
    items = [unanswered(f"{i}-0") for i in range(3)]
    for item in items:
        ledger.add(item)
    items[2].end = Cancel("", "2-0", "expired", "expired", "")
    ledger.suspect(outside={"1-0"})
    assert [item.suspected for item in items] == [True, False, False]
