"""Who waits with the tokens that a step ends with gets its own next token in that step."""

from __future__ import annotations

import pytest

from nano_inference.bus.control import Cancel
from nano_inference.bus.messages import StepPlan
from nano_inference.bus.pooling import Pooling
from nano_inference.bus.weights import InFlight

from .replica import CacheType, FakeReplica, expected, reported

PROMPT = [1, 2, 3, 4, 5, 6]
SEQ_IDS = (1, 2, 3)
# Of as many tokens as a step of the replica may have.
FULL_STEP = list(range(8))


@pytest.fixture(params=["paged", "radix"])
def replica(request: pytest.FixtureRequest) -> FakeReplica:
    """With two steps under way, and a budget that takes the prompt in two steps."""
    cache_type: CacheType = request.param
    return FakeReplica(cache_type=cache_type, max_tokens_per_batch=8)


def add(
    replica: FakeReplica,
    prompt: list[int] = PROMPT,
    max_tokens: int = 9,
    *,
    name: str = "a",
    **how: object,
) -> None:
    given: dict[str, object] = {"seq_ids": SEQ_IDS, "stop": False, **how}
    replica.add(prompt, request_id=name, max_tokens=max_tokens, **given)  # type: ignore[arg-type]


def forks(plan: StepPlan) -> list[int]:
    return [each for each, count in zip(plan.seq_ids, plan.num_tokens, strict=True) if not count]


def finish(replica: FakeReplica) -> None:
    replica.run()
    replica.check()
    assert replica.core.idle
    assert replica.core.cache.num_free_blocks() == replica.core.cache.num_blocks


def test_they_sample_in_the_step_that_ends_the_prompt(replica: FakeReplica) -> None:
    add(replica, list(range(14)), seq_ids=tuple(range(1, 8)))
    replica.plan()
    replica.plan()
    assert [sum(plan.num_tokens) for plan in replica.log] == [8, 6]
    assert [forks(plan) for plan in replica.log] == [[], [2, 3, 4, 5, 6, 7]]
    # With the next plan each gets a copy of the block in which they part.
    replica.retire()
    replica.plan()
    assert [len(plan.copies) for plan in replica.log] == [0, 0, 6]
    assert replica.log[-1].num_tokens == (1,) * 7
    finish(replica)
    assert replica.outputs == {
        each: expected(list(range(14)), 9, stop=False) for each in range(1, 8)
    }


def test_full_blocks_are_shared_without_a_copy(replica: FakeReplica) -> None:
    add(replica, [*PROMPT, 7, 8])
    free = replica.core.cache.num_free_blocks()
    replica.plan()
    assert free - replica.core.cache.num_free_blocks() == 2
    finish(replica)
    assert not any(plan.copies for plan in replica.log)


def test_another_request_with_the_same_tokens_forks_too(replica: FakeReplica) -> None:
    for name, seq_id in (("a", 1), ("b", 2)):
        add(replica, name=name, seq_ids=(seq_id,))
    replica.plan()
    assert forks(replica.log[0]) == [2]
    finish(replica)


@pytest.mark.parametrize("other", [[*PROMPT, 7], [9, *PROMPT[1:]], PROMPT[:-1]])
def test_none_with_other_tokens_does(replica: FakeReplica, other: list[int]) -> None:
    add(replica, seq_ids=(1,))
    add(replica, other, name="b", seq_ids=(2,))
    finish(replica)
    assert not any(map(forks, replica.log))


def test_salts_and_adapters_keep_them_apart(replica: FakeReplica) -> None:
    replica.core._adapter_versions = {"x": 1}
    for seq_id, adapter in enumerate(("x", "x", "")):
        add(replica, FULL_STEP, name=str(seq_id), seq_ids=(seq_id,), adapter=adapter)
    replica.plan()
    assert forks(replica.log[0]) == [1]
    finish(replica)


@pytest.mark.parametrize("vector", [1, 2])
def test_a_vector_is_nobody_s_first_token(replica: FakeReplica, vector: int) -> None:
    pooling = Pooling("last", normalize=False, dimensions=0)
    for each in (1, 2):
        how = {"pooling": pooling} if each == vector else {}
        add(replica, FULL_STEP, name=str(each), seq_ids=(each,), max_tokens=1, **how)
    finish(replica)
    assert not any(map(forks, replica.log))
    assert (replica.pooled, list(replica.outputs)) == ([vector], [3 - vector])


def test_what_computes_a_prompt_for_its_logprobs_does_not_fork(replica: FakeReplica) -> None:
    add(replica, FULL_STEP, name="b", seq_ids=(1,))
    add(replica, FULL_STEP, seq_ids=(2,), prompt_logprobs=0)
    finish(replica)
    assert not any(map(forks, replica.log))
    assert replica.executor.num_computed == 2 * (len(FULL_STEP) + 8)


def test_what_has_run_before_does_not_fork(replica: FakeReplica) -> None:
    """It was paid for when it began; what it computes when it goes on counts as done again."""
    long = list(range(14))
    add(replica, long, seq_ids=(2,))
    replica.plan()
    replica.retire()
    replica.core.pause_sequences((2,))
    add(replica, long, name="b", seq_ids=(1,))
    replica.core.resume_sequences((2,))
    finish(replica)
    assert not any(map(forks, replica.log))
    assert sorted(reported(replica).started) == [(1, 6), (2, 1), (2, 14)]


def test_nobody_is_passed_by_who_ranks_before(replica: FakeReplica) -> None:
    """The one in the middle waits for the next step, since the first one fills this."""
    add(replica, FULL_STEP, seq_ids=(1,))
    add(replica, [9, 9], name="b", seq_ids=(2,))
    add(replica, FULL_STEP, name="c", seq_ids=(3,), rank=1)
    replica.plan()
    assert replica.log[0].seq_ids == (1,)
    finish(replica)


def test_a_batch_has_no_more_than_it_may() -> None:
    replica = FakeReplica(max_batch_size=3)
    add(replica, seq_ids=tuple(range(5)))
    replica.plan()
    assert replica.log[0].seq_ids == (0, 1, 2)
    finish(replica)


def test_none_takes_a_block_that_those_who_run_may_need() -> None:
    """Of four blocks the prompt has two; one is kept for a next token, so one fork has room."""
    replica = FakeReplica(num_blocks=4, block_size=4)
    add(replica, max_tokens=2)
    replica.plan()
    assert forks(replica.log[0]) == [2]
    finish(replica)
    assert replica.outputs == {each: expected(PROMPT, 2, stop=False) for each in SEQ_IDS}


def test_none_begins_in_a_step_that_takes_blocks_from_others() -> None:
    """Two that have run for six steps rank behind two that come, and one of them has to yield."""
    replica = FakeReplica(num_blocks=8, block_size=4, max_tokens_per_batch=8, steps_ahead=1)
    add(replica, seq_ids=(1, 2), rank=2, max_tokens=8)
    for _ in range(6):
        replica.plan()
        replica.retire()
    add(replica, list(range(10, 17)), name="b", seq_ids=(3, 4), max_tokens=8)
    finish(replica)
    assert not any(map(forks, replica.log[6:]))
    assert replica.core.take_counters().preemptions == 1


def test_none_forks_from_what_began_before_a_flush(replica: FakeReplica) -> None:
    add(replica, list(range(14)), max_tokens=2)
    replica.plan()
    replica.core.cache.flush()
    finish(replica)
    assert not forks(replica.log[1])
    assert replica.executor.num_computed == 2 * 14 + 3, "once more, for the two that waited"


# --- what may happen meanwhile ------------------------------------------------------------------


def test_their_first_token_may_be_their_last(replica: FakeReplica) -> None:
    add(replica, max_tokens=1)
    finish(replica)
    assert len(replica.log) == 1
    assert replica.outputs == {each: expected(PROMPT, 1, stop=False) for each in SEQ_IDS}


def test_the_leader_may_end_first(replica: FakeReplica) -> None:
    """Its last block stays until what is copied from it is there."""
    add(replica)
    replica.plan()
    replica.core.stop([1])
    finish(replica)
    assert replica.outputs[2] == replica.outputs[3] == expected(PROMPT, 9, stop=False)


@pytest.mark.parametrize("num_planned", [1, 2])
def test_what_is_lost_comes_again(replica: FakeReplica, num_planned: int) -> None:
    add(replica)
    for _ in range(num_planned):
        replica.plan()
    replica.retract()
    replica.check()
    finish(replica)
    assert replica.outputs == {each: expected(PROMPT, 9, stop=False) for each in SEQ_IDS}


@pytest.mark.parametrize("num_retired", [0, 1])
def test_a_pause_before_the_copy(replica: FakeReplica, num_retired: int) -> None:
    add(replica)
    replica.plan()
    for _ in range(num_retired):
        replica.retire()
    replica.core.pause_sequences((1, 2))
    replica.run()
    replica.check()
    replica.core.resume_sequences((1, 2))
    finish(replica)
    assert replica.outputs == {each: expected(PROMPT, 9, stop=False) for each in SEQ_IDS}


@pytest.mark.parametrize("in_flight", ["keep", "retract"])
def test_new_weights_before_the_copy(replica: FakeReplica, in_flight: InFlight) -> None:
    add(replica)
    replica.plan()
    replica.core.change_weights(2, in_flight)
    finish(replica)
    assert replica.outputs == {each: expected(PROMPT, 9, stop=False) for each in SEQ_IDS}
    replica.add(PROMPT, request_id="b", seq_ids=(9,), max_tokens=1)
    replica.plan()
    found = replica.log[-1].new[0].num_cached
    assert found == (0 if in_flight == "keep" else len(PROMPT) - 1), "of older weights none is"


def test_cancelled_before_the_copy(replica: FakeReplica) -> None:
    add(replica)
    replica.plan()
    replica.core.cancel(Cancel("a", "a", "cancelled", "cancelled", ""))
    finish(replica)
    assert replica.ended == ["a"]


def test_what_they_compute_is_found_by_others(replica: FakeReplica) -> None:
    add(replica)
    finish(replica)
    tokens = [*PROMPT, *replica.outputs[2]]
    replica.add(tokens, request_id="b", seq_ids=(9,), max_tokens=1)
    replica.plan()
    assert replica.log[-1].new[0].num_cached == len(tokens) - 1
