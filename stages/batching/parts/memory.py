"""Release of device memory."""

from __future__ import annotations

from ....bus.control import MemoryState, ReplicaCapacity
from ....bus.parts.memory import ReleasePlan
from ....config import EngineConfig
from ..plans import PlanDraft
from . import Core, Part


class MemoryRelease(Part):
    """Releases memory with the next plan; no steps are planned while memory is lacking.

    Without the KV cache, all prefixes are forgotten and running sequences compute theirs again.
    """

    handles = (MemoryState,)

    def __init__(self, core: Core, config: EngineConfig, capacity: ReplicaCapacity) -> None:
        super().__init__(core, config, capacity)
        self._release: tuple[str, ...] = ()

    def receive(self, message: MemoryState, now_ns: int, deadline_ns: int | None) -> None:
        self.core.lacks, self._release = message.lacks, message.release
        if message.release:
            # Plans in flight must be back, also if no sequence loses its KV.
            self.core.recompute(lambda seq: "kv_cache" in message.release)

    def begin(self, now_ns: int) -> None:
        if "kv_cache" in self._release:
            self.core.cache.forget_device()

    def is_urgent(self) -> bool:
        return bool(self._release)

    def planned(self, draft: PlanDraft) -> None:
        if self._release:
            draft.parts.append(ReleasePlan(self._release))
            self._release = ()

    def reset(self) -> None:
        self._release = ()
