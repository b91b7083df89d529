"""Handover of a sequence from a replica that prefills to one that decodes."""

from __future__ import annotations

from collections.abc import Iterator

from ..messages import Handover, RemoteBlocks
from ..sections import Section, Sections
from ..steps import StepPlan, StepResult, StepSummary


class HandoverRoute(Section, frozen=True):
    """In AdmittedRequest: where sequences go on, and where KV of theirs is.

    Attributes:
        successors: For each sequence, the number of the replica that continues it after its first
            token; empty if the sequences stay.
        remote: Blocks of the replica that hands the one sequence over; None for none.
    """

    successors: tuple[int, ...] = ()
    remote: RemoteBlocks | None = None


class HandoversPlan(Section, frozen=True):
    """In StepPlan: rows that sample the first token of a sequence that another replica continues.

    Attributes:
        leaving: (sequence, replica, `num_messages` of the Handover) for each.
    """

    leaving: tuple[tuple[int, int, int], ...]


class HandoversResult(Section, frozen=True):
    """In StepSummary: sequences whose first token was sent to the replica that continues them."""

    seq_ids: tuple[int, ...]

    @classmethod
    def of(
        cls, leaving: tuple[tuple[int, int, int], ...], result: StepResult
    ) -> tuple[HandoversResult, ...]:
        """Return the section of a step; none if no row leaves. `leaving`: as in HandoversPlan."""
        if not leaving:
            return ()
        ended = result.ended_sequences
        return (cls(tuple([i for i, *_ in leaving if i in result.seq_ids and i not in ended])),)


def first_tokens(plan: StepPlan, summary: StepSummary) -> Iterator[tuple[int, Handover]]:
    """Return a step's handovers, each with the number of the replica that continues."""
    planned, done = HandoversPlan.find(plan.parts), HandoversResult.find(summary.parts)
    if planned is None or done is None:
        return
    for seq_id, successor, num_messages in planned.leaving:
        if seq_id in done.seq_ids:
            rows = zip(summary.seq_ids, summary.token_ids, strict=True)
            token_ids = tuple([token_id for each, token_id in rows if each == seq_id])
            yield successor, Handover(seq_id, token_ids, num_messages, summary.end_ns)


def leaving_of(parts: Sections) -> tuple[tuple[int, int, int], ...]:
    """Return a plan's handovers, as in HandoversPlan."""
    found = HandoversPlan.find(parts)
    return found.leaving if found is not None else ()
