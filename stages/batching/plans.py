"""Plans in flight, and the next one in the making."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ...bus.control import Cancel
from ...bus.messages import RequestInfo
from ...bus.sections import Section
from ...bus.steps import NewSequence, StepPlan, StepSummary
from ...bus.times import Break
from .schedule import NOTHING, SchedulerOutput
from .sequence import Sequence, SequenceStatus


class SentPlan(NamedTuple):
    """A plan whose result is not back, and the sequences of its rows."""

    plan: StepPlan
    seqs: list[Sequence]


@dataclass(slots=True)
class PlanDraft:
    """The next plan: what happened since the last one, and then what is decided.

    Attributes:
        ended: Requests that were cut short.
        forget: Sequences that run no more; the executor drops its state of them.
        left: As in StepTimes.
        held_since_ns: Since when no step is allowed; 0 if one is.
        step_id: The plan's.
        now_ns: When it is made.
        decision: The chosen rows.
        num_tokens: The rows: tokens by sequence id, in order.
        seqs: Their sequences.
        new: Sequences that start.
        grown, copies: As in StepPlan.
        parts: Sections for the executor.
        onward: Sections for streaming.
    """

    ended: list[Cancel] = field(default_factory=list)
    forget: list[int] = field(default_factory=list)
    left: list[tuple[int, Break]] = field(default_factory=list)
    held_since_ns: int = 0
    step_id: int = 0
    now_ns: int = 0
    decision: SchedulerOutput = NOTHING
    num_tokens: Mapping[int, int] = field(default_factory=dict)
    seqs: list[Sequence] = field(default_factory=list)
    new: list[NewSequence] = field(default_factory=list)
    grown: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    parts: list[Section] = field(default_factory=list)
    onward: list[Section] = field(default_factory=list)

    def plan(self) -> StepPlan:
        """Return the message."""
        return StepPlan(
            step_id=self.step_id,
            new=tuple(self.new),
            seq_ids=tuple(self.num_tokens),
            num_tokens=tuple(self.num_tokens.values()),
            grown=tuple(self.grown),
            copies=tuple(self.copies),
            finished=tuple(self.forget),
            ended=tuple(self.ended),
            made_ns=self.now_ns,
            parts=tuple(self.parts),
            onward=tuple(self.onward),
        )


def settle(sent: SentPlan, result: StepSummary) -> tuple[list[Sequence], int]:
    """Apply a result to the sequences of its plan.

    Returns:
        Sequences to commit, and the number of tokens computed for sequences that had ended.
    """
    due: list[Sequence] = []
    num_wasted = 0
    tokens = dict(zip(result.seq_ids, result.token_ids, strict=True))
    for seq, num_tokens in zip(sent.seqs, sent.plan.num_tokens, strict=False):
        if seq.status is SequenceStatus.FINISHED:
            num_wasted += num_tokens
            continue
        seq.num_computed += num_tokens
        if seq.seq_id in tokens:
            seq.token_ids.append(tokens[seq.seq_id])
        if seq.num_computed >= seq.next_commit:
            due.append(seq)
    return due, num_wasted


def aborted(info: RequestInfo, why: str) -> Cancel:
    """Return the cancellation of a request that keeps its tokens."""
    return Cancel(info.request_id, info.entry_id, "cancelled", "aborted", why)


def expired(info: RequestInfo) -> Cancel:
    """Return the cancellation of a request whose time is over."""
    message = "the request's time budget ran out before it was done"
    return Cancel(info.request_id, info.entry_id, "expired", "expired", message)
