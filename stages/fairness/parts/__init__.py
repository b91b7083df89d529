"""Optional parts of fairness, a module for each."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ....bus.messages import AdmittedRequest, Credit
from ....bus.sections import Section
from ....config import FairnessConfig, ReplicaRole
from ...parts import Part as BasePart
from ..queue import PriorityClass, Running, Waiting
from ..replicas import Replica
from ..state import FairnessState


class Part(BasePart):
    """Base class of parts."""

    def __init__(self, core: FairnessState) -> None:
        self.core = core

    def reset(self, epoch: int) -> None:
        """An epoch begins with an empty queue and without replicas."""

    def configure(self, config: FairnessConfig) -> None:
        """The settings have changed."""

    def pushed(self, waiting: Waiting) -> None:
        """A request is about to enter the queue."""

    def joined(self, replica: Replica) -> None:
        """A replica has sent its first report of the epoch."""

    def absorbed(self, replica: Replica, report: Credit) -> None:
        """A replica has sent a report, whose sequences are not counted yet."""

    def reported(self, replica: Replica, seq_id: int) -> None:
        """A replica reports that a sequence has started or ended."""

    def left(self, replica: Replica, seq_ids: Sequence[int]) -> None:
        """A replica reports that sequences continue elsewhere."""

    def continued(self, running: Running) -> None:
        """A sequence has started where it continues."""

    def ended(self, running: Running) -> None:
        """A sequence has ended."""

    def counted(self, replica: Replica, gained: Sequence[tuple[Running, int]]) -> None:
        """Sequences of a replica have gained tokens, each the given number."""

    def starters(self, replicas: Collection[Replica]) -> Collection[Replica]:
        """Return the replicas, of the given ones, on which a prompt may start."""
        return replicas

    def limit(self, request: AdmittedRequest, replica: Replica, number: int) -> int:
        """Return how many sequences of a request may start on a replica, at most `number`."""
        return number

    def dispatched(self, waiting: Waiting, replica: Replica, started: Sequence[Running]) -> None:
        """Sequences of a request start on a replica."""

    def section(self, replica: Replica, started: Sequence[Running]) -> Section | None:
        """Return the part's section of the dispatched request."""

    def may_run(self, waiting: Waiting) -> bool:
        """Return whether a request may run now."""
        return True

    def yields(self, now_ns: int) -> Sequence[Running]:
        """Return sequences that must pause although there may be room for all."""
        return ()

    def is_hopeless(self, waiting: Waiting, now_ns: int) -> bool:
        """Return whether a request can't end before its deadline."""
        return False

    def pauses(
        self, full: Sequence[Replica], first: PriorityClass, now_ns: int
    ) -> Sequence[Running]:
        """Return sequences that must pause.

        Args:
            full: The replicas without a credit.
            first: The class whose request leaves next.
            now_ns: The time.
        """
        return ()


def make_parts(
    core: FairnessState, roles: Sequence[ReplicaRole], lane: str, max_draft_tokens: int
) -> list[Part]:
    """Return the parts, in the order in which their hooks run. Settings may change at any time."""
    from .background import Background
    from .exchange import Exchange
    from .fastest_step import FastestStep
    from .handovers import Handovers
    from .locality import Locality
    from .preemption import Preemption
    from .time_slices import TimeSlices

    return [
        Exchange(core, lane),
        Locality(core),
        Handovers(core, roles),
        FastestStep(core, max_draft_tokens),
        Background(core),
        Preemption(core),
        TimeSlices(core),
    ]
