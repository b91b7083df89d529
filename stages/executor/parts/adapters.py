"""LoRA adapters, switched between two steps."""

from __future__ import annotations

from typing import ClassVar

from ....bus.control import ReplicaCapacity
from ....bus.parts.adapters import AdapterCapacity, AdaptersPlan, AdaptersResult
from ....bus.sections import with_sections
from ..driver.sampled import Sampled
from ..driver.step import LaunchedStep
from . import Part


class AdapterChanges(Part):
    """Puts staged adapters in place when a plan names their versions."""

    reads = AdaptersPlan
    changes: ClassVar[bool] = True

    def apply(self, section: AdaptersPlan, step: LaunchedStep) -> None:
        for id, version in section.changes:
            self.switch(id, version)

    def switch(self, id: str, version: int) -> None:
        """Switch an adapter's version between two steps, with the sequences that have it; see
        `AdapterTable.switch`.
        """
        state = self.state
        state.table.change_adapter(*state.runner.adapters.switch(id, version))

    def finish(self, step: LaunchedStep, sampled: Sampled) -> None:
        if sampled.adapter_versions:
            step.parts.append(AdaptersResult(sampled.adapter_versions))

    def capacity(self, found: ReplicaCapacity) -> ReplicaCapacity:
        adapters = self.state.runner.adapters.describe()
        return with_sections(found, AdapterCapacity(adapters)) if adapters else found
