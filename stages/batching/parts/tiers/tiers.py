"""The accounting of KV tiers below the device: the blocks in host memory and on disk.

The executor moves the bytes, in the order of the plans; here a block is a name, its block hash.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from random import Random
from typing import Any, NamedTuple

import xxhash

from .....bus.control import AuditedBlock, TierCapacity, TiersChanged
from .....bus.kv_events import DISK, HOST, Medium
from .....bus.messages import CacheScope, RemoteBlocks
from .....bus.steps import KVMove, MoveKind
from ...allocation import UnitLog
from .eviction import POLICIES

FETCH_SHARE = 2
"""At most one in so many host slots waits for the disk."""


OFFER_S = 60.0
"""Seconds for which an offered block keeps its slot, if the receiver doesn't release it before."""

MOST_CHOSEN = 16
"""Loaded blocks that may wait to be audited; beyond, the oldest is passed over."""


class LoadedBlock(NamedTuple):
    """A block that a sequence has loaded.

    Attributes:
        name: Its block hash.
        block_id: Its place on the device.
        token_ids: Token ids of the block and all blocks before it.
        scope: Scope of the sequence.
        snapshot: Number of the snapshot at its end, if this was loaded; else -1.
    """

    name: bytes
    block_id: int
    token_ids: Sequence[int]
    scope: CacheScope
    snapshot: int = -1


class RemoteBlock(NamedTuple):
    """A block in a host slot of another executor, its name there, and the step that offers it."""

    address: str
    name: bytes
    slot: int
    step: int


NOT_REMOTE: Mapping[bytes, RemoteBlock] = {}


class Offer(NamedTuple):
    """Blocks offered to another executor, and when the offer ends."""

    names: tuple[bytes, ...]
    until_ns: int


@dataclass
class TierCounts:
    """Numbers of blocks since the last `KVTiers.take_counts`.

    Attributes:
        stored: Stored in host memory.
        loaded: Loaded from host memory to the device.
        fetched: Read from disk into host memory.
        offered: Offered to other executors.
        received: Read from another executor into host memory.
        lost: Not written to disk, or not read whole.
        audited: Computed again and compared.
        different: Compared blocks with other bits.
    """

    stored: int = 0
    loaded: int = 0
    fetched: int = 0
    offered: int = 0
    received: int = 0
    lost: int = 0
    audited: int = 0
    different: int = 0


class KVTiers:
    """Blocks that left the device, in host slots and in files on disk.

    A block that is evicted from the device is stored in a host slot, and written to disk from
    there. A block in a slot is loaded by the plan that starts its sequence. A block on disk is
    fetched into a slot first, while its sequence waits; it can be found once the executor has
    reported that the file is whole.

    A sequence that is handed over to another executor takes its blocks along: they are offered,
    each in a slot that it keeps until `release_offer`. The other executor fetches them as if from
    disk.

    Moves are applied in the order of `take_moves`. Plans whose result never comes may not have
    been applied, so `forget_plans` drops what they would have stored.

    One of `audit_every` loaded blocks, on average, is chosen to be computed again. If it differs,
    the tiers are off until `clear`: nothing is stored, loaded or fetched.

    Snapshots of a recurrent state are accounted for in the same way, by another instance: their
    names are those of the blocks that end there, their places on the device are their numbers.

    Attributes:
        capacity: The executor's tiers.
        chosen: Loaded blocks to be audited. Those of both instances are in one.
        difference: The first audited block that differed; None if all were equal.
    """

    def __init__(
        self,
        capacity: TierCapacity,
        block_size: int,
        policy: str,
        audit_every: int = 0,
        events: UnitLog | None = None,
        *,
        state: bool = False,
    ) -> None:
        """Set up empty tiers.

        Args:
            capacity: The executor's tiers.
            block_size: Tokens of a block.
            policy: Name of the eviction policy.
            audit_every: 0 for no audit, as without deterministic mode.
            events: Log of the blocks that can be found; None for no log.
            state: Whether these are snapshots. Whether one pays depends on the tokens before it,
                so the caller decides.
        """
        self.capacity = capacity
        self._state = state
        self.chosen: deque[LoadedBlock] = deque(maxlen=MOST_CHOSEN)
        self.difference: AuditedBlock | None = None
        self._audit_every = audit_every
        self._draw = Random(capacity.incarnation)
        self._until_audit = self._next_gap()
        # Blocks are chosen as long as an audit is due: most have left the device when it begins.
        self._audits_due = 0
        self._computing_ns = capacity.token_ns * block_size
        self._host_pays = state or capacity.load_ns < self._computing_ns
        self._disk_pays = state or capacity.load_ns + capacity.fetch_ns < self._computing_ns
        self._host = POLICIES[policy](capacity.host_slots)
        self._disk = POLICIES[policy](capacity.disk_blocks)
        self._slot_of: dict[bytes, int] = {}
        self._free_slots = list(range(capacity.host_slots))
        self._on_disk: set[bytes] = set()
        self._writing: set[bytes] = set()
        self._fetching: dict[bytes, int] = {}
        self._receiving: set[bytes] = set()  # of these, the blocks of another executor
        self._offers: dict[int, Offer] = {}
        # Written or fetched across a flush: not to be found when they arrive.
        self._flushed: set[bytes] = set()
        self._pinned: Counter[bytes] = Counter()  # blocks that keep their slots
        self._moves: list[KVMove] = []
        self._counts = TierCounts()
        self._events = events

    def root(self, weight_version: int, scope: CacheScope) -> int:
        """Return the root of the block-hash chain of a scope.

        Weights as they were loaded have the same root after a restart, and on every executor. Those
        of an update or an adapter are known to this executor only.
        """
        origin = f"{self.capacity.incarnation}.{weight_version}"
        if self._is_known_elsewhere(weight_version, scope):
            origin = self.capacity.model
        return xxhash.xxh3_128_intdigest(repr((self.capacity.layout, origin, *scope)).encode())

    def survives(self, weight_version: int, scope: CacheScope) -> bool:
        """Whether another start could find a block of these weights on disk."""
        return self.capacity.disk_blocks > 0 and self._is_known_elsewhere(weight_version, scope)

    # --- blocks -------------------------------------------------------------------------------

    def store(self, name: bytes, block_id: int) -> None:
        """Store a block that is evicted from the device, in a slot and on disk, unless it is there
        already."""
        if self.difference is not None:
            return
        slot = self._slot_of.get(name)
        if slot is not None:
            self._host.hit(name)
            # Of an offer, from another executor, or written in vain.
            if self._begins_write(name):
                self._moves.append(self._move("write", name, slot))
        elif (slot := self._take_slot()) is not None:
            self._fill(name, slot)
            write = self._begins_write(name)
            self._moves.append(self._move("store", name, slot, block_id, write=write))
            self._counts.stored += 1

    def save(self, name: bytes, block_id: int) -> None:
        """Store a block that stays on the device, unless it is on disk."""
        if name not in self._on_disk:
            self.store(name, block_id)

    def num_stored(self, names: Sequence[bytes]) -> int:
        """Return the number of leading names in host slots or on disk, or on their way."""
        if self.difference is not None:
            return 0
        return sum(1 for _ in takewhile(self._is_stored, names))

    def num_reachable(
        self, names: Sequence[bytes], remote: Mapping[bytes, RemoteBlock] = NOT_REMOTE
    ) -> int:
        """Return the number of leading names in host slots, or that can be fetched into them, if
        that beats computing."""
        if not self._host_pays or self.difference is not None:
            return 0
        stored = self._is_stored if self._disk_pays else self._is_near
        return sum(1 for _ in takewhile(lambda name: name in remote or stored(name), names))

    def num_ready(self, names: Sequence[bytes]) -> int:
        """Return the number of leading names in host slots, if loading beats computing."""
        if not self._host_pays or self.difference is not None:
            return 0
        return sum(1 for _ in takewhile(self._slot_of.__contains__, names))

    def load(self, name: bytes, block_id: int) -> bool:
        """Load a block from its slot into a block of the device.

        Returns:
            Whether it is chosen to be audited, if it is still there then.
        """
        self._host.hit(name)
        self._moves.append(self._move("load", name, self._slot_of[name], block_id))
        self._counts.loaded += 1
        self._until_audit -= 1
        if self._until_audit == 0:
            self._until_audit = self._next_gap()
            self._audits_due = min(self._audits_due + 1, MOST_CHOSEN)
        return self._audits_due > 0

    def end_audit(self) -> None:
        """Take note that a chosen block is audited."""
        self._audits_due -= 1
        if not self._audits_due:
            for block in [each for each in self.chosen if (each.snapshot >= 0) == self._state]:
                self.chosen.remove(block)

    @contextmanager
    def pinned(self, names: Sequence[bytes]) -> Iterator[None]:
        """Keep these blocks in their slots."""
        self._pin(names)
        try:
            yield
        finally:
            self._unpin(names)

    def fetch(
        self,
        names: Sequence[bytes],
        num_asked: int,
        remote: Mapping[bytes, RemoteBlock] = NOT_REMOTE,
    ) -> tuple[bool, int]:
        """Fetch leading blocks from disk or another executor, if that beats computing.

        Args:
            names: Names of a sequence's blocks, in order, after those on the device.
            num_asked: The first of them that were fetched for it before, and are not again.
            remote: Blocks that another executor offers.

        Returns:
            Whether the sequence has to wait, and the new `num_asked`.
        """
        wanted = list(takewhile(lambda name: name in remote or self._is_stored(name), names))
        waits = any(name in self._fetching for name in wanted)
        if self.difference is not None:
            return waits, num_asked
        with self.pinned(wanted):
            for index in range(num_asked, len(wanted)):
                name, block = wanted[index], remote.get(wanted[index])
                if name in self._slot_of or name in self._fetching:
                    continue
                if not (self._host_pays if block is not None else self._disk_pays):
                    break
                room = len(self._fetching) * FETCH_SHARE < self.capacity.host_slots
                slot = self._take_slot() if room else None
                if slot is None:
                    # Blocks in flight make room when they have come.
                    return bool(self._fetching), index
                self._fetching[name] = slot
                self._moves.append(self._fetch(name, slot, block))
                waits = True
        return waits, max(num_asked, len(wanted))

    def offer(
        self, seq_id: int, names: Sequence[bytes], block_ids: Sequence[int], now_ns: int
    ) -> tuple[int, list[KVMove]]:
        """Offer a sequence's blocks to another executor, as far as there are slots for them.

        Blocks that were offered before stay offered, unless they have other names now.

        Returns:
            The number of blocks offered before; and the moves of the others, after the step that
            computes the last of these blocks.
        """
        moves: list[KVMove] = []
        before = self._offers[seq_id].names if seq_id in self._offers else ()
        if before != tuple(names[: len(before)]):
            self.release_offer(seq_id)
            before = ()
        first = len(before)
        if not self.capacity.address or self.difference is not None:
            return first, moves
        with self.pinned(names):
            for name, block_id in zip(names[first:], block_ids[first:], strict=True):
                slot = self._slot_of.get(name)
                if slot is not None:
                    block_id = -1
                elif (slot := self._take_slot()) is None:
                    break
                else:
                    self._fill(name, slot)
                moves.append(self._move("offer", name, slot, block_id))
        offered = tuple(move.name for move in moves)
        self._pin(offered)
        self._offers.pop(seq_id, None)  # offers are in order of their ends
        self._offers[seq_id] = Offer(before + offered, now_ns + int(OFFER_S * 1e9))
        self._counts.offered += len(offered)
        return first, moves

    def release_offer(self, seq_id: int) -> None:
        """End an offer, if it has not ended."""
        if (offer := self._offers.pop(seq_id, None)) is not None:
            self._unpin(offer.names)

    def end_offers(self, now_ns: int) -> None:
        """End offers that have lasted for `OFFER_S`."""
        # In order of their ends.
        ended = takewhile(lambda each: each[1].until_ns <= now_ns, [*self._offers.items()])
        for seq_id, _ in ended:
            self.release_offer(seq_id)

    def remote_of(
        self, names: Sequence[bytes], remote: RemoteBlocks, weight_version: int, scope: CacheScope
    ) -> dict[bytes, RemoteBlock]:
        """Return blocks that another executor offers by their names here; none if they differ."""
        theirs = (remote.layout, remote.model, remote.weight_version, remote.adapter_version)
        ours = (
            self.capacity.layout,
            self.capacity.model,
            weight_version,
            scope.adapter_version,
        )
        if theirs != ours:
            return {}
        blocks = (RemoteBlock(remote.address, *block) for block in remote.blocks)
        return dict(zip(names, blocks, strict=False))

    def clear(self) -> None:
        """Forget all blocks, delete those on disk, and be on again after a difference."""
        self.difference = None
        self.forget_host()
        for name in self._on_disk:
            self._moves.append(self._move("drop", name))
        self._on_disk.clear()
        self._disk.clear()
        self._log_lost(DISK)

    def forget_host(self) -> None:
        """Forget the blocks in host slots, and all that are being written or fetched."""
        self._flushed |= self._writing | self._fetching.keys()
        self._free_slots += self._slot_of.values()
        self._slot_of.clear()
        self._host.clear()
        self._offers.clear()
        self._pinned.clear()
        self.chosen.clear()
        self._log_lost(HOST)

    def disown(self, names: Set[bytes]) -> None:
        """Delete these blocks once they are written: no sequence can find them any more."""
        self._flushed |= self._writing & names

    # --- plans and reports --------------------------------------------------------------------

    @property
    def has_moves(self) -> bool:
        """Whether the executor has something to do, with or without a step."""
        return bool(self._moves)

    @property
    def has_offers(self) -> bool:
        """Whether blocks are offered."""
        return bool(self._offers)

    @property
    def fetches(self) -> bool:
        """Whether a block is being fetched."""
        return bool(self._fetching)

    def is_fetching(self, name: bytes) -> bool:
        """Whether a block of this name is being fetched."""
        return name in self._fetching

    def take_moves(self) -> tuple[KVMove, ...]:
        """Return the moves since the last call, in order."""
        moves, self._moves = tuple(self._moves), []
        return moves

    def take_counts(self) -> TierCounts:
        """Return the counts since the last call."""
        counts, self._counts = self._counts, TierCounts()
        return counts

    def saved_s(self, num_blocks: int) -> float:
        """Return the computing time that loading so many blocks has saved, in seconds."""
        return num_blocks * max(self._computing_ns - self.capacity.load_ns, 0) / 1e9

    def changed(self, changes: TiersChanged) -> None:
        """Apply the executor's report."""
        if changes.whole:
            for name in self._on_disk.difference(changes.stored):
                self._disk.remove(name)
                self._log_removed(DISK, name)
            self._on_disk.intersection_update(changes.stored)
        for name in changes.stored:
            self._writing.discard(name)
            if name in self._flushed:
                self._flushed.remove(name)
                self._moves.append(self._move("drop", name))
            elif name not in self._on_disk:
                self._on_disk.add(name)
                self._disk.add(name)
                self._log_stored(DISK, name)
        if changes.whole:
            # Nothing is being written any more.
            self._writing.clear()
            self._flushed &= self._fetching.keys()
        for name in changes.fetched:
            self._end_fetch(name, whole=True)
        for name in changes.lost:
            self._counts.lost += 1
            if name in self._receiving:  # a file of this block is as good as before
                self._end_fetch(name, whole=False)
                continue
            self._writing.discard(name)
            self._flushed.discard(name)
            if name in self._on_disk:
                self._on_disk.remove(name)
                self._disk.remove(name)
                self._log_removed(DISK, name)
            self._end_fetch(name, whole=False)
        for block in changes.audited:
            self._counts.audited += 1
            if block.loaded != block.computed:
                self._counts.different += 1
                self.turn_off(block)

    def turn_off(self, difference: AuditedBlock) -> None:
        """Store, load and fetch nothing until `clear`, after a difference."""
        self.difference = self.difference or difference
        self._log_lost(HOST)
        self._log_lost(DISK)

    def forget_plans(self, moves: Iterable[KVMove]) -> None:
        """Drop what lost moves store, those not taken yet too, and all fetches: the executor has
        dropped them too."""
        for seq_id in [*self._offers]:
            self.release_offer(seq_id)
        for move in (*moves, *self._moves):
            if (
                move.state == self._state
                and move.kind in ("store", "offer")
                and move.block_id >= 0
                and self._slot_of.get(move.name) == move.slot
            ):
                self._host.remove(move.name)
                self._free_slots.append(self._slot_of.pop(move.name))
                self._log_removed(HOST, move.name)
        self._free_slots += self._fetching.values()
        self._flushed -= self._fetching.keys()
        self._fetching.clear()
        self._receiving.clear()
        self._writing.clear()
        self._moves = [move for move in self._moves if move.kind == "drop"]

    def check(self) -> None:
        """Check that every slot is in exactly one place.

        Raises:
            AssertionError: One is lost, or in two places.
        """
        slots = [*self._free_slots, *self._slot_of.values(), *self._fetching.values()]
        assert sorted(slots) == list(range(self.capacity.host_slots)), "a host slot is lost"
        assert len(self._host) == len(self._slot_of), "a host slot has no order of eviction"
        assert len(self._disk) == len(self._on_disk), "a file has no order of eviction"

    def load_report(self) -> dict[str, int]:
        """Return the numbers of blocks in each tier."""
        return {
            "kv_host": len(self._slot_of),
            "kv_host_total": self.capacity.host_slots,
            "kv_disk": len(self._on_disk),
            "kv_disk_total": self.capacity.disk_blocks,
        }

    def _move(
        self, kind: MoveKind, name: bytes, slot: int = -1, block_id: int = -1, **fields: Any
    ) -> KVMove:
        return KVMove(kind, name, slot, block_id, state=self._state, **fields)

    def _is_known_elsewhere(self, weight_version: int, scope: CacheScope) -> bool:
        return weight_version == self.capacity.weight_version and not scope.adapter

    def _is_stored(self, name: bytes) -> bool:
        return self._is_near(name) or name in self._on_disk

    def _is_near(self, name: bytes) -> bool:
        return name in self._slot_of or name in self._fetching

    def _pin(self, names: Iterable[bytes]) -> None:
        self._pinned.update(names)

    def _unpin(self, names: Iterable[bytes]) -> None:
        for name in names:
            if self._pinned[name] > 1:
                self._pinned[name] -= 1
            else:
                del self._pinned[name]

    def _fetch(self, name: bytes, slot: int, remote: RemoteBlock | None) -> KVMove:
        """Return the move that fetches a block from another executor, or else from disk."""
        if remote is None:
            self._disk.hit(name)
            return self._move("fetch", name, slot)
        self._receiving.add(name)
        return self._move(
            "fetch",
            name,
            slot,
            other=remote.slot,
            source=remote.address,
            source_name=remote.name,
            step=remote.step,
        )

    def _fill(self, name: bytes, slot: int) -> None:
        self._slot_of[name] = slot
        self._host.add(name)
        self._log_stored(HOST, name)

    def _take_slot(self) -> int | None:
        if self._free_slots:
            return self._free_slots.pop()
        victim = self._host.evict(self._pinned.keys())
        if victim is None:
            return None
        self._log_removed(HOST, victim)
        return self._slot_of.pop(victim)

    def _log_stored(self, medium: Medium, name: bytes) -> None:
        """Log a block that can be found in a tier: while tiers are off, or slower than computing,
        there is none."""
        pays = self._host_pays if medium == HOST else self._disk_pays
        if self._events is not None and pays and self.difference is None:
            self._events.store_below(medium, name)

    def _log_removed(self, medium: Medium, name: bytes) -> None:
        if self._events is not None:
            self._events.remove_below(medium, name)

    def _log_lost(self, medium: Medium) -> None:
        if self._events is not None:
            self._events.lose(medium)

    def _begins_write(self, name: bytes) -> bool:
        """Return whether a block is to be written to disk: it isn't there, and there is room."""
        if name in self._on_disk or name in self._writing or not self._make_room_on_disk():
            return False
        self._writing.add(name)
        return True

    def _make_room_on_disk(self) -> bool:
        """Drop blocks on disk until one more fits. Returns whether it does."""
        while len(self._on_disk) + len(self._writing) >= self.capacity.disk_blocks:
            if (victim := self._disk.evict()) is None:
                return False
            self._on_disk.remove(victim)
            self._log_removed(DISK, victim)
            self._moves.append(self._move("drop", victim))
        return True

    def _next_gap(self) -> int:
        """Return the number of loads until the next audit; 0 for never.

        A fixed number could meet the same block of a few prompts again and again.
        """
        return self._draw.randint(1, 2 * self._audit_every - 1) if self._audit_every else 0

    def _end_fetch(self, name: bytes, *, whole: bool) -> None:
        slot = self._fetching.pop(name, None)
        if slot is None:
            return
        received = name in self._receiving
        self._receiving.discard(name)
        if whole and name not in self._flushed and name not in self._slot_of:
            self._fill(name, slot)
            self._host.hit(name)
            self._counts.received += received
            self._counts.fetched += not received
        else:
            self._flushed.discard(name)
            self._free_slots.append(slot)
