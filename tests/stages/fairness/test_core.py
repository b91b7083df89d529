"""The queue: order by priority and age, credits, cancellation, expiry."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.bus.messages import AdmittedRequest, CacheScope
from nano_inference.bus.parts.speculation import Prediction
from nano_inference.bus.public import StageTime
from nano_inference.config import FairnessConfig
from nano_inference.stages.fairness import Dispatched, FairnessCore
from nano_inference.stages.lazy_heap import LEFTOVERS_KEPT

from ...sections import prediction_of
from .requests import SECOND, cancel, drain, grant, request


def popped(core: FairnessCore, now_ns: int) -> tuple[Dispatched, AdmittedRequest]:
    dispatched = core.pop(now_ns)
    assert dispatched is not None
    assert isinstance(dispatched.message, AdmittedRequest)
    return dispatched, dispatched.message


def filled(*requests: tuple[str, int, int], aging_s: float = 2.0) -> FairnessCore:
    """A core with (name, priority, arrival in s) in it, and credits for all."""
    core = FairnessCore(FairnessConfig(aging_s=aging_s))
    for name, priority, arrival_s in requests:
        core.push(request(name, priority=priority), arrival_s * SECOND)
    grant(core, 100, 10 * SECOND)
    return core


def test_two_seconds_of_waiting_are_worth_one_level() -> None:
    assert drain(filled(("old", 0, 0), ("new", 1, 1))) == ["new", "old"]
    assert drain(filled(("old", 0, 0), ("new", 1, 3))) == ["old", "new"]


def test_more_samples_than_credits_leave_in_parts() -> None:
    core = FairnessCore(FairnessConfig())
    core.push(request("a", samples=5), 0)
    grant(core, 3)
    first, message = popped(core, 7)
    assert len(message.sequences) == 3
    assert not first.last
    assert core.pop(7) is None
    grant(core, 9)
    second, message = popped(core, 8)
    assert [spec.sample_index for spec in message.sequences] == [3, 4]
    assert second.last
    assert core.credits == 7


def test_a_dispatch_keeps_prediction_and_cache_scope() -> None:
    core = FairnessCore(FairnessConfig())
    sent = msgspec.structs.replace(
        request("it"), parts=(Prediction((5, 6)),), cache_scope=CacheScope("t", "s")
    )
    core.push(sent, 0)
    grant(core, 1)
    dispatch = popped(core, 0)[1]
    assert (prediction_of(dispatch), dispatch.cache_scope) == ((5, 6), CacheScope("t", "s"))


def test_a_dispatch_has_the_time_spent_waiting() -> None:
    _, message = popped(filled(("a", 0, 3)), 5 * SECOND)
    held = message.info.queued
    assert held == StageTime(stage="fairness", start_ns=3 * SECOND, end_ns=5 * SECOND)


def test_cancelling_a_waiting_request_says_that_it_has_not_started() -> None:
    core = filled(("a", 0, 0), ("b", 0, 1))
    assert core.cancel(cancel("a")).unstarted
    assert drain(core) == ["b"]
    assert core.num_queued == 0


def test_cancelling_a_partly_dispatched_request_does_not() -> None:
    core = FairnessCore(FairnessConfig())
    core.push(request("a", samples=4), 0)
    grant(core, 2)
    core.pop(0)
    assert not core.cancel(cancel("a")).unstarted
    grant(core, 9)
    assert core.pop(0) is None


def test_cancel_of_an_unknown_request_is_passed_on_as_it_came() -> None:
    assert FairnessCore(FairnessConfig()).cancel(cancel("x")) == cancel("x")


def test_expired_requests_leave_the_queue() -> None:
    core = FairnessCore(FairnessConfig())
    core.push(request("a"), 0, deadline_ns=50)
    core.push(request("b"), 0, deadline_ns=90)
    assert core.next_deadline_ns() == 50
    assert [(c.request_id, c.status, c.unstarted) for c in core.expire(60)] == [
        ("a", "expired", True)
    ]
    grant(core, 9)
    assert drain(core) == ["b"]
    assert core.next_deadline_ns() is None
    assert core.expire(100) == []


def test_new_settings_reorder_waiting_requests() -> None:
    core = filled(("old", 0, 0), ("new", 1, 3), aging_s=2.0)
    core.configure(FairnessConfig(aging_s=10.0))
    assert drain(core) == ["new", "old"]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), max_size=30), st.integers(1, 5))
def test_every_sequence_is_dispatched_once_and_equals_leave_in_order(
    arrivals: list[tuple[int, int]], credits: int
) -> None:
    core = FairnessCore(FairnessConfig(aging_s=2.0))
    for index, (priority, samples) in enumerate(arrivals):
        core.push(request(str(index), priority=priority, samples=samples), index)
    order: list[str] = []
    counts: dict[str, int] = {}
    while core.num_queued:
        grant(core, credits)
        while (dispatched := core.pop(100)) is not None:
            name = dispatched.request.info.request_id
            assert isinstance(dispatched.message, AdmittedRequest)
            order.append(name)
            counts[name] = counts.get(name, 0) + len(dispatched.message.sequences)
    assert counts == {str(i): samples for i, (_, samples) in enumerate(arrivals)}
    # They all came at the same time, as far as ageing is concerned.
    ranks = [(-arrivals[int(name)][0], int(name)) for name in order]
    assert ranks == sorted(ranks)


def test_stale_entries_are_bounded() -> None:
    core = FairnessCore(FairnessConfig())
    core.push(request("stays", priority=-999), 0, deadline_ns=10**18)
    for i in range(2000):
        core.push(request(str(i)), i, deadline_ns=10**18)
        if i % 2:
            core.cancel(cancel(str(i)))
        else:
            grant(core, 1)
            assert drain(core, i) == [str(i)]
    assert core.num_queued == 1
    assert len(core._deadlines._entries) <= LEFTOVERS_KEPT + 4
    assert len(core._of_request) == 1
    grant(core, 1)
    assert drain(core, 3000) == ["stays"]
