"""Which drafted tokens a step verifies, and what is learned of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .....bus.messages import VerifiedDraft
from ...runner.interface import IntArray
from ..constraints import Constraints
from ..sequences import BoolArray, SequenceTable
from ..unread import SampledRows
from .costs import LEAST_GAIN
from .drafts import NO_DRAFT, Draft, DraftContext, DraftSource
from .ledger import DraftLedger

_ENOUGH = 4.0
"""Tokens expected of a draft, from which on no other source is asked for a better one."""

_MOST_MODEL_REST = 256
"""Steps in which a draft model that did not pay is not asked."""

_MOST_RESTS = 8
"""How many steps a sequence goes without being asked about at most, if there was nothing before."""


class DraftControl(Protocol):
    """Says how much of which drafts is worth its time."""

    def add(self, row: int) -> None:
        """A row of the table has a new sequence."""
        ...

    def begin(self, num_rows: int, num_prefill: int, context: float) -> bool:
        """A step begins; says whether drafts would be worth their time, if they were right.

        Args:
            num_rows: Rows of one token that the step has anyway.
            num_prefill: Tokens of its other rows.
            context: Tokens that a row of one token has before it, on average.
        """
        ...

    def rest(self) -> int:
        """For so many steps to come nobody is to be asked, which the caller sees to. To be called
        where `begin` has said that it would not be worth while."""
        ...

    def expected(self, row: int, draft: Draft) -> list[float]:
        """How likely it is of each drafted token that it and all before it are accepted."""
        ...

    def lengths(self, chances: Sequence[Sequence[float]]) -> list[int]:
        """How many tokens of each draft to verify in the step that has begun: of each draft's
        chances, as `expected` gives them."""
        ...

    def spent(self, num_asked: int, seconds: float, num_accepted: int) -> None:
        """The step that began last is over. Asking about so many rows, and learning from what came,
        took so long, without the draft model's passes; so many tokens were accepted."""
        ...

    def value(self, num_verified: int, num_accepted: int) -> tuple[float, float]:
        """What some drafted tokens were worth in the step that has begun, all others apart.

        Args:
            num_verified: How many of the tokens that `lengths` has chosen are meant.
            num_accepted: How many of them were accepted.

        Returns:
            Seconds that verifying them took, and seconds that the accepted ones would have taken
            without drafts.
        """
        ...

    def settle(self, row: int, draft: Draft, got: Sequence[int]) -> None:
        """A row got tokens in a step for which a draft was proposed, verified in part or not."""
        ...

    def timed(self, seconds: float) -> None:
        """A step has taken so long, from its beginning to its tokens: the one that began last, if
        one did since the last call."""
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
        rest: As StepResult's `draft_rest`.
    """

    counts: IntArray
    verified: dict[int, Draft]
    proposed: dict[int, Draft]
    rest: int = 0


class Speculator:
    """The sources of drafts of a lane, and the control over them."""

    def __init__(
        self,
        table: SequenceTable,
        constraints: Constraints,
        sources: Sequence[DraftSource],
        control: DraftControl,
        draft_model: DraftSource | None = None,
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """Takes its parts.

        Args:
            table: The sequences.
            constraints: Their grammars.
            sources: Those that take next to no time. Each is asked where those before it have no
                good draft.
            control: Says how much to verify.
            draft_model: One that takes time, and is asked last.
            now_ns: The clock for that.
        """
        self._table = table
        self._constraints = constraints
        self._sources = tuple(sources)
        self._draft_model = draft_model
        self._now_ns = now_ns
        self._ledger = DraftLedger(_MOST_MODEL_REST)
        # By the draft model's passes, in the step that is under way.
        self._drafting_s = 0.0
        self._control = control
        # Of the last step for which sources were asked.
        self._asked: _Asked | None = None
        # Of that, the draft model's part.
        self._asking_model_s = 0.0
        self._rests: dict[int, _Rest] = {}

    def begin(self, rows: IntArray, num_tokens: IntArray, limits: IntArray) -> StepDrafts:
        """Drafts for a step; what is to be verified is written behind the rows' known tokens.

        Args:
            rows: `[rows]`, of the table: all that the step has.
            num_tokens: `[rows]`, how many each computes anyway.
            limits: `[rows]`, most drafted tokens of each; 0 for a row that is to have none.
        """
        if (asked := self._asked) is not None:
            self._control.spent(asked.num_rows, asked.seconds, asked.num_accepted)
            self._asked = None
        # Steps that run ahead are not timed.
        self._drafting_s = 0.0
        single = num_tokens == 1
        num_rows, num_prefill = int(single.sum()), int(num_tokens[~single].sum())
        wanted = limits > 0
        known = float(self._table.num_known[rows[single]].mean()) if num_rows else 0.0
        worth_while = self._control.begin(num_rows, num_prefill, known)
        if not wanted.any():
            return StepDrafts(np.zeros_like(rows), {}, {})
        if not worth_while:
            return StepDrafts(np.zeros_like(rows), {}, {}, self._control.rest())
        begin_ns = time.thread_time_ns()
        contexts = self._contexts(rows[wanted], limits[wanted])
        self._asking_model_s = 0.0
        drafts, chances = self._propose(contexts)
        lengths = self._control.lengths(chances)
        verified: dict[int, Draft] = {}
        proposed: dict[int, Draft] = {}
        for context, draft, length in zip(contexts, drafts, lengths, strict=True):
            row = context.row
            if draft.tokens:
                proposed[row] = draft
            if length:
                verified[row] = cut = _cut(draft, length)
                known = len(context.tokens)
                self._table.tokens[row, known : known + length] = cut.tokens
                self._rests.pop(row, None)
            else:
                self._rest(row)
        if not any(self._is_of_model(draft) for draft in drafts):
            self._ledger.owe(self._drafting_s, least_gain=LEAST_GAIN)
        elif not verified:
            self._judge(())
        lengths_of = {row: len(draft.tokens) for row, draft in verified.items()}
        counts = np.array([lengths_of.get(row, 0) for row in rows.tolist()], np.int64)
        asking_s = (time.thread_time_ns() - begin_ns) * 1e-9
        self._asked = _Asked(len(contexts), max(asking_s - self._asking_model_s, 0.0))
        return StepDrafts(counts, verified, proposed)

    def verdicts(
        self, step: StepDrafts, rows: IntArray, num_accepted: IntArray
    ) -> tuple[VerifiedDraft, ...]:
        """What the result says of a step's drafts: `[rows]`, how many tokens were accepted."""
        ids = self._table.ids_of(rows).tolist()
        verdicts = tuple(
            VerifiedDraft(seq_id, draft.source, len(draft.tokens), accepted)
            for row, seq_id, accepted in zip(rows.tolist(), ids, num_accepted.tolist(), strict=True)
            if (draft := step.verified.get(row)) is not None
        )
        if self._asked is not None:
            self._asked.num_accepted = sum(each.num_accepted for each in verdicts)
        if any(self._is_of_model(draft) for draft in step.proposed.values()):
            self._judge(verdicts)
        return verdicts

    def timed(self, seconds: float) -> None:
        """As DraftControl says; for steps that run one after the other. What the draft model took
        of it is no cost of rows."""
        self._control.timed(seconds - self._drafting_s)
        self._drafting_s = 0.0

    def observe(
        self, sampled: SampledRows, seq_ids: Sequence[int], proposed: Mapping[int, Draft]
    ) -> None:
        """A step's tokens are known.

        Args:
            sampled: Where they are.
            seq_ids: The sequences that they count for: others had ended before.
            proposed: By row of the table, the drafts that there were for the step.
        """
        if not proposed:
            return
        begin_ns = time.thread_time_ns()
        held = np.isin(sampled.seq_ids, np.array(seq_ids, np.int64))
        rows, places = sampled.rows[held], sampled.places[held]
        if not rows.size:
            return
        firsts = np.flatnonzero(np.append(True, rows[1:] != rows[:-1]))
        tokens = self._table.tokens[rows, places].tolist()
        stops = [*firsts[1:].tolist(), len(tokens)]
        for row, start, stop in zip(rows[firsts].tolist(), firsts.tolist(), stops, strict=True):
            if (draft := proposed.get(row)) is not None:
                self._control.settle(row, draft, tuple(tokens[start:stop]))
        if self._asked is not None:
            self._asked.seconds += (time.thread_time_ns() - begin_ns) * 1e-9

    def add(self, seq_id: int) -> None:
        """A sequence is new in the table."""
        row = self._table.row_of(seq_id)
        assert row is not None
        self._control.add(row)
        self._rests.pop(row, None)

    def forget(self, seq_id: int) -> None:
        """A sequence is about to leave the table; one that is not there is forgotten already."""
        row = self._table.row_of(seq_id)
        if row is not None:
            self._control.forget(row)
            for source in self._all_sources:
                source.forget(row, seq_id)

    def clear(self) -> None:
        """All sequences leave the table."""
        self._control.clear()
        self._rests.clear()
        self._asked = None
        for source in self._all_sources:
            source.clear()

    @property
    def _all_sources(self) -> tuple[DraftSource, ...]:
        model = self._draft_model
        return self._sources if model is None else (*self._sources, model)

    def _is_of_model(self, draft: Draft | VerifiedDraft) -> bool:
        return self._draft_model is not None and draft.source == self._draft_model.name

    def _judge(self, verdicts: Sequence[VerifiedDraft]) -> None:
        """Tells the ledger what became of the draft model's drafts in a step that has some."""
        of_model = [each for each in verdicts if self._is_of_model(each)]
        verified = sum(each.num_tokens for each in of_model)
        took, saved = self._control.value(verified, sum(each.num_accepted for each in of_model))
        self._ledger.settle(self._drafting_s + took, saved, least_gain=LEAST_GAIN)

    def _rest(self, row: int) -> None:
        """There was nothing to verify for a row: it is asked about again after some steps.

        A draft model sees to that by itself, and must not be kept from reading on.
        """
        if self._draft_model is not None:
            return
        rest = self._rests.setdefault(row, _Rest())
        rest.last = min(2 * rest.last + 1, _MOST_RESTS)
        rest.steps = rest.last

    def _rests_now(self, row: int) -> bool:
        rest = self._rests.get(row)
        if rest is None or not rest.steps:
            return False
        rest.steps -= 1
        return True

    def _contexts(self, rows: IntArray, limits: IntArray) -> list[DraftContext]:
        """Of those rows of the table that don't rest."""
        table = self._table
        known = table.num_known[rows]
        return [
            DraftContext(
                row,
                seq_id,
                table.tokens[row, :end],
                end - generated,
                table.scope[row],
                table.prediction[row],
                limit,
            )
            for row, seq_id, end, generated, limit in zip(
                rows.tolist(),
                table.ids_of(rows).tolist(),
                known.tolist(),
                table.num_generated[rows].tolist(),
                limits.tolist(),
                strict=True,
            )
            if not self._rests_now(row)
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
                    row, draft = contexts[index].row, proposed
                    if self._table.constrained[row]:
                        draft = _cut(draft, self._constraints.check_draft(row, draft.tokens))
                    expected = self._control.expected(row, draft)
                    if sum(expected) > sum(chances[index]):
                        best[index], chances[index] = draft, expected

        for source in self._sources:
            ask(source, [i for i, each in enumerate(chances) if sum(each) < _ENOUGH])
        if self._draft_model is not None and self._ledger.may_ask():
            begin_ns, own_ns = self._now_ns(), time.thread_time_ns()
            ask(self._draft_model, [i for i, each in enumerate(chances) if sum(each) < _ENOUGH])
            self._drafting_s = (self._now_ns() - begin_ns) * 1e-9
            self._asking_model_s = (time.thread_time_ns() - own_ns) * 1e-9
        return best, chances


@dataclass(slots=True)
class _Asked:
    """What asking for a step's drafts took.

    Attributes:
        num_rows: About so many rows.
        seconds: Of this thread, learning from what came included: how long others kept it waiting
            says nothing.
        num_accepted: Drafted tokens of the step.
    """

    num_rows: int
    seconds: float
    num_accepted: int = 0


@dataclass(slots=True)
class _Rest:
    """How long a sequence is not asked about.

    Attributes:
        last: So many steps it was the last time.
        steps: So many are left.
    """

    last: int = 0
    steps: int = 0


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
