"""benchmarks/hostile.py detects broken bounds."""

from __future__ import annotations

from typing import Any

import pytest

from ..rig import load

CALM = {"sent": 100, "worst_s": 0.2, "median_s": 0.1, "lost": 0, "errors": []}
ROW = {
    **{"http": CALM, "redis": CALM, "constrained": CALM},
    **{"before_mb": 800, "after_mb": 850, "log_kb": 10, "same_processes": True},
}


def test_a_row_within_all_bounds_is_not_broken() -> None:
    assert load("hostile_rig").bounds_broken(ROW) == []


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"http": CALM | {"worst_s": 1.2}}, "waits 1.2 s over http"),
        ({"redis": CALM | {"worst_s": 60.0}}, "waits 60.0 s over redis"),
        ({"constrained": CALM | {"worst_s": 1.2}}, "waits 1.2 s over constrained"),
        ({"redis": CALM | {"lost": 1, "errors": ["x"]}}, "1 of 100 lost over redis"),
        ({"after_mb": 901}, "101 MB more"),
        ({"log_kb": 1025}, "1025 kB more in the log"),
        ({"same_processes": False}, "processes ended"),
    ],
)
def test_each_broken_bound_is_reported(changed: dict[str, Any], text: str) -> None:
    (sentence,) = load("hostile_rig").bounds_broken(ROW | changed)
    assert text in sentence


def test_every_attack_is_found_and_described() -> None:
    attacks = load("hostile_attacks").BY_NAME
    assert len(attacks) == 42
    assert all(attack.__doc__ for attack in attacks.values())
    assert set(load("hostile_surroundings").SURROUNDINGS) <= set(attacks)
