"""Columns of tokens."""

from __future__ import annotations

from ....bus.parts.columns import TokenColumns
from ..driver.sampled import Sampled
from ..driver.step import LaunchedStep
from . import Part


class PerToken(Part):
    """Reports the values of optional features for a step's tokens."""

    def finish(self, step: LaunchedStep, sampled: Sampled) -> None:
        if sampled.columns:
            step.parts.append(TokenColumns(dict(sampled.columns)))
