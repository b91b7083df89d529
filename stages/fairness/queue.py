"""The whole queue: its priority classes, and who is next."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ...bus.messages import SequenceSpec
from ...config import FairnessConfig
from .order import LeastFirst
from .tenants import Flow, PriorityClass, Waiting

CANDIDATES = 8
"""At so many tenants, the least served, is looked for one whose prefix is cached."""


class Next(NamedTuple):
    """What leaves next, and the class that it belongs to."""

    waiting: Waiting
    priority_class: PriorityClass


class FairQueue:
    """Who is next, in O(log n) of the classes, tenants and requests that wait.

    Attributes:
        num_requests: Requests, or parts of them, that wait.
        num_sequences: Sequences that wait.
    """

    def __init__(self, config: FairnessConfig) -> None:
        self._config = config
        self._classes: dict[int, PriorityClass] = {}
        self._order: LeastFirst[PriorityClass] = LeastFirst()
        self._dispatched = 0
        self.num_requests = 0
        self.num_sequences = 0

    def add(self, waiting: Waiting, now_ns: int) -> None:
        """Adds what waits from now on; `now_ns` never falls."""
        priority = waiting.request.priority
        priority_class = self._classes.get(priority)
        if priority_class is None:
            priority_class = self._classes[priority] = PriorityClass(priority, self._config)
        priority_class.add(waiting, now_ns)
        if not priority_class.version:
            self._order.put(priority_class)
        waiting.before = (self._dispatched, priority_class.dispatched, waiting.flow.dispatched)
        self.num_requests += 1
        self.num_sequences += len(waiting.specs)

    def first_class(self) -> PriorityClass | None:
        """The class that goes first; None when nothing waits."""
        return self._order.first()

    def next(self, cached: Callable[[Waiting], int]) -> Next | None:
        """What leaves next; None when nothing waits.

        Args:
            cached: Tokens of a request that need no computing, as far as is known. Asked only
                where tenants are close enough for that to decide.
        """
        priority_class = self._order.first()
        if priority_class is None:
            return None
        margin = self._config.locality_tokens
        least = priority_class.order.first()
        assert least is not None, "a class in the order has nothing that waits"
        if margin and len(priority_class.order) > 1:
            near = priority_class.order.least(CANDIDATES, margin)
            # The first of several with the same prefix, who is the least served.
            least = max(near, key=lambda flow: cached(flow.first()))
        return Next(least.first(), priority_class)

    def next_of(self, able: Callable[[Waiting], bool]) -> Next | None:
        """What leaves next of those that are able to; None when none is.

        For when the first is not. It looks at one after the other, so it takes as long as there
        are others that are not able either, besides putting the tenants in order.
        """
        for priority_class in sorted(
            self._classes.values(), key=lambda level: level.key if level.turns else 0
        ):
            for flow in sorted(priority_class.flows(), key=lambda flow: flow.key):
                if (waiting := flow.first_of(able)) is not None:
                    return Next(waiting, priority_class)
        return None

    def take(self, chosen: Next, number: int, now_ns: int) -> tuple[SequenceSpec, ...]:
        """Takes so many of its sequences out; they run from now on."""
        self._dispatched += 1
        specs = chosen.priority_class.take(chosen.waiting, number, now_ns)
        self.num_sequences -= number
        if not chosen.waiting.specs:
            self._gone(chosen.priority_class)
        return specs

    def drop(self, waiting: Waiting) -> None:
        """Takes out what waits and shall not run."""
        priority_class = waiting.flow.priority_class
        self.num_sequences -= len(waiting.specs)
        priority_class.drop(waiting)
        self._gone(priority_class)

    def back(self, flow: Flow) -> None:
        """One of the sequences that were taken runs no longer."""
        priority_class = flow.priority_class
        priority_class.back(flow)
        priority_class.forget_idle(flow)
        self._forget(priority_class)

    def passed_by(self, waiting: Waiting) -> tuple[int, int, int]:
        """Dispatches while it waited: of other classes, of other tenants, of its own tenant.

        To be asked when it was just taken, so the last one is its own.
        """
        in_all, of_class, own = waiting.before
        in_all = self._dispatched - in_all
        of_class = waiting.flow.priority_class.dispatched - of_class
        own = waiting.flow.dispatched - own
        return in_all - of_class, of_class - own, own - 1

    def configure(self, config: FairnessConfig) -> None:
        """Takes settings, for those that wait too."""
        self._config = config
        for priority_class in self._classes.values():
            priority_class.configure(config)
            if priority_class.version:
                self._order.put(priority_class)

    def classes(self) -> list[PriorityClass]:
        """All classes in which something waits or runs."""
        return list(self._classes.values())

    def _gone(self, priority_class: PriorityClass) -> None:
        self.num_requests -= 1
        if not priority_class.num_sequences:
            self._order.discard(priority_class)
            self._forget(priority_class)

    def _forget(self, priority_class: PriorityClass) -> None:
        """When nothing of a class waits or runs, all its tenants are even."""
        if not priority_class.num_sequences and not priority_class.num_running:
            self._classes.pop(priority_class.priority, None)
