"""How fast the device can be, as far as was seen."""

from __future__ import annotations

from math import ceil

from ...bus.messages import AdmittedRequest

WINDOW = 256
"""Reports after which the fastest step of before begins to be forgotten."""

CAUTION = 0.5
"""A step may take so much of the fastest that was seen lately: an emptier batch is faster."""


class FastestStep:
    """The fastest step lately, from which follows what certainly can't be done in time.

    A sequence gains at most one token with each step, and as many more as may be drafted for it.
    """

    def __init__(self, max_draft_tokens: int = 0) -> None:
        """`max_draft_tokens`: of a sequence in one step; 0 where nothing is drafted."""
        self._max_draft_tokens = max_draft_tokens
        self._now_ns = self._before_ns = 0
        self._seen = 0

    def add(self, step_ns: int) -> None:
        """A step took this long."""
        if self._seen == WINDOW:
            self._before_ns, self._now_ns, self._seen = self._now_ns, 0, 0
        self._seen += 1
        self._now_ns = min(self._now_ns or step_ns, step_ns)

    @property
    def least_step_ns(self) -> float:
        """What the shortest step may take; 0 as long as nothing was seen."""
        seen = [step_ns for step_ns in (self._now_ns, self._before_ns) if step_ns]
        return CAUTION * min(seen, default=0)

    def least_ns(self, request: AdmittedRequest) -> float:
        """What a sample may take at the least; 0 as long as no step was seen."""
        drafted, own = self._max_draft_tokens, request.sampling.max_draft_tokens
        if own is not None:
            drafted = min(drafted, own)
        return ceil(least_tokens(request) / (1 + drafted)) * self.least_step_ns


def least_tokens(request: AdmittedRequest) -> int:
    """Tokens that a sample has at the least."""
    sampling = request.sampling
    may_stop = sampling.stop_token_ids or request.has_stop_strings
    return max(1, sampling.min_tokens) if may_stop else sampling.max_tokens
