"""Replicas whose host has vanished: no message reports their end, and their own reports stop."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ...config import split_role
from ...store.board import StageReport
from .participants import is_replicated

WATCH_S = 2.5
"""Interval between two looks at the board, in seconds."""

_FRESH_S = 2.0
_MOST_MISSES = 2


class VanishedReplicas:
    """Finds stages of other hosts that take part and report no more.

    The end of a process on this host is known from its supervisor. A stage that was only slow joins
    the lane again with its next message.
    """

    def __init__(self, host: str, lane: str) -> None:
        """Args: this host's name, and the lane's."""
        self._host = host
        self._lane = lane
        # Of each role the host that it last reported from, and the looks that missed it since.
        self._hosts: dict[str, str] = {}
        self._misses: dict[str, int] = {}

    def look(self, reports: Iterable[StageReport], taking_part: Collection[str]) -> list[str]:
        """Return a role of each replica that has vanished; none while no other replica reports,
        which could take their requests over.

        Args:
            reports: Reports of the board, which drops those older than `STALE_AFTER_S`.
            taking_part: Roles in the current epoch.
        """
        here = [report for report in reports if report.lane == self._lane]
        own = [report.age_s for report in here if report.stage == "admission"]
        if min(own, default=_FRESH_S) >= _FRESH_S:
            return []  # the bus was away, or this process was stopped
        reported = {report.stage for report in here}
        self._hosts |= {report.stage: report.host for report in here}
        missing = {
            role
            for role in taking_part
            if is_replicated(role)
            and role not in reported
            and self._hosts.get(role, self._host) != self._host
        }
        self._misses = {role: self._misses.get(role, 0) + 1 for role in missing}
        lost = {
            split_role(role)[1]: role
            for role, misses in self._misses.items()
            if misses >= _MOST_MISSES
        }
        gone = {split_role(role)[1] for role in missing}
        others = {split_role(role)[1] for role in reported if is_replicated(role)} - gone
        return [lost[replica] for replica in sorted(lost)] if others else []
