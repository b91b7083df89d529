"""The plans that are under way, and what the next one has to carry."""

from __future__ import annotations

import msgspec

from ...bus.control import Cancel
from .sequence import Sequence


class SentPlan(msgspec.Struct, frozen=True):
    """A plan whose result is not back.

    Attributes:
        step_id: As in the plan.
        in_step: Whether it is a step of the running batch.
        rows: Its other rows: their tokens, and whether they sample.
        ended: As in the plan.
    """

    step_id: int
    in_step: bool
    rows: tuple[tuple[Sequence, int, bool], ...]
    ended: tuple[Cancel, ...]


class NextPlan(msgspec.Struct):
    """What happened since the last plan and goes out with the next one.

    Attributes:
        ended: Requests that were cut short.
        forget: Sequences that run no more; the executor drops what it knows of them.
        weight_version: Of weights to be put in place before the step; 0 for none.
        release: Tags of memory to be released before the step.
        retract: Whether all that runs gives up its KV first.
    """

    ended: list[Cancel] = []
    forget: list[int] = []
    weight_version: int = 0
    release: tuple[str, ...] = ()
    retract: bool = False

    @property
    def cannot_wait(self) -> bool:
        """Whether the plan is to be made though no sequence has a row in it."""
        return bool(self.ended or self.weight_version or self.release)

    @property
    def waits_for_results(self) -> bool:
        """Whether all other plans must be back before it is made: it takes KV away."""
        return self.retract or bool(self.release)
