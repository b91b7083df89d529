"""Columns of tokens: a value of an optional feature for each token."""

from __future__ import annotations

from collections.abc import Iterable

from ....bus.parts.columns import TokenColumns
from ..samples import Sample
from ..step import Step
from . import Part


class PerToken(Part):
    """Appends a step's columns to its samples; the tokens follow."""

    reads = TokenColumns

    def read(self, section: TokenColumns, step: Step) -> Iterable[Sample]:
        for name, values in section.columns.items():
            for seq_id, value in zip(step.result.seq_ids, values, strict=True):
                if value is not None and (sample := step.find(seq_id)) is not None:
                    sample.columns.setdefault(name, []).append(value)
        return ()
