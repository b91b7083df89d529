"""Sessions: the KV of conversations that clients pin, release, demote and prefetch between turns.

A session is named by its tenant and its id, and kept for its time to live. It has the tokens of
its last turn, prompt and completion, and may hold (pin) their leading full blocks on the device.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, assert_never

from ....bus.control import AdapterReady, ControlSession, ReplicaCapacity, TiersChanged
from ....bus.kv_sessions import (
    KVSession,
    KVSessionResult,
    SessionAction,
    SessionOutcome,
    SessionTier,
)
from ....bus.messages import AdmittedRequest, CacheScope
from ....bus.parts.sessions import SessionGrant, SessionTurn
from ....bus.steps import StepSummary
from ....config import EngineConfig, shown
from ..allocation import Allocation
from ..plans import PlanDraft, SentPlan
from ..schedule import SchedulerOutput
from ..sequence import Sequence as Sample
from . import Core, Part

MOST_SESSIONS = 1024
"""Sessions that are known at once, besides those with a turn; the first to expire is forgotten."""

NO_ROOM = "the share of sessions in the KV cache (engine.kv_session_share) is used up"
NO_BLOCKS = "the KV cache has no free blocks to load the rest"
GONE = "the KV cache has lost the rest"
BELOW = "the rest is in the tiers below the device; prefetch it"
RUNS = "a turn of the session runs; it is done when the turn ends"
FETCHES = "blocks are on their way from disk or host memory"
NO_STEPS = "generation is paused or memory is released; ask again when steps run"


class SessionKey(NamedTuple):
    """A session's name: no tenant reaches another's."""

    tenant: str
    id: str


class SessionCall(NamedTuple):
    """A client's action on a session; `ttl_s`: None to leave the time to live as it is."""

    action: SessionAction
    ttl_s: float | None = None


@dataclass(slots=True, eq=False)
class Session:
    """A conversation.

    Attributes:
        allocation: Its tokens, and the blocks that are pinned.
        ttl_ns: Its time to live.
        expires_ns: When it is forgotten; None while a turn runs, and until `refresh` sets it.
        num_turns: Turns that run.
        deferred: A call to be carried out when its turn ends.
    """

    allocation: Allocation
    ttl_ns: int = 0
    expires_ns: int | None = None
    num_turns: int = 0
    deferred: SessionCall | None = None

    @property
    def order(self) -> float:
        """Sort key: the first to expire comes first."""
        return float("inf") if self.expires_ns is None else self.expires_ns


class _Turn(NamedTuple):
    """A turn that runs.

    Attributes:
        session: Its session.
        wish: The request's.
        grant: Blocks that it may leave pinned.
        num_reserved: Blocks of the share that are kept for it, besides those that are pinned.
    """

    session: Session
    wish: KVSession
    grant: SessionGrant
    num_reserved: int


class _Load(NamedTuple):
    """Blocks on their way from host memory to the device; `step_id` is 0 before their plan."""

    session: Session
    allocation: Allocation
    step_id: int = 0


class Sessions(Part):
    """The sessions of a replica, the blocks that they pin, and their running turns.

    Pins never keep a sequence from running: they give way before a sequence is preempted, and where
    a waiting sequence would start without them. Pins of KV that the cache has forgotten (new
    weights, a flush) are dropped by `refresh`; the session's tokens stay known.

    Attributes:
        known: All sessions.
        pins: Number of sessions that hold each pinned block: a shared block uses the share once.
    """

    handles = (ControlSession, AdapterReady, TiersChanged)

    def __init__(self, core: Core, config: EngineConfig, capacity: ReplicaCapacity) -> None:
        super().__init__(core, config, capacity)
        self._cache = core.cache
        self._below = core.cache.below
        self._max_pinned = int(config.kv_session_share * core.cache.num_blocks)
        self._max_ttl_s = config.kv_session_ttl_s
        self.known: dict[SessionKey, Session] = {}
        self._turns: dict[int, _Turn] = {}
        self._num_reserved = 0
        self.pins: Counter[int] = Counter()
        self._loads: list[_Load] = []
        # Sessions whose prefetch waits for blocks from disk.
        self._fetching: set[Session] = set()
        # Sessions whose turn has ended, and whose time to live begins with the next `refresh`.
        self._ended: list[Session] = []
        # The earliest end of a session, or an earlier time; None if there is none.
        self._first_ns: int | None = None
        self._generation = core.cache.generation
        self._counts: Counter[str] = Counter()

    # --- the core's hooks ---------------------------------------------------------------------

    def receive(
        self,
        message: ControlSession | AdapterReady | TiersChanged,
        now_ns: int,
        deadline_ns: int | None,
    ) -> KVSessionResult | None:
        match message:
            case ControlSession():
                key = SessionKey(message.tenant, message.session)
                return self.call(key, SessionCall(message.action, message.ttl_s), now_ns)
            case AdapterReady():
                self._change_adapter(message.adapter, message.version)
            case TiersChanged():
                self._continue_prefetches()
            case _:
                assert_never(message)
        return None

    def admit(self, seq: Sample, request: AdmittedRequest) -> None:
        if (turn := SessionTurn.find(request.parts)) is not None:
            seq.extras["turn"] = request.tenant, turn.session

    def start(self, seq: Sample, new: dict[str, Any]) -> None:
        if (turn := seq.extras.get("turn")) is not None:
            tenant, wish = turn
            new["onward"] += (
                self.begin_turn(seq.seq_id, tenant, wish, seq.allocation, seq.max_length),
            )

    def leave(self, seq: Sample) -> None:
        self.end_turn(seq.seq_id, seq.allocation.token_ids, seq.allocation.scope)

    def begin(self, now_ns: int) -> None:
        if self.known:
            self.refresh(now_ns)

    def relieve(
        self,
        decision: SchedulerOutput,
        starting: Sequence[Sample],
        decide: Callable[[int], SchedulerOutput],
    ) -> bool:
        """Drop the pin that expires first, if dropping pins lets more sequences run."""
        if not self.pins:
            return False
        late = next((seq for seq in starting if seq.seq_id not in decision.num_tokens), None)
        if late is None and not decision.preempted_seqs:
            return False
        # Dropping a pin with whose blocks it starts would not help it.
        own = frozenset() if late is None else self._cache.held_prefix(late.allocation)
        but = frozenset() if decision.preempted_seqs else own
        num_freed = len(self._cache.held_alone(self.pins) - but)
        without = decide(self._cache.num_free_blocks() + num_freed)
        saved = len(decision.preempted_seqs) - len(without.preempted_seqs)
        if saved <= 0 and len(without.prefill_seqs) <= len(decision.prefill_seqs):
            return False
        self._give_way(own)
        return True

    def planned(self, draft: PlanDraft) -> None:
        # The plan has all moves so far.
        self._loads = [each._replace(step_id=each.step_id or draft.step_id) for each in self._loads]

    def absorb(self, sent: SentPlan, result: StepSummary) -> Iterable[Sample]:
        """Let the blocks be found that were loaded by a plan that is back."""
        for session, allocation, step_id in self._loads:
            found = step_id == result.step_id and session.allocation is allocation
            if found and allocation.block_ids:
                num_tokens = len(allocation.block_ids) * self._cache.block_size
                self._cache.commit(allocation, num_tokens)
        self._loads = [each for each in self._loads if each.step_id != result.step_id]
        return ()

    def lose(self) -> None:
        # The plans with the moves are lost.
        for session, allocation, _ in self._loads:
            if session.allocation is allocation:
                self._unpin(session)
        self._loads.clear()
        self._fetching.clear()

    def reset(self) -> None:
        # The sequences of all turns have been dropped.
        for turn in self._turns.values():
            turn.session.num_turns, turn.session.deferred = 0, None
            self._ended.append(turn.session)
        self._turns.clear()
        self._num_reserved = 0

    def wake_at_ns(self) -> int | None:
        return self._first_ns

    def num_spare_blocks(self) -> int:
        return len(self.pins)

    def allocations(self) -> Iterable[Allocation]:
        return (session.allocation for session in self.known.values())

    def numbers(self) -> Mapping[str, int]:
        return {"kv_pinned": len(self.pins)}

    def take_counts(self) -> Mapping[str, Mapping[str, float]]:
        """Return the numbers of outcomes since the last call, and of pins that gave way."""
        counts, self._counts = self._counts, Counter()
        return {"sessions": counts}

    # --- turns --------------------------------------------------------------------------------

    def begin_turn(
        self, seq_id: int, tenant: str, wish: KVSession, allocation: Allocation, max_length: int
    ) -> SessionGrant:
        """Begin a turn, or continue it after a preemption. Its share is reserved until it ends.

        Args:
            seq_id: Id of its sequence.
            tenant: The request's, as the next one.
            wish: The requested action on its KV.
            allocation: The sequence's, which has its blocks.
            max_length: Most tokens of prompt and completion.
        """
        if (turn := self._turns.get(seq_id)) is not None:
            return turn.grant
        pins, size, tiers = wish.after == "pin", self._cache.block_size, self._below.exists
        if reason := self._refusal(wish.ttl_s, pins=pins):
            self._counts["rejected"] += 1
            return SessionGrant(wish.after, 0, size, tiers, reason)
        key = SessionKey(tenant, wish.id)
        session = self.known.get(key) or self._add(key, allocation.scope)
        session.num_turns += 1
        session.expires_ns = None
        num_blocks = num_reserved = 0
        if pins:
            num_blocks = (max_length - 1) // size
            # Pinned blocks use the share already: those that the turn begins with, and those of the
            # session's present pin, which ends with the turn.
            present = {each for each in allocation.block_ids if each in self.pins}
            present |= {each for each in session.allocation.block_ids if self.pins[each] == 1}
            num_reserved = max(0, min(num_blocks - len(present), self._room()))
            if num_blocks > len(present) + num_reserved:
                num_blocks, reason = len(present) + num_reserved, NO_ROOM
        self._num_reserved += num_reserved
        grant = SessionGrant(wish.after, num_blocks, size, tiers, reason)
        self._turns[seq_id] = _Turn(session, wish, grant, num_reserved)
        return grant

    def end_turn(self, seq_id: int, token_ids: Sequence[int], scope: CacheScope) -> None:
        """End a turn, if the sequence is one: its session's tokens are these from now on.

        Args:
            seq_id: A sequence that has given back its blocks, which are in the prefix cache.
            token_ids: Its tokens.
            scope: Its scope.
        """
        if (turn := self._turns.pop(seq_id, None)) is None:
            return
        session, wish, grant, num_reserved = turn
        session.num_turns -= 1
        self._num_reserved -= num_reserved
        self._unpin(session)
        self._fetching.discard(session)
        session.allocation = Allocation(array("q", token_ids), scope)
        call, session.deferred = session.deferred, None
        ttl_s = wish.ttl_s if call is None or call.ttl_s is None else call.ttl_s
        session.ttl_ns = _ns(ttl_s)
        self._ended.append(session)
        self._counts[grant.result(len(token_ids)).outcome] += 1
        action = wish.after if call is None else call.action
        if action == "pin":
            self._hold(session, self._max_pinned if call is not None else grant.num_blocks)
        elif action == "demote":
            self._demote(session)

    # --- calls --------------------------------------------------------------------------------

    def call(self, key: SessionKey, call: SessionCall, now_ns: int) -> KVSessionResult:
        """Carry out a client's call."""
        result = self._call(key, call, now_ns)
        self._counts[result.outcome] += 1
        return result

    def _call(self, key: SessionKey, call: SessionCall, now_ns: int) -> KVSessionResult:
        action, ttl_s = call
        pins = action in ("pin", "prefetch")
        if reason := self._refusal(ttl_s, pins=pins):
            return KVSessionResult(outcome="rejected", reason=reason)
        self.refresh(now_ns)
        if (session := self.known.get(key)) is None:
            reason = "the session is not known: it has no turn yet, or its time to live is over"
            return KVSessionResult(outcome="missing", reason=reason)
        if session.num_turns:
            if action != "prefetch":
                session.deferred = call
            return KVSessionResult(outcome="deferred", reason=RUNS)
        if action in ("demote", "prefetch") and self._room_to_load() is None:
            return KVSessionResult(outcome="rejected", reason=NO_STEPS)
        if ttl_s is not None:
            session.ttl_ns = _ns(ttl_s)
            self._set_expiry(session, now_ns)
        if self._is_loading(session) and pins:
            return self._result(session, "deferred", FETCHES)
        self._fetching.discard(session)
        match action:
            case "pin":
                return self._pin(session)
            case "prefetch":
                return self._prefetch(session)
            case "demote":
                return self._demote(session)
            case "release":
                num_tokens = len(session.allocation.block_ids) * self._cache.block_size
                tier: SessionTier = "device" if num_tokens else ""
                self._unpin(session)
                return KVSessionResult(outcome="accepted", num_tokens=num_tokens, tier=tier)
            case _:
                assert_never(action)

    def _pin(self, session: Session) -> KVSessionResult:
        num_found = self._hold(session, self._max_pinned)
        allocation = session.allocation
        if len(allocation.block_ids) == self._num_full(session):
            return self._result(session, "accepted")
        if len(allocation.block_ids) < num_found:
            outcome: SessionOutcome = "clipped" if allocation.block_ids else "rejected"
            return self._result(session, outcome, NO_ROOM)
        if self._num_below(allocation):
            return self._result(session, "clipped", BELOW)
        return self._result(session, "clipped" if num_found else "missing", GONE)

    def _prefetch(self, session: Session, num_fetched: int = 0) -> KVSessionResult:
        """Pin what is on the device, and load what is in the tiers after it.

        `num_fetched`: leading blocks that are not fetched from disk again.
        """
        num_found = self._hold(session, self._max_pinned)
        allocation, num_full = session.allocation, self._num_full(session)
        allocation.num_fetched = num_fetched
        if len(allocation.block_ids) < min(num_found, num_full):
            outcome: SessionOutcome = "clipped" if allocation.block_ids else "rejected"
            return self._result(session, outcome, NO_ROOM)
        if len(allocation.block_ids) < num_full and self._below.fetch(allocation):
            self._fetching.add(session)
            return self._result(session, "deferred", FETCHES)
        share, room = self._room(), self._room_to_load() or 0
        if number := self._below.load(allocation, min(share, room)):
            self.pins.update(allocation.block_ids[-number:])
            self._loads.append(_Load(session, allocation))
        if len(allocation.block_ids) == num_full:
            return self._result(session, "accepted")
        reason = GONE
        if self._num_below(allocation):
            reason = NO_ROOM if share <= room else NO_BLOCKS
        if allocation.block_ids:
            return self._result(session, "clipped", reason)
        return self._result(session, "missing" if reason == GONE else "rejected", reason)

    def _demote(self, session: Session) -> KVSessionResult:
        """Let a session's blocks be evicted next, after storing them in the tiers if there are."""
        self._unpin(session)
        allocation = session.allocation = Allocation(
            session.allocation.token_ids, session.allocation.scope
        )
        self._cache.hold(allocation)
        block_ids = [*allocation.block_ids]
        num_below = self._num_below(allocation)
        stores = self._room_to_load() is not None
        if block_ids:
            self._cache.states.demote(allocation, stores=stores)
        self._cache.release(allocation)
        self._cache.evict_next(block_ids, stores=stores)
        num_tokens = (len(block_ids) + num_below) * self._cache.block_size
        if not num_tokens and self._num_full(session):
            return KVSessionResult(outcome="missing", reason=GONE)
        is_all = num_tokens == self._num_full(session) * self._cache.block_size
        return KVSessionResult(
            outcome="accepted" if is_all else "clipped",
            num_tokens=num_tokens,
            tier="" if not num_tokens else "host" if self._below.exists else "device",
            reason="" if is_all else GONE,
        )

    # --- changes ------------------------------------------------------------------------------

    def refresh(self, now_ns: int) -> None:
        """Forget expired sessions, and drop pins of KV that the cache has forgotten."""
        if self._generation != self._cache.generation:
            self._generation = self._cache.generation
            for session in self.known.values():
                self._unpin(session)
        for session in self._ended:
            if not session.num_turns:
                self._set_expiry(session, now_ns)
        self._ended.clear()
        if self._first_ns is None or now_ns < self._first_ns:
            return
        for key, session in [*self.known.items()]:
            if session.order <= now_ns:
                self._forget(key)
        ends = [each.expires_ns for each in self.known.values() if each.expires_ns is not None]
        self._first_ns = min(ends, default=None)

    def _give_way(self, last: Set[int]) -> None:
        """Drop the pin of the session that expires first. There must be one.

        Args:
            last: Sessions with these blocks come last.
        """

        def order(session: Session) -> tuple[bool, float]:
            return not last.isdisjoint(session.allocation.block_ids), session.order

        self._unpin(
            min((each for each in self.known.values() if each.allocation.block_ids), key=order)
        )
        self._counts["gave_way"] += 1

    def _change_adapter(self, adapter: str, version: int) -> None:
        """Drop the pins of KV that an adapter's former weights have computed."""
        for session in self.known.values():
            if (scope := session.allocation.scope).adapter == adapter:
                self._unpin(session)
                scope = scope._replace(adapter_version=version)
                session.allocation = Allocation(session.allocation.token_ids, scope)

    def _continue_prefetches(self) -> None:
        """Continue prefetches that wait for the disk."""
        for session in [*self._fetching]:
            if not self._below.fetch(session.allocation):
                self._fetching.remove(session)
                self._prefetch(session, session.allocation.num_fetched)

    # --- internals ----------------------------------------------------------------------------

    def _room_to_load(self) -> int | None:
        """Return how many free blocks no sequence needs soon; None if no block may be moved."""
        core = self.core
        if core.paused or core.lacks:
            return None
        reserved = -(-len(core.running) // self._cache.block_size)
        return 0 if core.waiting else max(self._cache.num_free_blocks() - reserved, 0)

    def _refusal(self, ttl_s: float | None, *, pins: bool) -> str:
        """Return why a wish is rejected; "" if it isn't."""
        # Written so that NaN fails.
        if ttl_s is not None and not 0 < ttl_s <= self._max_ttl_s:
            most = f"{self._max_ttl_s:g} (engine.kv_session_ttl_s)"
            return f"ttl_s is {shown(ttl_s)}; it must be above 0 and at most {most}"
        if pins and not self._max_pinned:
            return "sessions have no share of the KV cache; set engine.kv_session_share"
        return ""

    def _add(self, key: SessionKey, scope: CacheScope) -> Session:
        if len(self.known) >= MOST_SESSIONS:
            resting = ((k, each) for k, each in self.known.items() if not each.num_turns)
            if first := min(resting, key=lambda pair: pair[1].order, default=None):
                self._forget(first[0])
        session = self.known[key] = Session(Allocation(array("q"), scope))
        return session

    def _forget(self, key: SessionKey) -> None:
        session = self.known.pop(key)
        self._unpin(session)
        self._fetching.discard(session)

    def _set_expiry(self, session: Session, now_ns: int) -> None:
        session.expires_ns = now_ns + session.ttl_ns
        self._first_ns = min(self._first_ns or session.expires_ns, session.expires_ns)

    def _num_full(self, session: Session) -> int:
        """Return the number of full blocks: the last token has no KV before the next turn."""
        return max(len(session.allocation.token_ids) - 1, 0) // self._cache.block_size

    def _num_below(self, allocation: Allocation) -> int:
        """Return the number of blocks in the tiers after those that a allocation holds."""
        return self._below.num_stored(allocation)

    def _room(self) -> int:
        return max(self._max_pinned - len(self.pins) - self._num_reserved, 0)

    def _is_loading(self, session: Session) -> bool:
        return session in self._fetching or any(
            each.allocation is session.allocation for each in self._loads
        )

    def _hold(self, session: Session, most: int) -> int:
        """Pin leading blocks that are on the device, at most so many, and as the share allows.

        Returns:
            The number of leading blocks on the device.
        """
        self._unpin(session)
        allocation = session.allocation = Allocation(
            session.allocation.token_ids, session.allocation.scope
        )
        self._cache.hold(allocation)
        num_found, room, keep = len(allocation.block_ids), self._room(), 0
        for block_id in allocation.block_ids[:most]:
            room -= block_id not in self.pins
            if room < 0:
                break
            keep += 1
        self._cache.trim(allocation, self._cache.states.usable(allocation, keep))
        self._cache.states.hold(allocation)
        self.pins.update(allocation.block_ids)
        return num_found

    def _unpin(self, session: Session) -> None:
        for block_id in session.allocation.block_ids:
            self.pins[block_id] -= 1
            if not self.pins[block_id]:
                del self.pins[block_id]
        self._cache.states.release(session.allocation)
        self._cache.release(session.allocation)

    def _result(
        self, session: Session, outcome: SessionOutcome, reason: str = ""
    ) -> KVSessionResult:
        num_tokens = len(session.allocation.block_ids) * self._cache.block_size
        tier: SessionTier = "device" if num_tokens else ""
        if (
            not num_tokens
            and outcome in ("clipped", "deferred")
            and self._num_below(session.allocation)
        ):
            tier = "host"
        return KVSessionResult(outcome=outcome, num_tokens=num_tokens, tier=tier, reason=reason)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
