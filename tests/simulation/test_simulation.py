"""The engine in simulated time: stories that hold, stories that fail, and what finds them."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("lupa", reason="the extra `simulation` is not installed")

from nano_inference.simulation.shrink import shrink, table_of, violations_of
from nano_inference.simulation.story import draw
from nano_inference.simulation.world import World

from .hunting import hunt
from .mutants import EVERY_DAY, MUTANTS, OLD_DEFECTS
from .planting import planted

SOAK_S = 3600.0
SEEDS = 80
"""Of short stories, in equal parts for the workers."""

PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_every_token_is_right_under_all_faults(part: int) -> None:
    failed = {}
    for seed in range(part * SEEDS // PARTS, (part + 1) * SEEDS // PARTS):
        if violations := violations_of(draw(seed, most_requests=3)):
            failed[seed] = violations[0]
    assert failed == {}


@pytest.mark.soak(only=True)
def test_every_token_is_right_in_long_stories() -> None:
    seed, until = 1_000_000, time.monotonic() + SOAK_S
    while time.monotonic() < until:
        assert violations_of(draw(seed)) == [], f"seed {seed}"
        seed += 1


def test_a_seed_runs_the_same_way_each_time() -> None:
    """With kills, and with several lanes."""
    story = draw(35, most_requests=8)
    assert story.lanes > 1
    assert {"kill", "failover"} & {fault.kind for fault in story.faults}
    first, second = World(story), World(story, trace=True)
    first.run()
    second.run()
    assert first.digest() == second.digest()
    assert second.lines
    other = World(draw(36, most_requests=8))
    other.run()
    assert other.digest() != first.digest()


@pytest.mark.parametrize("name", EVERY_DAY)
def test_planted_defects_are_found(name: str) -> None:
    defect = next(each for each in (*MUTANTS, *OLD_DEFECTS) if each.name == name)
    first = EVERY_DAY[name]
    assert hunt(defect, range(first, first + 5)) is not None


@pytest.mark.soak(only=True)
def test_all_planted_defects_are_found() -> None:
    started = time.process_time()
    missed = [each.name for each in (*MUTANTS, *OLD_DEFECTS) if hunt(each, range(400)) is None]
    assert missed == []
    assert time.process_time() - started < 600


def test_a_failing_story_is_made_short() -> None:
    """One request is enough to fail where the batch has no bound."""
    defect = next(each for each in MUTANTS if each.name == "a dispatched sequence costs no credit")
    with planted(defect):
        story = draw(0, most_requests=6)
        assert violations_of(story)
        short = shrink(story, most_runs=60)
        assert violations_of(short)
    assert len(short.requests) == 1
    assert short.faults == ()
    ((_, what, details),) = table_of(short)
    assert what.startswith("request r")
    assert "prompt of 1" in details
