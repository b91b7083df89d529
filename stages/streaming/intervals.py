"""The time between two tokens of a sample, for metrics: told by the step, not by the token."""

from __future__ import annotations

from collections.abc import Sequence

_KEPT = 256
"""Sequences that have ended that may be left, besides those of a step, before all are dropped."""


class TokenIntervals:
    """When each sequence had its last token.

    Nearly all sequences of a step were in the step before, so there are few different intervals.
    Each is given once for a step, however many sequences have it; so a step costs microseconds.
    """

    def __init__(self) -> None:
        self._last_ns: dict[int, int] = {}

    def step(self, seq_ids: Sequence[int], end_ns: int) -> list[int]:
        """Takes the sequences that sampled in a step.

        Returns:
            The different times since their last tokens, in nanoseconds. Sequences with their first
            token have none.
        """
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
