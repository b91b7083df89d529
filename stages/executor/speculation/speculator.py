"""Which drafted tokens a step verifies, and what is learned of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ....bus.messages import VerifiedDraft
from ..batch import IntArray
from ..constraints import Constraints
from ..sequences import BoolArray, SequenceTable
from ..unread import SampledRows
from .drafts import NO_DRAFT, Draft, DraftContext, DraftSource

_ENOUGH = 2.0
"""Tokens expected of a draft, from which on the draft model is not asked for another."""


class DraftControl(Protocol):
    """Says how much of which drafts is worth its time."""

    def add(self, row: int) -> None:
        """A row of the table has a new sequence."""
        ...

    def expected(self, row: int, draft: Draft) -> list[float]:
        """How likely it is of each drafted token that it and all before it are accepted."""
        ...

    def lengths(
        self, num_rows: int, num_prefill: int, chances: Sequence[Sequence[float]]
    ) -> list[int]:
        """How many tokens of each draft to verify in a step.

        Args:
            num_rows: Rows of one token that the step has anyway.
            num_prefill: Tokens of its other rows.
            chances: Of each draft, as `expected` gives them.
        """
        ...

    def settle(self, row: int, draft: Draft, got: Sequence[int]) -> None:
        """A row got tokens in a step for which a draft was proposed, verified in part or not."""
        ...

    def timed(self, seconds: float) -> None:
        """A step has taken so long, from its beginning to its tokens; the one whose `lengths` were
        asked for last, if any were since the last call."""
        ...

    def forget(self, row: int) -> None:
        """The sequence of a row has left."""
        ...

    def clear(self) -> None:
        """All have."""
        ...


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """The drafts of one step.

    Attributes:
        counts: `[rows]`, how many drafted tokens of each row of the step are verified.
        verified: By the row of the SequenceTable, those tokens, where there are any.
        proposed: By that row, the whole drafts.
    """

    counts: IntArray
    verified: dict[int, Draft]
    proposed: dict[int, Draft]


class Speculator:
    """The sources of drafts of a lane, and the control over them."""

    def __init__(
        self,
        table: SequenceTable,
        constraints: Constraints,
        sources: Sequence[DraftSource],
        control: DraftControl,
        draft_model: DraftSource | None = None,
    ) -> None:
        """Takes its parts.

        Args:
            table: The sequences.
            constraints: Their grammars.
            sources: Those that take next to no time.
            control: Says how much to verify.
            draft_model: One that takes time, and is asked where the others have no good draft.
        """
        self._table = table
        self._constraints = constraints
        self._asked_always = tuple(sources)
        self._draft_model = draft_model
        self._sources = (*sources, draft_model) if draft_model is not None else tuple(sources)
        self._control = control

    def begin(self, rows: IntArray, num_tokens: IntArray, limits: IntArray) -> StepDrafts:
        """Drafts for a step; what is to be verified is written behind the rows' known tokens.

        Args:
            rows: `[rows]`, of the table: all that the step has.
            num_tokens: `[rows]`, how many each computes anyway.
            limits: `[rows]`, most drafted tokens of each; 0 for a row that is to have none.
        """
        contexts = self._contexts(rows[limits > 0], limits[limits > 0])
        drafts, chances = self._propose(contexts)
        single = num_tokens == 1
        num_rows, num_prefill = int(single.sum()), int(num_tokens[~single].sum())
        lengths = self._control.lengths(num_rows, num_prefill, chances)
        verified: dict[int, Draft] = {}
        counts = dict.fromkeys(rows.tolist(), 0)
        for context, draft, length in zip(contexts, drafts, lengths, strict=True):
            if length:
                verified[context.row] = cut = _cut(draft, length)
                counts[context.row] = length
                known = len(context.tokens)
                self._table.tokens[context.row, known : known + length] = cut.tokens
        proposed = {context.row: draft for context, draft in zip(contexts, drafts, strict=True)}
        return StepDrafts(np.array(list(counts.values()), np.int64), verified, proposed)

    def verdicts(
        self, step: StepDrafts, rows: IntArray, num_accepted: IntArray
    ) -> tuple[VerifiedDraft, ...]:
        """What the result says of a step's drafts: `[rows]`, how many tokens were accepted."""
        ids = self._table.ids_of(rows).tolist()
        return tuple(
            VerifiedDraft(seq_id, draft.source, len(draft.tokens), accepted)
            for row, seq_id, accepted in zip(rows.tolist(), ids, num_accepted.tolist(), strict=True)
            if (draft := step.verified.get(row)) is not None
        )

    def timed(self, seconds: float) -> None:
        """As DraftControl says; for steps that run one after the other."""
        self._control.timed(seconds)

    def observe(
        self, sampled: SampledRows, seq_ids: Sequence[int], proposed: Mapping[int, Draft]
    ) -> None:
        """A step's tokens are known.

        Args:
            sampled: Where they are.
            seq_ids: The sequences that they count for: others had ended before.
            proposed: By row of the table, the drafts that there were for the step.
        """
        held = np.isin(sampled.seq_ids, np.array(seq_ids, np.int64))
        rows, places = sampled.rows[held], sampled.places[held]
        if not rows.size:
            return
        firsts = np.flatnonzero(np.append(True, rows[1:] != rows[:-1]))
        starts, ends = places[firsts], np.append(places[firsts[1:] - 1], places[-1]) + 1
        contexts = self._contexts(rows[firsts], np.zeros_like(firsts), ends)
        for source in self._sources:
            source.observe(contexts)
        for context, start in zip(contexts, starts.tolist(), strict=True):
            got = context.tokens[start:].tolist()
            self._control.settle(context.row, proposed.get(context.row, NO_DRAFT), got)

    def add(self, seq_id: int) -> None:
        """A sequence is new in the table."""
        row = self._table.row_of(seq_id)
        assert row is not None
        self._control.add(row)

    def forget(self, seq_id: int) -> None:
        """A sequence is about to leave the table; one that is not there is forgotten already."""
        row = self._table.row_of(seq_id)
        if row is not None:
            self._control.forget(row)
            for source in self._sources:
                source.forget(row, seq_id)

    def clear(self) -> None:
        """All sequences leave the table."""
        self._control.clear()
        for source in self._sources:
            source.clear()

    def _contexts(
        self, rows: IntArray, limits: IntArray, ends: IntArray | None = None
    ) -> list[DraftContext]:
        """Of rows of the table; `ends`: how far their tokens are to be looked at."""
        table = self._table
        known = table.num_known[rows]
        return [
            DraftContext(
                row=row,
                seq_id=seq_id,
                tokens=table.tokens[row, :end],
                num_prompt=num_known - generated,
                scope=table.scope[row],
                prediction=table.prediction[row],
                limit=limit,
            )
            for row, seq_id, end, num_known, generated, limit in zip(
                rows.tolist(),
                table.ids_of(rows).tolist(),
                (known if ends is None else ends).tolist(),
                known.tolist(),
                table.num_generated[rows].tolist(),
                limits.tolist(),
                strict=True,
            )
        ]

    def _propose(self, contexts: list[DraftContext]) -> tuple[list[Draft], list[Sequence[float]]]:
        """The draft of each sequence from which most is to be expected, and what is."""
        best = [NO_DRAFT] * len(contexts)
        chances: list[Sequence[float]] = [()] * len(contexts)

        def ask(source: DraftSource, which: Sequence[int]) -> None:
            for index, proposed in zip(
                which, source.propose([contexts[i] for i in which]), strict=True
            ):
                if proposed.tokens:
                    row = contexts[index].row
                    draft = _cut(proposed, self._constraints.check_draft(row, proposed.tokens))
                    expected = self._control.expected(row, draft)
                    if sum(expected) > sum(chances[index]):
                        best[index], chances[index] = draft, expected

        for source in self._asked_always:
            ask(source, range(len(contexts)))
        if self._draft_model is not None:
            ask(self._draft_model, [i for i, each in enumerate(chances) if sum(each) < _ENOUGH])
        return best, chances


def _cut(draft: Draft, length: int) -> Draft:
    if length == len(draft.tokens):
        return draft
    return Draft(draft.tokens[:length], draft.likelihoods[:length], draft.source)


def longest_drafts(
    table: SequenceTable, rows: IntArray, num_drafts: IntArray, block_size: int
) -> IntArray:
    """Most drafted tokens that each row can have, `[rows]`.

    Args:
        table: The sequences.
        rows: `[rows]`, which compute their last known token.
        num_drafts: `[rows]`, what the plan allows.
        block_size: Of the KV cache.
    """
    known = table.num_known[rows]
    room = table.num_blocks[rows] * block_size - known
    left = table.max_tokens[rows] - table.num_generated[rows] - 1
    limits: IntArray = np.minimum(np.minimum(num_drafts, room), left)
    return np.maximum(limits, 0)


def accepted_counts(counts: BoolArray, starts: IntArray) -> IntArray:
    """How many drafted tokens of each row were accepted, `[rows]`.

    Args:
        counts: `[places]`, as `accept` says.
        starts: `[rows]`, the first place of each.
    """
    accepted: IntArray = np.add.reduceat(counts.astype(np.int64), starts) - 1
    return accepted
