"""State that fairness's core shares with its parts."""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import Any

import msgspec

from ...bus.messages import AdmittedRequest, ResumeSequences
from ...config import FairnessConfig
from ..parts import Parts
from .queue import FairQueue, Running
from .replicas import Replica


class Counts(msgspec.Struct):
    """Events since the start, for telemetry. `tokens`: generated ones, by priority."""

    preemptions: int = 0
    yields: int = 0
    resumes: int = 0
    handovers: int = 0
    recomputed_tokens: int = 0
    hopeless: int = 0
    tokens: Counter[int] = msgspec.field(default_factory=Counter)


class Dispatched(msgspec.Struct, frozen=True, kw_only=True):
    """A message for a replica, with data for telemetry and time budgets.

    Attributes:
        resumed: The sequence that is resumed; None if sequences start.
        last: No sequence of the request waits any more for its first run.
        passed_by: Dispatches while it waited: of other priorities, of other tenants, of its own.
    """

    replica: str
    message: AdmittedRequest | ResumeSequences
    request: AdmittedRequest
    arrived_ns: int
    deadline_ns: int | None
    resumed: Running | None
    last: bool
    passed_by: tuple[int, int, int]


class FairnessState:
    """Queue, replicas, settings and counts.

    Attributes:
        config: Settings; they may change at any time.
        has_several: Whether there may be several replicas.
        queue: Waiting requests.
        replicas: Replicas that have reported in this epoch, by name.
        counts: Events since the start.
    """

    _parts: Parts[Any]

    def __init__(self, config: FairnessConfig, *, has_several: bool) -> None:
        self.config = config
        self.has_several = has_several
        self.queue = FairQueue(config)
        self.replicas: dict[str, Replica] = {}
        self.counts = Counts()
        self._order = count()

    @property
    def credits(self) -> int:
        """Sequences that the replicas can take."""
        return sum(replica.credits for replica in self.replicas.values())

    @property
    def num_queued(self) -> int:
        """Waiting requests, or parts of them."""
        return self.queue.num_requests

    @property
    def num_paused(self) -> int:
        """Paused sequences that wait to be resumed."""
        return sum(len(replica.paused) for replica in self.replicas.values())

    @property
    def num_leaving(self) -> int:
        """Running sequences whose pause was requested."""
        return sum(replica.num_leaving for replica in self.replicas.values())

    def is_low(self, running: Running) -> bool:
        """Whether a sequence's priority is below those that others pause for."""
        return running.request.priority < self.config.high_priority_threshold

    def is_preemptible(self, running: Running) -> bool:
        """Whether a sequence may pause for a higher priority."""
        config = self.config
        may_pause = running.preemptions < config.max_preemptions
        return config.enable_preemption and self.is_low(running) and may_pause

    def run(self, replica: Replica, running: Running, level: float, rank: int) -> None:
        """Start a sequence on a replica, with its effective priority and rank."""
        running.rank = rank
        replica.start(running, level, next(self._order), preemptible=self.is_preemptible(running))

    def count(self, replica: Replica) -> None:
        """Charge the tokens generated since the last call."""
        gained = list(replica.counted())
        for running, number in gained:
            running.flow.charge(number * self.config.decode_weight)
            self.counts.tokens[running.request.priority] += number
            running.num_tokens += number
        for hook in self._parts.counted:
            hook(replica, gained)
