"""Time slices and preemption: which sequences pause for which requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.bus.messages import Credit
from nano_inference.config import FairnessConfig
from nano_inference.stages.fairness import FairnessCore
from nano_inference.stages.fairness.replicas import KEPT_SHARE

from .replica import StepReplica
from .requests import SECOND, cancel, drain, grant, request, served

SLICES = FairnessConfig(max_timeslice_tokens=4)
PREEMPT = FairnessConfig(enable_preemption=True)


@pytest.mark.parametrize(
    ("config", "running", "arriving", "passes"),
    [
        (FairnessConfig(), 0, 100, False),  # both are off by default
        (SLICES, 0, 0, True),
        (SLICES, 1, 0, False),  # no slice ends for a lower priority
        (SLICES, 5, 5, False),  # high priorities have no slices
        (PREEMPT, 0, 4, False),  # only high priorities preempt
        (PREEMPT, 4, 4, False),
        (PREEMPT, 5, 9, False),  # only low priorities are preempted
        (PREEMPT, 4, 5, True),
    ],
)
def test_priorities_that_pass_a_running_sequence(
    config: FairnessConfig, running: int, arriving: int, passes: bool
) -> None:
    replica = StepReplica(config, places=1)
    replica.submit("running", 20, priority=running)
    replica.step(2)
    replica.submit("arriving", 2, priority=arriving)
    replica.run()
    assert replica.finished == ["arriving", "running"][:: 1 if passes else -1]
    counts = replica.core.counts
    assert (counts.yields, counts.preemptions) == (
        passes and config is SLICES,
        passes and config is PREEMPT,
    )
    assert counts.resumes == passes
    if passes and config is SLICES:
        assert replica.started["arriving"] == 4 * replica.step_ns, "after four tokens"


@pytest.mark.parametrize("how", ["cancel", "stop"])
def test_a_paused_sequence_can_end(how: str) -> None:
    """By a cancellation, or by a stop string in its output."""
    replica = StepReplica(PREEMPT, places=1)
    replica.submit("low", 50)
    replica.step(2)
    replica.submit("urgent", 5, priority=9)
    replica.step(1)
    (seq_id,) = replica.paused
    if how == "cancel":
        assert not replica.core.cancel(cancel("low")).unstarted, "it has run"
    replica.core.absorb(Credit(0, ended=(seq_id,)), replica.now_ns)
    replica.paused.clear()
    replica.run()
    assert replica.finished == ["urgent"]
    assert (replica.core.num_queued, replica.core.num_paused, replica.core.credits) == (0, 0, 1)
    assert not replica.core.queue._classes


def test_each_token_of_a_step_counts_for_slice_and_service() -> None:
    """A step names a sequence once for each token that it got."""
    core = FairnessCore(SLICES)
    core.push(request("long", tenant="a"), 0)
    core.push(request("other", tenant="b"), 0)
    grant(core, 2)
    assert drain(core) == ["long", "other"]
    (_, long), (_, other) = sorted(
        (running.request.tenant, running)
        for replica in core.replicas.values()
        for running in replica.running.values()
    )
    before = served(core)
    core.absorb(Credit(0, steps=((*[long.spec.seq_id] * 3, other.spec.seq_id),)), 1)
    after = served(core)
    gained = {tenant: after[0, tenant] - before[0, tenant] for tenant in ("a", "b")}
    assert gained["a"] == 3 * gained["b"] > 0
    assert (long.in_slice, other.in_slice) == (3, 1)
    core.push(request("waits", tenant="c"), 2)
    assert core.ask_to_pause(2) == [], "three tokens of four"
    core.absorb(Credit(0, steps=((long.spec.seq_id,) * 2,), kv_free=10_000), 3)
    assert core.ask_to_pause(3) == [long]
    assert core.counts.tokens[0] == 6


def test_no_slice_ends_while_nothing_waits() -> None:
    replica = StepReplica(SLICES, places=2)
    replica.submit("a", 50)
    replica.submit("b", 50)
    replica.run()
    assert replica.core.counts.yields == 0


def test_a_used_up_slice_ends_as_soon_as_a_request_waits() -> None:
    replica = StepReplica(SLICES, places=1)
    replica.submit("long", 50)
    replica.step(20)
    replica.submit("short", 1)
    replica.step(1)
    assert "short" in replica.started


@pytest.mark.parametrize(("kv_free", "yields"), [(80, False), (130, True)])
def test_no_slice_ends_where_its_kv_would_be_evicted(kv_free: int, yields: bool) -> None:
    replica = StepReplica(SLICES, places=1, kv_free=kv_free)
    replica.submit("long", 10, prompt=(1,) * 10)
    replica.submit("short", 2)
    replica.run()
    assert (replica.finished[0] == "short") is yields


def test_paused_sequences_keep_at_most_a_share_of_the_free_cache() -> None:
    replica = StepReplica(SLICES, places=4, kv_free=480)
    for number in range(4):
        replica.submit(f"long-{number}", 40, prompt=(1,) * 10, tenant="a")
    for number in range(4):
        replica.submit(f"other-{number}", 40, prompt=(1,) * 10, tenant=f"b-{number}")
    (own,) = replica.core.replicas.values()
    seen = []
    while replica.core.num_queued:
        replica.step()
        assert own.paused_tokens == sum(each.num_tokens for each in own.paused.values())
        seen.append(own.paused_tokens)
    assert 0 < max(seen) <= KEPT_SHARE * (480 + 50)
    replica.run()
    assert own.paused_tokens == 0


def test_a_sequence_paused_for_another_tenant_is_its_own_tenants_next() -> None:
    replica = StepReplica(SLICES, places=1)
    replica.submit("first", 30, tenant="a")
    replica.step()
    replica.submit("second", 30, tenant="a")
    replica.step()
    replica.submit("guest", 2, tenant="b")
    replica.run()
    assert replica.core.counts.yields > 0
    assert replica.finished[0] == "guest"
    order = replica.starts
    assert order[:3] == ["first", "guest", "first"], "not after what its tenant has waiting"


def test_no_slice_ends_for_a_tenant_that_was_served_more() -> None:
    """It would get its place back at once."""
    replica = StepReplica(SLICES, places=2)
    replica.submit("filler", 400, tenant="greedy")
    replica.submit("filler-2", 400, tenant="greedy")
    for number in range(4):
        replica.submit(f"greedy-{number}", 400, tenant="greedy")
    replica.step(40)
    replica.submit("modest", 60, tenant="modest")
    replica.step(60)
    assert replica.made[replica._requests["modest"].sequences[0].seq_id] >= 50, "it runs on"


def test_a_high_priority_preempts_in_a_full_batch_at_once() -> None:
    replica = StepReplica(PREEMPT, places=2)
    replica.submit("low-0", 50)
    replica.submit("low-1", 50, priority=1)
    replica.step(3)
    replica.submit("urgent", 5, priority=5)
    replica.step(1)
    assert "urgent" in replica.started
    assert replica._requests["low-0"].sequences[0].seq_id in replica.paused, "the lowest goes"
    replica.run()
    assert replica.finished[0] == "urgent"
    assert (replica.core.counts.preemptions, replica.core.counts.resumes) == (1, 1)


def test_only_strictly_lower_effective_priority_is_preempted() -> None:
    replica = StepReplica(PREEMPT, places=1)
    replica.submit("first", 1100)
    replica.submit("waited", 100)
    replica.run_until("waited")
    assert replica.now_ns >= 11 * SECOND, "it waited for more than five levels"
    replica.submit("urgent", 1, priority=5)
    replica.run()
    assert replica.finished == ["first", "waited", "urgent"]


def test_of_equals_the_last_dispatched_is_preempted() -> None:
    replica = StepReplica(PREEMPT, places=3)
    for number in range(3):
        replica.submit(f"low-{number}", 50)
        replica.step(1)
    replica.submit("urgent", 1, priority=9)
    replica.step(1)
    assert list(replica.paused) == [replica._requests["low-2"].sequences[0].seq_id]


def test_only_as_many_sequences_pause_as_wait() -> None:
    replica = StepReplica(PREEMPT, places=4)
    for number in range(4):
        replica.submit(f"low-{number}", 50)
    replica.submit("urgent", 3, priority=9, samples=2)
    replica.step(1)
    assert len(replica.paused) == 2
    core = replica.core
    assert core.counts.preemptions == 2


def test_no_other_pause_is_requested_until_the_first_sequence_has_paused() -> None:
    core = FairnessCore(PREEMPT)
    grant(core, 3)
    for number in range(3):
        core.push(request(f"low-{number}"), 0)
    drain(core)
    core.push(request("urgent", priority=9), 1)
    assert len(core.ask_to_pause(1)) == 1
    assert core.ask_to_pause(2) == []


def test_preemption_can_be_switched_on_while_others_run() -> None:
    replica = StepReplica(places=1)
    replica.submit("low", 50)
    replica.submit("urgent", 1, priority=9)
    replica.step(5)
    assert "urgent" not in replica.started
    replica.core.configure(PREEMPT)
    replica.step(1)
    assert "urgent" in replica.started


def test_the_lowest_priority_starts_within_the_age_bound_under_endless_load() -> None:
    """With preemption and one place, and a request of priority 10 always waiting."""
    replica = StepReplica(PREEMPT, places=1, step_ns=SECOND // 10)
    replica.submit("first", 3, priority=10)
    replica.submit("lowest", 3, priority=0)
    number = 0
    while "lowest" not in replica.started:
        replica.submit(f"high-{number}", 3, priority=10)
        number += 1
        replica.step(2)
        assert replica.now_ns <= 10 * 2 * SECOND + SECOND
    replica.run()


def test_every_tenant_of_the_lowest_priority_starts() -> None:
    """Ten tenants of priority 0 under endless priority 4: each starts after 8 s of waiting."""
    replica = StepReplica(places=2, step_ns=SECOND // 10)
    for number in range(10):
        replica.submit(f"low-{number}", 2, priority=0, tenant=f"tenant-{number}")
    number = 0
    while not all(f"low-{n}" in replica.started for n in range(10)):
        for _ in range(3):
            replica.submit(f"high-{number}", 2, priority=4, tenant=f"high-{number % 3}")
            number += 1
        replica.step()
        assert replica.now_ns <= (4 * 2 + 3) * SECOND


@pytest.mark.soak
@given(
    st.lists(
        st.tuples(st.integers(0, 8), st.integers(1, 30), st.integers(0, 2), st.integers(0, 4)),
        max_size=30,
    ),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(0, 2),
)
def test_no_ping_pong(
    arrivals: list[tuple[int, int, int, int]], places: int, slice_tokens: int, cap: int
) -> None:
    """A paused sequence has made a slice of tokens, or is one preemption nearer to its cap."""
    config = FairnessConfig(
        max_timeslice_tokens=slice_tokens, enable_preemption=True, max_preemptions=cap
    )
    replica = StepReplica(config, places=places)
    tokens = 0
    for number, (priority, length, tenant, pause) in enumerate(arrivals):
        tokens += length
        replica.submit(str(number), length, priority=priority, tenant=str(tenant))
        replica.step(pause)
    replica.run()
    counts = replica.core.counts
    assert counts.yields <= tokens / slice_tokens
    assert all(times <= cap for times in replica.preemptions.values())
    assert counts.resumes == counts.yields + counts.preemptions
    assert len(replica.finished) == len(arrivals)
