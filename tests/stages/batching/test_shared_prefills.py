"""Shared prefills: one sequence computes the prompt, and its siblings sample in the same step."""

from __future__ import annotations

from typing import Any

import pytest

from nano_inference.bus.pooling import Pooling
from nano_inference.bus.steps import StepPlan
from nano_inference.bus.weights import InFlight
from nano_inference.store.loaded_adapter import LoadedAdapter

from .replica import CacheType, FakeReplica, expected, reported

PROMPT = [1, 2, 3, 4, 5, 6]
SEQ_IDS = (1, 2, 3)
# As many tokens as a step may have.
FULL_STEP = list(range(8))


@pytest.fixture
def replica(cache_type: CacheType) -> FakeReplica:
    """Two steps in flight, of eight tokens each."""
    return FakeReplica(cache_type=cache_type, max_tokens_per_batch=8)


def add(
    replica: FakeReplica,
    prompt: list[int] = PROMPT,
    max_tokens: int = 9,
    *,
    name: str = "a",
    seq_ids: int | tuple[int, ...] = SEQ_IDS,
    **how: Any,
) -> None:
    replica.add(prompt, seq_ids, name=name, max_tokens=max_tokens, **how)


def shared_rows(plan: StepPlan) -> list[int]:
    return [each for each, count in zip(plan.seq_ids, plan.num_tokens, strict=True) if not count]


def finish(replica: FakeReplica) -> None:
    replica.run()
    replica.check()
    assert replica.core.idle
    assert replica.core.cache.num_free_blocks() == replica.core.cache.num_blocks


def test_siblings_sample_in_the_step_that_ends_the_prompt(replica: FakeReplica) -> None:
    add(replica, list(range(14)), seq_ids=tuple(range(1, 8)))
    replica.plan()
    replica.plan()
    assert [sum(plan.num_tokens) for plan in replica.log] == [8, 6]
    assert [shared_rows(plan) for plan in replica.log] == [[], [2, 3, 4, 5, 6, 7]]
    # The next plan copies the partial block for each.
    replica.retire()
    replica.plan()
    assert [len(plan.copies) for plan in replica.log] == [0, 0, 6]
    assert replica.log[-1].num_tokens == (1,) * 7
    finish(replica)
    assert replica.outputs == {each: expected(list(range(14)), 9) for each in range(1, 8)}


def test_full_blocks_are_shared_without_a_copy(replica: FakeReplica) -> None:
    add(replica, [*PROMPT, 7, 8])
    free = replica.core.cache.num_free_blocks()
    replica.plan()
    assert free - replica.core.cache.num_free_blocks() == 2
    finish(replica)
    assert not any(plan.copies for plan in replica.log)


def test_another_request_with_the_same_tokens_shares_the_prefill(replica: FakeReplica) -> None:
    for name, seq_id in (("a", 1), ("b", 2)):
        add(replica, name=name, seq_ids=seq_id)
    replica.plan()
    assert shared_rows(replica.log[0]) == [2]
    finish(replica)


@pytest.mark.parametrize("other", [[*PROMPT, 7], [9, *PROMPT[1:]], PROMPT[:-1]])
def test_other_tokens_share_no_prefill(replica: FakeReplica, other: list[int]) -> None:
    add(replica, seq_ids=1)
    add(replica, other, name="b", seq_ids=2)
    finish(replica)
    assert not any(map(shared_rows, replica.log))


def test_adapters_share_no_prefill(replica: FakeReplica) -> None:
    replica.set_adapters([LoadedAdapter("x", 1)])
    for seq_id, adapter in enumerate(("x", "x", "")):
        add(replica, FULL_STEP, name=str(seq_id), seq_ids=seq_id, adapter=adapter)
    replica.plan()
    assert shared_rows(replica.log[0]) == [1]
    finish(replica)


@pytest.mark.parametrize("vector", [1, 2])
def test_pooled_prompts_share_no_prefill(replica: FakeReplica, vector: int) -> None:
    pooling = Pooling("last", normalize=False, dimensions=0)
    for each in (1, 2):
        how = {"pooling": pooling} if each == vector else {}
        add(replica, FULL_STEP, name=str(each), seq_ids=each, max_tokens=1, **how)
    finish(replica)
    assert not any(map(shared_rows, replica.log))
    assert (replica.pooled, list(replica.outputs)) == ([vector], [3 - vector])


def test_a_scored_prompt_computes_its_own_prefill(replica: FakeReplica) -> None:
    add(replica, FULL_STEP, name="b", seq_ids=1)
    add(replica, FULL_STEP, seq_ids=2, prompt_logprobs=0)
    finish(replica)
    assert not any(map(shared_rows, replica.log))
    assert replica.executor.num_computed == 2 * (len(FULL_STEP) + 8)


def test_a_resumed_sequence_shares_no_prefill(replica: FakeReplica) -> None:
    """Its tenant has paid for its prompt; computing it again counts as recomputed."""
    long = list(range(14))
    add(replica, long, seq_ids=2)
    replica.steps(1, ahead=1)
    replica.core.pause_sequences((2,))
    add(replica, long, name="b", seq_ids=1)
    replica.core.resume_sequences((2,))
    finish(replica)
    assert not any(map(shared_rows, replica.log))
    assert sorted(reported(replica).started) == [(1, 6), (2, 1), (2, 14)]


def test_sharing_keeps_the_order_of_ranks(replica: FakeReplica) -> None:
    """The second one waits for the next step, since the first one fills this step."""
    add(replica, FULL_STEP, seq_ids=1)
    add(replica, [9, 9], name="b", seq_ids=2)
    add(replica, FULL_STEP, name="c", seq_ids=3, rank=1)
    replica.plan()
    assert replica.log[0].seq_ids == (1,)
    finish(replica)


def test_sharing_keeps_to_the_batch_size() -> None:
    replica = FakeReplica(max_batch_size=3)
    add(replica, seq_ids=tuple(range(5)))
    replica.plan()
    assert replica.log[0].seq_ids == (0, 1, 2)
    finish(replica)


def test_sharing_leaves_blocks_for_running_sequences() -> None:
    """The prompt has two of four blocks and one is reserved, so one sibling has room."""
    replica = FakeReplica(num_blocks=4, block_size=4)
    add(replica, max_tokens=2)
    replica.plan()
    assert shared_rows(replica.log[0]) == [2]
    finish(replica)
    assert replica.outputs == {each: expected(PROMPT, 2) for each in SEQ_IDS}


def test_a_step_with_preemptions_shares_no_prefill() -> None:
    """Two sequences run for six steps; two that rank before them come, and one is preempted."""
    replica = FakeReplica(num_blocks=8, block_size=4, max_tokens_per_batch=8, steps_ahead=1)
    add(replica, seq_ids=(1, 2), rank=2, max_tokens=8)
    replica.steps(6, ahead=1)
    add(replica, list(range(10, 17)), name="b", seq_ids=(3, 4), max_tokens=8)
    finish(replica)
    assert not any(map(shared_rows, replica.log[6:]))
    assert replica.core.take_counters().preemptions == 1


def test_a_prefill_from_before_a_flush_is_not_shared(replica: FakeReplica) -> None:
    add(replica, list(range(14)), max_tokens=2)
    replica.plan()
    replica.core.cache.flush()
    finish(replica)
    assert not shared_rows(replica.log[1])
    assert replica.executor.num_computed == 2 * 14 + 3, "computed again for the two that waited"


# --- events before the copy ---------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", ["keep", "retract"])
def test_new_weights_before_the_copy(replica: FakeReplica, in_flight: InFlight) -> None:
    add(replica)
    replica.plan()
    replica.change_weights(2, in_flight)
    finish(replica)
    assert replica.outputs == {each: expected(PROMPT, 9) for each in SEQ_IDS}
    replica.add(PROMPT, 9, max_tokens=1, stop=True)
    replica.plan()
    found = replica.log[-1].new[0].num_cached
    assert found == (0 if in_flight == "keep" else len(PROMPT) - 1), (
        "KV of older weights is not found"
    )


def test_tokens_after_a_shared_prefill_are_cached(replica: FakeReplica) -> None:
    add(replica)
    finish(replica)
    tokens = [*PROMPT, *replica.outputs[2]]
    replica.add(tokens, 9, max_tokens=1, stop=True)
    replica.plan()
    assert replica.log[-1].new[0].num_cached == len(tokens) - 1
