"""Replicas whose host has vanished, by the reports that are missing."""

from __future__ import annotations

from collections.abc import Sequence

from nano_inference.stages.admission.vanished import VanishedReplicas
from nano_inference.store.board import StageReport

FRONT = ("admission", "fairness", "streaming")
FIRST, SECOND = ("batching", "executor"), ("batching.1", "executor.1")
ALL = (*FRONT, *FIRST, *SECOND)


def reports(
    roles: Sequence[str], *, elsewhere: Sequence[str] = SECOND, own_age_s: float = 0.5
) -> list[StageReport]:
    return [
        StageReport(
            lane="a",
            stage=role,
            incarnation=role,
            host="b" if role in elsewhere else "a",
            pid=1,
            epoch=1,
            state="ready",
            age_s=own_age_s if role == "admission" else 0.5,
        )
        for role in roles
    ]


def test_a_host_that_reports_no_more_is_found_at_the_second_look() -> None:
    vanished = VanishedReplicas("a", "a")
    left = reports((*FRONT, *FIRST))
    assert vanished.look(reports(ALL), ALL[1:]) == []
    assert vanished.look(left, ALL[1:]) == []
    (role,) = vanished.look(left, ALL[1:])
    assert role in SECOND
    assert vanished.look(left, (*FRONT[1:], *FIRST)) == [], "it takes part no more"


def test_a_report_in_between_counts() -> None:
    vanished = VanishedReplicas("a", "a")
    for seen in (ALL, (*FRONT, *FIRST), ALL, (*FRONT, *FIRST)):
        assert vanished.look(reports(seen), ALL[1:]) == []


def test_replicas_with_a_supervisor_here_or_without_a_peer_are_ignored() -> None:
    left = reports((*FRONT, *FIRST))

    def looks(first: list[StageReport], then: list[StageReport]) -> list[str]:
        vanished = VanishedReplicas("a", "a")
        return [role for seen in (first, *3 * [then]) for role in vanished.look(seen, ALL[1:])]

    assert looks(reports(ALL), left)
    # Of this host: its supervisor knows.
    assert looks(reports(ALL, elsewhere=()), left) == []
    # No report is newer than the bus's return.
    assert looks(reports(ALL), reports((*FRONT, *FIRST), own_age_s=8.0)) == []
    # There is no other replica.
    assert looks(reports(ALL, elsewhere=(*FIRST, *SECOND)), reports(FRONT)) == []
    assert looks(reports(ALL), reports(())) == []
