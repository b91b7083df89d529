"""Paused sequences keep their tokens, and resume from cached blocks."""

from __future__ import annotations

import pytest

from nano_inference.bus.control import Cancel

from .replica import CacheType, FakeReplica, expected, reported

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def replica_with_one(cache_type: CacheType = "radix", steps: int = 6) -> FakeReplica:
    """A replica whose one sequence has run for some steps, the last of them in flight."""
    replica = FakeReplica(cache_type=cache_type)
    replica.add(PROMPT, 1, name="a", max_tokens=20)
    replica.steps(steps)
    assert replica.plans, "a plan is in flight"
    replica.core.take_report()
    return replica


def come_to_rest(replica: FakeReplica) -> None:
    while replica.plan() or replica.retire():
        pass


def test_a_resumed_sequence_gives_the_same_tokens_from_cached_blocks(cache_type: CacheType) -> None:
    replica = replica_with_one(cache_type)
    replica.core.pause_sequences([1])
    come_to_rest(replica)
    replica.check()
    made = len(replica.outputs[1])
    assert 0 < made < 20, "it stopped in the middle"
    assert not replica.core.idle
    assert replica.core.cache.num_free_blocks() == replica.core.cache.num_blocks
    assert reported(replica).paused == (1,)
    replica.core.resume_sequences([1])
    come_to_rest(replica)
    assert replica.outputs[1] == expected(PROMPT, 20)
    report = reported(replica)
    ((seq_id, computed_again),) = report.started
    assert seq_id == 1
    assert computed_again <= 1 + replica.core.limits.block_size, "all but the last block was cached"
    assert (report.sequences, report.ended) == (1, (1,))
    assert replica.core.idle


def test_a_place_is_free_when_no_plan_in_flight_names_the_sequence() -> None:
    replica = replica_with_one()
    replica.core.pause_sequences([1])
    assert replica.core.take_report() is None, "the plan in flight still uses its blocks"
    replica.retire_all()
    report = reported(replica)
    assert (report.sequences, report.paused, report.ended) == (1, (1,), ())


def test_a_waiting_sequence_pauses_at_once() -> None:
    replica = FakeReplica()
    replica.add(PROMPT, 1, stop=True)
    replica.core.pause_sequences([1])
    assert reported(replica).paused == (1,)
    assert not replica.plan()
    replica.core.resume_sequences([1])
    replica.run()
    assert replica.outputs[1] == expected(PROMPT, 8, stop=True)


def test_a_sequence_that_ends_in_its_last_step_is_not_paused() -> None:
    replica = FakeReplica()
    replica.add(PROMPT, 1, max_tokens=2)
    replica.plan()
    replica.plan()
    replica.core.pause_sequences([1])
    replica.run()
    report = reported(replica)
    assert (report.sequences, report.paused, report.ended) == (1, (), (1,))
    assert replica.outputs[1] == expected(PROMPT, 2)
    assert replica.core.idle
    replica.core.resume_sequences([1])
    assert reported(replica).sequences == 1, "the credit of an ended sequence comes back"


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("how", ["cancel", "stop", "deadline"])
def test_a_paused_sequence_can_end(how: str, paused: bool) -> None:
    replica = FakeReplica()
    deadline = 100 if how == "deadline" else None
    replica.add(PROMPT, 1, name="a", max_tokens=20, deadline_ns=deadline)
    replica.steps(3)
    replica.core.pause_sequences([1])
    if paused:
        replica.retire_all()
    if how == "cancel":
        replica.core.cancel(Cancel("a", "a", "cancelled", "cancelled", ""))
    elif how == "stop":
        replica.core.stop([1])
    replica.plan(now_ns=100)
    come_to_rest(replica)
    report = reported(replica)
    assert report.ended == (1,)
    assert report.sequences == 1, "one place, given back once"
    assert replica.ended == ([] if how == "stop" else ["a"])
    assert all(not cancel.unstarted for plan in replica.log for cancel in plan.ended)
    assert replica.core.idle
    replica.check()


def test_smaller_ranks_start_first_and_are_preempted_last() -> None:
    replica = FakeReplica(num_blocks=6, block_size=4, max_batch_size=2)
    for rank in (30, 10, 20):
        prompt = [rank] * 8
        replica.add(prompt, rank, max_tokens=8, rank=rank)
    replica.plan()
    assert [new.seq_id for new in replica.log[0].new] == [10, 20]
    assert [seq.seq_id for seq in replica.core.running] == [10, 20]
    replica.run()
    preempted = [seq_id for plan in replica.log for seq_id in plan.finished]
    assert preempted[0] == 20
    for rank in (10, 20, 30):
        assert replica.outputs[rank] == expected([rank] * 8, 8)
