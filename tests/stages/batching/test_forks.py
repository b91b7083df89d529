"""Who waits with the tokens that a step ends with gets its own next token in that step."""

from __future__ import annotations

import pytest

from nano_inference.bus.control import Cancel
from nano_inference.bus.messages import StepPlan
from nano_inference.bus.pooling import Pooling
from nano_inference.bus.weights import InFlight

from .lane import CacheType, Lane, expected, reported

PROMPT = [1, 2, 3, 4, 5, 6]
SEQ_IDS = (1, 2, 3)
# Of as many tokens as a step of the lane may have.
FULL_STEP = list(range(8))


@pytest.fixture(params=["paged", "radix"])
def lane(request: pytest.FixtureRequest) -> Lane:
    """With two steps under way, and a budget that takes the prompt in two steps."""
    cache_type: CacheType = request.param
    return Lane(cache_type=cache_type, max_tokens_per_batch=8)


def add(
    lane: Lane, prompt: list[int] = PROMPT, max_tokens: int = 9, *, name: str = "a", **how: object
) -> None:
    given: dict[str, object] = {"seq_ids": SEQ_IDS, "stop": False, **how}
    lane.add(prompt, request_id=name, max_tokens=max_tokens, **given)  # type: ignore[arg-type]


def forks(plan: StepPlan) -> list[int]:
    return [each for each, count in zip(plan.seq_ids, plan.num_tokens, strict=True) if not count]


def finish(lane: Lane) -> None:
    lane.run()
    lane.check()
    assert lane.core.idle
    assert lane.core.cache.num_free_blocks() == lane.core.cache.num_blocks


def test_they_sample_in_the_step_that_ends_the_prompt(lane: Lane) -> None:
    add(lane, list(range(14)), seq_ids=tuple(range(1, 8)))
    lane.plan()
    lane.plan()
    assert [sum(plan.num_tokens) for plan in lane.log] == [8, 6]
    assert [forks(plan) for plan in lane.log] == [[], [2, 3, 4, 5, 6, 7]]
    # With the next plan each gets a copy of the block in which they part.
    lane.retire()
    lane.plan()
    assert [len(plan.copies) for plan in lane.log] == [0, 0, 6]
    assert lane.log[-1].num_tokens == (1,) * 7
    finish(lane)
    assert lane.outputs == {each: expected(list(range(14)), 9, stop=False) for each in range(1, 8)}


def test_full_blocks_are_shared_without_a_copy(lane: Lane) -> None:
    add(lane, [*PROMPT, 7, 8])
    free = lane.core.cache.num_free_blocks()
    lane.plan()
    assert free - lane.core.cache.num_free_blocks() == 2
    finish(lane)
    assert not any(plan.copies for plan in lane.log)


def test_another_request_with_the_same_tokens_forks_too(lane: Lane) -> None:
    for name, seq_id in (("a", 1), ("b", 2)):
        add(lane, name=name, seq_ids=(seq_id,))
    lane.plan()
    assert forks(lane.log[0]) == [2]
    finish(lane)


@pytest.mark.parametrize("other", [[*PROMPT, 7], [9, *PROMPT[1:]], PROMPT[:-1]])
def test_none_with_other_tokens_does(lane: Lane, other: list[int]) -> None:
    add(lane, seq_ids=(1,))
    add(lane, other, name="b", seq_ids=(2,))
    finish(lane)
    assert not any(map(forks, lane.log))


def test_salts_and_adapters_keep_them_apart(lane: Lane) -> None:
    lane.core.adapters._versions = {"x": 1}
    for seq_id, adapter in enumerate(("x", "x", "")):
        add(lane, FULL_STEP, name=str(seq_id), seq_ids=(seq_id,), adapter=adapter)
    lane.plan()
    assert forks(lane.log[0]) == [1]
    finish(lane)


@pytest.mark.parametrize("vector", [1, 2])
def test_a_vector_is_nobody_s_first_token(lane: Lane, vector: int) -> None:
    pooling = Pooling("last", normalize=False, dimensions=0)
    for each in (1, 2):
        how = {"pooling": pooling} if each == vector else {}
        add(lane, FULL_STEP, name=str(each), seq_ids=(each,), max_tokens=1, **how)
    finish(lane)
    assert not any(map(forks, lane.log))
    assert (lane.pooled, list(lane.outputs)) == ([vector], [3 - vector])


def test_what_computes_a_prompt_for_its_logprobs_does_not_fork(lane: Lane) -> None:
    add(lane, FULL_STEP, name="b", seq_ids=(1,))
    add(lane, FULL_STEP, seq_ids=(2,), prompt_logprobs=0)
    finish(lane)
    assert not any(map(forks, lane.log))
    assert lane.executor.num_computed == 2 * (len(FULL_STEP) + 8)


def test_what_has_run_before_does_not_fork(lane: Lane) -> None:
    """It was paid for when it began; what it computes when it goes on counts as done again."""
    long = list(range(14))
    add(lane, long, seq_ids=(2,))
    lane.plan()
    lane.retire()
    lane.core.pause_sequences((2,))
    add(lane, long, name="b", seq_ids=(1,))
    lane.core.resume_sequences((2,))
    finish(lane)
    assert not any(map(forks, lane.log))
    assert sorted(reported(lane).started) == [(1, 6), (2, 1), (2, 14)]


def test_nobody_is_passed_by_who_ranks_before(lane: Lane) -> None:
    """The one in the middle waits for the next step, since the first one fills this."""
    add(lane, FULL_STEP, seq_ids=(1,))
    add(lane, [9, 9], name="b", seq_ids=(2,))
    add(lane, FULL_STEP, name="c", seq_ids=(3,), rank=1)
    lane.plan()
    assert lane.log[0].seq_ids == (1,)
    finish(lane)


def test_a_batch_has_no_more_than_it_may() -> None:
    lane = Lane(max_batch_size=3)
    add(lane, seq_ids=tuple(range(5)))
    lane.plan()
    assert lane.log[0].seq_ids == (0, 1, 2)
    finish(lane)


def test_none_takes_a_block_that_those_who_run_may_need() -> None:
    """Of four blocks the prompt has two; one is kept for a next token, so one fork has room."""
    lane = Lane(num_blocks=4, block_size=4)
    add(lane, max_tokens=2)
    lane.plan()
    assert forks(lane.log[0]) == [2]
    finish(lane)
    assert lane.outputs == {each: expected(PROMPT, 2, stop=False) for each in SEQ_IDS}


def test_none_begins_in_a_step_that_takes_blocks_from_others() -> None:
    """Two that have run for six steps rank behind two that come, and one of them has to yield."""
    lane = Lane(num_blocks=8, block_size=4, max_tokens_per_batch=8, steps_ahead=1)
    add(lane, seq_ids=(1, 2), rank=2, max_tokens=8)
    for _ in range(6):
        lane.plan()
        lane.retire()
    add(lane, list(range(10, 17)), name="b", seq_ids=(3, 4), max_tokens=8)
    finish(lane)
    assert not any(map(forks, lane.log[6:]))
    assert lane.core.take_counters().preemptions == 1


def test_none_forks_from_what_began_before_a_flush(lane: Lane) -> None:
    add(lane, list(range(14)), max_tokens=2)
    lane.plan()
    lane.core.cache.flush()
    finish(lane)
    assert not forks(lane.log[1])
    assert lane.executor.num_computed == 2 * 14 + 3, "once more, for the two that waited"


# --- what may happen meanwhile ------------------------------------------------------------------


def test_their_first_token_may_be_their_last(lane: Lane) -> None:
    add(lane, max_tokens=1)
    finish(lane)
    assert len(lane.log) == 1
    assert lane.outputs == {each: expected(PROMPT, 1, stop=False) for each in SEQ_IDS}


def test_the_leader_may_end_first(lane: Lane) -> None:
    """Its last block stays until what is copied from it is there."""
    add(lane)
    lane.plan()
    lane.core.stop([1])
    finish(lane)
    assert lane.outputs[2] == lane.outputs[3] == expected(PROMPT, 9, stop=False)


@pytest.mark.parametrize("num_planned", [1, 2])
def test_what_is_lost_comes_again(lane: Lane, num_planned: int) -> None:
    add(lane)
    for _ in range(num_planned):
        lane.plan()
    lane.retract()
    lane.check()
    finish(lane)
    assert lane.outputs == {each: expected(PROMPT, 9, stop=False) for each in SEQ_IDS}


@pytest.mark.parametrize("num_retired", [0, 1])
def test_a_pause_before_the_copy(lane: Lane, num_retired: int) -> None:
    add(lane)
    lane.plan()
    for _ in range(num_retired):
        lane.retire()
    lane.core.pause_sequences((1, 2))
    lane.run()
    lane.check()
    lane.core.resume_sequences((1, 2))
    finish(lane)
    assert lane.outputs == {each: expected(PROMPT, 9, stop=False) for each in SEQ_IDS}


@pytest.mark.parametrize("in_flight", ["keep", "retract"])
def test_new_weights_before_the_copy(lane: Lane, in_flight: InFlight) -> None:
    add(lane)
    lane.plan()
    lane.core.change_weights(2, in_flight)
    finish(lane)
    assert lane.outputs == {each: expected(PROMPT, 9, stop=False) for each in SEQ_IDS}
    lane.add(PROMPT, request_id="b", seq_ids=(9,), max_tokens=1)
    lane.plan()
    found = lane.log[-1].new[0].num_cached
    assert found == (0 if in_flight == "keep" else len(PROMPT) - 1), "of older weights none is"


def test_cancelled_before_the_copy(lane: Lane) -> None:
    add(lane)
    lane.plan()
    lane.core.cancel(Cancel("a", "a", "cancelled", "cancelled", ""))
    finish(lane)
    assert lane.ended == ["a"]


def test_what_they_compute_is_found_by_others(lane: Lane) -> None:
    add(lane)
    finish(lane)
    tokens = [*PROMPT, *lane.outputs[2]]
    lane.add(tokens, request_id="b", seq_ids=(9,), max_tokens=1)
    lane.plan()
    assert lane.log[-1].new[0].num_cached == len(tokens) - 1
