"""The part of batching that keeps blocks below the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import asdict
from itertools import islice
from typing import Any

from .....bus.control import ReplicaCapacity, TierCapacity, TiersChanged
from .....bus.messages import RemoteBlocks
from .....bus.parts.tiers import FetchedBlocks, TiersPlan, moves_of
from .....bus.steps import AUDIT_SEQ_ID, KVMove, NewSequence, StepSummary
from .....config import EngineConfig
from ...allocation import NO_NAMES, Allocation, Below
from ...plans import PlanDraft, SentPlan
from ...sequence import Sequence as Sample
from .. import Core, Part
from ..kv_events import KVEvents
from .audit import BLOCKS_SAVED_AT_ONCE, TierAudit
from .snapshots import SnapshotTiers
from .tiers import KVTiers, LoadedBlock


class Tiers(Part, Below):
    """The KV tiers below a replica's cache, and their audit.

    A full block that is evicted from the device is stored here under its block hash, and is loaded
    again into a free block when a sequence starts with its tokens.

    Attributes:
        blocks: The blocks of each tier.
        states: The snapshots of each tier; None for a model without recurrent state.
        audit: Computes loaded blocks again while nothing else runs.
    """

    exists = True
    handles = (TiersChanged,)

    def __init__(self, core: Core, config: EngineConfig, capacity: ReplicaCapacity) -> None:
        super().__init__(core, config, capacity)
        self._cache = core.cache
        own = TierCapacity.find(capacity.parts)
        assert own is not None
        events = core.find(KVEvents)
        # Otherwise a block computed again may have other bits.
        audit_every = config.kv_audit_every if capacity.exact else 0
        log = events.log if events is not None else None
        self.blocks = KVTiers(own, capacity.block_size, config.kv_eviction, audit_every, log)
        self.states: SnapshotTiers | None = None
        if own.states is not None:
            self.states = SnapshotTiers(
                core.cache, self.blocks, own.states, config.kv_eviction, audit_every
            )
        self.audit = TierAudit(self._units, core.cache, core.limits)
        # Blocks that a later start could find on disk, and that may not be there.
        self._unsaved: dict[int, None] = {}
        self._offered: list[KVMove] = []
        self._forgets_audit = False
        self._now_ns = 0
        core.cache.below, core.cache.root = self, self.blocks.root
        # First, so that a router doesn't forget the tokens of a block that is stored here.
        core.cache.followers = (self, *core.cache.followers)

    @property
    def _units(self) -> list[KVTiers]:
        return [self.blocks] if self.states is None else [self.blocks, self.states.units]

    @property
    def fetches(self) -> bool:
        """Whether blocks are being fetched."""
        return any(each.fetches for each in self._units)

    @property
    def has_moves(self) -> bool:
        """Whether blocks wait to be moved with the next plan."""
        return any(each.has_moves for each in self._units)

    @property
    def audits(self) -> bool:
        """Whether the next plan computes a loaded block again, or compares it."""
        return (self.audit.is_due or self.audit.has_moves) and self.core.rests

    @property
    def saves(self) -> bool:
        """Whether the next plan saves blocks or snapshots to disk."""
        has_unsaved = self._unsaved or (self.states is not None and self.states.has_unsaved)
        return bool(has_unsaved) and self.core.rests

    # --- the cache's blocks -------------------------------------------------------------------

    def named(self, allocation: Allocation, first: int, end: int, named: Sequence[int]) -> None:
        if self.blocks.survives(self._cache.weight_version, allocation.scope):
            self._unsaved.update(dict.fromkeys(named))

    def evicted(self, block_id: int, name: bytes) -> None:
        self._unsaved.pop(block_id, None)
        self.blocks.store(name, block_id)

    def forgotten(self) -> None:
        self._unsaved.clear()
        if self.states is not None:
            self.states.forgotten()

    def flushed(self, *, new_weights: bool) -> None:
        for each in self._units:
            if new_weights:
                each.forget_host()
            else:
                each.clear()

    def disown(self, names: Set[bytes]) -> None:
        for each in self._units:
            each.disown(names)

    def check(self) -> None:
        for each in self._units:
            each.check()

    def ready(self, allocation: Allocation, first: int) -> Sequence[bytes]:
        names = self._following(allocation, first)
        return names[: self.blocks.num_ready(names)]

    def pinned(self, names: Sequence[bytes]) -> AbstractContextManager[None]:
        return self.blocks.pinned(names)

    def started(self, allocation: Allocation, names: Sequence[bytes], first: int) -> None:
        self._load(allocation, names, first)
        allocation.num_fetched, allocation.num_loaded = 0, len(names)
        allocation.remote, allocation.remote_states = {}, {}
        allocation.fetched_states = NO_NAMES
        if self.states is not None and (end := first + len(names)):
            self.states.started(allocation, end)

    def fetch(self, allocation: Allocation, *, ahead: bool = False) -> bool:
        if not allocation.may_reuse:
            return False
        known = allocation.num_known
        most = min(len(allocation.token_ids) - (not ahead), allocation.max_reuse)
        names = self._cache.names_of(allocation, most // self._cache.block_size)
        state_waits = False
        if self.states is not None:
            reach = known + self.blocks.num_reachable(names[known:], allocation.remote)
            end, state_waits = self.states.fetch(allocation, names[:reach])
            # Ahead, a snapshot may be offered after the blocks before it.
            names = names[: reach if ahead else end]
        num_asked = max(allocation.num_fetched - known, 0)
        waits, num_asked = self.blocks.fetch(names[known:], num_asked, allocation.remote)
        waits = waits or state_waits
        allocation.num_fetched = known + num_asked
        if waits and not ahead:
            allocation.fetching_since_ns = allocation.fetching_since_ns or self._now_ns
        return waits

    def num_stored(self, allocation: Allocation) -> int:
        return self.blocks.num_stored(self._following(allocation, len(allocation.block_ids)))

    def load(self, allocation: Allocation, max_blocks: int) -> int:
        first = len(allocation.block_ids)
        most = max(min(max_blocks, self._cache.num_free_blocks()), 0)
        names = self.ready(allocation, first)[:most]
        names = names[: self._cache.states.usable(allocation, first + len(names)) - first]
        with self.blocks.pinned(names):
            for _ in names:
                self._cache.extend(allocation)
        self._load(allocation, names, first)
        return len(names)

    def store(self, name: bytes, block_id: int) -> None:
        self.blocks.store(name, block_id)

    # --- the device's snapshots ---------------------------------------------------------------

    def reach(self, names: Sequence[bytes], num_blocks: int) -> int:
        return num_blocks if self.states is None else self.states.reach(names, num_blocks)

    def load_state(self, name: bytes, take: Callable[[], int]) -> None:
        assert self.states is not None
        self.states.load(name, take)

    def store_state(self, name: bytes, number: int) -> None:
        if self.states is not None:
            self.states.units.store(name, number)

    def made_state(self, number: int, allocation: Allocation) -> None:
        if self.states is not None:
            self.states.made(number, allocation)

    def _load(self, allocation: Allocation, names: Sequence[bytes], first: int) -> None:
        """Load blocks into those of an allocation, from the block with index `first` on."""
        for index, name in enumerate(names, first):
            if self.blocks.load(name, block_id := allocation.block_ids[index]):
                before = allocation.token_ids[: (index + 1) * self._cache.block_size]
                self.blocks.chosen.append(LoadedBlock(name, block_id, before, allocation.scope))

    def _following(self, allocation: Allocation, first: int) -> list[bytes]:
        """Return the names of an allocation's full blocks from `first` on that may be loaded, as
        in `KVCacheManager.start`."""
        num_full = max(allocation.most_cached(), 0) // self._cache.block_size
        return self._cache.names_of(allocation, num_full)[first:]

    # --- between executors --------------------------------------------------------------------

    def describe(self) -> tuple[str, str, str, str]:
        own = self.blocks.capacity
        return own.address, own.layout, own.model, own.states.address if own.states else ""

    def expect(self, allocation: Allocation, remote: RemoteBlocks) -> None:
        if allocation.may_reuse:
            num_blocks = len(allocation.token_ids) // self._cache.block_size
            names = self._cache.names_of(allocation, num_blocks)
            version = self._cache.weight_version
            allocation.remote = self.blocks.remote_of(names, remote, version, allocation.scope)
            if self.states is not None:
                allocation.remote_states = self.states.remote_of(allocation.remote, remote)

    def offer(
        self, seq_id: int, allocation: Allocation, num_tokens: int, now_ns: int
    ) -> tuple[int, list[KVMove]]:
        if not self._cache.is_current(allocation):
            return 0, []
        num_prompt = len(allocation.token_ids)
        num_blocks = min(num_tokens, num_prompt) // self._cache.block_size
        names = self._cache.names_of(allocation, num_blocks)
        block_ids = allocation.block_ids[: len(names)]
        first, moves = self.blocks.offer(seq_id, names, block_ids, now_ns)
        if self.states is not None and num_tokens >= num_prompt:
            moves += self.states.offer(seq_id, allocation, num_blocks, now_ns)
        self._offered += moves
        return first, moves

    def release_offer(self, seq_id: int) -> None:
        for each in self._units:
            each.release_offer(seq_id)

    # --- the core's hooks ---------------------------------------------------------------------

    def receive(self, message: TiersChanged, now_ns: int, deadline_ns: int | None) -> None:
        was_on = self.blocks.difference is None
        self.blocks.changed(message)
        if self.states is not None and message.states is not None:
            self.states.units.changed(message.states)
        found = (each.difference for each in self._units if each.difference is not None)
        if was_on and (difference := next(found, None)) is not None:
            for each in self._units:
                each.turn_off(difference)
            # Other blocks that were loaded may be as wrong, those of running sequences too.
            self._cache.forget_device()
            self.core.recompute()

    def start(self, seq: Sample, new: dict[str, Any]) -> None:
        if since_ns := seq.allocation.fetching_since_ns:
            seq.allocation.fetching_since_ns = 0
            new["onward"] += (FetchedBlocks(since_ns, seq.allocation.num_loaded),)

    def begin(self, now_ns: int) -> None:
        self._now_ns = now_ns
        for each in self._units:
            if each.has_offers:
                each.end_offers(now_ns)

    def rest(self, step_id: int) -> NewSequence | None:
        for block_id in [*islice(self._unsaved, BLOCKS_SAVED_AT_ONCE)]:
            del self._unsaved[block_id]
            name = self._cache.name_of(block_id)
            assert name is not None
            self.blocks.save(name, block_id)
        if self.states is not None and self.states.has_unsaved:
            self.states.save_next()
        return self.audit.begin(step_id)

    def is_urgent(self) -> bool:
        return self.audit.has_moves

    def planned(self, draft: PlanDraft) -> None:
        if self._forgets_audit:
            draft.forget.append(AUDIT_SEQ_ID)
            self._forgets_audit = False
        moves, offers = self.audit.take_moves(), tuple(self._offered)
        self._offered.clear()
        if moves or offers:
            draft.parts.append(TiersPlan(moves, offers))

    def absorb(self, sent: SentPlan, result: StepSummary) -> Iterable[Sample]:
        if self.audit.absorb(result.step_id):
            self._forgets_audit = True
        return ()

    def lose(self) -> None:
        lost = [move for sent in self.core.sent for move in moves_of(sent.plan.parts)]
        for each in self._units:
            each.forget_plans([*lost, *self._offered])
        self._offered.clear()
        self.audit.clear()
        self._forgets_audit = False

    def allocations(self) -> Iterable[Allocation]:
        return self.audit.allocations

    def numbers(self) -> Mapping[str, int]:
        report = self.blocks.load_report()
        if self.states is not None:
            states = self.states.units.load_report()
            report |= {name.replace("kv", "kv_states", 1): each for name, each in states.items()}
        return report

    def take_counts(self) -> Mapping[str, Mapping[str, float]]:
        counts = self.blocks.take_counts()
        moves, saved_s = asdict(counts), self.blocks.saved_s(counts.loaded)
        if self.states is not None:
            states = self.states.units.take_counts()
            moves |= {f"states_{name}": number for name, number in asdict(states).items()}
            saved_s = max(saved_s - states.loaded * self.states.units.capacity.load_ns / 1e9, 0)
        return {"tier_moves": moves, "tier_times": {"saved_s": saved_s}}
