"""New weights."""

from __future__ import annotations

from ..sections import Section


class WeightsPlan(Section, frozen=True):
    """In StepPlan: the version of new weights to be put in place before the pass."""

    version: int
