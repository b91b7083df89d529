"""Plans with and without drafts: no token changes."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nano_inference.bus.parts.speculation import DraftsResult
from nano_inference.bus.sections import with_sections
from nano_inference.bus.steps import StepPlan, StepResult, VerifiedDraft

from ...sections import read
from .replica import CacheType, FakeReplica, RuleExecutor, expected


class DraftingExecutor(RuleExecutor):
    """Accepts some of the drafted tokens that it is allowed.

    Attributes:
        rest: What its next result says of drafts in plans to come.
    """

    rest = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self._allowed = dict(zip(plan.seq_ids, read(plan).num_drafts, strict=False))
        self._verified: list[VerifiedDraft] = []
        result = super().execute(plan)
        rest, self.rest = self.rest, 0
        return with_sections(result, DraftsResult(tuple(self._verified), rest))

    def _row(self, seq_id: int, count: int) -> list[tuple[int, int, str]]:
        rows = super()._row(seq_id, count)
        allowed = self._allowed.get(seq_id, 0)
        if not rows or not allowed:
            return rows
        room = len(self.tables[seq_id]) * self.block_size - self.computed[seq_id]
        assert room >= allowed, "there are no blocks for all drafts"
        for _ in range((seq_id * 5 + len(self.tokens[seq_id])) % (allowed + 1)):
            if rows[-1][2]:
                break
            rows += super()._row(seq_id, 1)
        self._verified.append(VerifiedDraft(seq_id, "ngram", allowed, len(rows) - 1))
        return rows


def drafting_replica(**settings: int | str) -> tuple[FakeReplica, DraftingExecutor]:
    replica = FakeReplica(max_draft_tokens=3, **settings)  # type: ignore[arg-type]
    core = replica.core
    replica.executor = executor = DraftingExecutor(core.cache.num_blocks, core.limits.block_size)
    return replica, executor


@pytest.mark.soak
@given(
    actions=st.lists(
        st.tuples(
            st.sampled_from(("add", "plan", "retire", "steps", "steps", "rest", "retract")),
            st.integers(0, 10_000),
        ),
        max_size=60,
    ),
    block_size=st.sampled_from([1, 2, 4, 16]),
    steps_ahead=st.integers(1, 3),
    cache_type=st.sampled_from(["paged", "radix"]),
)
# Blocks that rejected drafts left over are used before another is taken, of which there is none.
@example(
    actions=[
        ("add", 6680),
        ("rest", 2288),
        ("add", 5934),
        ("add", 3402),
        ("add", 1247),
        ("add", 3072),
        ("add", 591),
    ],
    block_size=1,
    steps_ahead=3,
    cache_type="radix",
)
# The last token of a prompt is all that is left for a step of one of them, and the other forks.
@example(actions=[("add", 624), ("add", 6248)], block_size=1, steps_ahead=2, cache_type="paged")
@example(actions=[("add", 624), ("add", 6248)], block_size=4, steps_ahead=2, cache_type="radix")
def test_drafts_never_change_tokens(
    actions: list[tuple[str, int]], block_size: int, steps_ahead: int, cache_type: CacheType
) -> None:
    replica, executor = drafting_replica(
        num_blocks=-(-120 // block_size),
        block_size=block_size,
        steps_ahead=steps_ahead,
        cache_type=cache_type,
        max_batch_size=6,
    )
    wanted: dict[int, list[int]] = {}

    def do(action: str, which: int) -> None:
        match action:
            case "add":
                prompt = [which % 4 * 5 + place % 7 for place in range(1 + which % 37)]
                seq_id, stop, length = len(wanted), which % 5 > 0, 1 + which % 31
                wanted[seq_id] = expected(prompt, length, stop=stop)
                ids = (seq_id,)
                replica.add(prompt, ids, name=f"r{seq_id}", max_tokens=length, stop=stop)
            case "plan":
                replica.plan()
            case "retire":
                replica.retire()
            case "steps":
                replica.steps(which % 12)
            case "rest":
                executor.rest = which % 20
            case "retract":
                # Drafts accepted in lost plans are sampled again.
                replica.lose_plans()
        replica.check()

    for action, which in actions:
        do(action, which)
    replica.run()
    assert replica.core.idle
    assert replica.outputs == wanted


def test_drafts_are_allowed_again_after_so_many_plans() -> None:
    replica, executor = drafting_replica()
    for seq_id in range(3):
        prompt = [seq_id + 10] * 3
        replica.add(prompt, seq_id, max_tokens=100)
    replica.steps(1, ahead=1)
    executor.rest = 5
    replica.steps(1, ahead=1)
    replica.log.clear()
    replica.steps(8, ahead=1)
    assert [bool(read(plan).num_drafts) for plan in replica.log] == [False] * 5 + [True] * 3
