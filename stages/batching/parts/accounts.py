"""The times of a step, for the accounts of time that streaming makes."""

from __future__ import annotations

from ....bus.times import StepTimes
from ..plans import PlanDraft
from . import Part


class Accounts(Part):
    """Adds the times of steps that are not plain: without prefills, breaks and pauses."""

    def planned(self, draft: PlanDraft) -> None:
        num_decodes, since_ns = len(draft.decision.decode_seqs), draft.held_since_ns
        if since_ns or draft.left or num_decodes < len(draft.num_tokens):
            held_ns = (since_ns, draft.now_ns) if since_ns else None
            draft.parts.append(StepTimes(num_decodes, held_ns=held_ns, left=tuple(draft.left)))
