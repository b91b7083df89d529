"""The engine in simulated time: stories that hold, stories that fail, and what finds them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import islice

import pytest

from .found import EVERY_DAY, FOUND
from .guarded import GUARDED
from .hunting import hunt, stories
from .mutants import MUTANTS, OLD_DEFECTS
from .planting import ROOT, Defect, planted
from .shrink import shrink, table_of, violations_of
from .story import GATEWAY_DIGITS, draw, shorten
from .world import World

SOAK_S = 3600 * float(os.environ.get("HOURS", "1"))
"""`make soak HOURS=6` searches for longer."""
SEEDS = 120
"""Number of short stories, most of them in memory, in equal parts for the workers."""

ON_REDIS = (0, GATEWAY_DIGITS[0])
"""Last digits of the seeds whose stories run on Redis."""

HOLD_NOW = (
    5002017,  # three replicas crash in turn, and the request on them is given up
    5002031,  # two processes of a lane start at once
)

PARTS = 4

HUNT_S = 600.0
"""Processor time in which all planted defects are found."""


@pytest.mark.parametrize("part", range(PARTS))
def test_every_token_is_right_under_all_faults(part: int) -> None:
    failed = {}
    for seed in range(part * SEEDS // PARTS, (part + 1) * SEEDS // PARTS):
        story = shorten(draw(seed, most_requests=3), in_memory=seed % 10 not in ON_REDIS)
        if violations := violations_of(story):
            failed[seed] = violations[0]
    assert failed == {}


@pytest.mark.soak(only=True)
def test_every_token_is_right_in_long_stories() -> None:
    seed, until = 1_000_000, time.monotonic() + SOAK_S
    while time.monotonic() < until:
        assert violations_of(draw(seed)) == [], f"seed {seed}"
        seed += 1


@pytest.mark.parametrize("seed", HOLD_NOW)
def test_stories_that_once_failed_hold(seed: int) -> None:
    assert violations_of(draw(seed, most_requests=10)) == []


@pytest.mark.parametrize("name", sorted({each for each in FOUND.values() if isinstance(each, str)}))
def test_kept_stories_hold(name: str) -> None:
    """Each violates a promise where its defect is planted, so it holds that promise every day."""
    assert violations_of(next(stories(name))) == []


def test_a_seed_runs_the_same_way_each_time() -> None:
    """With kills, and with several lanes."""
    story = draw(285, most_requests=8)
    assert story.lanes > 1
    assert {"kill", "failover"} & {fault.kind for fault in story.faults}
    first, second = World(story), World(story, trace=True)
    first.run()
    second.run()
    assert first.digest() == second.digest()
    assert second.lines
    other = World(draw(286, most_requests=8))
    other.run()
    assert other.digest() != first.digest()


@pytest.mark.parametrize("seed", [4, 6])
def test_a_seed_with_gateways_runs_the_same_way_each_time(seed: int) -> None:
    """On each bus."""
    story = draw(seed, most_requests=4)
    first, second = World(story), World(story, trace=True)
    first.run()
    second.run()
    assert first.digest() == second.digest()
    assert first.answers
    assert not first.violations


def test_planted_defects_stand_in_the_code() -> None:
    """A defect whose place has changed must be planted anew, or it is looked for no more."""
    defects = (*MUTANTS, *OLD_DEFECTS)
    counts = {each.name: (ROOT / each.file).read_text().count(each.old) for each in defects}
    assert len(counts) == len(defects)
    assert {name: count for name, count in counts.items() if count != 1} == {}
    assert set(FOUND) == {each.name for each in (*MUTANTS, *OLD_DEFECTS)}
    text = (ROOT / "docs/simulation.md").read_text()
    rows = {
        "planted defects found": MUTANTS,
        "recovery defects found again": OLD_DEFECTS,
        "planted defects found by a room's test alone": GUARDED,
    }
    assert [row for row, found in rows.items() if f"| {row} | {len(found)} |" not in text] == []


@pytest.mark.parametrize("name", EVERY_DAY)
def test_planted_defects_are_found(name: str) -> None:
    defect = next(each for each in (*MUTANTS, *OLD_DEFECTS) if each.name == name)
    assert hunt(defect, islice(stories(FOUND[name]), 5)) is not None


@pytest.mark.parametrize(("defect", "finds"), GUARDED, ids=[each.name for each, _ in GUARDED])
def test_defects_that_something_makes_up_for_are_found_by_their_test(
    defect: Defect, finds: Callable[[], object]
) -> None:
    finds()
    with planted(defect), pytest.raises((AssertionError, LookupError, pytest.fail.Exception)):
        finds()


@pytest.mark.soak(only=True)
def test_all_planted_defects_are_found() -> None:
    started = time.process_time()
    found = {
        each.name: hunt(each, stories(FOUND[each.name]), 60) for each in (*MUTANTS, *OLD_DEFECTS)
    }
    assert [name for name, each in found.items() if each is None] == []
    assert time.process_time() - started < HUNT_S


def test_a_failing_story_is_made_short() -> None:
    """One request is enough to fail where the batch has no bound."""
    defect = next(each for each in MUTANTS if each.name == "a dispatched sequence costs no credit")
    with planted(defect):
        story = shorten(draw(1, most_requests=6), in_memory=True)
        assert violations_of(story)
        short = shrink(story, most_runs=60)
        assert violations_of(short)
    assert len(short.requests) == 1
    assert short.faults == ()
    ((_, what, details),) = table_of(short)
    assert what.startswith("request r")
    assert "prompt of 1" in details
