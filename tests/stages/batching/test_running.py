"""The batch that goes in step does what the scheduler says, sequence by sequence."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.bus.control import Cancel
from nano_inference.bus.messages import Credit, StepPlan
from nano_inference.stages.batching import Sequence
from nano_inference.stages.batching.counters import Counters
from nano_inference.stages.batching.running import RunningBatch

from .lane import CacheType, Lane, RuleExecutor, expected

CACHE_TYPES: tuple[CacheType, ...] = ("paged", "radix")


class ByHand(RunningBatch):
    """Nobody goes in step, so `schedule` decides everything, and each row is written down."""

    def gather(self, *, drafts: bool = True) -> bool:
        return False

    def prefilling(self) -> list[Sequence]:
        return [seq for seq in self if seq.num_computed < seq.num_to_prefill]


class MoodyExecutor(RuleExecutor):
    """Ends some sequences for reasons of its own."""

    def _row(self, seq_id: int, count: int) -> list[tuple[int, int, str]]:
        row = super()._row(seq_id, count)
        if row and (seq_id * 7 + len(self.tokens[seq_id])) % 23 == 0:
            self.done.add(seq_id)
            row = [(seq_id, row[0][1], "stop")]
        return row


class Twins:
    """Two lanes that are told the same, of which one does everything by hand."""

    def __init__(
        self,
        cache_type: CacheType,
        *,
        num_blocks: int,
        block_size: int,
        steps_ahead: int,
        max_tokens: int,
    ) -> None:
        self.lanes: list[Lane] = []
        for kind in (RunningBatch, ByHand):
            with patch("nano_inference.stages.batching.core.RunningBatch", kind):
                lane = Lane(
                    cache_type=cache_type,
                    num_blocks=num_blocks,
                    block_size=block_size,
                    max_batch_size=6,
                    max_tokens_per_batch=max_tokens,
                    steps_ahead=steps_ahead,
                )
            lane.executor = MoodyExecutor(num_blocks, block_size)
            self.lanes.append(lane)
        self.requests: dict[str, tuple[int, ...]] = {}
        self.paused: list[int] = []
        self.now_ns = 0
        self._next_id = 0

    def do(self, action: str, which: int) -> None:
        """Tells both, and holds them against each other."""
        self.now_ns += 1
        for lane in self.lanes:
            self._tell(lane, action, which)
        if action == "add":
            samples = 1 + which % 3
            seq_ids = tuple(range(self._next_id, self._next_id + samples))
            self.requests[f"r{self._next_id}"] = seq_ids
            self._next_id += samples
        elif action == "go on":
            del self.paused[: which % 4]
        elif action == "clear":
            self.paused.clear()
        self.compare()

    def compare(self) -> None:
        found, by_hand = map(self._seen, self.lanes)
        assert found == by_hand
        report = found[0]
        if report is not None:
            self.paused = [
                each for each in (*self.paused, *report.paused) if each not in report.ended
            ]
        for lane in self.lanes:
            lane.check()

    def _seen(
        self, lane: Lane
    ) -> tuple[Credit | None, list[StepPlan], dict[int, list[int]], dict[str, int], Counters]:
        core = lane.core
        log, lane.log = lane.log, []
        return core.take_report(), log, lane.outputs, core.load(), core.take_counters()

    def _tell(self, lane: Lane, action: str, which: int) -> None:
        core = lane.core
        requests = list(self.requests)
        request_id = requests[which % len(requests)] if requests else "nobody"
        seq_ids = self.requests.get(request_id, ())
        match action:
            case "add":
                self._add(lane, which)
            case "plan":
                lane.plan(self.now_ns)
            case "retire":
                lane.retire()
            case "steps":
                for _ in range(which % 12):
                    lane.plan(self.now_ns)
                    lane.plan(self.now_ns)
                    lane.retire()
            case "cancel":
                core.cancel(Cancel(request_id, request_id, "cancelled", "cancelled", ""))
            case "stop":
                core.stop(seq_ids[:1])
            case "make room":
                core.pause_sequences(seq_ids)
            case "go on":
                core.resume_sequences(self.paused[: which % 4], rank=which % 3)
            case "flush":
                core.cache.flush()
            case "pause":
                core.paused = not core.paused
            case "retract":
                lane.retract()
            case "clear":
                lane.plans.clear()
                lane.executor.forget()
                core.clear()

    def _add(self, lane: Lane, which: int) -> None:
        samples = 1 + which % 3
        lane.add(
            [which % 4 * 5 + place % 7 for place in range(1 + which % 37)],
            request_id=f"r{self._next_id}",
            seq_ids=tuple(range(self._next_id, self._next_id + samples)),
            max_tokens=1 + which % 31,
            stop=which % 5 > 0,
            priority=which % 2,
            rank=which % 3,
            prompt_logprobs=0 if which % 4 == 0 else None,
            deadline_ns=self.now_ns + 40 if which % 11 == 0 else None,
        )


OFTEN = ("add", "add", "plan", "retire", "steps", "steps")
SELDOM = (
    "cancel",
    "stop",
    "make room",
    "go on",
    "flush",
    "pause",
    "retract",
    "clear",
)


@pytest.mark.soak
@given(
    actions=st.lists(
        st.tuples(st.sampled_from((*OFTEN, *OFTEN, *SELDOM)), st.integers(0, 10_000)), max_size=60
    ),
    num_tokens=st.sampled_from([80, 120, 400]),
    block_size=st.sampled_from([1, 2, 4, 16]),
    steps_ahead=st.integers(1, 3),
    max_tokens=st.sampled_from([6, 9, 64]),
    cache_type=st.sampled_from(CACHE_TYPES),
)
def test_plan_for_plan_as_if_each_sequence_were_scheduled(
    actions: list[tuple[str, int]],
    num_tokens: int,
    block_size: int,
    steps_ahead: int,
    max_tokens: int,
    cache_type: CacheType,
) -> None:
    twins = Twins(
        cache_type,
        num_blocks=-(-num_tokens // block_size),
        block_size=block_size,
        steps_ahead=steps_ahead,
        max_tokens=max_tokens,
    )
    # Few tokens to be scored, so that several prompts are under way at a time.
    with patch("nano_inference.stages.batching.schedule.MAX_SCORED_TOKENS", 4):
        for action, which in actions:
            twins.do(action, which)
        for lane in twins.lanes:
            lane.core.paused = False
        for _ in range(60):
            if all(lane.core.idle for lane in twins.lanes):
                break
            twins.do("go on", 3)
            twins.do("steps", 11)
    assert all(lane.core.idle for lane in twins.lanes)


def test_prompts_under_way_go_on_in_order() -> None:
    """One that came later ranks before one that has begun."""
    lane = Lane(max_tokens_per_batch=9)
    with patch("nano_inference.stages.batching.schedule.MAX_SCORED_TOKENS", 4):
        lane.add([1] * 20, request_id="a", seq_ids=(1,), rank=5, prompt_logprobs=0)
        lane.plan()
        lane.retire()
        lane.add([2] * 20, request_id="b", seq_ids=(2,), rank=0)
        for _ in range(3):
            lane.plan()
            lane.retire()
    rows = [dict(zip(plan.seq_ids, plan.num_tokens, strict=True)) for plan in lane.log]
    assert rows == [{1: 4}, {1: 4, 2: 5}, {2: 9}, {2: 6, 1: 3}]
    lane.run()
    for seq_id in (1, 2):
        assert lane.outputs[seq_id] == expected([seq_id] * 20, 8)


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_nothing_is_kept_of_those_that_have_left(cache_type: CacheType) -> None:
    lane = Lane(num_blocks=400, block_size=4, cache_type=cache_type)
    for seq_id in range(8):
        prompt = [seq_id + 10] * 3
        lane.add(prompt, request_id=str(seq_id), seq_ids=(seq_id,), max_tokens=100, stop=False)
    for _ in range(40):
        lane.plan()
        lane.plan()
        lane.retire()
    batch = lane.core._running
    assert len(batch.in_step) == 8
    assert len(batch._tokens) == 4, "no more steps than a block has places"
    lane.core.stop(range(8))
    assert not batch.in_step
    while lane.retire():
        lane.check()
    assert not len(batch)
    assert not any((*batch._begins, batch._limits, batch._left, [*batch.prefilling()]))
