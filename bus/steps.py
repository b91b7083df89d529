"""Messages of a step: batching's plan, and the executor's result."""

from __future__ import annotations

from itertools import compress
from typing import Literal

from ..config import SamplingParams
from .control import Cancel, Internal, InternalPart
from .messages import (
    DEFAULT_SCOPE,
    CacheScope,
    RequestInfo,
    RowFinish,
    SequenceSpec,
    TopLogprobs,
)
from .sections import Section, Sections
from .times import StageTime


class NewSequence(InternalPart, frozen=True, array_like=True):
    """A sequence as the executor needs it, sent once.

    Attributes:
        seq_id: The sequence's id.
        token_ids: Prompt, and after a preemption the generated tokens.
        num_generated: Number of generated tokens at the end of `token_ids`.
        num_cached: Leading tokens whose KV is already in the blocks; all of them with a shared
            prefill.
        block_ids: Blocks of the KV cache, in order.
        sampling: Parameters; `max_tokens` counts from the prompt's end and is already limited by
            the model's length.
        sample: The sample's index and seed.
        info: Its request.
        cache_scope: Speculation drafts only from sequences of the same scope.
        handed_over: As in StartedSequence.
        hands_over: Whether it leaves with its first token here.
        parts: Sections of optional parts.
        onward: Sections for streaming, which the executor passes on in StartedSequence unread.
    """

    seq_id: int
    token_ids: tuple[int, ...]
    num_generated: int
    num_cached: int
    block_ids: tuple[int, ...]
    sampling: SamplingParams
    sample: SequenceSpec
    info: RequestInfo
    cache_scope: CacheScope = DEFAULT_SCOPE
    handed_over: bool = False
    hands_over: bool = False
    parts: Sections = ()
    onward: Sections = ()


AUDIT_SEQ_ID = -2
"""The sequence that computes a block of the KV tiers again. It belongs to no request."""


MoveKind = Literal["store", "load", "fetch", "write", "offer", "drop", "compare"]


class KVMove(InternalPart, frozen=True, array_like=True):
    """A move of one unit, a block or a snapshot, between the KV cache and the tiers below it.

    Attributes:
        kind: "store": from a block of the cache to a host slot. "load": from a host slot to a
            block. "fetch": from disk, or from another executor, to a host slot, in the background.
            "write": from a host slot to disk, in the background. "offer": store it if it has a
            block, and let other executors read the slot. "drop": delete it on disk. "compare":
            report whether two blocks of the cache are equal.
        name: Its block hash, 16 bytes; of a snapshot, that of the block that ends there.
        slot: The host slot; -1 for none. Snapshots have slots of their own.
        block_id: The block of the cache, or the snapshot's number; -1 for none.
        write: For "store": also write the block to disk, in the background.
        other: For "compare": the loaded block; `block_id` is the computed one. For "fetch": the
            host slot of the other executor.
        source: For "fetch": address of the other executor; "" for the disk.
        source_name: The block's name there.
        step: The step there that offers the block, for which the fetch waits.
        state: Whether it is a snapshot of a recurrent state.
    """

    kind: MoveKind
    name: bytes
    slot: int = -1
    block_id: int = -1
    write: bool = False
    other: int = -1
    source: str = ""
    source_name: bytes = b""
    step: int = 0
    state: bool = False


class StepPlan(Internal, frozen=True):
    """One forward pass.

    The executor applies `finished`, `parts`, `new`, `grown` and `copies` in this order, then runs
    the rows.

    Row i computes the next `num_tokens[i]` tokens of `seq_ids[i]`. A row that reaches the end of
    the tokens known so far samples one more; the executor feeds that token to the sequence's next
    row itself, so the next plan may be sent before this one's result is back.

    Attributes:
        step_id: Counts up from 1 within an epoch.
        new: Sequences that appear for the first time (or again, after a preemption).
        seq_ids: `[rows]`.
        num_tokens: `[rows]`; 0 for a shared prefill: the row samples from the logits of the row
            before, whose tokens are the same.
        grown: (seq_id, block ids appended to its table) for each sequence that grew.
        copies: (source, destination) blocks to copy before the pass.
        finished: Sequences that will not be named again; the executor forgets them.
        ended: Requests that were cut short, passed on to streaming in order after their tokens.
        made_ns: When batching made the plan.
        parts: Sections of optional parts.
        onward: Sections for streaming, which the executor passes on in StepResult unread.
    """

    step_id: int
    new: tuple[NewSequence, ...]
    seq_ids: tuple[int, ...]
    num_tokens: tuple[int, ...]
    grown: tuple[tuple[int, tuple[int, ...]], ...]
    copies: tuple[tuple[int, int], ...]
    finished: tuple[int, ...]
    ended: tuple[Cancel, ...]
    made_ns: int
    parts: Sections = ()
    onward: Sections = ()


class StartedSequence(InternalPart, frozen=True, array_like=True):
    """A sequence whose first step this is; after a preemption, its first step since.

    Attributes:
        num_cached: Prompt tokens that needed no computing.
        num_generated: Tokens that earlier runs of this sequence have already reported.
        executed_ns: When the step began on the device.
        queued: As in RequestInfo.
        handed_over: Whether another replica computed the sequence before.
        hands_over: As in NewSequence.
        parts: The sections in `NewSequence.onward`.
    """

    seq_id: int
    sample_index: int
    request_id: str
    entry_id: str
    num_cached: int
    num_generated: int
    executed_ns: int
    queued: StageTime | None = None
    handed_over: bool = False
    hands_over: bool = False
    parts: Sections = ()


class StepResult(Internal, frozen=True):
    """Tokens of one forward pass. Rows that only prefilled are not in it.

    A sequence whose draft was accepted in part or whole is named once for each token that it got,
    in order and one after the other. So `[rows]` are tokens here.

    Attributes:
        step_id: The plan's.
        started: Sequences that were new in this step.
        seq_ids: `[rows]`, those that sampled.
        token_ids: `[rows]`.
        logprobs: `[rows]`, of the policy.
        finish_reasons: `[rows]`, "" while the sequence goes on.
        ended: As in the plan.
        weight_version: Version of the weights that made these tokens.
        start_ns, end_ns: When the device began the step, and when its tokens were on the host.
        top_logprobs: `[rows]`, empty for a row that needs none; all empty: no row does.
        failed: Requests that the executor ends; rows of theirs don't count.
        parts: Sections of optional parts.
    """

    step_id: int
    started: tuple[StartedSequence, ...]
    seq_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reasons: tuple[RowFinish, ...]
    ended: tuple[Cancel, ...]
    weight_version: int
    start_ns: int
    end_ns: int
    top_logprobs: tuple[TopLogprobs, ...] = ()
    failed: tuple[Cancel, ...] = ()
    parts: Sections = ()

    @property
    def ended_sequences(self) -> tuple[int, ...]:
        """Sequences that have ended with this step."""
        without_token = [seq_id for part in self.parts for seq_id in part.ended]
        return (*compress(self.seq_ids, self.finish_reasons), *without_token)

    def summary(self, *sections: Section) -> StepSummary:
        """Return the share for batching, with these sections besides."""
        own = [part for part in self.parts if part.for_batching]
        return StepSummary(
            step_id=self.step_id,
            seq_ids=self.seq_ids,
            token_ids=self.token_ids,
            ended=self.ended_sequences,
            start_ns=self.start_ns,
            end_ns=self.end_ns,
            parts=(*own, *sections),
        )


class StepSummary(Internal, frozen=True):
    """The part of a StepResult that batching needs: no logprobs, no vectors.

    Attributes:
        step_id, seq_ids, token_ids, start_ns, end_ns: As in StepResult.
        ended: Sequences that have ended with this step, by a finish reason or with their vector.
        parts: Sections of optional parts.
    """

    step_id: int
    seq_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    ended: tuple[int, ...]
    start_ns: int
    end_ns: int
    parts: Sections = ()
