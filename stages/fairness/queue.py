"""The queue: priority classes, in them tenants, and of each tenant its requests.

    FairQueue ──► PriorityClass (one for each priority)  order: the oldest turn, one priority level
                    │                                    being worth `aging_s` of age
                    └─► Flow (one for each tenant)       order: the least served
                          └─► Waiting                    order: the oldest, or the earliest deadline

docs/fairness.md states the rule and its bounds.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from ...bus.messages import AdmittedRequest, SequenceSpec
from ...config import BACKGROUND, FairnessConfig
from ..lazy_heap import LazyHeap

UNDATED_NS = 30_000_000_000
"""In order of deadlines a request is due at the latest so long after it came. So urgent requests
can't delay one without a deadline for ever."""

NEVER_NS = -(2**62)
"""Head start of the background, which no age makes up for."""

IDLE_KEPT = 1024
"""Idle tenants of a class that are remembered, since they were served more than others."""

CANDIDATES = 8
"""Least served tenants among which a cached prefix is looked for."""


class Ordered(Protocol):
    """An item of LeastFirst.

    Attributes:
        version: Number of the item's current entry; 0 while it is not in the heap.
    """

    version: int

    @property
    def key(self) -> float:
        """The item's present sort key; the smallest comes first."""


class Exchange(Protocol):
    """Service of this lane and of others.

    Attributes:
        on: Whether service is recorded.
        lead: The most that service elsewhere puts a tenant of weight 1 ahead.
        capped: Times that a tenant's lead was cut to `lead`.
    """

    on: bool
    lead: float
    capped: int

    def record(self, priority: int, tenant: str, cost: float) -> None:
        """Add service of this lane; a refund is below zero."""


T = TypeVar("T", bound=Ordered)


class LeastFirst(Generic[T]):
    """Items by a key that may change while they are in; items with equal keys take turns.

    A key that has grown is noticed when its entry comes up, so growing costs nothing. After a key
    has fallen, call `put` again. Each operation takes O(log n), amortised.
    """

    def __init__(self) -> None:
        self._heap: LazyHeap[T] = LazyHeap(lambda number, item: item.version == number)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def put(self, item: T) -> None:
        """Add an item, or update one whose key has fallen."""
        self._size += not item.version
        item.version = self._heap.push(item.key, item)

    def discard(self, item: T) -> None:
        """Remove an item, if it is in."""
        self._size -= bool(item.version)
        item.version = 0

    def first(self) -> T | None:
        """Return the item with the least key; None if there is none."""
        while (found := self._heap.first()) is not None:
            key, item = found
            if item.key <= key:
                return item
            self._heap.pop()
            item.version = self._heap.push(item.key, item)
        return None

    def least(self, number: int, margin: float) -> list[T]:
        """Return up to `number` items with the least keys, at most `margin` above the least one."""
        items: list[T] = []
        while len(items) < number and (item := self.first()) is not None:
            if items and item.key > items[0].key + margin:
                break
            self._heap.pop()
            items.append(item)
        for item in items:
            self._heap.push(item.key, item, item.version)
        return items


@dataclass(slots=True, eq=False)
class Running:
    """A dispatched sequence, until batching reports its end; paused sequences included.

    Attributes:
        arrived_ns: When its request came.
        num_tokens: Prompt and generated tokens.
        replica: The replica that has it.
        rank: Its rank there.
        successor: The replica that is to continue it, or does; "" if it stays where it began.
        giver: The replica that offers its blocks after a handover; "" for none.
        chain: As in Waiting.
        level: The effective priority with which it was dispatched. It doesn't age while it runs.
        order: Number of the dispatch.
        victim: Number of its entry among the replica's victims; 0 for none.
        charged: Prompt tokens charged in advance, until batching reports how many were computed.
        started: Whether its first step has been planned.
        in_slice: Tokens since it was dispatched.
        preemptions: Number of pauses for a higher priority.
        leaving: Whether its pause was requested, at `asked_ns`, when it had `asked_tokens`.
        preempted: Asked for a higher priority, not at the end of its time slice.
        after: It is resumed after its tenant's waiting requests, else before them.
        paused_ns: When it paused.
    """

    spec: SequenceSpec
    request: AdmittedRequest
    flow: Flow
    arrived_ns: int
    deadline_ns: int | None
    num_tokens: int
    replica: str = ""
    rank: int = 0
    successor: str = ""
    giver: str = ""
    chain: tuple[int, ...] = ()
    level: float = 0.0
    order: int = 0
    victim: int = 0
    charged: int = 0
    started: bool = False
    in_slice: int = 0
    preemptions: int = 0
    leaving: bool = False
    asked_ns: int = 0
    asked_tokens: int = 0
    preempted: bool = False
    behind: bool = False
    paused_ns: int = 0

    @classmethod
    def of(cls, waiting: Waiting, spec: SequenceSpec) -> Running:
        """Return a sequence of a request that is dispatched for the first time."""
        return cls(
            spec=spec,
            request=waiting.request,
            flow=waiting.flow,
            arrived_ns=waiting.arrived_ns,
            deadline_ns=waiting.deadline_ns,
            num_tokens=len(waiting.request.prompt.token_ids) + len(spec.generated),
            chain=waiting.chain,
        )


@dataclass(slots=True, eq=False)
class Waiting:
    """Sequences of one request that wait: the ones not dispatched yet, or one that was paused.

    Attributes:
        specs: The sequences; empty once all are dispatched or the request was cancelled.
        since_ns: When it began to wait here.
        arrived_ns: When the request came.
        chain: As returned by `prefix_chain`; empty if locality doesn't matter.
        paused: The paused sequence.
        untouched: Nothing of the request has ever been dispatched.
        before: Dispatches so far when it came: in all, of its class, of its tenant.
        flow: Its tenant's flow, set by the queue.
    """

    request: AdmittedRequest
    specs: deque[SequenceSpec]
    since_ns: int
    arrived_ns: int
    deadline_ns: int | None = None
    chain: tuple[int, ...] = ()
    paused: Running | None = None
    untouched: bool = True
    before: tuple[int, int, int] = (0, 0, 0)
    flow: Flow = field(init=False)

    @property
    def due_ns(self) -> int:
        """When it is due, for the order of deadlines."""
        latest = self.since_ns + UNDATED_NS
        return latest if self.deadline_ns is None else min(self.deadline_ns, latest)


class Flow:
    """One tenant's requests of one priority, and its service.

    Attributes:
        counter: Tokens served, each kind at its price, divided by the tenant's weight.
        num_waiting: Waiting requests, or parts of them.
        num_sequences: Their sequences.
        waiting_tokens: The prompt tokens of these.
        num_running: Sequences that were dispatched and are not back.
        dispatched: Dispatches so far.
    """

    def __init__(self, tenant: str, weight: float, priority_class: PriorityClass) -> None:
        self.tenant = tenant
        self.weight = weight
        self.priority_class = priority_class
        self.counter = 0.0
        self.version = 0
        self.num_waiting = self.num_sequences = self.waiting_tokens = 0
        self.num_running = self.dispatched = 0
        self._heap: LazyHeap[Waiting] = LazyHeap(lambda _, waiting: bool(waiting.specs))

    @property
    def key(self) -> float:
        return self.counter

    def charge(self, cost: float) -> None:
        """Count service; a `cost` below zero gives a charge back."""
        self.counter += cost / self.weight
        if cost < 0 and self.version:
            self.priority_class.order.put(self)
        exchange = self.priority_class.exchange
        if exchange is not None and exchange.on:
            exchange.record(self.priority_class.priority, self.tenant, cost)

    def add(self, waiting: Waiting, key: int) -> None:
        """Add a request, which leaves in order of `key`."""
        self._heap.push(key, waiting)
        self.num_waiting += 1

    def count(self, waiting: Waiting, number: int) -> None:
        """Count sequences of a request that wait, or no longer wait (a number below zero)."""
        self.num_sequences += number
        self.waiting_tokens += number * len(waiting.request.prompt.token_ids)

    def first(self) -> Waiting:
        """Return the request that leaves next. There must be one."""
        found = self._heap.first()
        assert found is not None, "a tenant in the order has no waiting request"
        return found[1]

    def first_of(self, is_able: Callable[[Waiting], bool]) -> Waiting | None:
        """Return the first able request; None if there is none."""
        able = (entry for entry in self._heap.alive() if is_able(entry[2]))
        first = min(able, default=None)
        return first[2] if first is not None else None

    def reorder(self, key_of: Callable[[Waiting], int]) -> None:
        """Reorder waiting requests; requests with equal keys keep their order."""
        entries = sorted(self._heap.alive())
        self._heap.clear()
        for _, _, waiting in entries:
            self._heap.push(key_of(waiting), waiting)


class PriorityClass:
    """The waiting requests of one priority.

    Each tenant that waits here holds one turn, dated from when it began to wait. A dispatch uses up
    the oldest turn, no matter which tenant is served, and adds a new one if the served tenant still
    waits. So a class ages by its tenants' waiting, and the length of one tenant's queue doesn't
    matter.

    Attributes:
        order: The tenants that wait, least served first.
        turns: Dates of their turns in ns, oldest first.
        num_requests: Waiting requests, or parts of them.
        num_sequences: Waiting sequences.
        num_running: Sequences that were dispatched and are not back.
        dispatched: Dispatches so far.
        exchange: Records the service; None if it is not recorded.
    """

    def __init__(self, priority: int, config: FairnessConfig, exchange: Exchange | None) -> None:
        self.priority = priority
        self.exchange = exchange
        self.version = 0
        self.order: LeastFirst[Flow] = LeastFirst()
        self.turns: deque[int] = deque()
        self.num_requests = self.num_sequences = self.num_running = self.dispatched = 0
        self._flows: dict[str, Flow] = {}
        self._floor = 0.0
        # At the last exchange between lanes.
        self._exchanged_floor = 0.0
        self._last: Flow | None = None
        self._sweep_at = 2 * IDLE_KEPT
        self.configure(config)

    def configure(self, config: FairnessConfig) -> None:
        """Apply settings, also to waiting requests."""
        self._config = config
        worth_ns = round(self.priority * config.aging_s * 1e9)
        self._head_start_ns = NEVER_NS if self.priority == BACKGROUND else worth_ns
        for flow in self._flows.values():
            flow.weight = config.tenant_weights.get(flow.tenant, 1.0)
            flow.reorder(self._key_of)

    @property
    def key(self) -> float:
        """The oldest turn's date less the priority's worth; the class with the least goes first."""
        return self.turns[0] - self._head_start_ns

    def level(self, now_ns: int) -> float:
        """Return the effective priority: the class's, plus one per `aging_s` of the oldest turn."""
        return (now_ns - self.key) / (self._config.aging_s * 1e9)

    def would_pass(self, priority: int, now_ns: int) -> bool:
        """Whether the class goes before a request of that priority that comes now."""
        return self.key <= now_ns - round(priority * self._config.aging_s * 1e9)

    def flows(self) -> list[Flow]:
        """Return all tenants that wait, run, or are remembered."""
        return list(self._flows.values())

    def add(self, waiting: Waiting, now_ns: int) -> None:
        """Add a request."""
        tenant = waiting.request.tenant
        if (flow := self._flows.get(tenant)) is None:
            flow = self._new_flow(tenant)
        waiting.flow = flow
        if not flow.num_waiting:
            self._lift(flow)
            self.order.put(flow)
            self.turns.append(now_ns)
        flow.add(waiting, self._key_of(waiting))
        flow.count(waiting, len(waiting.specs))
        self.num_requests += 1
        self.num_sequences += len(waiting.specs)

    def take(self, waiting: Waiting, number: int, now_ns: int) -> tuple[SequenceSpec, ...]:
        """Remove sequences that are dispatched now, which uses up a turn."""
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
            self._remove(flow)
        return chosen

    def drop(self, waiting: Waiting) -> None:
        """Remove a request that will not be dispatched."""
        waiting.flow.count(waiting, -len(waiting.specs))
        self.num_sequences -= len(waiting.specs)
        waiting.specs.clear()
        self._remove(waiting.flow)
        self._forget_idle(waiting.flow)

    def back(self, flow: Flow) -> None:
        """Note that a sequence of this tenant no longer runs."""
        flow.num_running -= 1
        self.num_running -= 1
        self._forget_idle(flow)

    def serve_elsewhere(self, tenant: str, cost: float) -> None:
        """Count service of other lanes; it puts no tenant further ahead than `exchange.lead`."""
        assert self.exchange is not None, "no other lane is known without one"
        self._raise_floor()
        flow = self._flows.get(tenant)
        if flow is None:
            flow = self._new_flow(tenant)
            flow.counter = self._exchanged_floor
        before = flow.counter
        after = before + cost / flow.weight
        most = max(min(before, after), self._floor + self.exchange.lead)
        self.exchange.capped += after > most
        flow.counter = min(after, most)
        if not (flow.num_waiting or flow.num_running):
            flow.counter = max(flow.counter, self._floor)
        if flow.counter < before and flow.version:
            self.order.put(flow)
        self._forget_idle(flow)

    def note_exchange(self) -> None:
        """Note that all lanes' service up to now is counted."""
        self._raise_floor()
        self._exchanged_floor = self._floor

    def _new_flow(self, tenant: str) -> Flow:
        weight = self._config.tenant_weights.get(tenant, 1.0)
        flow = self._flows[tenant] = Flow(tenant, weight, self)
        return flow

    def _remove(self, flow: Flow) -> None:
        self.num_requests -= 1
        flow.num_waiting -= 1
        if not flow.num_waiting:
            self.order.discard(flow)
            self.turns.pop()
            self._last = flow

    def _forget_idle(self, flow: Flow) -> None:
        """Forget an idle tenant, unless it is ahead of the others: a pause must not pay a debt.

        Of tenants that are ahead, those furthest ahead are remembered, up to a number.
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

    def _lift(self, flow: Flow) -> None:
        """Raise a returning tenant to the least served one: idleness is not saved up."""
        self._raise_floor()
        flow.counter = max(flow.counter, self._floor)

    def _raise_floor(self) -> None:
        least = self.order.first() or self._last
        if least is not None:
            self._floor = max(self._floor, least.counter)

    def _key_of(self, waiting: Waiting) -> int:
        return waiting.due_ns if self._config.deadline_order else waiting.since_ns


class FairQueue:
    """All waiting requests. The next one is found in O(log n) of classes, tenants and requests.

    Attributes:
        exchange: As in PriorityClass; set it before the first request.
    """

    def __init__(self, config: FairnessConfig) -> None:
        self._config = config
        self.exchange: Exchange | None = None
        self._classes: dict[int, PriorityClass] = {}
        self._order: LeastFirst[PriorityClass] = LeastFirst()
        self._dispatched = 0

    @property
    def num_requests(self) -> int:
        """Waiting requests, or parts of them."""
        return sum(each.num_requests for each in self._classes.values())

    @property
    def num_classes(self) -> int:
        """Classes with requests that wait, or sequences that run."""
        return len(self._classes)

    def class_of(self, priority: int) -> PriorityClass | None:
        """Return a class; None if nothing of it waits or runs."""
        return self._classes.get(priority)

    def add(self, waiting: Waiting, now_ns: int) -> None:
        """Add a request; `now_ns` never falls."""
        priority = waiting.request.priority
        if (priority_class := self._classes.get(priority)) is None:
            priority_class = PriorityClass(priority, self._config, self.exchange)
            self._classes[priority] = priority_class
        priority_class.add(waiting, now_ns)
        if not priority_class.version:
            self._order.put(priority_class)
        waiting.before = self._counts(waiting)

    def busiest_tenants(self, most: int) -> dict[str, tuple[int, int]]:
        """Return the sequences of tenants that run and wait, for those with most of them."""
        sums: dict[str, tuple[int, int]] = {}
        for flow in (flow for each in self._classes.values() for flow in each.flows()):
            runs, waits = sums.get(flow.tenant, (0, 0))
            sums[flow.tenant] = runs + flow.num_running, waits + flow.num_sequences
        busy = filter(lambda item: any(item[1]), sums.items())
        return dict(heapq.nlargest(most, busy, key=lambda item: (sum(item[1]), item[0])))

    def first_class(self) -> PriorityClass | None:
        """Return the class that goes first; None if nothing waits."""
        return self._order.first()

    def next(self, cached: Callable[[Waiting], int]) -> Waiting | None:
        """Return the request that leaves next; None if nothing waits.

        Args:
            cached: Returns the tokens of a request that are probably cached. Called only where
                tenants are close enough for that to decide.
        """
        priority_class = self._order.first()
        if priority_class is None:
            return None
        order, margin = priority_class.order, self._config.locality_tokens
        if margin and len(order) > 1:
            # `max` returns the first of several with the same prefix, which is the least served.
            near = [flow.first() for flow in order.least(CANDIDATES, margin)]
            return max(near, key=cached)
        least = order.first()
        assert least is not None, "a class in the order has no waiting tenant"
        return least.first()

    def next_of(self, is_able: Callable[[Waiting], bool]) -> Waiting | None:
        """Return the able request that leaves next; None if there is none.

        Needed only when the first request isn't able. Sorts classes and tenants, and examines each
        request up to the first able one.
        """
        for priority_class in sorted(
            self._classes.values(), key=lambda each: each.key if each.turns else 0
        ):
            for flow in sorted(priority_class.flows(), key=lambda flow: flow.key):
                if (waiting := flow.first_of(is_able)) is not None:
                    return waiting
        return None

    def take(self, waiting: Waiting, number: int, now_ns: int) -> tuple[SequenceSpec, ...]:
        """Remove so many sequences of a request; they run from now on."""
        self._dispatched += 1
        priority_class = waiting.flow.priority_class
        specs = priority_class.take(waiting, number, now_ns)
        self._forget(priority_class)
        return specs

    def drop(self, waiting: Waiting) -> None:
        """Remove a request that will not run."""
        priority_class = waiting.flow.priority_class
        priority_class.drop(waiting)
        self._forget(priority_class)

    def back(self, flow: Flow) -> None:
        """Note that a sequence that was taken no longer runs."""
        flow.priority_class.back(flow)
        self._forget(flow.priority_class)

    def serve_elsewhere(self, news: Iterable[tuple[int, str, float]]) -> None:
        """Count service of other lanes, as (priority, tenant, service).

        A class without requests here has no counters.
        """
        for priority, tenant, cost in news:
            if (priority_class := self._classes.get(priority)) is not None:
                priority_class.serve_elsewhere(tenant, cost)
        for priority_class in self._classes.values():
            priority_class.note_exchange()

    def passed_by(self, waiting: Waiting) -> tuple[int, int, int]:
        """Return the dispatches while a request waited: of other classes, other tenants, its own.

        Call it right after `take`, whose dispatch isn't counted.
        """
        in_all, of_class, own = (
            now - before for now, before in zip(self._counts(waiting), waiting.before, strict=True)
        )
        return in_all - of_class, of_class - own, own - 1

    def configure(self, config: FairnessConfig) -> None:
        """Apply settings, also to waiting requests."""
        self._config = config
        for priority_class in self._classes.values():
            priority_class.configure(config)
            if priority_class.version:
                self._order.put(priority_class)

    def _counts(self, waiting: Waiting) -> tuple[int, int, int]:
        flow = waiting.flow
        return self._dispatched, flow.priority_class.dispatched, flow.dispatched

    def _forget(self, priority_class: PriorityClass) -> None:
        """Forget a class without sequences: all its tenants are even."""
        if not priority_class.num_sequences:
            self._order.discard(priority_class)
            if not priority_class.num_running:
                self._classes.pop(priority_class.priority, None)
