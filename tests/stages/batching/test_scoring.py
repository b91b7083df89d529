"""Scored prompts: computed in full, few tokens per step, and cached for others."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.bus.messages import SequenceSpec
from nano_inference.config import SamplingParams, SchedulerConfig
from nano_inference.stages.batching import Sequence, schedule
from nano_inference.stages.batching.schedule import MAX_SCORED_TOKENS

from .replica import CacheType, FakeReplica, expected

PROMPT = list(range(30))


def sequence(seq_id: int, length: int, *, scored: bool = True, sample_index: int = 0) -> Sequence:
    sampling = SamplingParams(prompt_logprobs=0 if scored else None)
    spec = SequenceSpec(seq_id, sample_index, seed=0)
    return Sequence(seq_id, (1,) * length, sampling, spec=spec)


def test_the_first_sample_computes_all_despite_a_warm_cache(cache_type: CacheType) -> None:
    replica = FakeReplica(cache_type=cache_type)
    replica.add(PROMPT, 1, max_tokens=2)
    replica.run()
    replica.add(PROMPT, (2, 3), max_tokens=2, prompt_logprobs=1)
    replica.run()
    cached = {new.seq_id: new.num_cached for plan in replica.log for new in plan.new}
    assert cached == {1: 0, 2: 0, 3: len(PROMPT) - 1}
    assert replica.outputs[2] == replica.outputs[3] == replica.outputs[1] == expected(PROMPT, 2)
    replica.check()


def test_siblings_wait_for_the_scored_prompt(cache_type: CacheType) -> None:
    replica = FakeReplica(cache_type=cache_type)
    replica.add(PROMPT, tuple(range(6)), max_tokens=1, prompt_logprobs=0)
    replica.run()
    assert replica.executor.num_computed == len(PROMPT)
    replica.add(PROMPT, 9, max_tokens=1)
    replica.run()
    assert replica.executor.num_computed == len(PROMPT) + 1, "others find it as well"


def test_two_scored_prompts_do_not_wait_for_each_other() -> None:
    replica = FakeReplica(max_tokens_per_batch=64)
    for name, seq_id in (("a", 1), ("b", 2)):
        replica.add(PROMPT, seq_id, name=name, prompt_logprobs=0)
    assert replica.plan()
    assert replica.log[0].seq_ids == (1, 2)
    replica.run()
    assert replica.outputs[1] == replica.outputs[2] == expected(PROMPT, 8)


def test_a_scored_sequence_uses_the_cache_after_its_first_token(cache_type: CacheType) -> None:
    """Ten blocks for two sequences that end with seven each: one is preempted."""
    replica = FakeReplica(num_blocks=10, cache_type=cache_type)
    prompts = {1: [1, 2, 3, 4, 5], 2: [9, 8, 7, 6, 5]}
    for seq_id, prompt in prompts.items():
        replica.add(prompt, seq_id, max_tokens=20, prompt_logprobs=2)
    replica.run()
    again = [new for plan in replica.log for new in plan.new if new.num_generated]
    assert again, "one was to be preempted"
    assert any(new.num_cached for new in again)
    for seq_id, prompt in prompts.items():
        assert replica.outputs[seq_id] == expected(prompt, 20)


def test_a_scored_sequence_preempted_before_its_first_token_starts_over() -> None:
    seq = sequence(1, 10)
    assert not seq.allocation.may_reuse
    seq.start(0)
    seq.preempt()
    assert not seq.allocation.may_reuse
    seq.start(0)
    seq.append_token(3)
    seq.preempt()
    assert seq.allocation.may_reuse


def test_only_the_first_sample_scores_the_prompt() -> None:
    assert sequence(1, 10).scores_prompt
    assert not sequence(1, 10, scored=False).scores_prompt
    assert not sequence(1, 10, sample_index=1).scores_prompt
    assert sequence(1, 10, sample_index=1).allocation.may_reuse


@pytest.mark.parametrize(
    ("asked", "reused"),
    [
        ({"prompt_logprobs": 0, "prompt_logprob_start": 7}, 7),
        ({"prompt_logprob_token_ids": [[], [-1], [4, 4], [], []], "prompt_logprob_start": 3}, 5),
        ({"prompt_logprob_token_ids": [[]] * 9}, 9),
        ({"prompt_logprob_token_ids": [[]] * 8 + [[1]], "prompt_logprobs": 0}, 0),
    ],
)
def test_tokens_before_the_first_scored_position_may_be_cached(
    asked: dict[str, Any], reused: int
) -> None:
    spec = SequenceSpec(1, 0, seed=0)
    seq = Sequence(1, (1,) * 10, SamplingParams(**asked), spec=spec)
    assert (seq.first_scored, seq.allocation.max_reuse) == (reused, reused)


def test_unscored_tokens_of_a_scored_prompt_do_not_count_as_scored() -> None:
    config = SchedulerConfig(max_batch_size=16, max_tokens_per_batch=4096, block_size=16)
    sampling = SamplingParams(prompt_logprobs=0, prompt_logprob_start=1000)
    spec = SequenceSpec(1, 0, seed=0)
    late = Sequence(1, (1,) * 2000, sampling, spec=spec)
    output = schedule([late, sequence(2, 2000)], [], 10_000, config)
    assert output.num_tokens == {1: 1000 + MAX_SCORED_TOKENS}


@pytest.mark.soak
@given(
    running=st.lists(st.tuples(st.integers(1, 600), st.booleans()), max_size=5),
    waiting=st.lists(st.tuples(st.integers(1, 600), st.booleans()), max_size=5),
    budget=st.integers(16, 2048),
)
def test_scored_tokens_per_step_are_limited(
    running: list[tuple[int, bool]], waiting: list[tuple[int, bool]], budget: int
) -> None:
    config = SchedulerConfig(max_batch_size=16, max_tokens_per_batch=budget, block_size=16)
    sequences = {}
    for number, (length, scored) in enumerate(running + waiting):
        sequences[number] = seq = sequence(number, length, scored=scored)
        if number < len(running):
            seq.start(block_ids=range(-(-length // 16)))
    all_of_them = list(sequences.values())
    output = schedule(all_of_them[len(running) :], all_of_them[: len(running)], 10_000, config)
    scored_tokens = [
        count for seq_id, count in output.num_tokens.items() if sequences[seq_id].scores_prompt
    ]
    single = sum(count == 1 for count in scored_tokens)
    assert sum(scored_tokens) <= MAX_SCORED_TOKENS + single
    assert sum(output.num_tokens.values()) <= budget
    assert all(count >= 1 for count in output.num_tokens.values())
    # Whoever is first gets on, and the budget that they leave is for the others.
    if running or waiting:
        assert output.num_tokens
    left = budget - sum(output.num_tokens.values())
    for number, (length, scored) in enumerate(running + waiting):
        if not scored and left:
            assert output.num_tokens[number] == length
