"""One step, or the share of a step that was held back."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

from ...bus.control import Cancel
from ...bus.messages import RowFinish, TopLogprobs
from ...bus.sections import Section
from ...bus.steps import StartedSequence, StepResult
from .samples import Sample

Row = tuple[int, float, RowFinish, TopLogprobs]
"""One row of a StepResult: token, logprob, finish reason, top logprobs."""


@dataclass(slots=True)
class Step:
    """A step, as far as it is to be absorbed.

    Attributes:
        result: The whole step.
        replica: Number of the replica that ran it.
        now_ns: When it is absorbed.
        find: Returns the running sample of a sequence in this share; else None.
        started, failed, ended: The entries of `result` that concern this share.
        sections: Sections of `result` that parts read, each with its part's `read`.
        notes: State of parts, by part.
    """

    result: StepResult
    replica: int
    now_ns: int
    find: Callable[[int], Sample | None]
    started: tuple[StartedSequence, ...]
    failed: tuple[Cancel, ...]
    ended: tuple[Cancel, ...]
    sections: list[tuple[Callable[..., Iterable[Sample]], Section]] = field(default_factory=list)
    notes: dict[Any, Any] = field(default_factory=dict)

    def concerns(self, seq_ids: set[int]) -> bool:
        """Return whether the step is about one of these sequences."""
        return (
            not seq_ids.isdisjoint(self.result.seq_ids)
            or any(each.seq_id in seq_ids for each in self.started)
            or any(section.concerns(seq_ids) for _, section in self.sections)
        )

    def ends(self, request_id: str) -> bool:
        """Return whether the step ends a request early."""
        return any(each.request_id == request_id for each in (*self.failed, *self.ended))

    def share(self, seq_ids: Container[int], request_id: str = "") -> Step:
        """Return the share of some sequences, with early ends of one request."""
        share = self._of(lambda seq_id: seq_id in seq_ids)
        share.failed = tuple([each for each in self.failed if each.request_id == request_id])
        share.ended = tuple([each for each in self.ended if each.request_id == request_id])
        return share

    def without(self, seq_ids: Container[int]) -> Step:
        """Return the share of all other sequences, with all early ends."""
        return self._of(lambda seq_id: seq_id not in seq_ids)

    def _of(self, has: Callable[[int], bool]) -> Step:
        find = self.find
        return replace(
            self,
            find=lambda seq_id: find(seq_id) if has(seq_id) else None,
            started=tuple([each for each in self.started if has(each.seq_id)]),
        )

    def rows(self) -> Iterable[tuple[int, Sequence[Row]]]:
        """Return each sequence's rows; only with drafts may it have several."""
        result = self.result
        rows = zip(
            result.token_ids,
            result.logprobs,
            result.finish_reasons,
            result.top_logprobs or ((),) * len(result.seq_ids),
            strict=True,
        )
        if len(set(result.seq_ids)) == len(result.seq_ids):
            return zip(result.seq_ids, zip(rows), strict=True)
        pairs = zip(result.seq_ids, rows, strict=True)
        by_sequence = groupby(pairs, itemgetter(0))
        return [(seq_id, [pair[1] for pair in some]) for seq_id, some in by_sequence]
