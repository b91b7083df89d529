"""Sequences that make room: nothing of them is lost, and going on costs little."""

from __future__ import annotations

import pytest

from nano_inference.bus.control import Cancel
from nano_inference.stages.batching import SequenceStatus

from .lane import CacheType, Lane, expected, reported

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(params=["paged", "radix"])
def cache_type(request: pytest.FixtureRequest) -> CacheType:
    param: CacheType = request.param
    return param


def lane_with_one(cache_type: CacheType = "radix", steps: int = 6) -> Lane:
    """A lane whose one sequence has gone some steps, the last of them still under way."""
    lane = Lane(cache_type=cache_type)
    lane.add(PROMPT, request_id="a", seq_ids=(1,), max_tokens=20, stop=False)
    for _ in range(steps):
        lane.plan()
        lane.plan()
        lane.retire()
    assert lane.plans, "a plan is under way"
    lane.core.take_report()
    return lane


def come_to_rest(lane: Lane) -> None:
    while lane.plan() or lane.retire():
        pass


def test_what_goes_on_gives_the_same_tokens_from_its_cached_blocks(cache_type: CacheType) -> None:
    lane = lane_with_one(cache_type)
    lane.core.pause_sequences([1])
    come_to_rest(lane)
    lane.check()
    made = len(lane.outputs[1])
    assert 0 < made < 20, "it stopped in the middle"
    assert not lane.core.idle
    assert lane.core.cache.num_free_blocks() == lane.core.cache.num_blocks
    assert reported(lane).paused == (1,)
    lane.core.resume_sequences([1])
    come_to_rest(lane)
    assert lane.outputs[1] == expected(PROMPT, 20, stop=False)
    report = reported(lane)
    ((seq_id, computed_again),) = report.started
    assert seq_id == 1
    assert computed_again <= 1 + lane.core.limits.block_size, "all but the last block was cached"
    assert (report.sequences, report.ended) == (1, (1,))
    assert lane.core.idle


def test_its_place_is_free_when_no_plan_names_it() -> None:
    lane = lane_with_one()
    lane.core.pause_sequences([1])
    assert lane.core.take_report() is None, "the plan under way still uses its blocks"
    while lane.plans:
        lane.retire()
    report = reported(lane)
    assert (report.sequences, report.paused, report.ended) == (1, (1,), ())


def test_what_waits_makes_room_at_once() -> None:
    lane = Lane()
    lane.add(PROMPT, request_id="a", seq_ids=(1,))
    lane.core.pause_sequences([1])
    assert reported(lane).paused == (1,)
    assert not lane.plan()
    lane.core.resume_sequences([1])
    lane.run()
    assert lane.outputs[1] == expected(PROMPT, 8)


def test_a_sequence_that_ends_in_its_last_step_has_ended_and_not_made_room() -> None:
    lane = Lane()
    lane.add(PROMPT, request_id="a", seq_ids=(1,), max_tokens=2, stop=False)
    lane.plan()
    lane.plan()
    lane.core.pause_sequences([1])
    lane.run()
    report = reported(lane)
    assert (report.sequences, report.paused, report.ended) == (1, (), (1,))
    assert lane.outputs[1] == expected(PROMPT, 2, stop=False)
    assert lane.core.idle
    lane.core.resume_sequences([1])
    assert reported(lane).sequences == 1, "the credit of who has ended comes back"


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("how", ["cancel", "stop", "deadline"])
def test_what_was_paused_can_end_like_any_other(how: str, paused: bool) -> None:
    lane = Lane()
    deadline = 100 if how == "deadline" else None
    lane.add(PROMPT, request_id="a", seq_ids=(1,), max_tokens=20, stop=False, deadline_ns=deadline)
    for _ in range(3):
        lane.plan()
        lane.plan()
        lane.retire()
    lane.core.pause_sequences([1])
    if paused:
        while lane.plans:
            lane.retire()
    if how == "cancel":
        lane.core.cancel(Cancel("a", "a", "cancelled", "cancelled", ""))
    elif how == "stop":
        lane.core.stop([1])
    lane.plan(now_ns=100)
    come_to_rest(lane)
    report = reported(lane)
    assert report.ended == (1,)
    assert report.sequences == 1, "one place, given back once"
    assert lane.ended == ([] if how == "stop" else ["a"])
    assert all(not cancel.unstarted for plan in lane.log for cancel in plan.ended)
    assert lane.core.idle
    lane.check()


def test_after_lost_plans_what_was_to_pause_is_paused() -> None:
    lane = lane_with_one()
    lane.core.pause_sequences([1])
    lane.retract()
    lane.check()
    assert reported(lane).paused == (1,)
    lane.core.resume_sequences([1])
    come_to_rest(lane)
    assert lane.outputs[1] == expected(PROMPT, 20, stop=False)


def test_smaller_ranks_start_first_and_are_preempted_last() -> None:
    lane = Lane(num_blocks=6, block_size=4, max_batch_size=2)
    for rank in (30, 10, 20):
        prompt = [rank] * 8
        lane.add(prompt, request_id="r", seq_ids=(rank,), max_tokens=8, stop=False, rank=rank)
    lane.plan()
    assert [new.seq_id for new in lane.log[0].new] == [10, 20]
    assert [seq.seq_id for seq in lane.core._running] == [10, 20]
    lane.run()
    preempted = [seq_id for plan in lane.log for seq_id in plan.finished]
    assert preempted[0] == 20
    for rank in (10, 20, 30):
        assert lane.outputs[rank] == expected([rank] * 8, 8, stop=False)


def test_only_running_sequences_take_tokens() -> None:
    lane = lane_with_one()
    lane.core.pause_sequences([1])
    while lane.plans:
        lane.retire()
    (seq,) = lane.core._paused_seqs.values()
    assert seq.status is SequenceStatus.WAITING
    with pytest.raises(ValueError, match="not running"):
        seq.append_token(1)
