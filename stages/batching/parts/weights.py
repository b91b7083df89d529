"""New weights."""

from __future__ import annotations

from ....bus.control import ReplicaCapacity, WeightsReady
from ....bus.parts.weights import WeightsPlan
from ....config import EngineConfig
from ..plans import PlanDraft
from . import Core, Part


class WeightChanges(Part):
    """Puts new weights in place with the next plan.

    No sequence that starts from then on finds KV of older weights, nor KV of sequences that run
    across the change.
    """

    handles = (WeightsReady,)

    def __init__(self, core: Core, config: EngineConfig, capacity: ReplicaCapacity) -> None:
        super().__init__(core, config, capacity)
        self._version = 0  # to put in place; 0 for none

    def receive(self, message: WeightsReady, now_ns: int, deadline_ns: int | None) -> None:
        why = "the weights were replaced, and requests in flight were to end"
        self.core.interrupt(message.in_flight, why)
        if any(seq.pools for seq in self.core.running):
            # A prompt's vector has to be of one version.
            self.core.recompute(lambda seq: seq.pools)
        self._version = message.version

    def begin(self, now_ns: int) -> None:
        if self._version:
            self.core.cache.begin_weight_version(self._version)
            # Weights that hold nothing are replaced only by a complete set.
            self.core.lacks = tuple(tag for tag in self.core.lacks if tag != "weights")

    def is_urgent(self) -> bool:
        return self._version > 0

    def planned(self, draft: PlanDraft) -> None:
        if self._version:
            draft.parts.append(WeightsPlan(self._version))
            self._version = 0

    def reset(self) -> None:
        self._version = 0
