"""The KV cache's accounting: the owners of each block, and the contract of prefix caches.

The executor owns the KV tensors; here a block is a number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any, NamedTuple

import msgspec

from ...bus.control import TiersChanged
from ...bus.kv_events import DEVICE
from ...bus.messages import DEFAULT_SCOPE, CacheScope, RemoteBlocks
from ...bus.steps import KVMove
from ...config import NanoInferenceError
from .block_hash import chain_root, compute_block_hash
from .kv_events import KVEventLog
from .tiers import KVTiers, LoadedBlock, RemoteBlock


class OutOfBlocks(NanoInferenceError):
    """More blocks are needed than are free. The scheduler never lets this happen."""

    code = "out_of_blocks"


class CacheAllocation(msgspec.Struct, frozen=True):
    """The blocks of a sequence that starts.

    Attributes:
        block_ids: In order.
        cached_length: Leading tokens that need no computing.
        copies: (source, destination) blocks to copy before the first uncached token is computed:
            `cached_length` ends within the destination.
    """

    block_ids: tuple[int, ...]
    cached_length: int
    copies: tuple[tuple[int, int], ...] = ()


class PrefixMatch(msgspec.Struct, frozen=True):
    """What starting a sequence would find and take.

    Attributes:
        num_cached: Leading tokens that need no computing.
        num_needed: Free blocks that the sequence would take.
        next_run: As returned by `KVCacheManager.next_run`; None when all tokens are cached but the
            last, which is always computed.
    """

    num_cached: int
    num_needed: int
    next_run: Hashable


@dataclass(slots=True, eq=False)
class Lease:
    """One sequence's part of a cache; created before the sequence has any block.

    Attributes:
        token_ids: The ids by which KV is found: the sequence's own list, which it may extend. Any
            64-bit integers, so a hash of media can stand in place of its placeholder tokens.
        scope: Only leases of the same scope find each other's tokens.
        may_reuse: Whether to start with cached blocks. Others find what the lease computes either
            way.
        block_ids: The block table, extended in place; empty while the sequence does not run.
        source: A block held until it has been copied, or -1.
        generation: The cache's generation when the blocks were taken.
        num_known: Leading blocks found in the index when it was last searched.
        root: Root of the block-hash chain (PagedKVCache).
        chain: For each leading block, its name in the index: a hash, or a node of the tree.
        names: For each leading full block, its name in the KV tiers and in KV events.
        names_root: Root of the chain of `names`.
        whole_blocks: Whether to start with whole blocks only, and copy no part of one.
        num_fetched: Leading blocks that were fetched since the lease last held any.
        num_loaded: Blocks that it loaded from the tiers when it started.
        remote: Blocks in another executor's memory, by their names here, until the lease starts.
    """

    token_ids: Sequence[int]
    scope: CacheScope = DEFAULT_SCOPE
    may_reuse: bool = True
    block_ids: list[int] = field(default_factory=list)
    source: int = -1
    generation: int = 0
    num_known: int = 0
    root: Hashable = None
    chain: list[Any] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    names_root: int | None = None
    num_fetched: int = 0
    num_loaded: int = 0
    remote: dict[bytes, RemoteBlock] = field(default_factory=dict)
    whole_blocks: bool = False

    def held(self) -> list[int]:
        """All blocks that the lease holds."""
        return self.block_ids if self.source < 0 else [*self.block_ids, self.source]

    def forget_chain(self) -> None:
        """Drop the names of all blocks."""
        self.root = None
        self.chain.clear()
        self.num_known = 0


class Prefix(NamedTuple):
    """A cached prefix: whole blocks to share, then `num_partial` tokens of `source` to copy."""

    block_ids: list[int]
    source: int = -1
    num_partial: int = 0


class KVCacheManager(ABC):
    """Reference-counted blocks of fixed size, found again by their tokens.

    A block is held or free. A free block whose KV was computed can be found until it is evicted,
    least recently freed first. Whole blocks are shared; of a partly matching block the common
    tokens are copied. A block can be found only after `commit`, that is once its KV has been
    computed. A sequence never finds all of its tokens: sampling needs one to compute.

    With tiers, a full block that is evicted is stored below the device, under its block hash, and
    is loaded again into a free block when a sequence starts with its tokens.

    The life of a lease: `match` as often as needed, `start`, then `extend` and `commit` as it
    grows, `release`; then it may start again. Subclasses implement the index.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        tiers: KVTiers | None = None,
        events: KVEventLog | None = None,
    ) -> None:
        """Args: the number of blocks, the tokens in each, both at least 1, the tiers below, and the
        log of what can be found; None for no log."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError("a cache needs at least one block of at least one token")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.weight_version = 0
        self.tiers = tiers
        self.events = events
        self._ref_counts = [0] * num_blocks
        # With tiers or events: of full blocks that hold the KV of their names' tokens.
        self._names: list[bytes | None] = [None] * num_blocks
        # Of these, blocks that a later start could find on disk, and that may not be there.
        self._unsaved: dict[int, None] = {}
        # In order of eviction. Blocks outside the index go to the front. A sequence's last block
        # is freed first, so continuations are evicted before their prefixes.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._generation = 0
        self._num_evicted = 0
        self._forget_all()

    def take_evicted(self) -> int:
        """Return the number of cached blocks evicted since the last call."""
        evicted, self._num_evicted = self._num_evicted, 0
        return evicted

    @property
    def generation(self) -> int:
        """Counts up whenever the tokens of all blocks on the device are forgotten."""
        return self._generation

    def num_free_blocks(self) -> int:
        """Return the number of blocks without a holder, cached ones included."""
        return len(self._free)

    def begin_weight_version(self, version: int) -> None:
        """Forget all tokens; KV computed from now on belongs to these weights."""
        self.weight_version = version
        if self.events is not None:
            self.events.clear()
        self.forget_device()
        if self.tiers is not None:
            self.tiers.forget_host()

    def flush(self) -> None:
        """Forget all tokens, in the tiers too. Blocks in use stay in use.

        What their holders compute from now on isn't cached, since it depends on older KV.
        """
        if self.events is not None:
            self.events.clear()
        self.forget_device()
        if self.tiers is not None:
            self.tiers.clear()

    def change_tiers(self, changes: TiersChanged) -> bool:
        """Apply the executor's report about its KV tiers.

        Returns:
            Whether it is the first with a loaded block that differs from a computed one. Then all
            tokens are forgotten: other blocks that were loaded may be as wrong.
        """
        if self.tiers is None:
            return False
        was_on = self.tiers.difference is None
        self.tiers.changed(changes)
        if not was_on or self.tiers.difference is None:
            return False
        self.forget_device()
        return True

    def forget_device(self) -> None:
        """Forget the tokens of all blocks on the device, as `flush`; the tiers keep theirs."""
        self._generation += 1
        self._names = [None] * self.num_blocks
        self._unsaved.clear()
        self._forget_all()
        if self.events is not None:
            self.events.lose(DEVICE)

    def retire_adapter(self, adapter: str) -> None:
        """Report the blocks of an adapter as removed: its weights are replaced, so that no sequence
        finds them any more."""
        if self.events is None:
            return
        retired = self.events.retire(adapter)
        for block_id, name in enumerate(self._names):
            if name in retired:
                self._names[block_id] = None  # so that no tier stores it
        if self.tiers is not None:
            self.tiers.disown(retired)

    # --- leases -------------------------------------------------------------------------------

    def match(self, lease: Lease) -> PrefixMatch:
        """Return what `start` would find and take now. Takes nothing."""
        prefix, num_needed, names = self._fit(lease, len(self._free))
        num_cached = (len(prefix.block_ids) + len(names)) * self.block_size + prefix.num_partial
        gains = num_cached < len(lease.token_ids) - 1
        return PrefixMatch(num_cached, num_needed, self.next_run(lease) if gains else None)

    def fetch(self, lease: Lease, *, ahead: bool = False) -> bool:
        """Fetch a lease's blocks from disk or another executor, if that pays.

        `ahead`: the token behind the lease's is not known yet.

        Returns:
            Whether the sequence has to wait for them.
        """
        if self.tiers is None or not lease.may_reuse:
            return False
        known, most = lease.num_known, len(lease.token_ids) - (not ahead)
        names = self._names_of(lease, most // self.block_size)[known:]
        waits, asked = self.tiers.fetch(names, max(lease.num_fetched - known, 0), lease.remote)
        lease.num_fetched = known + asked
        return waits

    def expect(self, lease: Lease, remote: RemoteBlocks) -> None:
        """Let a lease fetch blocks that another executor offers, if they are its own."""
        if self.tiers is not None and lease.may_reuse:
            names = self._names_of(lease, len(lease.token_ids) // self.block_size)
            lease.remote = self.tiers.remote_of(names, remote, self.weight_version, lease.scope)

    def offer(
        self, seq_id: int, lease: Lease, num_tokens: int, now_ns: int
    ) -> tuple[int, list[KVMove]]:
        """Offer the full blocks of a started lease's leading tokens to another executor.

        Returns:
            The number of blocks offered before; and the moves of the others, behind the step that
            computes the last of these blocks.
        """
        if self.tiers is None or not self.is_current(lease):
            return 0, []
        num_blocks = min(num_tokens, len(lease.token_ids)) // self.block_size
        names = self._names_of(lease, num_blocks)
        return self.tiers.offer(seq_id, names, lease.block_ids[: len(names)], now_ns)

    @property
    def has_unsaved(self) -> bool:
        """Whether `save` has something to do."""
        return bool(self._unsaved)

    def save(self, max_blocks: int) -> None:
        """Store blocks that would be missing on disk after a restart, although they stay here."""
        for block_id in [*islice(self._unsaved, max_blocks)]:
            del self._unsaved[block_id]
            name = self._names[block_id]
            assert self.tiers is not None
            assert name is not None
            self.tiers.save(name, block_id)

    def name_of(self, block_id: int) -> bytes | None:
        """Return the name of the full block whose KV is in a block, if it is known."""
        return self._names[block_id]

    def next_run(self, lease: Lease) -> Hashable:
        """Return a name for the first tokens, up to a block, that the cache doesn't know.

        Two sequences with the same name are about to compute the same KV. None for a lease that
        started before a flush, since its KV can't be shared.
        """
        if lease.block_ids and not self.is_current(lease):
            return None
        known = lease.num_known
        start = known * self.block_size
        run = tuple(lease.token_ids[start : start + self.block_size])
        return (lease.chain[known - 1] if known else lease.scope), run

    def is_current(self, lease: Lease) -> bool:
        """Whether KV that a started lease computes can be shared: no flush came since."""
        return lease.generation == self._generation

    def move(self, lease: Lease, scope: CacheScope) -> None:
        """Give a lease another scope.

        Nothing that it computes before it starts again can be shared.
        """
        lease.scope = scope
        lease.generation = -1
        lease.forget_chain()

    def start(self, lease: Lease, num_blocks: int) -> CacheAllocation:
        """Take blocks for all tokens of a sequence, cached ones where possible.

        Args:
            lease: Without blocks.
            num_blocks: The `num_needed` of its match: at most so many free blocks are taken.

        Raises:
            OutOfBlocks: Nothing was taken.
            ValueError: There is no token.
        """
        if not lease.token_ids:
            raise ValueError("a sequence must hold at least one token")
        prefix, _, names = self._fit(lease, num_blocks)
        shared = len(prefix.block_ids)
        num_fresh = -(-len(lease.token_ids) // self.block_size) - shared
        held = [*prefix.block_ids, prefix.source] if prefix.num_partial else prefix.block_ids
        self._require(num_fresh + sum(not self._ref_counts[block_id] for block_id in held))
        # Hold every block of the prefix before the first fresh block evicts one of them.
        for block_id in held:
            self._free.pop(block_id, None)
            self._ref_counts[block_id] += 1
        with self.tiers.pinned(names) if self.tiers is not None else nullcontext():
            lease.block_ids = [*prefix.block_ids, *(self._take_free() for _ in range(num_fresh))]
        if self.tiers is not None:
            self._load(lease, names, shared)
            lease.num_fetched, lease.num_loaded = 0, len(names)
            lease.remote.clear()
        lease.generation = self._generation
        copies: tuple[tuple[int, int], ...] = ()
        if prefix.num_partial:
            lease.source = prefix.source
            copies = ((prefix.source, lease.block_ids[shared]),)
        cached_length = (shared + len(names)) * self.block_size + prefix.num_partial
        return CacheAllocation(tuple(lease.block_ids), cached_length, copies)

    def extend(self, lease: Lease) -> int:
        """Append one block to write to, and return it.

        Raises:
            OutOfBlocks: None is free.
        """
        self._require(1)
        block_id = self._take_free()
        lease.block_ids.append(block_id)
        return block_id

    def share(self, lease: Lease, other: Lease) -> None:
        """Take the blocks of another lease with the same tokens, whether computed yet or not.

        Full blocks are shared; the last one is copied on write. If it isn't full, the lease gets a
        block of its own and holds the other's as `source` until the first `commit`. The caller
        copies the block after its tokens are computed and before any token behind them.

        Args:
            lease: Without blocks.
            other: With exactly the blocks that its tokens need.

        Raises:
            OutOfBlocks: Nothing was taken.
            ValueError: Tokens or scopes differ, or some tokens have no block.
        """
        same = lease.scope == other.scope and lease.token_ids == other.token_ids
        if not same or len(other.block_ids) != -(-len(lease.token_ids) // self.block_size):
            raise ValueError("only all tokens of another sequence can be shared, with their blocks")
        held = list(other.block_ids)
        if len(lease.token_ids) % self.block_size:
            self._require(1)
            lease.source = held[-1]
        for block_id in held:
            self._ref_counts[block_id] += 1
        lease.block_ids = held if lease.source < 0 else [*held[:-1], self._take_free()]
        lease.generation = other.generation
        lease.root, lease.chain, lease.num_known = other.root, other.chain[:], other.num_known

    def commit(self, lease: Lease, num_tokens: int) -> None:
        """Add the first `num_tokens` tokens to the index: their KV has been computed.

        Raises:
            ValueError: The lease has fewer tokens, or holds no block for some of them.
        """
        if num_tokens > min(len(lease.token_ids), len(lease.block_ids) * self.block_size):
            raise ValueError(f"{num_tokens} tokens can't be computed without a block for each")
        new = lease.block_ids[lease.num_known : -(-num_tokens // self.block_size)]
        if not all(map(self._ref_counts.__getitem__, new)):
            raise ValueError("KV can't be computed in a free block")
        self._drop_source(lease)
        if lease.generation == self._generation:  # `is_current`, without a call
            first = self._index(lease, num_tokens)
            if self.tiers is not None or self.events is not None:
                self._name_blocks(lease, first, num_tokens // self.block_size)

    def release(self, lease: Lease) -> None:
        """Give back all blocks of a lease.

        Raises:
            ValueError: One of them is free already.
        """
        self._drop_source(lease)
        self._drop(lease.block_ids)
        lease.block_ids = []

    # --- blocks without a sequence ------------------------------------------------------------

    def hold(self, lease: Lease) -> None:
        """Hold all leading full blocks of a lease's tokens that can be found, for no sequence.

        The last token is left out, as in `start`.

        Args:
            lease: Without blocks.
        """
        lease.block_ids = self._find(lease).block_ids
        for block_id in lease.block_ids:
            self._free.pop(block_id, None)
            self._ref_counts[block_id] += 1
        lease.generation = self._generation

    def load(self, lease: Lease, max_blocks: int) -> int:
        """Load blocks behind those that a lease holds from the tiers, if that pays.

        They can be found after `commit`, once the plan with their moves is back.

        Args:
            lease: Holds full blocks; its last token has no block.
            max_blocks: At most so many free blocks are taken.

        Returns:
            The number of blocks.
        """
        names = self.names_behind(lease)[: max(min(max_blocks, len(self._free)), 0)]
        if self.tiers is None or not (number := self.tiers.num_ready(names)):
            return 0
        names, shared = names[:number], len(lease.block_ids)
        with self.tiers.pinned(names):
            lease.block_ids += [self._take_free() for _ in names]
        self._load(lease, names, shared)
        return number

    def names_behind(self, lease: Lease) -> list[bytes]:
        """Return the names of a lease's full blocks behind those that it holds; [] without tiers.

        The last token is left out, as in `start`.
        """
        if self.tiers is None:
            return []
        num_full = max(len(lease.token_ids) - 1, 0) // self.block_size
        return self._names_of(lease, num_full)[len(lease.block_ids) :]

    def trim(self, lease: Lease, num_blocks: int) -> None:
        """Give back all blocks of a lease but so many leading ones."""
        self._drop(lease.block_ids[num_blocks:])
        del lease.block_ids[num_blocks:]

    def evict_next(self, block_ids: Sequence[int], *, stores: bool) -> None:
        """Let leading blocks of a sequence be evicted next, the last one first, unless held.

        Until then they can be found. `stores`: whether to store them in the tiers now.
        """
        for block_id in block_ids:
            name = self._names[block_id]
            if stores and self.tiers is not None and name is not None:
                self.tiers.store(name, block_id)
            self._demote(block_id)

    def held_prefix(self, lease: Lease) -> frozenset[int]:
        """Return the held blocks that `start` would share: they take no free block."""
        block_ids = self._find(lease).block_ids if lease.may_reuse else []
        return frozenset(takewhile(self._ref_counts.__getitem__, block_ids))

    def held_alone(self, counts: Mapping[int, int]) -> set[int]:
        """Return the blocks that have no other holders than these numbers of them, by block."""
        return {
            block_id for block_id, count in counts.items() if self._ref_counts[block_id] == count
        }

    def num_reclaimable(self, lease: Lease) -> int:
        """Return the number of blocks that releasing the lease would free."""
        return sum(self._ref_counts[block_id] == 1 for block_id in lease.held())

    # --- checks -------------------------------------------------------------------------------

    def check(self, leases: Iterable[Lease]) -> None:
        """Check that reference counts and free blocks match all leases.

        Raises:
            AssertionError: A block is lost, held without a holder, or both free and held.
        """
        held = Counter(block_id for lease in leases for block_id in lease.held())
        # By the held blocks, since the others can be many, and are counted without Python code.
        num_free, counts, free = self.num_blocks - len(held), self._ref_counts, self._free.keys()
        right = all(counts[block_id] == count for block_id, count in held.items())
        assert right, "reference counts do not match the block tables"
        assert counts.count(0) == num_free, "a block without a holder has references"
        assert len(free) == num_free, "free blocks are not exactly those without a holder"
        assert free.isdisjoint(held), "a block is both free and held"
        if self.tiers is not None:
            self.tiers.check()

    @abstractmethod
    def num_cached_blocks(self) -> int:
        """Return the number of blocks in the index, held or free. Counted at each call."""

    # --- the index, implemented by subclasses --------------------------------------------------

    @abstractmethod
    def _find(self, lease: Lease) -> Prefix:
        """Return the longest cached prefix, at most all tokens but one; set `num_known`."""

    @abstractmethod
    def _index(self, lease: Lease, num_tokens: int) -> int:
        """Add leading tokens; set `num_known`. Tokens that are indexed already stay as they are.

        Returns:
            The number of leading blocks that were indexed before.
        """

    @abstractmethod
    def _is_indexed(self, block_id: int) -> bool:
        """Whether the block can be found."""

    @abstractmethod
    def _is_indexed_whole(self, block_id: int) -> bool:
        """Whether the block, a full one, can be found with all of its tokens."""

    @abstractmethod
    def _forget(self, block_id: int) -> None:
        """Remove a block from the index."""

    @abstractmethod
    def _forget_all(self) -> None:
        """Make the index empty; the constructor calls it first."""

    # --- internals ----------------------------------------------------------------------------

    def _fit(self, lease: Lease, room: int) -> tuple[Prefix, int, Sequence[bytes]]:
        """Return the prefix to start with, the free blocks that starting takes, and the names of
        the blocks behind the prefix that are loaded from the tiers.

        Holding the source of a copy may take one more free block. Without room for it nothing is
        copied: a sequence that fits must never wait for an optional block.
        """
        num_needed = -(-len(lease.token_ids) // self.block_size)
        if not lease.may_reuse:
            lease.forget_chain()
            return Prefix([]), num_needed, ()
        prefix = self._find(lease)
        if lease.whole_blocks:
            prefix = Prefix(prefix.block_ids)
        for block_id in prefix.block_ids:
            # Held blocks behind a free one don't count: another start in the same plan may evict
            # the free one, and then they aren't found any more.
            if not self._ref_counts[block_id]:
                break
            num_needed -= 1
        if self.tiers is not None:
            names = self._names_of(lease, (len(lease.token_ids) - 1) // self.block_size)
            names = names[len(prefix.block_ids) :]
            if number := self.tiers.num_ready(names):
                return Prefix(prefix.block_ids), num_needed, names[:number]
        if prefix.num_partial and not self._ref_counts[prefix.source]:
            if num_needed < room:
                return prefix, num_needed + 1, ()
            return Prefix(prefix.block_ids), num_needed, ()
        return prefix, num_needed, ()

    def _names_of(self, lease: Lease, num_blocks: int) -> list[bytes]:
        """Return the names of leading full blocks."""
        if self.tiers is not None:
            root = self.tiers.root(self.weight_version, lease.scope)
        else:
            root = chain_root(self.weight_version, lease.scope)
        if lease.names_root != root:
            lease.names_root = root
            lease.names.clear()
        names, size = lease.names, self.block_size
        for index in range(len(names), num_blocks):
            before = int.from_bytes(names[-1], "little") if names else root
            run = lease.token_ids[index * size : (index + 1) * size]
            names.append(compute_block_hash(run, before).to_bytes(16, "little"))
        return names[:num_blocks]

    def _name_blocks(self, lease: Lease, first: int, end: int) -> None:
        """Note the names of full blocks, from `first` to `end`, that are in the index."""
        if first >= end:
            return
        names = self._names_of(lease, end)
        saves = self.tiers is not None and self.tiers.survives(self.weight_version, lease.scope)
        for index in range(first, end):
            block_id = lease.block_ids[index]
            if self._is_indexed(block_id) and self._names[block_id] != names[index]:
                self._names[block_id] = names[index]
                if saves:
                    self._unsaved[block_id] = None
        if self.events is not None:
            self._announce(self.events, lease, first, end)

    def _announce(self, events: KVEventLog, lease: Lease, first: int, end: int) -> None:
        """Log the blocks, from `first` to `end`, that can be found since now."""
        index, size = first, self.block_size
        while index < end:
            start = index
            while index < end and self._is_new(events, lease.block_ids[index]):
                index += 1
            if start < index:
                events.store(
                    lease.block_ids[start:index],
                    lease.names[start:index],
                    lease.names[start - 1] if start else None,
                    lease.token_ids[start * size : index * size],
                    lease.scope,
                )
            index += 1

    def _is_new(self, events: KVEventLog, block_id: int) -> bool:
        return self._is_indexed_whole(block_id) and not events.is_announced(block_id)

    def _load(self, lease: Lease, names: Sequence[bytes], first: int) -> None:
        """Load blocks into those of a lease, from the block with index `first` on."""
        assert self.tiers is not None
        for index, name in enumerate(names, first):
            if self.tiers.load(name, block_id := lease.block_ids[index]):
                before = lease.token_ids[: (index + 1) * self.block_size]
                self.tiers.chosen.append(LoadedBlock(name, block_id, before, lease.scope))

    def _require(self, num_blocks: int) -> None:
        if num_blocks > len(self._free):
            needed = f"{num_blocks} block{' is' if num_blocks == 1 else 's are'} needed"
            raise OutOfBlocks(f"{needed} and {len(self._free)} are free")

    def _take_free(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        self._num_evicted += self._is_indexed(block_id)
        self._forget(block_id)
        if (name := self._names[block_id]) is not None:
            self._names[block_id] = None
            if self.tiers is not None:
                self._unsaved.pop(block_id, None)
                self.tiers.store(name, block_id)
            if self.events is not None:
                # After the tier's event, so that a router doesn't forget the block's tokens.
                self.events.remove(block_id)
        self._ref_counts[block_id] = 1
        return block_id

    def _drop(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each block; unreferenced blocks become free, the last one first."""
        for block_id in reversed(block_ids):
            if self._ref_counts[block_id] < 1:
                raise ValueError(f"block {block_id} was freed twice")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                if not self._is_indexed(block_id):
                    self._demote(block_id)

    def _drop_source(self, lease: Lease) -> None:
        if lease.source >= 0:
            self._drop((lease.source,))
            lease.source = -1

    def _hide(self, block_id: int) -> None:
        """Evict a block next that has left the index with a block before it."""
        self._demote(block_id)
        if self.events is not None:
            self.events.remove(block_id)

    def _demote(self, block_id: int) -> None:
        """Evict a block next, if it is free."""
        if block_id in self._free:
            self._free.move_to_end(block_id, last=False)
