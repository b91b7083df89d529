"""Preemption: sequences pause for requests of high priority."""

from __future__ import annotations

from collections.abc import Sequence

from ....config import FairnessConfig
from ..queue import PriorityClass, Running
from ..replicas import Replica
from . import Part


class Preemption(Part):
    """Makes room for a class of high priority, at the cost of lower effective priorities."""

    def configure(self, config: FairnessConfig) -> None:
        for replica in self.core.replicas.values():
            replica.configure(self.core.is_preemptible)

    def pauses(
        self, full: Sequence[Replica], first: PriorityClass, now_ns: int
    ) -> Sequence[Running]:
        core, asked = self.core, list[Running]()
        config = core.config
        if not config.enable_preemption or first.priority < config.high_priority_threshold:
            return asked
        level = first.level(now_ns)
        while core.num_leaving < first.num_sequences:
            lowest = [running for replica in full if (running := replica.lowest()) is not None]
            victim = min(lowest, key=lambda running: (running.level, -running.order), default=None)
            if victim is None or victim.level >= level:
                break
            core.replicas[victim.replica].ask_to_pause(victim, now_ns, preempted=True)
            asked.append(victim)
        return asked
