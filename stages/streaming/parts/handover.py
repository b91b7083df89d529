"""Handover: steps that continue a sequence before the step that handed it over has arrived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ....bus.steps import StartedSequence
from ..samples import RequestState
from ..step import Step
from . import FindRequest, Part


class _Ahead(NamedTuple):
    """A sequence that is ahead.

    Attributes:
        started: Its start on the replica that continues it.
        replica: Number of that replica.
        steps: Its shares of the replica's steps.
    """

    started: StartedSequence
    replica: int
    steps: list[Step]


class StepsAhead(Part):
    """Keeps steps of a sequence until all tokens of the replica before are absorbed."""

    def __init__(self) -> None:
        self._ahead: dict[int, _Ahead] = {}

    def hold(self, step: Step, find: FindRequest) -> Step:
        for started in step.started:
            if started.handed_over and _is_ahead(started, find):
                self._ahead[started.seq_id] = _Ahead(started, step.replica, [])
        for seq_id, ahead in self._ahead.items():
            # A step of another replica may be the missing one.
            if ahead.replica == step.replica and step.concerns({seq_id}):
                ahead.steps.append(step.share({seq_id}))
                step = step.without({seq_id})
        return step

    def release(self, find: FindRequest) -> list[Step]:
        steps: list[Step] = []
        for ahead in [*self._ahead.values()] if self._ahead else ():
            if not _is_ahead(ahead.started, find):
                del self._ahead[ahead.started.seq_id]
                steps += ahead.steps
        return steps

    def reset(self, requests: Sequence[RequestState]) -> None:
        self._ahead.clear()


def _is_ahead(started: StartedSequence, find: FindRequest) -> bool:
    """Return whether tokens are missing that another replica has made of an open request."""
    request = find(started.request_id, started.entry_id)
    if request is None:
        return False
    sample = request.samples.get(started.sample_index)
    return sample is None or len(sample.token_ids) < started.num_generated
