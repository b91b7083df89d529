"""What sources of drafts are asked about."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nano_inference.bus.messages import DEFAULT_SCOPE, CacheScope
from nano_inference.stages.executor.driver.sequences import SequenceTable
from nano_inference.stages.executor.driver.speculation.drafts import (
    Draft,
    DraftContext,
    DraftSource,
)
from nano_inference.stages.executor.driver.speculation.suffix import SuffixSource


def context(
    tokens: Sequence[int],
    *,
    num_prompt: int = 1,
    row: int = 0,
    seq_id: int = 1,
    scope: CacheScope = DEFAULT_SCOPE,
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


class SuffixOfContexts(SuffixSource):
    """One whose table has the sequences that it is asked about."""

    def __init__(self, max_tokens: int = 100_000) -> None:
        self.table = SequenceTable(8, 4096, 16)
        super().__init__(self.table, max_tokens)

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        for asked in contexts:
            self.put(asked)
        return super().propose(contexts)

    def put(self, asked: DraftContext) -> None:
        table, row, known = self.table, asked.row, len(asked.tokens)
        table.tokens[row, :known] = asked.tokens
        table.num_known[row] = known
        table.num_generated[row] = max(known - asked.num_prompt, 0)
        table.scope[row] = asked.scope

    def end(self, asked: DraftContext) -> None:
        """A sequence leaves, with these tokens."""
        self.put(asked)
        self.forget(asked.row, asked.seq_id)


def run(
    source: SuffixOfContexts,
    tokens: Sequence[int],
    *,
    num_prompt: int,
    seq_id: int,
    scope: CacheScope = DEFAULT_SCOPE,
) -> list[Draft]:
    """A whole sequence, one token in each step, that leaves at its end; what was drafted."""
    drafts = []
    for end in range(num_prompt, len(tokens)):
        now = context(tokens[:end], num_prompt=num_prompt, seq_id=seq_id, scope=scope)
        drafts.append(propose(source, now))
    source.end(context(tokens, num_prompt=num_prompt, seq_id=seq_id, scope=scope))
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
