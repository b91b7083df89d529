"""The scheduler, a pure function: what runs in the next step."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Protocol

import msgspec

from ...config import SchedulerConfig
from .sequence import Sequence, SequenceStatus

MAX_SCORED_TOKENS = 256
"""Most tokens per step of prompts whose logprobs are wanted.

Other prompts need the logits of their last token only; these need logits at every position. Without
a limit a step of 2,048 such tokens would take more than a gigabyte at a vocabulary of 150,000.
"""

LEAST_AHEAD = 8
"""Blocks of a step from which on another replica gains by reading them while the prompt's last one
is computed."""


class SchedulerOutput(msgspec.Struct, frozen=True):
    """A scheduling decision, by sequence id.

    Attributes:
        prefill_seqs: Sequences that compute (a chunk of) their prompt.
        decode_seqs: Sequences that compute one token and sample the next.
        preempted_seqs: Sequences that give up their blocks first.
        num_tokens: Tokens of each scheduled sequence in this step: decodes, then prefills.
        num_drafts: Most drafted tokens to verify besides, where above 0.
        num_blocks: Blocks that running sequences take, where above 0.
    """

    prefill_seqs: tuple[int, ...]
    decode_seqs: tuple[int, ...]
    preempted_seqs: tuple[int, ...]
    num_tokens: Mapping[int, int]
    num_drafts: Mapping[int, int] = {}
    num_blocks: Mapping[int, int] = {}


NOTHING = SchedulerOutput((), (), (), {})


class StepLimit(Protocol):
    """A limit of what a step computes of prompts, besides tokens and blocks.

    Attributes:
        blocked: Whether a part of a prompt waits for a step with room; then none starts after it.
    """

    blocked: bool

    def limit(self, seq: Sequence, start: int, num_tokens: int) -> int:
        """Return how many of a prompt's tokens, from `start` on, the step computes."""


def schedule(
    waiting: Seq[Sequence],
    running: Seq[Sequence],
    num_free_blocks: int,
    config: SchedulerConfig,
    *,
    num_elsewhere: int = 0,
    limits: Seq[StepLimit] = (),
) -> SchedulerOutput:
    """Decide what runs in the next step. No side effects.

    Decodes come first, then prefills in progress, then waiting sequences in their order, all within
    the batch size and the token budget; prompts to be scored share a smaller budget. When a decode
    finds no free block, the last of `running` is preempted; nothing new starts in such a step, nor
    in one where it would leave less than a block for each `block_size` running sequences. The last
    block of a prompt that another replica continues is computed in a step of its own.

    To apply a decision, first free the blocks of preempted sequences (`preempt`). Then give each
    sequence that starts its blocks (`start`) and each that `needs_block` one more, and record the
    tokens (`plan`). A decision never takes more blocks than are free.

    Args:
        waiting: Sequences that may start, in order. Where a prefix cache has some of their tokens,
            `num_cached` and `num_to_allocate` are set.
        running: The last to be preempted first, with blocks for all tokens that they had when they
            started. Where blocks are shared, `num_reclaimable` is set.
        num_free_blocks: Blocks without a holder.
        config: The limits.
        num_elsewhere: Further running sequences, which other plans compute.
        limits: Further limits of the step.

    Raises:
        ValueError: A sequence is in the wrong list, or the number of blocks is below 0.
    """
    _check(waiting, running, num_free_blocks)
    block_size = config.block_size
    most_decodes = min(config.max_tokens_per_batch, config.max_batch_size)
    free = num_free_blocks
    stays = list(running)
    prefilling: list[Sequence] = []
    preempted: list[int] = []
    num_tokens: dict[int, int] = {}
    num_blocks: dict[int, int] = {}
    for index, seq in enumerate(running):
        if index >= len(stays) or len(num_tokens) == most_decodes:
            break
        num_remaining = seq.num_planned - seq.num_scheduled
        if num_remaining > 1:
            prefilling.append(seq)
        if num_remaining != 1 or seq.num_planned >= seq.max_length:
            continue
        if seq.needs_block(block_size):
            while free == 0 and index < len(stays):
                victim = stays.pop()
                preempted.append(victim.seq_id)
                free += victim.blocks_to_reclaim()
            if index == len(stays):  # the sequence itself was the last one
                break
            free -= 1
            num_blocks[seq.seq_id] = 1
        num_tokens[seq.seq_id] = 1
    decode_seqs = tuple(num_tokens)
    startable = () if preempted else waiting
    prefills = _schedule_prefills(
        startable, prefilling, len(stays) + num_elsewhere, len(num_tokens), free, config, limits
    )
    num_tokens |= prefills
    return SchedulerOutput(
        tuple(prefills), decode_seqs, tuple(preempted), num_tokens, num_blocks=num_blocks
    )


def _schedule_prefills(
    waiting: Seq[Sequence],
    prefilling: Seq[Sequence],
    num_running: int,
    num_decodes: int,
    num_free_blocks: int,
    config: SchedulerConfig,
    limits: Seq[StepLimit],
) -> dict[int, int]:
    """Return the tokens of each prefill by sequence id, in order."""
    budget, scored_budget = config.max_tokens_per_batch - num_decodes, MAX_SCORED_TOKENS
    prefills: dict[int, int] = {}

    def take(seq: Sequence, start: int, count: int) -> bool:
        nonlocal budget, scored_budget
        count = min(count, budget)
        if seq.scores_prompt:
            most = scored_budget
            if most == MAX_SCORED_TOKENS:
                most = max(most, seq.num_indivisible)
            unscored = max(seq.first_scored - start, 0)
            count = max(min(count, unscored + most), 0)
        if seq.hands_over:
            count = _without_last_block(seq, start, count, config.block_size)
        for limit in limits:
            count = limit.limit(seq, start, count)
        if seq.scores_prompt:
            scored_budget -= max(count - unscored, 0)
        budget -= count
        if count:
            prefills[seq.seq_id] = count
        return count > 0

    for seq in prefilling:
        if num_decodes + len(prefills) == config.max_batch_size:
            break
        take(seq, seq.num_scheduled, seq.num_remaining)

    # Keep the blocks that running sequences need in the next step, on average: starting a sequence
    # only to preempt it in the next step would waste its prefill.
    reserved = -(-num_running // config.block_size)
    room = config.max_batch_size - num_running
    for seq in waiting[: max(room, 0)]:
        needed = seq.blocks_to_start(config.block_size)
        # A prompt that can't be split waits for a step with room, and keeps its place in line.
        least = len(seq.token_ids) if seq.is_whole else 1
        if budget < least or needed > num_free_blocks - reserved:
            break
        if any(limit.blocked for limit in limits):
            break
        # Where only the budget of scored prompts or another limit is used up, later ones may start.
        if take(seq, seq.num_cached, len(seq.token_ids) - seq.num_cached):
            num_free_blocks -= needed
    return prefills


def _without_last_block(seq: Sequence, start: int, count: int, block_size: int) -> int:
    """Return how many tokens of a prompt that another replica continues to compute in a step.

    The last block has a step of its own, while the other replica reads the blocks before it: with
    the first token, it lacks that one only.
    """
    before = (len(seq.token_ids) - 1) // block_size * block_size - start
    return before if LEAST_AHEAD * block_size <= before < count else count


def _check(waiting: Seq[Sequence], running: Seq[Sequence], num_free_blocks: int) -> None:
    if num_free_blocks < 0:
        raise ValueError(f"the number of free blocks must be 0 or more; got {num_free_blocks}")
    for seqs, status in ((waiting, SequenceStatus.WAITING), (running, SequenceStatus.RUNNING)):
        for seq in seqs:
            if seq.status is not status:
                raise ValueError(
                    f"sequence {seq.seq_id} is {seq.status.name.lower()}, but in the list of "
                    f"{status.name.lower()} ones"
                )
