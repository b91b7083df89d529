"""The queue: order by priority and age, credits, cancellation, expiry."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nano_inference.bus.messages import AdmittedRequest, Cancel, RequestInfo, SequenceSpec
from nano_inference.config import FairnessConfig, SamplingParams
from nano_inference.stages.fairness import FairnessCore
from nano_inference.stages.fairness.core import LEFTOVERS_KEPT

SECOND = 1_000_000_000


def request(name: str, *, priority: int = 0, samples: int = 1) -> AdmittedRequest:
    info = RequestInfo(name, f"entry-{name}", "m", samples, True, (), 1, "", "", 0)
    sequences = tuple(SequenceSpec(hash((name, i)) % 10**6, i, 0) for i in range(samples))
    return AdmittedRequest(info, (1,), SamplingParams(), sequences, "default", priority)


def cancel(name: str) -> Cancel:
    return Cancel(name, f"entry-{name}", "cancelled", "cancelled", "")


def drain(core: FairnessCore, now_ns: int = 0) -> list[str]:
    names = []
    while (dispatched := core.pop(now_ns)) is not None:
        names.append(dispatched.dispatch.info.request_id)
    return names


def filled(*requests: tuple[str, int, int], aging_s: float = 2.0) -> FairnessCore:
    """A core with (name, priority, arrival in s) in it, and credits for all."""
    core = FairnessCore(FairnessConfig(aging_s=aging_s))
    for name, priority, arrival_s in requests:
        core.push(request(name, priority=priority), arrival_s * SECOND)
    core.credits = 100
    return core


def test_equal_priorities_leave_in_order_of_arrival() -> None:
    assert drain(filled(("a", 0, 0), ("b", 0, 1), ("c", 0, 2))) == ["a", "b", "c"]


def test_higher_priority_leaves_first() -> None:
    assert drain(filled(("low", 0, 0), ("high", 5, 1))) == ["high", "low"]


def test_two_seconds_of_waiting_are_worth_one_level() -> None:
    assert drain(filled(("old", 0, 0), ("new", 1, 1))) == ["new", "old"]
    assert drain(filled(("old", 0, 0), ("new", 1, 3))) == ["old", "new"]


def test_lowest_priority_starts_under_endless_high_priority_load() -> None:
    core = FairnessCore(FairnessConfig(aging_s=2.0))
    core.push(request("lowest", priority=0), 0)
    started_at = None
    for second in range(60):
        core.push(request(f"high-{second}", priority=10), second * SECOND)
        core.credits = 1
        if drain(core) == ["lowest"]:
            started_at = second
            break
    assert started_at is not None
    assert started_at <= 10 * 2 + 1, "ten levels are made up for in twenty seconds"


def test_nothing_leaves_without_credits() -> None:
    core = filled(("a", 0, 0), ("b", 0, 1))
    core.credits = 1
    assert drain(core) == ["a"]
    assert core.credits == 0
    core.credits += 1
    assert drain(core) == ["b"]


def test_more_samples_than_credits_leave_in_parts() -> None:
    core = FairnessCore(FairnessConfig())
    core.push(request("a", samples=5), 0)
    core.credits = 3
    first = core.pop(7)
    assert first is not None
    assert len(first.dispatch.sequences) == 3
    assert not first.last
    assert core.pop(7) is None
    core.credits = 9
    second = core.pop(8)
    assert second is not None
    assert [spec.sample_index for spec in second.dispatch.sequences] == [3, 4]
    assert second.last
    assert core.credits == 7


def test_dispatch_tells_how_long_it_waited() -> None:
    core = filled(("a", 0, 3))
    dispatched = core.pop(5 * SECOND)
    assert dispatched is not None
    (held,) = dispatched.dispatch.info.stages
    assert (held.stage, held.start_ns, held.end_ns) == ("fairness", 3 * SECOND, 5 * SECOND)


def test_cancel_of_an_untouched_request_vouches_for_it() -> None:
    core = filled(("a", 0, 0), ("b", 0, 1))
    assert core.cancel(cancel("a")).unstarted
    assert drain(core) == ["b"]
    assert core.num_queued == 0


def test_cancel_of_a_partly_dispatched_request_does_not() -> None:
    core = FairnessCore(FairnessConfig())
    core.push(request("a", samples=4), 0)
    core.credits = 2
    core.pop(0)
    assert not core.cancel(cancel("a")).unstarted
    core.credits = 9
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
    core.credits = 9
    assert drain(core) == ["b"]
    assert core.next_deadline_ns() is None
    assert core.expire(100) == []


def test_new_settings_reorder_those_who_wait() -> None:
    core = filled(("old", 0, 0), ("new", 1, 3), aging_s=2.0)
    core.update(FairnessConfig(aging_s=10.0))
    assert drain(core) == ["new", "old"]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30), st.integers(1, 4)), max_size=30),
    st.integers(1, 5),
)
def test_every_sequence_is_dispatched_once_in_order_of_effective_priority(
    arrivals: list[tuple[int, int, int]], credits: int
) -> None:
    core = FairnessCore(FairnessConfig(aging_s=2.0))
    ranks = {}
    for index, (priority, arrival_s, samples) in enumerate(arrivals):
        core.push(request(str(index), priority=priority, samples=samples), arrival_s * SECOND)
        ranks[str(index)] = arrival_s - 2 * priority
    order: list[str] = []
    counts: dict[str, int] = {}
    while core.num_queued:
        core.credits = credits
        while (dispatched := core.pop(100 * SECOND)) is not None:
            name = dispatched.dispatch.info.request_id
            order.append(name)
            counts[name] = counts.get(name, 0) + len(dispatched.dispatch.sequences)
    assert [ranks[name] for name in order] == sorted(ranks[name] for name in order)
    assert counts == {str(i): samples for i, (_, _, samples) in enumerate(arrivals)}


def test_what_is_left_of_dispatched_and_cancelled_requests_is_bounded() -> None:
    core = FairnessCore(FairnessConfig())
    core.push(request("stays", priority=-1000), 0, deadline_ns=10**18)
    for i in range(2000):
        core.push(request(str(i)), i, deadline_ns=10**18)
        if i % 2:
            core.cancel(cancel(str(i)))
        else:
            core.credits = 1
            assert drain(core, i) == [str(i)]
    assert core.num_queued == 1
    assert len(core._heap) <= LEFTOVERS_KEPT + 4
    assert len(core._deadlines) <= LEFTOVERS_KEPT + 4
    core.credits = 1
    assert drain(core, 3000) == ["stays"]
