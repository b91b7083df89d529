"""Release of device memory."""

from __future__ import annotations

from ..sections import Section


class ReleasePlan(Section, frozen=True):
    """In StepPlan: memory to be released.

    No plan before has rows, nor has any until the memory is resumed.
    """

    tags: tuple[str, ...]
