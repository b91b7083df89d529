"""What streaming is told of the sequences that are new in a step."""

from __future__ import annotations

from ....bus.messages import NewSequence, StartedSequence, StepPlan


def started_sequences(plan: StepPlan, executed_ns: int) -> tuple[StartedSequence, ...]:
    """What is told of the sequences that are new in a plan: the prompt once for each request."""
    first = {new.info.entry_id: new.seq_id for new in reversed(plan.new)}
    return tuple(
        StartedSequence(
            seq_id=new.seq_id,
            sample_index=new.sample.sample_index,
            num_cached=new.num_cached,
            num_generated=new.num_generated,
            info=new.info,
            planned_ns=plan.made_ns,
            executed_ns=executed_ns,
            prompt_token_ids=_prompt(new) if first[new.info.entry_id] == new.seq_id else (),
        )
        for new in plan.new
    )


def _prompt(new: NewSequence) -> tuple[int, ...]:
    return new.token_ids[: len(new.token_ids) - new.num_generated]
