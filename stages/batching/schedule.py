"""What fits in the next step: the scheduler, a pure function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

import msgspec

from ...config import SchedulerConfig
from .sequence import Sequence, SequenceStatus

MAX_SCORED_TOKENS = 256
"""Most tokens per step of prompts whose logprobs are wanted.

Other prompts need the logits of their last token only; these need them at every place, and a row
of logits is as long as the vocabulary. Without a limit a step of 2,048 such tokens would take more
than a gigabyte for a vocabulary of 150,000.
"""


class SchedulerOutput(msgspec.Struct, frozen=True):
    """A scheduling decision, by sequence id.

    Attributes:
        prefill_seqs: Sequences that compute (a chunk of) their prompt.
        decode_seqs: Sequences that compute one token and sample the next.
        preempted_seqs: Sequences that must give up their blocks first.
        num_tokens: Tokens of each scheduled sequence in this step.
        num_drafts: How many drafted tokens may be verified besides, of sequences where any may.
    """

    prefill_seqs: tuple[int, ...]
    decode_seqs: tuple[int, ...]
    preempted_seqs: tuple[int, ...]
    num_tokens: Mapping[int, int]
    num_drafts: Mapping[int, int] = {}


NOTHING = SchedulerOutput((), (), (), {})
"""Nobody runs."""


class _Budget:
    """The tokens that are left of a step."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._scored = MAX_SCORED_TOKENS

    def take(self, seq: Sequence, count: int) -> int:
        """As many of `count` tokens as are left for this sequence, maybe none."""
        count = min(count, self.tokens)
        if seq.scores_prompt:
            count = min(count, self._scored)
            self._scored -= count
        self.tokens -= count
        return count


def schedule(
    waiting: Seq[Sequence],
    running: Seq[Sequence],
    num_free_blocks: int,
    config: SchedulerConfig,
) -> SchedulerOutput:
    """Decides what runs in the next step. No side effects.

    Decodes come first, then prefills under way, then waiting sequences in their order, all within
    the batch size and the token budget; prompts to be scored share a smaller one. When a decode
    finds no free block, the last of `running` is preempted; nothing new starts in such a step. Nor
    does it where it would leave less than a block for each `block_size` sequences that run.

    Whoever carries the decision out frees the blocks of those preempted first (`preempt`), then
    gives each that starts its blocks (`start`), each that `needs_block` one more, and tells all of
    them their tokens (`plan`). No more blocks than are free will be asked for.

    Args:
        waiting: Those that may start, in order. Where a prefix cache knows some of their tokens,
            `num_cached` and `num_to_allocate` say so.
        running: Those under way, most deserving first, with blocks for all tokens that they had
            when they started. Where blocks are shared, `num_reclaimable` says how many are not; it
            matters when there are fewer free blocks than sequences.
        num_free_blocks: Blocks that nobody holds.
        config: The limits.

    Raises:
        ValueError: A sequence is in the wrong list, or the number of blocks is below 0.
    """
    _check(waiting, running, num_free_blocks)
    free = num_free_blocks
    decodes: list[int] = []
    preempted: list[int] = []

    stays = list(running)
    most = min(config.max_tokens_per_batch, config.max_batch_size)
    index = 0
    while index < len(stays) and len(decodes) < most:
        seq = stays[index]
        index += 1
        if seq.num_remaining != 1 or not seq.may_sample:
            continue
        needs_block = seq.needs_block(config.block_size)
        while needs_block and free == 0:
            victim = stays.pop()
            preempted.append(victim.seq_id)
            free += victim.blocks_to_reclaim()
            if victim is seq:
                break
        else:
            free -= needs_block
            decodes.append(seq.seq_id)

    startable = () if preempted else waiting
    prefills = schedule_prefills(startable, stays, len(stays), len(decodes), free, config)
    num_tokens = dict.fromkeys(decodes, 1) | prefills
    return SchedulerOutput(tuple(prefills), tuple(decodes), tuple(preempted), num_tokens)


def schedule_prefills(
    waiting: Seq[Sequence],
    running: Seq[Sequence],
    num_running: int,
    num_decodes: int,
    num_free_blocks: int,
    config: SchedulerConfig,
) -> dict[int, int]:
    """The second half of `schedule`: what computes its prompt beside the decodes.

    Args:
        waiting: As in `schedule`.
        running: Those that may have a prompt to compute, most deserving first.
        num_running: All that run.
        num_decodes: Those that decode, with a token each.
        num_free_blocks: What the decodes leave of them.
        config: The limits.

    Returns:
        The number of tokens of each that is scheduled, by sequence id, in order.
    """
    budget = _Budget(config.max_tokens_per_batch - num_decodes)
    prefills: dict[int, int] = {}
    for seq in running:
        if num_decodes + len(prefills) == config.max_batch_size:
            break
        if seq.num_remaining > 1 and (count := budget.take(seq, seq.num_remaining)):
            prefills[seq.seq_id] = count

    # What those that run may need in the next step, on average, stays free for them: to start a
    # sequence and preempt it in the next step would only cost.
    free = num_free_blocks - -(-num_running // config.block_size)
    room = config.max_batch_size - num_running
    for seq in waiting[: max(room, 0)]:
        needed = seq.blocks_to_start(config.block_size)
        # One that can't be cut waits for a step that has room, and no shorter one goes before it.
        least = len(seq.token_ids) if seq.is_whole else 1
        if budget.tokens < least or needed > free:
            break
        # Where only the budget of prompts to be scored is used up, those behind may start.
        if count := budget.take(seq, len(seq.token_ids) - seq.num_cached):
            free -= needed
            prefills[seq.seq_id] = count
    return prefills


def grant_drafts(
    decodes: Iterable[Sequence], num_free_blocks: int, num_tokens: int, block_size: int
) -> dict[int, int]:
    """How many drafted tokens may be verified beside the next token of each sequence.

    Drafts take what nobody else needs: no sequence waits, or gives up a block, for another's.

    Args:
        decodes: Those that decode in the step, most deserving first, with a block for that.
        num_free_blocks: What is left of them when the step has its own.
        num_tokens: What is left of the step's budget.
        block_size: Tokens per block.

    Returns:
        By sequence id, above 0.
    """
    granted: dict[int, int] = {}
    for seq in decodes:
        wanted = min(seq.num_draftable(), num_tokens)
        if wanted <= 0:
            continue
        lacking = seq.num_lacking(wanted, block_size) - seq.num_lacking(0, block_size)
        if lacking > num_free_blocks:
            # As many as there is room for in what it has.
            wanted, lacking = min(wanted, seq.num_spare(block_size)), 0
        if wanted > 0:
            granted[seq.seq_id] = wanted
            num_free_blocks -= lacking
            num_tokens -= wanted
    return granted


def _check(waiting: Seq[Sequence], running: Seq[Sequence], num_free_blocks: int) -> None:
    if num_free_blocks < 0:
        raise ValueError(f"there can't be {num_free_blocks} free blocks")
    for seqs, status in ((waiting, SequenceStatus.WAITING), (running, SequenceStatus.RUNNING)):
        for seq in seqs:
            if seq.status is not status:
                raise ValueError(
                    f"sequence {seq.seq_id} is {seq.status.name.lower()}, and stands among those "
                    f"that are {status.name.lower()}"
                )
