"""`schedule` and `Sequence` without a batching core."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference import SamplingParams, SchedulerConfig, Sequence, SequenceStatus, schedule
from nano_inference.stages.batching import SchedulerOutput

LIMITS = SchedulerConfig(max_batch_size=8, max_tokens_per_batch=128, block_size=16)


def decoding(seq_id: int, length: int, *, max_tokens: int = 100) -> Sequence:
    """A sequence that runs: a prompt of `length - 1` tokens is computed, one token is sampled."""
    seq = Sequence(seq_id, range(length - 1), SamplingParams(max_tokens=max_tokens))
    seq.start(block_ids=range(-(-(length - 1) // 16)))
    assert seq.plan(length - 1)
    seq.append_token(7, -0.5)
    return seq


def test_a_sequence_is_a_prompt_and_parameters() -> None:
    seq = Sequence(3, [5, 6, 7], SamplingParams(max_tokens=2))
    assert (seq.seq_id, seq.token_ids, seq.num_prompt_tokens) == (3, [5, 6, 7], 3)
    assert (seq.status, seq.block_ids, seq.output_logprobs) == (SequenceStatus.WAITING, [], [])
    seq.start(block_ids=[4])
    assert (seq.status, seq.block_ids) == (SequenceStatus.RUNNING, [4])
    for token, logprob in ((8, -0.25), (9, -1.5)):
        assert seq.plan(seq.num_remaining)
        seq.append_token(token, logprob)
    assert (seq.token_ids, seq.output_logprobs) == ([5, 6, 7, 8, 9], [-0.25, -1.5])
    assert seq.num_generated == 2
    assert not seq.may_sample


def test_a_sequence_without_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence 3 has no token"):
        Sequence(3, [])


@pytest.mark.parametrize("status", [SequenceStatus.WAITING, SequenceStatus.FINISHED])
def test_a_sequence_that_is_not_running_takes_no_token(status: SequenceStatus) -> None:
    seq = Sequence(3, [5])
    seq.status = status
    with pytest.raises(ValueError, match=f"is {status.name.lower()}, not running"):
        seq.append_token(7, -0.5)
    assert (seq.token_ids, seq.output_logprobs) == ([5], [])


@pytest.mark.parametrize(
    ("length", "steps"),
    [(128, [128]), (129, [128, 1]), (144, [128, 16]), (300, [256, 44]), (400, [256, 128, 16])],
)
def test_the_last_block_of_a_prompt_that_another_replica_continues_has_a_step_of_its_own(
    length: int, steps: list[int]
) -> None:
    """Unless few blocks are before it in its step."""
    limits = SchedulerConfig(max_batch_size=8, max_tokens_per_batch=256, block_size=16)
    seq = Sequence(1, range(length))
    seq.hands_over = True
    found = [schedule([seq], [], 40, limits).num_tokens[1]]
    seq.start(block_ids=range(-(-length // 16)))
    while not seq.plan(found[-1]):
        found.append(schedule([], [seq], 0, limits).num_tokens[1])
    assert found == steps


@pytest.mark.parametrize(("num_free_blocks", "starts"), [(0, False), (6, False), (7, True)])
def test_a_fresh_sequence_starts_where_its_whole_prompt_has_blocks(
    num_free_blocks: int, starts: bool
) -> None:
    decision = schedule([Sequence(1, range(100))], [], num_free_blocks, LIMITS)
    found = SchedulerOutput((1,), (), (), {1: 100}) if starts else SchedulerOutput((), (), (), {})
    assert decision == found


def test_waiting_sequences_start_in_order_until_blocks_run_out() -> None:
    waiting = [Sequence(1, range(30)), Sequence(2, range(20)), Sequence(3, range(5))]
    assert schedule(waiting, [], 4, LIMITS).prefill_seqs == (1, 2)
    assert schedule(waiting, [], 3, LIMITS).prefill_seqs == (1,), "a shorter prompt doesn't pass"


def test_a_long_prompt_comes_in_chunks_after_the_decodes() -> None:
    waiting = [Sequence(1, range(200))]
    running = [decoding(2, 10), decoding(3, 12)]
    decision = schedule(waiting, running, 100, LIMITS)
    assert (decision.decode_seqs, decision.prefill_seqs) == ((2, 3), (1,))
    assert decision.num_tokens == {2: 1, 3: 1, 1: 126}


def test_growing_sequences_get_blocks_before_waiting_ones() -> None:
    at_the_border, within = decoding(1, 17), decoding(2, 16)
    assert at_the_border.needs_block(16)
    assert not within.needs_block(16)
    running = [at_the_border, within]
    waiting = [Sequence(3, range(16))]
    # One to grow, one for the new sequence, and one that stays free for the next step.
    assert schedule(waiting, running, 3, LIMITS).prefill_seqs == (3,)
    decision = schedule(waiting, running, 2, LIMITS)
    assert (decision.prefill_seqs, decision.decode_seqs) == ((), (1, 2))


def test_the_last_sequence_is_preempted_when_no_block_is_left() -> None:
    running = [decoding(1, 17), decoding(2, 33), decoding(3, 40)]
    decision = schedule([Sequence(4, [1])], running, 0, LIMITS)
    assert decision == SchedulerOutput((), (1, 2), (3,), {1: 1, 2: 1}, num_blocks={1: 1, 2: 1})


def test_a_sequence_alone_without_blocks_preempts_itself() -> None:
    assert schedule([], [decoding(1, 17)], 0, LIMITS) == SchedulerOutput((), (), (1,), {})


def test_preemption_frees_only_unshared_blocks() -> None:
    running = [decoding(1, 17), decoding(2, 33), decoding(3, 40)]
    running[2].num_reclaimable = 1  # though it has three
    assert schedule([], running, 0, LIMITS).preempted_seqs == (3, 2)


def test_the_batch_size_limits_running_sequences_too() -> None:
    two = SchedulerConfig(max_batch_size=2, max_tokens_per_batch=128, block_size=16)
    running = [decoding(seq_id, 10) for seq_id in range(3)]
    assert schedule([Sequence(8, [1])], running, 100, two).num_tokens == {0: 1, 1: 1}
    prefilling = [Sequence(seq_id, range(40)) for seq_id in (3, 4)]
    for seq in prefilling:
        seq.start(block_ids=range(3))
    decision = schedule([Sequence(8, [1])], [running[0], *prefilling], 100, two)
    assert decision.num_tokens == {0: 1, 3: 40}


def test_a_sequence_at_its_length_limit_decodes_no_more() -> None:
    assert schedule([], [decoding(1, 10, max_tokens=1)], 100, LIMITS).num_tokens == {}


def test_a_sequence_in_the_wrong_list_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence 1 is running, but in the list of waiting ones"):
        schedule([decoding(1, 10)], [], 100, LIMITS)
    with pytest.raises(ValueError, match="list of running ones"):
        schedule([], [Sequence(1, [5])], 100, LIMITS)
    with pytest.raises(ValueError, match="must be 0 or more; got -1"):
        schedule([], [], -1, LIMITS)


class Caller:
    """Applies the decisions of `schedule`, with a list of free blocks."""

    def __init__(
        self, prompts: Iterable[tuple[int, int]], num_blocks: int, limits: SchedulerConfig
    ):
        self.limits = limits
        self.free = list(range(num_blocks))
        self.sequences = {
            seq_id: Sequence(seq_id, range(length), SamplingParams(max_tokens=max_tokens))
            for seq_id, (length, max_tokens) in enumerate(prompts)
        }
        self.waiting = list(self.sequences.values())
        self.running: list[Sequence] = []
        self.num_preempted = 0

    def step(self) -> None:
        limits = self.limits
        decision = schedule(self.waiting, self.running, len(self.free), limits)
        assert decision == schedule(self.waiting, self.running, len(self.free), limits), "not pure"
        assert sum(decision.num_tokens.values()) <= limits.max_tokens_per_batch
        assert len(decision.num_tokens) <= limits.max_batch_size
        assert list(decision.num_tokens) == [*decision.decode_seqs, *decision.prefill_seqs]
        assert not decision.num_tokens.keys() & set(decision.preempted_seqs)
        assert decision.num_tokens or decision.preempted_seqs, "no progress"
        for seq_id in decision.preempted_seqs:
            seq = self.running.pop()
            assert seq.seq_id == seq_id
            self.free += seq.block_ids
            seq.preempt()
            self.waiting.insert(0, seq)
        self.num_preempted += len(decision.preempted_seqs)
        for seq_id, num_tokens in decision.num_tokens.items():
            self._compute(self.sequences[seq_id], num_tokens)
        assert len(self.running) <= limits.max_batch_size

    def _compute(self, seq: Sequence, num_tokens: int) -> None:
        if seq.status is SequenceStatus.WAITING:
            blocks = [self.free.pop() for _ in range(seq.blocks_to_start(self.limits.block_size))]
            seq.start(block_ids=blocks)
            self.waiting.remove(seq)
            self.running.append(seq)
        elif seq.needs_block(self.limits.block_size):
            seq.block_ids.append(self.free.pop())
        samples = seq.plan(num_tokens)
        assert seq.num_scheduled <= len(seq.block_ids) * self.limits.block_size
        if samples:
            seq.append_token(seq.num_generated, -1.0)
        if not seq.may_sample:
            seq.status = SequenceStatus.FINISHED
            self.running.remove(seq)
            self.free += seq.block_ids


@pytest.mark.soak
@given(
    prompts=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=10),
    block_size=st.sampled_from([1, 4, 16]),
    spare=st.integers(0, 40),
    max_batch_size=st.integers(1, 6),
    max_tokens_per_batch=st.integers(1, 64),
)
def test_random_work_keeps_to_all_limits_and_ends(
    prompts: list[tuple[int, int]],
    block_size: int,
    spare: int,
    max_batch_size: int,
    max_tokens_per_batch: int,
) -> None:
    """`list.pop` fails where a decision takes a block that is not free."""
    longest = max(length + max_tokens for length, max_tokens in prompts)
    num_blocks = -(-longest // block_size) + spare // block_size
    limits = SchedulerConfig(max_batch_size, max_tokens_per_batch, block_size)
    caller = Caller(prompts, num_blocks, limits)
    for _ in range(5_000):
        if not (caller.waiting or caller.running):
            break
        caller.step()
    assert len(caller.free) == num_blocks
    for seq, (length, max_tokens) in zip(caller.sequences.values(), prompts, strict=True):
        assert seq.token_ids == [*range(length), *range(max_tokens)]
        assert seq.output_logprobs == [-1.0] * max_tokens


def test_work_that_runs_out_of_blocks_ends() -> None:
    """Shows that the random test above sees preemptions."""
    caller = Caller([(4, 40)] * 4, 12, SchedulerConfig(4, 64, 4))
    while caller.waiting or caller.running:
        caller.step()
    assert caller.num_preempted
