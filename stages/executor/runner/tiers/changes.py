"""Finished work of the tiers' threads, on its way to batching."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from .....bus.control import TiersChanged


class Changes(Protocol):
    """Receives changes of one kind of unit; see `TierChanges`."""

    @property
    def generation(self) -> int: ...
    def add(self, change: TiersChanged, generation: int | None = None) -> None: ...


class TierChanges:
    """Changes to be reported to batching, added and taken by any thread.

    A change of a fetch belongs to the generation in which the fetch was planned. `reset` begins
    another, and drops the changes of the one before: batching has forgotten these fetches, and
    would take them for new ones of the same blocks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._generation = 0
        self._changes: list[tuple[int | None, TiersChanged]] = []
        self._wake: Callable[[], None] = lambda: None
        self._changed = threading.Event()

    @property
    def generation(self) -> int:
        """The number of resets so far."""
        return self._generation

    def follow(self, wake: Callable[[], None]) -> None:
        """Call a function, from any thread, when there are changes to take."""
        self._wake = wake

    def add(self, change: TiersChanged, generation: int | None = None) -> None:
        """Add a change. One of an earlier generation is dropped."""
        with self._lock:
            if generation is not None and generation != self._generation:
                return
            self._changes.append((generation, change))
            self._changed.set()
        self._wake()

    def reset(self) -> None:
        """Begin another generation."""
        with self._lock:
            self._generation += 1
            self._changes = [each for each in self._changes if each[0] is None]

    def take(self) -> TiersChanged | None:
        """Return the changes since the last call as one; None for none."""
        with self._lock:
            changes = [change for _, change in self._changes]
            self._changes.clear()
            self._changed.clear()
        return _merged(changes)

    def wait(self, timeout_s: float) -> None:
        """Wait until there are changes to take."""
        self._changed.wait(timeout_s)


class StateChanges:
    """Adds the changes of snapshots to those of blocks."""

    def __init__(self, changes: TierChanges) -> None:
        self._changes = changes

    @property
    def generation(self) -> int:
        """The generation of the blocks."""
        return self._changes.generation

    def add(self, change: TiersChanged, generation: int | None = None) -> None:
        """Add a change of snapshots; see `TierChanges.add`."""
        self._changes.add(TiersChanged(states=change), generation)


def _merged(changes: Sequence[TiersChanged]) -> TiersChanged | None:
    if not changes:
        return None
    return TiersChanged(
        stored=tuple(name for each in changes for name in each.stored),
        fetched=tuple(name for each in changes for name in each.fetched),
        lost=tuple(name for each in changes for name in each.lost),
        audited=tuple(block for each in changes for block in each.audited),
        states=_merged([each.states for each in changes if each.states is not None]),
    )
