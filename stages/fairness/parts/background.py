"""Background: sequences of the lowest priority run while nothing else does."""

from __future__ import annotations

from collections.abc import Sequence

from ....config import BACKGROUND
from ..queue import Running, Waiting
from . import Part


class Background(Part):
    """Holds requests of the class `BACKGROUND` back, and pauses its sequences, while others wait
    or run. Their KV stays until it is needed."""

    def may_run(self, waiting: Waiting) -> bool:
        return waiting.request.priority != BACKGROUND or self._room > 0

    def yields(self, now_ns: int) -> Sequence[Running]:
        if self._room >= 0:
            return ()
        staying = [
            running
            for replica in self.core.replicas.values()
            for running in replica.running.values()
            if running.request.priority == BACKGROUND
            and not running.leaving
            # Paused before it is handed over, it would keep its place on the other replica, which
            # the requests that it is to let pass need.
            and running.successor in ("", running.replica)
        ]
        asked = sorted(staying, key=lambda running: running.order)
        asked = asked[self.core.config.background_beside :]
        for running in asked:
            self.core.replicas[running.replica].ask_to_pause(running, now_ns)
        return asked

    @property
    def _room(self) -> int:
        """How many more of its sequences may run; below 0 if some must pause."""
        background = self.core.queue.class_of(BACKGROUND)
        if background is None:
            return 0
        if self.core.queue.num_classes == 1:
            return 1
        return self.core.config.background_beside - background.num_running
