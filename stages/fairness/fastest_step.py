"""The shortest time that a request can take."""

from __future__ import annotations

from math import ceil

from ...bus.messages import AdmittedRequest

WINDOW = 256
"""Reports per window; the fastest step of the last two windows counts."""

CAUTION = 0.5
"""Factor on the fastest step, since steps of an emptier batch are faster."""


class FastestStep:
    """The fastest recent step, a lower bound on the time of requests.

    A sequence gains at most one token per step, and as many more as may be drafted for it.
    """

    def __init__(self, max_draft_tokens: int = 0) -> None:
        """`max_draft_tokens`: of a sequence in one step; 0 without speculation."""
        self._max_draft_tokens = max_draft_tokens
        self._now_ns = self._before_ns = 0
        self._seen = 0

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
