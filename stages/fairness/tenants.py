"""What waits: priority classes, in them tenants, and of each tenant its requests.

    Waiting ──► PriorityClass (one for each priority)  who goes first: the oldest turn, a priority
                  │                                    worth `aging_s` of age
                  └─► Flow (one for each tenant)       who goes first: the least served
                        └─► Waiting                    who goes first: the oldest, or most urgent

docs/fairness.md states the rule and what follows from it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from itertools import count

from ...bus.messages import AdmittedRequest, SequenceSpec
from ...config import FairnessConfig
from .locality import PrefixChain
from .order import LEFTOVERS_KEPT, LeastFirst

UNDATED_NS = 30_000_000_000
"""In order of deadlines a request counts as due at the latest so long after it came. So one without
a deadline is not passed by urgent ones for ever."""

IDLE_KEPT = 1024
"""Tenants of a class that have no request and are remembered, since they were served more."""


class Waiting:
    """Sequences of one request that wait: those not dispatched yet, or one that was paused.

    Attributes:
        specs: The sequences; empty once all are dispatched or the request was cancelled.
        since_ns: Since when it waits here.
        arrived_ns: When the request came.
        untouched: Nothing of the request has ever been dispatched.
        resumed: These sequences have run before, and batching has them.
        chain: Names the prompt's prefixes; empty when nobody asks for them.
        before: Dispatches counted so far when it came: in all, of its class, of its tenant.
    """

    __slots__ = (
        "arrived_ns",
        "before",
        "chain",
        "deadline_ns",
        "flow",
        "request",
        "resumed",
        "since_ns",
        "specs",
        "untouched",
    )

    def __init__(
        self,
        request: AdmittedRequest,
        specs: deque[SequenceSpec],
        since_ns: int,
        deadline_ns: int | None = None,
        *,
        arrived_ns: int | None = None,
        resumed: bool = False,
        chain: PrefixChain = (),
    ) -> None:
        self.request = request
        self.specs = specs
        self.since_ns = since_ns
        self.arrived_ns = since_ns if arrived_ns is None else arrived_ns
        self.deadline_ns = deadline_ns
        self.untouched = not resumed
        self.resumed = resumed
        self.chain = chain
        self.flow: Flow
        self.before = (0, 0, 0)

    @property
    def due_ns(self) -> int:
        """When it is due, for the order of deadlines."""
        latest = self.since_ns + UNDATED_NS
        return latest if self.deadline_ns is None else min(self.deadline_ns, latest)


class Flow:
    """One tenant's requests of one priority, and what it has been served.

    Attributes:
        counter: Tokens served, each kind at its price, divided by the tenant's weight.
        num_waiting: Requests (or parts of them) that wait.
        num_sequences: Their sequences.
        waiting_tokens: The prompts' tokens of these.
        num_running: Sequences that were dispatched and are not back.
        dispatched: Dispatches so far.
    """

    __slots__ = (
        "_heap",
        "_order",
        "counter",
        "dispatched",
        "num_running",
        "num_sequences",
        "num_waiting",
        "priority_class",
        "tenant",
        "version",
        "waiting_tokens",
        "weight",
    )

    def __init__(self, tenant: str, weight: float, priority_class: PriorityClass) -> None:
        self.tenant = tenant
        self.weight = weight
        self.priority_class = priority_class
        self.counter = 0.0
        self.version = 0
        self.num_waiting = 0
        self.num_sequences = 0
        self.waiting_tokens = 0
        self.num_running = 0
        self.dispatched = 0
        self._heap: list[tuple[int, int, Waiting]] = []
        self._order = count()

    @property
    def key(self) -> float:
        return self.counter

    def charge(self, cost: float) -> None:
        """Counts service, or takes back (`cost` below zero) what was counted and not needed."""
        self.counter += cost / self.weight
        if cost < 0 and self.version:
            self.priority_class.order.put(self)

    def add(self, waiting: Waiting, key: int) -> None:
        """Adds a request, to leave in order of `key`."""
        heapq.heappush(self._heap, (key, next(self._order), waiting))
        self.num_waiting += 1
        if len(self._heap) > 2 * self.num_waiting + LEFTOVERS_KEPT:
            self._heap = [entry for entry in self._heap if entry[2].specs]
            heapq.heapify(self._heap)

    def count(self, waiting: Waiting, number: int) -> None:
        """So many more of a request's sequences wait, or with a minus fewer."""
        self.num_sequences += number
        self.waiting_tokens += number * len(waiting.request.token_ids)

    def first(self) -> Waiting:
        """The request that leaves next. There must be one."""
        while not self._heap[0][2].specs:
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def first_of(self, able: Callable[[Waiting], bool]) -> Waiting | None:
        """The request that leaves next of those that are able to; None when none is."""
        entries = (entry for entry in self._heap if entry[2].specs and able(entry[2]))
        first = min(entries, default=None)
        return first[2] if first is not None else None

    def reorder(self, key_of: Callable[[Waiting], int]) -> None:
        """Puts what waits in another order; those with equal keys stay as they are."""
        waiting = [item for _, _, item in sorted(self._heap) if item.specs]
        self._heap = [(key_of(item), next(self._order), item) for item in waiting]
        heapq.heapify(self._heap)


class PriorityClass:
    """All that waits at one priority.

    Each tenant that waits here holds one turn, dated from when it began to wait; a dispatch uses
    up the oldest turn, whoever is served, and gives a new one if the tenant served still waits.
    So a class ages by its tenants' waiting, and the length of one tenant's queue counts for
    nothing.

    Attributes:
        order: The tenants that wait, least served first.
        turns: Their turns' dates in ns, oldest first.
        num_sequences: Sequences that wait.
        num_running: Sequences that were dispatched and are not back.
    """

    def __init__(self, priority: int, config: FairnessConfig) -> None:
        self.priority = priority
        self.version = 0
        self.order: LeastFirst[Flow] = LeastFirst()
        self.turns: deque[int] = deque()
        self.num_sequences = 0
        self.num_running = 0
        self.dispatched = 0
        self._flows: dict[str, Flow] = {}
        self._floor = 0.0
        self._last: Flow | None = None
        self._sweep_at = 2 * IDLE_KEPT
        self.configure(config)

    def configure(self, config: FairnessConfig) -> None:
        """Takes settings, for those that wait too."""
        self._config = config
        self._head_start_ns = round(self.priority * config.aging_s * 1e9)
        for flow in self._flows.values():
            flow.weight = config.tenant_weights.get(flow.tenant, 1.0)
            flow.reorder(self._key_of)

    @property
    def key(self) -> float:
        """The oldest turn's date less what the priority is worth; the least class goes first."""
        return self.turns[0] - self._head_start_ns

    def level(self, now_ns: int) -> float:
        """The effective priority: the class's, and one for each `aging_s` of the oldest turn."""
        return (now_ns - self.key) / (self._config.aging_s * 1e9)

    def would_pass(self, priority: int, now_ns: int) -> bool:
        """Whether what waits here goes before something of that priority that comes now."""
        return self.key <= now_ns - round(priority * self._config.aging_s * 1e9)

    def flow_of(self, tenant: str) -> Flow:
        """The tenant's place in this class."""
        flow = self._flows.get(tenant)
        if flow is None:
            weight = self._config.tenant_weights.get(tenant, 1.0)
            flow = self._flows[tenant] = Flow(tenant, weight, self)
        return flow

    def flows(self) -> list[Flow]:
        """All tenants that wait, run, or are remembered."""
        return list(self._flows.values())

    def add(self, waiting: Waiting, now_ns: int) -> None:
        """Adds what waits from now on."""
        flow = waiting.flow = self.flow_of(waiting.request.tenant)
        if not flow.num_waiting:
            self._lift(flow)
            self.order.put(flow)
            self.turns.append(now_ns)
        flow.add(waiting, self._key_of(waiting))
        flow.count(waiting, len(waiting.specs))
        self.num_sequences += len(waiting.specs)

    def take(self, waiting: Waiting, number: int, now_ns: int) -> tuple[SequenceSpec, ...]:
        """Takes sequences out that are dispatched now: a turn is used up."""
        flow = waiting.flow
        chosen = tuple(waiting.specs.popleft() for _ in range(number))
        flow.count(waiting, -number)
        self.num_sequences -= number
        self.num_running += number
        flow.num_running += number
        flow.dispatched += 1
        self.dispatched += 1
        self.turns.popleft()
        self.turns.append(now_ns)
        if not waiting.specs:
            self._one_less(flow)
        return chosen

    def drop(self, waiting: Waiting) -> None:
        """Takes out what will not be dispatched any more."""
        waiting.flow.count(waiting, -len(waiting.specs))
        self.num_sequences -= len(waiting.specs)
        waiting.specs.clear()
        self._one_less(waiting.flow)
        self.forget_idle(waiting.flow)

    def back(self, flow: Flow) -> None:
        """A sequence of this tenant runs no longer."""
        flow.num_running -= 1
        self.num_running -= 1

    def forget_idle(self, flow: Flow) -> None:
        """Forgets a tenant that has nothing here, unless it is ahead of those that have.

        One that is ahead must not lose its debt by a pause. Of those that pause, the ones that are
        furthest ahead are remembered, up to a number.
        """
        if flow.num_waiting or flow.num_running:
            return
        if flow.counter <= self._floor:
            self._flows.pop(flow.tenant, None)
        elif len(self._flows) > self._sweep_at:
            busy = {t: f for t, f in self._flows.items() if f.num_waiting or f.num_running}
            idle = (f for t, f in self._flows.items() if t not in busy)
            ahead = heapq.nlargest(IDLE_KEPT, idle, key=lambda flow: flow.counter)
            self._flows = busy | {flow.tenant: flow for flow in ahead if flow.counter > self._floor}
            self._sweep_at = 2 * (len(busy) + IDLE_KEPT)

    def _one_less(self, flow: Flow) -> None:
        flow.num_waiting -= 1
        if not flow.num_waiting:
            self.order.discard(flow)
            self.turns.pop()
            self._last = flow

    def _lift(self, flow: Flow) -> None:
        """A tenant that comes back starts level with the least served: idleness is not saved up."""
        least = self.order.first() or self._last
        if least is not None:
            self._floor = max(self._floor, least.counter)
        flow.counter = max(flow.counter, self._floor)

    def _key_of(self, waiting: Waiting) -> int:
        return waiting.due_ns if self._config.deadline_order else waiting.since_ns
