"""The batching core against an executor that detects foreign KV."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Literal
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nano_inference.bus.control import Cancel
from nano_inference.bus.messages import Credit
from nano_inference.bus.public import KVSession
from nano_inference.bus.steps import StepPlan
from nano_inference.stages.batching.parts.sessions import SessionCall, SessionKey
from nano_inference.stages.batching.report import REPORTED_STEPS
from nano_inference.stages.lazy_heap import LEFTOVERS_KEPT

from .replica import CACHE_TYPES, CacheType, FakeReplica, expected, reported


def cancel(request_id: str) -> Cancel:
    return Cancel(request_id, request_id, "cancelled", "cancelled", "")


def test_plans_run_one_step_ahead_of_results() -> None:
    replica = FakeReplica(steps_ahead=2)
    replica.add([1, 2, 3], 1)
    assert replica.plan()
    assert replica.plan(), "the second plan does not wait for the first result"
    assert not replica.plan(), "a third does"
    replica.retire()
    assert replica.plan()


def test_length_is_known_ahead_so_no_row_is_wasted_on_it() -> None:
    replica = FakeReplica(steps_ahead=2)
    replica.add([1, 2, 3], 1, max_tokens=3)
    replica.run()
    assert [sum(plan.num_tokens) for plan in replica.log] == [3, 1, 1]


@pytest.mark.parametrize("length", [2, 3, 4, 5, 32, 33, 34, 36])
@pytest.mark.parametrize("chunk", [8, 64])
def test_siblings_compute_their_prompt_once(length: int, chunk: int, cache_type: CacheType) -> None:
    replica = FakeReplica(
        block_size=4, max_batch_size=8, max_tokens_per_batch=chunk, cache_type=cache_type
    )
    prompt = list(range(length))
    replica.add(prompt, tuple(range(8)), max_tokens=3)
    replica.run()
    # The first computes all; the others fork: they share its full blocks, and copy the partial one
    # before the next step. Then each computes two of the three tokens that it sampled.
    assert replica.executor.num_computed == length + 8 * 2
    for seq_id in range(8):
        assert replica.outputs[seq_id] == expected(prompt, 3)


def test_siblings_diverge_within_a_copied_block(cache_type: CacheType) -> None:
    replica = FakeReplica(block_size=4, cache_type=cache_type)
    prompt = [1, 2, 3, 4, 5, 6]
    replica.add(prompt, 1, max_tokens=9)
    replica.steps(1, ahead=1)
    # The second prompt extends the first one, whose sequence still writes to the shared block.
    replica.add([*prompt, 49], 2, max_tokens=9)
    replica.run()
    assert [new.num_cached for plan in replica.log for new in plan.new] == [0, 6]
    assert replica.outputs[1] == expected(prompt, 9)
    assert replica.outputs[2] == expected([*prompt, 49], 9)
    replica.check()


def test_the_source_of_a_copy_is_held_until_the_copy_is_made(cache_type: CacheType) -> None:
    replica = FakeReplica(num_blocks=8, block_size=4, cache_type=cache_type)
    replica.add([1, 2, 3], 1, max_tokens=1)
    replica.run()
    assert replica.core.cache.num_free_blocks() == 8
    replica.add([1, 2, 3, 4], 2, name="b", max_tokens=9)
    replica.plan()
    ((source, destination),) = replica.log[-1].copies
    assert source != destination
    assert replica.core.cache.num_free_blocks() == 6
    replica.plan()
    assert replica.log[-1].copies == ()
    num_free = replica.core.cache.num_free_blocks()
    replica.core.cancel(cancel("b"))
    assert replica.core.cache.num_free_blocks() == num_free, (
        "all is held while the plan is in flight"
    )
    replica.retire()
    replica.retire()
    assert replica.core.cache.num_free_blocks() == 8
    replica.check()


def test_finished_sequences_stay_cached_for_the_next_turn(cache_type: CacheType) -> None:
    replica = FakeReplica(block_size=4, cache_type=cache_type)
    replica.add(list(range(10)), 1, max_tokens=8)
    replica.run()
    turn = [*range(10), *replica.outputs[1], 3, 4]
    before = replica.executor.num_computed
    replica.add(turn, 2, max_tokens=1)
    replica.run()
    # 17 of the 18 tokens before the new turn have their KV (the last was never fed back).
    assert replica.executor.num_computed - before == 3
    assert replica.outputs[2] == expected(turn, 1)


def test_the_lowest_priority_is_preempted() -> None:
    replica = FakeReplica(num_blocks=6, block_size=2, max_batch_size=8)
    replica.add([1], 1, max_tokens=8, priority=0)
    replica.add([2], 2, max_tokens=8, priority=5)
    replica.run()
    assert {new.seq_id for plan in replica.log for new in plan.new if new.num_generated} == {1}


@pytest.mark.parametrize(("planned", "unstarted"), [(False, True), (True, False)])
def test_a_cancellation_says_whether_the_request_has_started(
    planned: bool, unstarted: bool
) -> None:
    replica = FakeReplica()
    replica.add([1, 2, 3], 1, name="a", stop=True)
    if planned:
        replica.plan()
    replica.core.cancel(cancel("a"))
    replica.plan()
    assert replica.log[-1].ended[0].unstarted is unstarted


def test_cancel_of_an_unknown_request_is_passed_on_as_it_came() -> None:
    replica = FakeReplica()
    replica.core.cancel(cancel("gone"))
    replica.run()
    assert replica.log[-1].ended == (cancel("gone"),)


def test_ends_in_lost_plans_are_in_the_next_plan() -> None:
    """Before later ones; streaming ends the requests by them."""
    replica = FakeReplica()
    for seq_id, name in enumerate("abc", 1):
        replica.add([seq_id, 2, 3], seq_id, name=name, stop=True)
    replica.plan()
    for name in "ab":
        replica.core.cancel(cancel(name))
        replica.plan()
    replica.core.cancel(cancel("c"))
    replica.lose_plans()
    replica.plan()
    assert [each.request_id for each in replica.log[-1].ended] == ["a", "b", "c"]
    replica.run()
    assert replica.core.idle


def test_expired_requests_free_their_blocks_within_a_step(cache_type: CacheType) -> None:
    """One request runs with all blocks, one waits; both are past their deadline."""
    replica = FakeReplica(num_blocks=4, block_size=4, cache_type=cache_type)
    for name, seq_id in (("running", 1), ("waiting", 2)):
        prompt = [seq_id] * 12
        replica.add(prompt, seq_id, name=name, deadline_ns=100)
    replica.plan()
    replica.plan()
    assert replica.core.cache.num_free_blocks() < 3
    assert replica.core.next_deadline_ns() == 100
    replica.retire()
    assert replica.plan(100)
    ended = {cancel.request_id: cancel.status for cancel in replica.log[-1].ended}
    assert ended == {"running": "expired", "waiting": "expired"}
    replica.retire_all()
    assert replica.core.idle
    assert replica.core.cache.num_free_blocks() == 4
    assert reported(replica).sequences == 2
    assert replica.core.next_deadline_ns() is None
    replica.check()


def test_deadlines_of_ended_requests_are_not_kept() -> None:
    replica = FakeReplica()
    for seq_id in range(2000):
        replica.add([1], seq_id, max_tokens=1, deadline_ns=10**18, stop=True)
        replica.run()
    assert len(replica.core.index.deadlines._entries) <= LEFTOVERS_KEPT + 2


def test_paused_core_plans_no_rows_but_still_passes_cancellations_on() -> None:
    replica = FakeReplica()
    replica.add([1, 2], 1, name="a", stop=True)
    replica.core.paused = True
    assert not replica.plan()
    replica.core.cancel(cancel("a"))
    assert replica.plan()
    assert replica.log[-1].seq_ids == ()


def test_the_report_names_the_sequences_served() -> None:
    replica = FakeReplica(steps_ahead=1)
    replica.add([1, 2, 3], (1, 2), max_tokens=3)
    replica.run()
    report = reported(replica)
    assert Counter(chain.from_iterable(report.steps)) == {1: 3, 2: 3}
    # The prompt was computed with the first sample.
    assert report.started == ((1, 3), (2, 0))
    assert sorted(report.ended) == [1, 2]
    assert report.paused == ()


def test_steps_are_reported_although_no_place_is_free() -> None:
    replica = FakeReplica(steps_ahead=1)
    replica.add([1, 2, 3], 1, max_tokens=30)
    for _ in range(REPORTED_STEPS):
        assert replica.core.take_report() is None
        replica.steps(1, ahead=1)
    assert reported(replica).steps == ((1,),) * REPORTED_STEPS


def test_prompts_in_progress_go_on_in_order() -> None:
    """A prompt that came later ranks before one that has begun."""
    replica = FakeReplica(max_tokens_per_batch=9)
    with patch("nano_inference.stages.batching.schedule.MAX_SCORED_TOKENS", 4):
        replica.add([1] * 20, 1, rank=5, prompt_logprobs=0, stop=True)
        replica.steps(1, ahead=1)
        replica.add([2] * 20, 2, rank=0, stop=True)
        replica.steps(3, ahead=1)
    rows = [dict(zip(plan.seq_ids, plan.num_tokens, strict=True)) for plan in replica.log]
    assert rows == [{1: 4}, {1: 4, 2: 5}, {2: 9}, {2: 6, 1: 3}]
    replica.run()
    for seq_id in (1, 2):
        assert replica.outputs[seq_id] == expected([seq_id] * 20, 8, stop=True)


def test_a_result_out_of_order_is_refused() -> None:
    replica = FakeReplica()
    replica.add([1, 2], 1)
    replica.plan()
    replica.plan()
    late = replica.executor.execute(replica.plans[0]).summary()
    replica.core.absorb(late)
    with pytest.raises(ValueError, match="out of order"):
        replica.core.absorb(late)


def scored_positions(log: list[StepPlan]) -> dict[int, set[int]]:
    """Positions that each sequence computed before its first token."""
    found: dict[int, set[int]] = {}
    at: dict[int, int] = {}
    fresh: set[int] = set()
    for plan in log:
        for new in plan.new:
            at[new.seq_id] = new.num_cached
            fresh.discard(new.seq_id)
            if not new.num_generated:
                fresh.add(new.seq_id)
                found[new.seq_id] = set()
        for seq_id, count in zip(plan.seq_ids, plan.num_tokens, strict=True):
            if seq_id in fresh:
                found[seq_id] |= set(range(at[seq_id], at[seq_id] + count))
            at[seq_id] += count
    return found


arrivals = st.lists(
    st.tuples(
        st.integers(1, 24),  # prompt length
        st.integers(0, 3),  # which common prefix
        st.integers(1, 10),  # max_tokens
        st.integers(1, 3),  # samples
        st.integers(0, 2),  # priority
        st.booleans(),  # whether its prompt is scored
    ),
    min_size=1,
    max_size=12,
)
ACTIONS = (
    *("plan", "retire", "cancel", "flush", "stop", "lose plans", "pause", "resume", "tiers"),
    *("pin", "release", "demote", "prefetch", "later"),
)
actions = st.lists(st.sampled_from(ACTIONS), max_size=60)

PENDING = ("plan", "retire", "demote")
"""A block's move into host memory waits for the next plan."""


@pytest.mark.soak
@given(
    arrivals,
    actions,
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    st.sampled_from(CACHE_TYPES),
    st.sampled_from([(0, 0), (3, 0), (12, 0), (6, 3), (12, 100)]),
    st.sampled_from([1, 1, 2, 3]),
)
@example([(1, 0, 1, 1, 0, False)], [*PENDING, "lose plans"], 1, 1, "paged", (6, 3), 1)
def test_random_traces_conserve_blocks_and_outputs(
    arrivals: list[tuple[int, int, int, int, int, bool]],
    actions: list[str],
    block_size: int,
    steps_ahead: int,
    cache_type: CacheType,
    tiers: tuple[int, int],
    pipeline_stages: int,
) -> None:
    """With host slots and blocks on disk, too; loaded blocks are audited, events published. Single
    samples are turns of sessions. Pipeline stages have disjoint plans in flight."""
    replica = FakeReplica(
        host_slots=tiers[0],
        disk_blocks=tiers[1],
        cache_type=cache_type,
        num_blocks=-(-40 // block_size),
        block_size=block_size,
        max_batch_size=5,
        max_tokens_per_batch=9,
        steps_ahead=steps_ahead,
        kv_events=True,
        pipeline_stages=pipeline_stages,
    )
    core = replica.core
    wanted: dict[int, list[int]] = {}
    scored_prompts: dict[int, int] = {}
    cut_short: set[int] = set()
    members: dict[str, tuple[int, ...]] = {}
    places = 0
    paused: list[int] = []
    queue = list(arrivals)

    def arrive() -> None:
        length, prefix, max_tokens, samples, priority, scored = queue.pop()
        prompt = [prefix * 5 + i % 7 for i in range(length)]
        seq_ids = tuple(range(len(wanted), len(wanted) + samples))
        members[str(seq_ids[0])] = seq_ids
        logprobs = 0 if scored else None
        how = {"max_tokens": max_tokens, "priority": priority, "prompt_logprobs": logprobs}
        after: Literal["pin", "demote", "release"] = ("pin", "demote", "release")[priority]
        session = KVSession(id=str(prefix), ttl_s=1 + length % 3, after=after)
        replica.add(prompt, seq_ids, stop=True, session=session if samples == 1 else None, **how)
        if scored:
            scored_prompts[seq_ids[0]] = length
        wanted.update(dict.fromkeys(seq_ids, expected(prompt, max_tokens, stop=True)))

    def take_report() -> None:
        nonlocal places, paused
        report = core.take_report() or Credit(0)
        places += report.sequences
        paused = [each for each in (*paused, *report.paused) if each not in report.ended]

    def resume() -> None:
        nonlocal places, paused
        core.resume_sequences(paused)
        places -= len(paused)
        paused = []

    for action in [*actions, *["plan"] * len(arrivals)]:
        if queue and action == "plan":
            arrive()
        match action:
            case "plan":
                replica.plan()
            case "retire":
                replica.retire()
            case "flush":
                core.cache.flush()
            case "lose plans":
                replica.lose_plans()
            case "tiers":
                replica.change_tiers()
            case "cancel" if members:
                request_id, seq_ids = members.popitem()
                core.cancel(cancel(request_id))
                cut_short.update(seq_ids)
            case "stop" if members:
                victim = next(iter(members.values()))[0]
                core.stop([victim])
                cut_short.add(victim)
            case "pause" if members:
                core.pause_sequences([*next(iter(members.values())), 10**6])
            case "resume":
                resume()
            case "pin" | "release" | "demote" | "prefetch":
                for number in range(4):
                    call = SessionCall(action)
                    replica.sessions.call(SessionKey("", str(number)), call, replica.now_ns)
            case "later":
                replica.now_ns += 1_000_000_000
        assert len(replica.sessions.pins) <= core.cache.num_blocks / 2
        take_report()
        replica.check()
    replica.run()
    take_report()
    resume()
    replica.run()
    take_report()
    replica.check()
    assert core.idle
    assert replica.tiers is None or replica.tiers.difference is None
    for seq_id, tokens in wanted.items():
        got = replica.outputs.get(seq_id, [])
        assert got == (tokens[: len(got)] if seq_id in cut_short else tokens)
    computed = scored_positions(replica.log)
    for seq_id in scored_prompts.keys() - cut_short:
        assert set(range(scored_prompts[seq_id])) <= computed[seq_id]
    assert places == len(wanted)
    replica.sessions.refresh(10**18)
    assert not replica.sessions.known
    assert core.cache.num_free_blocks() == core.cache.num_blocks
