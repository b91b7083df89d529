"""A search for planted defects by simulations of seed after seed."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from nano_inference.simulation.story import draw
from nano_inference.simulation.world import World

from .planting import Defect, planted


class Found(NamedTuple):
    """How a defect was found: the seed, what was wrong, and after how many seconds."""

    seed: int
    what: str
    seconds: float


def hunt(defect: Defect, seeds: Iterable[int]) -> Found | None:
    """Return the first seed that finds a defect; None if none does."""
    started = time.process_time()
    with planted(defect):
        for seed in seeds:
            world = World(draw(seed, most_requests=10))
            world.run()
            if world.violations:
                return Found(seed, world.violations[0], time.process_time() - started)
    return None
