"""Hopeless requests: the shortest time that a request can take is longer than it has."""

from __future__ import annotations

from math import ceil

from ....bus.messages import AdmittedRequest, Credit
from ..queue import Waiting
from ..replicas import Replica
from ..state import FairnessState
from . import Part

WINDOW = 256
"""Reports per window; the fastest step of the last two windows counts."""

CAUTION = 0.5
"""Factor on the fastest step, since steps of an emptier batch are faster."""


class FastestStep(Part):
    """The fastest recent step, a lower bound on the time of requests.

    A sequence gains at most one token per step, and as many more as may be drafted for it.
    """

    def __init__(self, core: FairnessState, max_draft_tokens: int = 0) -> None:
        """`max_draft_tokens`: of a sequence in one step; 0 without speculation."""
        super().__init__(core)
        self._max_draft_tokens = max_draft_tokens
        self._now_ns = self._before_ns = self._seen = 0

    def reset(self, epoch: int) -> None:
        self._now_ns = self._before_ns = self._seen = 0

    def absorbed(self, replica: Replica, report: Credit) -> None:
        if report.step_ns:
            self.add(report.step_ns)

    def is_hopeless(self, waiting: Waiting, now_ns: int) -> bool:
        """Whether a request would miss its deadline even alone on the device."""
        deadline_ns, config = waiting.deadline_ns, self.core.config
        if deadline_ns is None or not waiting.untouched or not config.expire_hopeless:
            return False
        return now_ns + self.least_ns(waiting.request) > deadline_ns

    def add(self, step_ns: int) -> None:
        """Add the duration of a step."""
        if self._seen == WINDOW:
            self._before_ns, self._now_ns, self._seen = self._now_ns, 0, 0
        self._seen += 1
        self._now_ns = min(self._now_ns or step_ns, step_ns)

    @property
    def least_step_ns(self) -> float:
        """The shortest time of a step; 0 before the first."""
        seen = [step_ns for step_ns in (self._now_ns, self._before_ns) if step_ns]
        return CAUTION * min(seen, default=0)

    def least_ns(self, request: AdmittedRequest) -> float:
        """Return the shortest time of a sample; 0 before the first step."""
        drafted, own = self._max_draft_tokens, request.sampling.max_draft_tokens
        if own is not None:
            drafted = min(drafted, own)
        return ceil(least_tokens(request) / (1 + drafted)) * self.least_step_ns


def least_tokens(request: AdmittedRequest) -> int:
    """Return the fewest tokens that a sample can have."""
    sampling = request.sampling
    may_stop = sampling.stop_token_ids or request.has_stop_strings
    return max(1, sampling.min_tokens) if may_stop else sampling.max_tokens
