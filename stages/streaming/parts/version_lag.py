"""Samples that would be too old: flagged, cut, or begun anew. docs/rl.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ....bus.control import Cancel
from ....bus.parts.version_lag import VersionLagLimit
from ....bus.public import VersionLag
from ....bus.steps import StartedSequence
from ..deliveries import Deliveries, Ending
from ..samples import RequestState, Sample
from ..step import Step
from . import Part


class _Limited(NamedTuple):
    """A running sample with a limit, and the replica that runs it."""

    limit: VersionLagLimit
    replica: int


class VersionLags(Part):
    """Compares the oldest token of each sample with a limit to the weights in place.

    A step is the first of new weights, or the first of a sample that has tokens: before its tokens
    are added, samples beyond their limit end or begin anew. So no sample has tokens further apart
    than its limit allows, unless it is only flagged.
    """

    def __init__(self) -> None:
        self._running: dict[Sample, _Limited] = {}
        self._newest: dict[int, int] = {}  # by replica
        self._resumed: list[Sample] = []
        self._retractions: dict[Sample, int] = {}

    def started(self, sample: Sample, started: StartedSequence, step: Step) -> None:
        limit = VersionLagLimit.find(sample.request.info.parts)
        if limit is not None:
            self._running[sample] = _Limited(limit, step.replica)
            if sample.token_ids:
                self._resumed.append(sample)

    def cut(self, step: Step, deliveries: Deliveries) -> Iterable[Sample]:
        newest, resumed = step.result.weight_version, self._resumed
        if newest == self._newest.get(step.replica) and not resumed:
            return ()
        changed = self._newest.get(step.replica) != newest
        self._newest[step.replica], self._resumed = newest, []
        if not self._running:
            return ()
        about = [
            (sample, limited.limit)
            for sample, limited in self._running.items()
            if limited.replica == step.replica and (changed or sample in resumed)
        ]
        beyond = [
            sample
            for sample, limit in about
            if limit.beyond != "flag" and _lag(sample, newest) > limit.most
        ]
        return self._cut(beyond, deliveries)

    def _cut(self, samples: Iterable[Sample], deliveries: Deliveries) -> Iterable[Sample]:
        """Yield each sample once it has its end: with the last one its request ends."""
        for sample in samples:
            deliveries.halts.append(sample.seq_id)
            request = sample.request
            if self._running[sample].limit.beyond == "retract":
                sample.retracted = True
                deliveries.retracted.setdefault(request.key, []).append(sample.index)
            else:
                text = sample.abort()
                if request.info.stream:
                    chunk = sample.chunk(len(sample.token_ids), text)
                    deliveries.add(request.info.request_id, chunk)
            yield sample

    def finished(self, sample: Sample, unused: int, deliveries: Deliveries) -> None:
        self.stopped(sample)

    def stopped(self, sample: Sample) -> None:
        if sample.retracted:
            del self._running[sample]
            self._retractions[sample] = self._retractions.get(sample, 0) + 1
            sample.begin_anew()
            return
        limited = self._running.pop(sample, None)
        if limited is not None:
            newest = self._newest.get(limited.replica, 0)
            number = self._retractions.get(sample, 0)
            sample.fields["version_lag"] = _result(sample, newest, limited.limit, number)

    def completed(
        self, request: RequestState | None, cancel: Cancel | None, ending: Ending
    ) -> None:
        if request is None or not (self._retractions or request.restored):
            return
        limit = VersionLagLimit.find(request.info.parts)
        for sample in request.samples.values():
            self._retractions.pop(sample, None)
            if limit is not None and "version_lag" not in sample.fields:
                # It ended before a failure of this stage.
                newest = max(sample.weight_version, 0)
                sample.fields["version_lag"] = _result(sample, newest, limit, 0)

    def dropped(self, request: RequestState) -> None:
        for sample in request.samples.values():
            self._retractions.pop(sample, None)

    def reset(self, requests: object) -> None:
        self._running.clear()
        self._newest.clear()
        self._resumed = []


def _lag(sample: Sample, newest: int) -> int:
    """Return how many versions a sample's oldest token is behind; 0 without tokens."""
    versions = [version for version, _ in sample.weight_versions]
    return max(0, newest - min(versions)) if versions else 0


def _result(sample: Sample, newest: int, limit: VersionLagLimit, retractions: int) -> VersionLag:
    lag = _lag(sample, newest)
    if limit.beyond == "cut" and lag > limit.most:
        return VersionLag(versions=lag, outcome="cut")
    outcome = "flagged" if lag > limit.most else "retracted" if retractions else "within"
    return VersionLag(versions=lag, outcome=outcome, num_retractions=retractions)  # type: ignore[arg-type]
