"""What runs: on each replica its credits, its sequences, and which of them should pause."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from ...bus.messages import SequenceSpec
from .locality import PrefixChain, PrefixIndex
from .order import LEFTOVERS_KEPT
from .tenants import Waiting

MOST_UNCOUNTED = 64
"""Steps that may be noted before their tokens are counted."""


KEPT_SHARE = 1 / 8
"""Of the free KV, how much those may have that paused at the end of their time slice.

Measured with benchmarks/fairness_sim.py where the cache is short: with a half they lose so much of
it that the replica needs 4.5 % more time, with a quarter 1.1 %, with an eighth 0.1 %.
"""


class Running:
    """A sequence that was dispatched, until batching says that it is gone.

    Attributes:
        level: The effective priority with which it was dispatched; running adds nothing to it.
        charged: Prompt tokens charged in advance, until batching tells how many it took.
        started: Its first step has been planned.
        num_tokens: Prompt and generated tokens.
        in_slice: Tokens since it was dispatched.
        preemptions: How often it had to pause for a higher priority.
        leaving: It was asked to pause, at `asked_ns`, when it had `asked_tokens`.
        preempted: It was told for a higher priority, not at the end of its time slice.
        behind: It is resumed behind what its tenant has waiting then, else before it.
        paused_ns: When it paused.
    """

    __slots__ = (
        "arrived_ns",
        "asked_ns",
        "asked_tokens",
        "behind",
        "charged",
        "deadline_ns",
        "flow",
        "in_slice",
        "leaving",
        "level",
        "num_tokens",
        "order",
        "paused_ns",
        "preempted",
        "preemptions",
        "request",
        "spec",
        "started",
    )

    def __init__(self, spec: SequenceSpec, waiting: Waiting) -> None:
        self.request = waiting.request
        self.spec = spec
        self.flow = waiting.flow
        self.arrived_ns = waiting.arrived_ns
        self.deadline_ns = waiting.deadline_ns
        self.level = 0.0
        self.order = 0
        self.charged = 0
        self.started = False
        self.num_tokens = len(waiting.request.token_ids) + len(spec.generated)
        self.in_slice = 0
        self.preemptions = 0
        self.leaving = False
        self.asked_ns = 0
        self.asked_tokens = 0
        self.preempted = False
        self.behind = False
        self.paused_ns = 0


class Replica:
    """One batching stage and its executor, as fairness sees it.

    Attributes:
        credits: Sequences that it can take.
        running: Those that it has, by id.
        paused: Those that are paused, by id; batching keeps them.
        due: Those whose own time slice is used up.
        made_since_change: Tokens made that no slice which has ended is counted against; no more
            than a slice of each sequence.
        num_leaving: Those that were asked to pause and have not yet.
        paused_tokens: Tokens of those that are paused, or were asked to be.
        kv_free: Tokens for which KV was free, when it last said so.
        prefixes: What its prefix cache probably holds.
    """

    def __init__(self, name: str, prefixes: PrefixIndex | None = None) -> None:
        self.name = name
        self.credits = 0
        self.running: dict[int, Running] = {}
        self.paused: dict[int, Running] = {}
        self.due: dict[int, Running] = {}
        self.made_since_change = 0
        self.num_leaving = 0
        self.paused_tokens = 0
        self.kv_free = 0
        self.prefixes = prefixes if prefixes is not None else PrefixIndex()
        self._tenants: Counter[str] = Counter()
        self._steps: list[tuple[int, ...]] = []
        self._victims: list[tuple[float, int, Running]] = []

    @property
    def load(self) -> int:
        """Sequences that it has."""
        return len(self.running)

    def serves_others(self, tenant: str) -> bool:
        """Whether sequences of other tenants run here."""
        return len(self._tenants) > (tenant in self._tenants)

    def has(self, request_id: str) -> bool:
        """Whether sequences of a request run or are paused here."""
        here = chain(self.running.values(), self.paused.values())
        return any(running.request.info.request_id == request_id for running in here)

    def start(self, running: Running, level: float, order: int, *, preemptible: bool) -> None:
        """A sequence is dispatched to this replica; `order` grows with each one."""
        seq_id = running.spec.seq_id
        running.level = level
        running.order = order
        running.in_slice = 0
        running.leaving = False
        if self.paused.pop(seq_id, None) is not None:
            self.paused_tokens -= running.num_tokens
        self.running[seq_id] = running
        self._tenants[running.request.tenant] += 1
        if preemptible:
            heapq.heappush(self._victims, _as_victim(running))
            if len(self._victims) > 2 * len(self.running) + LEFTOVERS_KEPT:
                self._victims = [victim for victim in self._victims if self._is_victim(victim)]
                heapq.heapify(self._victims)

    def configure(self, preemptible: Callable[[Running], bool]) -> None:
        """Who may be told to pause is to be looked at anew."""
        self._victims = [
            _as_victim(running) for running in self.running.values() if preemptible(running)
        ]
        heapq.heapify(self._victims)
        self.due.clear()

    def note_steps(self, steps: Iterable[tuple[int, ...]]) -> bool:
        """Notes the sequences that gained a token in each step; whether it is time to count."""
        self._steps += steps
        return len(self._steps) >= MOST_UNCOUNTED

    def counted(self) -> Iterator[tuple[Running, int]]:
        """How many tokens each sequence has gained since this was last asked."""
        if not self._steps:
            return
        tokens = Counter(chain.from_iterable(self._steps))
        self._steps.clear()
        for seq_id, number in tokens.items():
            running = self.running.get(seq_id)
            if running is not None:
                yield running, number

    def ask(self, running: Running, now_ns: int, *, preempted: bool, behind: bool) -> None:
        """A sequence is asked to pause."""
        running.behind = behind
        running.leaving = True
        running.asked_ns = now_ns
        running.preempted = preempted
        running.preemptions += preempted
        self.num_leaving += 1
        running.asked_tokens = running.num_tokens
        self.paused_tokens += running.asked_tokens
        self.due.pop(running.spec.seq_id, None)

    def pause(self, seq_id: int, now_ns: int) -> Running | None:
        """A sequence is paused; returns it, None if it is not one of those that run here."""
        running = self._remove(seq_id)
        if running is not None:
            running.paused_ns = now_ns
            self.paused[seq_id] = running
            self.paused_tokens += running.num_tokens
        return running

    def end(self, seq_id: int) -> Running | None:
        """A sequence is gone for good: it ran, or else it was paused."""
        if (running := self._remove(seq_id)) is None:
            running = self.paused.pop(seq_id, None)
            if running is not None:
                self.paused_tokens -= running.num_tokens
        return running

    def keeps(self, running: Running, before: int) -> bool:
        """Whether the KV of a sequence would probably still be cached when it is resumed.

        `before`: Tokens of what runs before that. They, and those of all that are paused, may take
        `KEPT_SHARE` of what is free; the rest is for what runs, which grows and is replaced.
        """
        own = running.num_tokens
        return self.paused_tokens + own + before <= KEPT_SHARE * (self.kv_free + own)

    def lowest(self) -> Running | None:
        """The sequence to pause first for a higher priority: of those that may be, the lowest."""
        while self._victims and not self._is_victim(self._victims[0]):
            heapq.heappop(self._victims)
        return self._victims[0][2] if self._victims else None

    def _remove(self, seq_id: int) -> Running | None:
        running = self.running.pop(seq_id, None)
        if running is not None:
            self.due.pop(seq_id, None)
            tenant = running.request.tenant
            self._tenants[tenant] -= 1
            if not self._tenants[tenant]:
                del self._tenants[tenant]
            if running.leaving:
                self.num_leaving -= 1
                self.paused_tokens -= running.asked_tokens
        return running

    def _is_victim(self, entry: tuple[float, int, Running]) -> bool:
        _, order, running = entry
        there = self.running.get(running.spec.seq_id) is running
        return there and running.order == -order and not running.leaving


def _as_victim(running: Running) -> tuple[float, int, Running]:
    """Of equals the last one dispatched goes first: it has the least to lose."""
    return running.level, -running.order, running


def choose_replica(replicas: Iterable[Replica], chain: PrefixChain) -> Replica | None:
    """Where a request goes: of the replicas with room, that with the longest matching prefix.

    Of several the one with the least load, then the one with the most room.
    """
    able = [replica for replica in replicas if replica.credits > 0]
    if len(able) < 2:
        return able[0] if able else None
    return max(
        able, key=lambda replica: (replica.prefixes.match(chain), -replica.load, replica.credits)
    )
