"""Recurrent states in a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from ..batch import IntArray, Rows
from ..state.segments import Segments, segments_of
from .find import Mixers


class StateStep(msgspec.Struct, frozen=True):
    """The recurrent states that one step reads and writes.

    Attributes:
        mixers: The model's mixers.
        segments: The batch, cut where states are saved.
        fresh: State slots of sequences that begin, whose state is zero.
    """

    mixers: Mixers
    segments: Segments
    fresh: IntArray

    @classmethod
    def of(cls, mixers: Mixers, rows: Rows) -> StateStep:
        """Return those of a step. Raises ValueError if its rows have no slots."""
        segments = segments_of(rows)
        assert rows.states is not None
        return cls(mixers, segments, rows.states[rows.starts == 0])

    @contextmanager
    def active(self, cache: Any) -> Iterator[None]:
        """Context in which mixers read and write the states of a KVCache."""
        for slot in self.fresh.tolist():
            cache.drop(slot)
        with self.mixers.active(self.segments, cache.recurrent):
            yield
