"""Times between tokens are told once for each step and length, and nothing is kept for long."""

from __future__ import annotations

from nano_inference.stages.streaming.intervals import TokenIntervals


def test_a_length_is_told_once_however_many_sequences_have_it() -> None:
    intervals = TokenIntervals()
    assert intervals.step((1, 2, 3), 100) == [], "first tokens have none before them"
    assert intervals.step((1, 2, 3), 130) == [30]


def test_who_stood_aside_has_a_length_of_its_own() -> None:
    intervals = TokenIntervals()
    intervals.step((1, 2), 100)
    intervals.step((1,), 110)
    assert intervals.step((1, 2, 3), 125) == [15, 25]


def test_a_new_epoch_gives_the_ids_anew() -> None:
    intervals = TokenIntervals()
    intervals.step((1,), 100)
    intervals.clear()
    assert intervals.step((1,), 500) == []


def test_sequences_that_ended_are_not_kept_for_ever() -> None:
    intervals = TokenIntervals()
    for seq_id in range(5000):
        intervals.step((seq_id,), seq_id)
    assert len(intervals._last_ns) < 1000
