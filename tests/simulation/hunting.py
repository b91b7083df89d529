"""A search for planted defects by simulations of seed after seed."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from .planting import Defect, planted
from .story import MOST_REQUESTS, Story, draw
from .world import World

STORY_S = 20.0
"""Processor time after which a story is taken for endless; that of a throng takes six seconds."""

Known = tuple[int, int] | str
"""The key that finds a defect: a seed and the most requests of its story, or the name of a kept
story.
"""


class Found(NamedTuple):
    """A found defect: the story, the violation, and the seconds until it was found."""

    story: Story
    what: str
    seconds: float


class Endless(Exception):
    """A story doesn't end."""


def hunt(defect: Defect, stories: Iterable[Story], most_s: float = 1e9) -> Found | None:
    """Return the first story that finds a defect; None if none does, or none within `most_s`."""
    started = time.process_time()
    with planted(defect):
        for story in stories:
            with _watched():
                world = World(story)
                world.run()
            seconds = time.process_time() - started
            if world.violations:
                return Found(story, world.violations[0], seconds)
            if seconds > most_s:
                break
    return None


def stories(known: Known | None = None, first: int = 0) -> Iterator[Story]:
    """Return stories to try: the one that is known to find a defect, and then short and long ones
    in turn."""
    if isinstance(known, str):
        raw = (Path(__file__).parent / "stories" / f"{known}.json").read_bytes()
        yield msgspec.json.decode(raw, type=Story)
    elif known is not None:
        yield draw(*known)
    for seed in range(first, first + 100_000):
        yield draw(seed, most_requests=10 if seed % 4 else MOST_REQUESTS)


@contextmanager
def _watched() -> Iterator[None]:
    """Raise an error in a story that doesn't end."""

    def end(*_: Any) -> None:
        raise Endless

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, STORY_S, STORY_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
