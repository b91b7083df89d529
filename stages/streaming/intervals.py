"""The time between two tokens of a sample, for metrics: told by the step, not by the token."""

from __future__ import annotations

from collections.abc import Sequence

_KEPT = 256
"""Sequences that have ended that may be left, besides those of a step, before all are dropped."""


class TokenIntervals:
    """When each sequence had its last token.

    All that sampled in one step also did so in the one before, but for a few that stood aside, so
    there are few different times among them: each is told once for a step, and a step costs some
    microseconds, however many sequences it has.
    """

    def __init__(self) -> None:
        self._last_ns: dict[int, int] = {}

    def step(self, seq_ids: Sequence[int], end_ns: int) -> list[int]:
        """Takes a step's rows; returns the different times since their last tokens, in
        nanoseconds, those of first tokens left out."""
        before = set(map(self._last_ns.get, seq_ids)) - {None}
        now = dict.fromkeys(seq_ids, end_ns)
        if len(self._last_ns) > 2 * len(seq_ids) + _KEPT:
            self._last_ns = now
        else:
            self._last_ns.update(now)
        return sorted(end_ns - last_ns for last_ns in before if last_ns is not None)

    def clear(self) -> None:
        """A new epoch: the sequence ids begin anew."""
        self._last_ns.clear()
