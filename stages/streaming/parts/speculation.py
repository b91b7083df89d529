"""Counts of drafted tokens."""

from __future__ import annotations

from collections.abc import Iterable

from ....bus.control import Cancel
from ....bus.parts.speculation import DraftsResult
from ..deliveries import Deliveries, Ending
from ..samples import RequestState, Sample
from ..step import Step
from . import Part

DRAFTED, ACCEPTED = "num_draft_tokens", "num_accepted_draft_tokens"


class DraftCounts(Part):
    """Counts the drafted tokens that were verified since this object exists."""

    reads = DraftsResult

    def read(self, section: DraftsResult, step: Step) -> Iterable[Sample]:
        for draft in section.verified:
            if (sample := step.find(draft.seq_id)) is not None:
                fields = sample.fields
                fields[DRAFTED] = fields.get(DRAFTED, 0) + draft.num_tokens
                fields[ACCEPTED] = fields.get(ACCEPTED, 0) + draft.num_accepted
        return ()

    def finished(self, sample: Sample, unused: int, deliveries: Deliveries) -> None:
        # Tokens accepted after a stop string are not part of the answer.
        if unused:
            sample.fields[ACCEPTED] -= unused

    def completed(
        self, request: RequestState | None, cancel: Cancel | None, ending: Ending
    ) -> None:
        samples = () if request is None else request.samples.values()
        drafted = sum(sample.fields.get(DRAFTED, 0) for sample in samples)
        accepted = sum(sample.fields.get(ACCEPTED, 0) for sample in samples)
        ending.usage["accepted_prediction_tokens"] = accepted
        ending.usage["rejected_prediction_tokens"] = drafted - accepted
