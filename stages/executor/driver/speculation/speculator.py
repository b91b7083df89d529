"""Speculation in one step: the choice of drafted tokens, their acceptance, and its statistics."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from .....bus.parts.speculation import VerifiedDraft
from .....config import EngineConfig
from ...runner.interface import IntArray
from ..constraints import Constraints
from ..sampled import SampledRows
from ..sequences import BoolArray, Places, SequenceTable
from .control import CostControl, DraftLedger
from .drafts import (
    NO_DRAFT,
    Draft,
    DraftContext,
    DraftSource,
    ForcedSource,
    NgramSource,
    PredictionSource,
)
from .suffix import SuffixSource

_ENOUGH = 4.0
"""Expected tokens of a draft at which no further source is called."""

_MOST_MODEL_REST = 256
"""The longest rest, in steps, of a draft model that did not pay."""

_MOST_SKIPPED = 8
"""The most steps that skip a sequence without a useful draft."""


class StepDrafts(msgspec.Struct, frozen=True):
    """The drafts of one step.

    Attributes:
        counts: `[rows]`, verified tokens of each row of the step.
        verified: Those tokens, by row of the SequenceTable.
        proposed: The whole drafts, by that row.
        rest: As StepResult's `draft_rest`.
    """

    counts: IntArray
    verified: dict[int, Draft]
    proposed: dict[int, Draft]
    rest: int = 0


@dataclass(slots=True)
class _AskedDrafts:
    """The cost of a step's drafts.

    Attributes:
        seconds: CPU time of this thread, learning included.
        num_accepted: Accepted tokens.
    """

    seconds: float
    num_accepted: int = 0


@dataclass(eq=False)
class Speculator:
    """The sources of drafts, and the control over them.

    Attributes:
        table: The sequences.
        constraints: Their grammars.
        sources: Cheap sources, each called where earlier ones have no good draft.
        control: Chooses how much to verify.
        draft_model: A slow source, called last.
    """

    table: SequenceTable
    constraints: Constraints
    sources: Sequence[DraftSource]
    control: CostControl
    draft_model: DraftSource | None = None

    def __post_init__(self) -> None:
        self._ledger = DraftLedger(_MOST_MODEL_REST)
        # Wall and CPU time of the draft model's call in the current step.
        self._drafting_s = self._asking_model_s = 0.0
        # Of the last step that asked for drafts.
        self._asked: _AskedDrafts | None = None
        # By row without a useful draft: steps still to skip, and the length of that pause.
        self._skips: dict[int, tuple[int, int]] = {}

    def begin(self, rows: IntArray, num_tokens: IntArray, limits: IntArray) -> StepDrafts:
        """Draft for a step, and write the tokens to verify after the rows' known tokens.

        Args:
            rows: `[rows]`, all rows of the step, of the table.
            num_tokens: `[rows]`, tokens that each computes anyway.
            limits: `[rows]`, the most drafted tokens of each that the plan allows; 0 for none.
        """
        limits = self._limits(rows, limits)
        if (asked := self._asked) is not None:
            self.control.spent(asked.seconds, asked.num_accepted)
            self._asked = None
        # Steps that run ahead are not timed.
        self._drafting_s = 0.0
        single = num_tokens == 1
        num_rows, num_prefill = int(single.sum()), int(num_tokens[~single].sum())
        wanted = limits > 0
        known = float(self.table.num_known[rows[single]].mean()) if num_rows else 0.0
        pays = self.control.begin(num_rows, num_prefill, known)
        if not wanted.any():
            return StepDrafts(np.zeros_like(rows), {}, {})
        if not pays:
            return StepDrafts(np.zeros_like(rows), {}, {}, self.control.rest())
        begin_ns = time.thread_time_ns()
        contexts = self._contexts(rows[wanted], limits[wanted])
        self._asking_model_s = 0.0
        drafts, chances = self._propose(contexts)
        verified: dict[int, Draft] = {}
        proposed: dict[int, Draft] = {}
        lengths = self.control.lengths(chances)
        for context, draft, length in zip(contexts, drafts, lengths, strict=True):
            row = context.row
            if draft.tokens:
                proposed[row] = draft
            if length:
                verified[row] = cut = _cut(draft, length)
                known = len(context.tokens)
                self.table.tokens[row, known : known + length] = cut.tokens
                self._skips.pop(row, None)
            elif self.draft_model is None:
                # A draft model skips by itself, and must not be kept from reading on.
                pause = min(2 * self._skips.get(row, (0, 0))[1] + 1, _MOST_SKIPPED)
                self._skips[row] = pause, pause
        if not any(self._is_of_model(draft) for draft in drafts):
            self._ledger.owe(self._drafting_s)
        elif not verified:
            self._judge(())
        counts = np.array(
            [len(verified.get(row, NO_DRAFT).tokens) for row in rows.tolist()], np.int64
        )
        asking_s = (time.thread_time_ns() - begin_ns) * 1e-9
        self._asked = _AskedDrafts(max(asking_s - self._asking_model_s, 0.0))
        return StepDrafts(counts, verified, proposed)

    def accept(self, places: Places, tokens: IntArray, unsure: BoolArray | None) -> BoolArray:
        """Return which places count, `[places]`: those that sampling without drafts would reach.

        The first place of each row counts, and each place after a counting one whose sampled token
        is the drafted one and does not end the sequence.

        Args:
            places: The places of one row follow one another, in order.
            tokens: `[places]`, the sampled tokens.
            unsure: `[places]`, where a grammar's mask after drafted tokens is unknown; None for
                none.
        """
        table = self.table
        counts: BoolArray = places.ahead == 0
        behind = np.flatnonzero(~counts)
        if not behind.size:
            return counts
        before = behind - 1
        rows, drafted = places.rows[behind], places.ahead[behind] - 1
        holds = tokens[before] == table.tokens[rows, table.num_known[rows] + drafted]
        holds &= ~table.is_last(places[before])
        if unsure is not None:
            holds &= ~unsure[behind]
        for place, row, held in zip(behind.tolist(), rows.tolist(), holds.tolist(), strict=True):
            goes_on = held and counts[place - 1]
            counts[place] = goes_on and int(tokens[place - 1]) not in table.stop_ids[row]
        return counts

    def verdicts(
        self, step: StepDrafts, rows: IntArray, num_accepted: IntArray
    ) -> tuple[VerifiedDraft, ...]:
        """Return the result's entries for a step's drafts. `num_accepted`: `[rows]`."""
        ids = self.table.ids_of(rows).tolist()
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
        """As `CostControl.timed`, without the draft model's time. For steps one after the other."""
        self.control.timed(seconds - self._drafting_s)
        self._drafting_s = 0.0

    def observe(
        self, sampled: SampledRows, seq_ids: Sequence[int], proposed: Mapping[int, Draft]
    ) -> None:
        """Learn from a step's tokens.

        Args:
            sampled: The sampled rows.
            seq_ids: The sequences that had not ended before.
            proposed: All drafts for the step, by row of the table.
        """
        if not proposed:
            return
        begin_ns = time.thread_time_ns()
        held = np.isin(sampled.seq_ids, np.array(seq_ids, np.int64))
        rows, places = sampled.rows[held], sampled.places[held]
        if not rows.size:
            return
        firsts = np.flatnonzero(np.append(True, rows[1:] != rows[:-1]))
        tokens = self.table.tokens[rows, places].tolist()
        stops = [*firsts[1:].tolist(), len(tokens)]
        for row, start, stop in zip(rows[firsts].tolist(), firsts.tolist(), stops, strict=True):
            if (draft := proposed.get(row)) is not None:
                self.control.acceptance.settle(row, draft, tuple(tokens[start:stop]))
        if self._asked is not None:
            self._asked.seconds += (time.thread_time_ns() - begin_ns) * 1e-9

    def forget(self, seq_id: int) -> None:
        """A sequence is about to leave the table. Unknown ids are ignored."""
        row = self.table.row_of(seq_id)
        if row is not None:
            self.control.acceptance.forget(row)
            self._skips.pop(row, None)
            for source in self._all_sources:
                source.forget(row, seq_id)

    def clear(self) -> None:
        """All sequences leave the table."""
        self.control.clear()
        self._skips.clear()
        self._asked = None
        for source in self._all_sources:
            source.clear()

    @property
    def _all_sources(self) -> list[DraftSource]:
        return [*self.sources, *filter(None, (self.draft_model,))]

    def _limits(self, rows: IntArray, allowed: IntArray) -> IntArray:
        """Return the most drafted tokens of each row, `[rows]`: as allowed, as its blocks have
        room, and as its sequence may go on."""
        table = self.table
        known = table.num_known[rows]
        room = table.num_blocks[rows] * table.block_size - known
        left = table.max_tokens[rows] - table.num_generated[rows] - 1
        limits: IntArray = np.minimum(np.minimum(allowed, room), left)
        return np.maximum(limits, 0)

    def _is_of_model(self, draft: Draft | VerifiedDraft) -> bool:
        return self.draft_model is not None and draft.source == self.draft_model.name

    def _judge(self, verdicts: Sequence[VerifiedDraft]) -> None:
        """Record the draft model's drafts of a step in its ledger."""
        of_model = [each for each in verdicts if self._is_of_model(each)]
        verified = sum(each.num_tokens for each in of_model)
        took, saved = self.control.value(verified, sum(each.num_accepted for each in of_model))
        self._ledger.settle(self._drafting_s + took, saved)

    def _skipped(self, row: int) -> bool:
        left, pause = self._skips.get(row, (0, 0))
        if left:
            self._skips[row] = left - 1, pause
        return left > 0

    def _contexts(self, rows: IntArray, limits: IntArray) -> list[DraftContext]:
        """The contexts of rows of the table that are not skipped."""
        table = self.table
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
                table.num_known[rows].tolist(),
                table.num_generated[rows].tolist(),
                limits.tolist(),
                strict=True,
            )
            if not self._skipped(row)
        ]

    def _propose(self, contexts: list[DraftContext]) -> tuple[list[Draft], list[Sequence[float]]]:
        """The most promising draft of each sequence, and its chances."""
        best = [NO_DRAFT] * len(contexts)
        chances: list[Sequence[float]] = [()] * len(contexts)

        def ask(source: DraftSource) -> None:
            which = [i for i, each in enumerate(chances) if sum(each) < _ENOUGH]
            proposals = source.propose([contexts[i] for i in which])
            for index, draft in zip(which, proposals, strict=True):
                if draft.tokens:
                    row = contexts[index].row
                    if self.table.constrained[row]:
                        draft = _cut(draft, self.constraints.check_draft(row, draft.tokens))
                    expected = self.control.acceptance.expected(row, draft)
                    if sum(expected) > sum(chances[index]):
                        best[index], chances[index] = draft, expected

        for source in self.sources:
            ask(source)
        if self.draft_model is not None and self._ledger.may_ask():
            begin_ns, own_ns = time.perf_counter_ns(), time.thread_time_ns()
            ask(self.draft_model)
            self._drafting_s = (time.perf_counter_ns() - begin_ns) * 1e-9
            self._asking_model_s = (time.thread_time_ns() - own_ns) * 1e-9
        return best, chances


def _cut(draft: Draft, length: int) -> Draft:
    if length == len(draft.tokens):
        return draft
    return Draft(draft.tokens[:length], draft.likelihoods[:length], draft.source)


def make_sources(
    config: EngineConfig, table: SequenceTable, constraints: Constraints
) -> list[DraftSource]:
    """Return the cheap sources of the settings, in their order."""
    makers: dict[str, Callable[[], DraftSource]] = {
        "prediction": PredictionSource,
        "grammar": lambda: ForcedSource(constraints),
        "suffix": lambda: SuffixSource(table, config.suffix_index_tokens),
        "ngram": NgramSource,
    }
    return [makers[name]() for name in config.draft_sources]
