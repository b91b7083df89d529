"""Recurrent states of sequences, and their snapshots."""

from __future__ import annotations

from ....bus.control import ReplicaCapacity
from ....bus.parts.states import StateCapacity, StatePlan
from ....bus.sections import with_sections
from ..driver.states import SequenceStates
from ..driver.step import LaunchedStep
from ..runner.interface import count_scratch, slot_bytes
from . import ExecutorState, Part


class RecurrentStates(Part):
    """Makes the snapshots of plans.

    Attributes:
        of_sequences: The states of the sequences in the table.
    """

    reads = StatePlan

    def __init__(self, state: ExecutorState) -> None:
        super().__init__(state)
        self.of_sequences = SequenceStates(
            state.table, state.runner.cache, count_scratch(state.config, state.model)
        )
        state.steps.states = self.of_sequences

    def apply(self, section: StatePlan, step: LaunchedStep) -> None:
        self.of_sequences.plan(section.saves)

    def reset(self) -> None:
        self.of_sequences.clear()

    def capacity(self, found: ReplicaCapacity) -> ReplicaCapacity:
        num_snapshots = self.state.runner.cache.num_snapshots
        return with_sections(found, StateCapacity(num_snapshots, slot_bytes(self.state.model)))
