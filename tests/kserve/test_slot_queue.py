"""Slots are assigned in FIFO order, to one owner at a time, as soon as they suffice."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nano_inference.kserve.pool import SlotQueue, Waiter

N_SLOTS = 7


class Played(RuleBasedStateMachine):
    """Some ask, some leave with and without slots, some give theirs back, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = SlotQueue(N_SLOTS)
        self.line: list[Waiter] = []  # in the order in which they came
        self.owners: list[Waiter | None] = [None] * N_SLOTS

    def given(self, served: list[Waiter]) -> None:
        assert served == self.line[: len(served)], "strictly in turn"
        del self.line[: len(served)]
        for waiter in served:
            assert waiter.first is not None
            slots = slice(waiter.first, waiter.first + waiter.span)
            assert self.owners[slots] == [None] * waiter.span, "never two owners"
            self.owners[slots] = [waiter] * waiter.span

    def free(self, waiter: Waiter) -> None:
        self.owners = [None if each is waiter else each for each in self.owners]

    def holding(self) -> list[Waiter]:
        return list(dict.fromkeys(each for each in self.owners if each is not None))

    @rule(span=st.integers(1, N_SLOTS))
    def ask(self, span: int) -> None:
        waiter = self.queue.enter(span, lambda: None)
        self.line.append(waiter)
        if waiter.first is not None:
            self.given([waiter])

    @rule(data=st.data())
    def leave_the_line(self, data: st.DataObject) -> None:
        if self.line:
            waiter = data.draw(st.sampled_from(self.line))
            self.line.remove(waiter)
            self.given(self.queue.leave(waiter))
            assert self.queue.leave(waiter) == [], "the second time nothing happens"

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if holding := self.holding():
            waiter = data.draw(st.sampled_from(holding))
            self.free(waiter)
            self.given(self.queue.leave(waiter))
            assert self.queue.leave(waiter) == []

    @invariant()
    def it_adds_up(self) -> None:
        assert self.queue.free_slots == self.owners.count(None)
        assert list(self.queue.waiting) == self.line

    @invariant()
    def the_first_of_the_line_waits_for_good_reason(self) -> None:
        if self.line:
            span = self.line[0].span
            runs = [self.owners[at : at + span] for at in range(N_SLOTS - span + 1)]
            assert [None] * span not in runs

    def teardown(self) -> None:
        """Once all give back what they have, everybody in the line has had his turn."""
        while holding := self.holding():
            for waiter in holding:
                self.free(waiter)
                self.given(self.queue.leave(waiter))
        assert self.line == []


TestPlayed = Played.TestCase
TestPlayed.settings = settings(max_examples=60, stateful_step_count=60)


@pytest.mark.parametrize("span", [-1, 0, N_SLOTS + 1])
def test_an_impossible_span_is_refused(span: int) -> None:
    queue = SlotQueue(N_SLOTS)
    with pytest.raises(ValueError, match="can never be free"):
        queue.enter(span, lambda: None)
    assert not queue.waiting


@pytest.mark.parametrize("n_slots", [0, -3])
def test_no_slots_are_refused(n_slots: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        SlotQueue(n_slots)
