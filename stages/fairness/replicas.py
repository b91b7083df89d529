"""Replicas as fairness sees them: credits, running sequences, cached prefixes, speed."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from ...bus.messages import CacheScope
from ..lazy_heap import LazyHeap
from .queue import Running

MOST_UNCOUNTED = 64
"""Steps that may be noted before their tokens are counted."""

CHUNK_TOKENS = 64
"""Tokens between two prefixes that are compared."""

MOST_CHUNKS = 64
"""Chunks compared of a prompt."""

KEPT_SHARE = 1 / 8
"""Share of the free KV for sequences that paused at the end of their time slice.

Measured with benchmarks/fairness_sim.py on a short cache: at a half, so much KV is evicted that the
replica needs 4.5 % more time, at a quarter 1.1 %, at an eighth 0.1 %.
"""


def prefix_chain(token_ids: tuple[int, ...], scope: CacheScope) -> tuple[int, ...]:
    """Return one hash for each full chunk of a prompt, which covers all chunks before it."""
    hashes: list[int] = []
    value = hash(scope)
    for number in range(min(len(token_ids) // CHUNK_TOKENS, MOST_CHUNKS)):
        start = number * CHUNK_TOKENS
        value = hash((value, token_ids[start : start + CHUNK_TOKENS]))
        hashes.append(value)
    return tuple(hashes)


class PrefixIndex:
    """The prefixes last sent to one replica; the least recently used are forgotten first.

    A guess: the replica may have evicted a prefix or not have computed it yet. A wrong guess costs
    a cache hit, never a wrong answer.
    """

    def __init__(self, most_tokens: int = 1 << 20) -> None:
        self._most = max(1, most_tokens // CHUNK_TOKENS)
        self._known: OrderedDict[int, None] = OrderedDict()

    def match(self, prefixes: tuple[int, ...]) -> int:
        """Return the number of leading tokens that are probably cached."""
        for number, value in enumerate(prefixes):
            if value not in self._known:
                return number * CHUNK_TOKENS
        return len(prefixes) * CHUNK_TOKENS

    def clear(self) -> None:
        """Forget all: the replica has lost its cache."""
        self._known.clear()

    def add(self, prefixes: tuple[int, ...]) -> None:
        """Add prefixes that the replica is about to compute."""
        for value in prefixes:
            self._known[value] = None
            self._known.move_to_end(value)
        while len(self._known) > self._most:
            self._known.popitem(last=False)


class Replica:
    """One batching stage and its executor.

    Attributes:
        credits: Sequences that it can take.
        running: Its running sequences, by id.
        paused: Its paused sequences, by id; batching keeps them.
        expected: Sequences that are to continue here, by id, and run elsewhere.
        gone: Sequences that have continued elsewhere, by id, until its report says so.
        due: Running sequences whose own time slice is used up.
        made_since_change: Tokens made that have not ended a slice yet; at most a slice for each
            sequence.
        num_leaving: Running sequences whose pause was requested.
        paused_tokens: Tokens of sequences that are paused, or whose pause was requested.
        kv_free: Tokens for which KV is free, as last reported.
        prefixes: Prefixes that its cache probably holds.
    """

    def __init__(self, name: str, prefixes: PrefixIndex | None = None) -> None:
        self.name = name
        self.credits = 0
        self.running: dict[int, Running] = {}
        self.paused: dict[int, Running] = {}
        self.expected: dict[int, Running] = {}
        self.gone: dict[int, Running] = {}
        self.due: dict[int, Running] = {}
        self.made_since_change = 0
        self.num_leaving = 0
        self.paused_tokens = 0
        self.kv_free = 0
        self.prefixes = prefixes if prefixes is not None else PrefixIndex()
        self._tenants: Counter[str] = Counter()
        self._steps: list[tuple[int, ...]] = []
        self._victims: LazyHeap[Running] = LazyHeap(self._is_victim)

    def serves_others(self, tenant: str) -> bool:
        """Whether sequences of other tenants run here."""
        return len(self._tenants) > (tenant in self._tenants)

    def has(self, request_id: str) -> bool:
        """Whether sequences of a request run, are paused or are expected here."""
        here = chain(self.running.values(), self.paused.values(), self.expected.values())
        return any(running.request.info.request_id == request_id for running in here)

    def start(self, running: Running, level: float, order: int, *, preemptible: bool) -> None:
        """Add a sequence that is dispatched here; `order` grows with each one."""
        running.replica = self.name
        running.level = level
        running.order = order
        running.in_slice = 0
        running.leaving = False
        running.victim = 0
        if self.paused.pop(running.spec.seq_id, None) is not None:
            self.paused_tokens -= running.num_tokens
        self.running[running.spec.seq_id] = running
        self._tenants[running.request.tenant] += 1
        if preemptible:
            self._add_victim(running)

    def configure(self, is_preemptible: Callable[[Running], bool]) -> None:
        """Decide anew which sequences may be preempted."""
        self._victims.clear()
        for running in filter(is_preemptible, self.running.values()):
            self._add_victim(running)
        self.due.clear()

    def note_steps(self, steps: Iterable[tuple[int, ...]]) -> bool:
        """Note the sequences that gained a token in each step; return whether to count them."""
        self._steps += steps
        return len(self._steps) >= MOST_UNCOUNTED

    def counted(self) -> Iterator[tuple[Running, int]]:
        """Yield the number of tokens that each sequence has gained since the last call."""
        if not self._steps:
            return
        tokens = Counter(chain.from_iterable(self._steps))
        self._steps.clear()
        for seq_id, number in tokens.items():
            if (running := self.running.get(seq_id) or self.gone.get(seq_id)) is not None:
                yield running, number

    def ask_to_pause(
        self, running: Running, now_ns: int, *, preempted: bool = False, behind: bool = False
    ) -> None:
        """Record that a sequence's pause is requested."""
        running.leaving = True
        running.asked_ns = now_ns
        running.asked_tokens = running.num_tokens
        running.preempted = preempted
        running.preemptions += preempted
        running.behind = behind
        self.num_leaving += 1
        self.paused_tokens += running.asked_tokens
        self.due.pop(running.spec.seq_id, None)

    def pause(self, seq_id: int, now_ns: int) -> Running | None:
        """Move a running sequence to the paused ones; None if it doesn't run here."""
        running = self._remove(seq_id)
        if running is not None:
            running.paused_ns = now_ns
            self.paused[seq_id] = running
            self.paused_tokens += running.num_tokens
        return running

    def end(self, seq_id: int) -> Running | None:
        """Remove a running or paused sequence; None if there is none."""
        if (running := self._remove(seq_id)) is None:
            running = self.paused.pop(seq_id, None)
            if running is not None:
                self.paused_tokens -= running.num_tokens
        return running

    def let_go(self, running: Running) -> None:
        """Note that a sequence has continued elsewhere."""
        seq_id = running.spec.seq_id
        if self.end(seq_id) is not None:
            self.gone[seq_id] = running

    def keeps_kv(self, running: Running, before: int) -> bool:
        """Whether a sequence's KV would probably still be cached when it is resumed.

        Args:
            running: The sequence.
            before: Tokens of requests that run before it is resumed. They and all paused sequences
                may take `KEPT_SHARE` of the free KV; running sequences grow into the rest.
        """
        own = running.num_tokens
        return self.paused_tokens + own + before <= KEPT_SHARE * (self.kv_free + own)

    def lowest(self) -> Running | None:
        """Return the preemptible sequence with the lowest level, the last dispatched of equals."""
        found = self._victims.first()
        return found[1] if found is not None else None

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

    def _add_victim(self, running: Running) -> None:
        running.victim = self._victims.push((running.level, -running.order), running)

    def _is_victim(self, number: int, running: Running) -> bool:
        runs_here = self.running.get(running.spec.seq_id) is running
        return runs_here and running.victim == number and not running.leaving


def choose_replica(replicas: Iterable[Replica], prefixes: tuple[int, ...]) -> Replica | None:
    """Return the replica for a request; None if none has room.

    Of the replicas with room, the longest matching prefix decides, then the fewest running
    sequences, then the most room.
    """
    able = [replica for replica in replicas if replica.credits > 0]
    if len(able) < 2:
        return able[0] if able else None

    def merit(replica: Replica) -> tuple[int, int, int]:
        load = len(replica.running) + len(replica.expected)
        return replica.prefixes.match(prefixes), -load, replica.credits

    return max(able, key=merit)
