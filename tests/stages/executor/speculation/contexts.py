"""What sources of drafts are asked about."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nano_inference.stages.executor.speculation.drafts import Draft, DraftContext, DraftSource


def context(
    tokens: Sequence[int],
    *,
    num_prompt: int = 1,
    row: int = 0,
    seq_id: int = 1,
    scope: str = "",
    limit: int = 16,
) -> DraftContext:
    """A sequence of these tokens."""
    return DraftContext(
        row=row,
        seq_id=seq_id,
        tokens=np.array(tokens, np.int64),
        num_prompt=num_prompt,
        scope=scope,
        prediction=(),
        limit=limit,
    )


def propose(source: DraftSource, *contexts: DraftContext) -> Draft:
    """The draft of the last of these."""
    return source.propose(contexts)[-1]


def run(
    source: DraftSource, tokens: Sequence[int], *, num_prompt: int, seq_id: int, scope: str = ""
) -> list[Draft]:
    """A whole sequence, one token in each step, that leaves at its end; what was drafted."""
    drafts = []
    for end in range(num_prompt, len(tokens)):
        now = context(tokens[:end], num_prompt=num_prompt, seq_id=seq_id, scope=scope)
        drafts.append(propose(source, now))
    source.observe([context(tokens, num_prompt=num_prompt, seq_id=seq_id, scope=scope)])
    source.forget(0, seq_id)
    return drafts


def num_accepted(tokens: Sequence[int], drafts: Sequence[Draft], num_prompt: int) -> int:
    """How many drafted tokens came as they were drafted, over all steps."""
    accepted = 0
    for end, draft in enumerate(drafts, num_prompt):
        for drafted, came in zip(draft.tokens, tokens[end:], strict=False):
            if drafted != came:
                break
            accepted += 1
    return accepted
