"""Handover of a sequence from a replica that prefills to one that decodes."""

from __future__ import annotations

from ..messages import RemoteBlocks
from ..sections import Section, Sections


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


def leaving_of(parts: Sections) -> tuple[tuple[int, int, int], ...]:
    """Return a plan's handovers, as in HandoversPlan."""
    found = HandoversPlan.find(parts)
    return found.leaving if found is not None else ()
