"""The sequences that are new in a step, as streaming is told."""

from __future__ import annotations

from ....bus.messages import StartedSequence, StepPlan


def started_sequences(plan: StepPlan, executed_ns: int) -> tuple[StartedSequence, ...]:
    """Return the sequences that a plan starts."""
    return tuple(
        StartedSequence(
            seq_id=new.seq_id,
            sample_index=new.sample.sample_index,
            request_id=new.info.request_id,
            entry_id=new.info.entry_id,
            num_cached=new.num_cached,
            num_generated=new.num_generated,
            executed_ns=executed_ns,
            queued=new.info.queued,
        )
        for new in plan.new
    )
