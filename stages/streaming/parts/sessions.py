"""Sessions: KV that is kept after a turn of a conversation."""

from __future__ import annotations

from ....bus.control import Cancel
from ....bus.parts.sessions import SessionGrant
from ....bus.steps import StartedSequence
from ..deliveries import Ending
from ..samples import RequestState, Sample
from ..step import Step
from . import Part


class Sessions(Part):
    """Reports what a turn leaves in the KV cache."""

    def started(self, sample: Sample, started: StartedSequence, step: Step) -> None:
        if (grant := SessionGrant.find(started.parts)) is not None:
            sample.request.notes[self] = grant

    def completed(
        self, request: RequestState | None, cancel: Cancel | None, ending: Ending
    ) -> None:
        if request is not None and (grant := request.notes.get(self)) is not None:
            num_tokens = sum(len(sample.token_ids) for sample in request.samples.values())
            result = grant.result(len(request.info.prompt_token_ids) + num_tokens)
            ending.fields["kv_session"] = result
