"""First tokens, which the executor sends to the replicas that continue the sequences."""

from __future__ import annotations

from collections.abc import Iterator

from .messages import Handover, StepPlan, StepSummary


def first_tokens(plan: StepPlan, summary: StepSummary) -> Iterator[tuple[int, Handover]]:
    """Return a step's handovers, each with the number of the replica that continues."""
    for seq_id, successor, num_messages in plan.handovers:
        if seq_id in summary.handed_over:
            rows = zip(summary.seq_ids, summary.token_ids, strict=True)
            token_ids = tuple([token_id for each, token_id in rows if each == seq_id])
            yield successor, Handover(seq_id, token_ids, num_messages, summary.end_ns)
