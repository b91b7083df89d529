"""The KV cache's accounting: the owners of each block, and the contract of prefix caches.

The executor owns the KV tensors; here a block is a number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

import msgspec

from ...bus.messages import CacheScope
from ...config import NanoInferenceError
from .allocation import Allocation, Below, Follower, States
from .block_hash import chain_root, extend_chain


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
    """The cached blocks that a sequence would find, and the blocks that it would allocate, at its
    start.

    Attributes:
        num_cached: Leading tokens that need no computing.
        num_needed: Free blocks that the sequence would take.
        next_run: As returned by `KVCacheManager.next_run`; None when all tokens are cached but the
            last, which is always computed, and with recurrent state (`States.follows`).
    """

    num_cached: int
    num_needed: int
    next_run: Hashable


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

    The life of an allocation: `match` as often as needed, `start`, then `extend` and `commit` as it
    grows, `release`; then it may start again. Subclasses implement the index.

    Attributes:
        below: The memory below the device, from which blocks are loaded when a sequence starts.
        states: Snapshots of recurrent state. With them, whole blocks are shared only, up to one at
            whose end there is a snapshot; nothing is copied.
        followers: Informed of each block that can be found by its name, and of its end; `below`
            first, if it exists.
        root: Returns the root of the block-hash chain of a weight version and a scope.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Args: the number of blocks, and the tokens in each, both at least 1."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError("a cache needs at least one block of at least one token")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.weight_version = 0
        self.below = Below()
        self.states = States()
        self.followers: tuple[Follower, ...] = ()
        self.root = chain_root
        self._ref_counts = [0] * num_blocks
        # With followers: of full blocks that hold the KV of their names' tokens.
        self._names: list[bytes | None] = [None] * num_blocks
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
        self.flush(new_weights=True)

    def flush(self, *, new_weights: bool = False) -> None:
        """Forget all tokens, also below the device. Blocks in use stay in use.

        What their holders compute from now on isn't cached, since it depends on older KV.
        `new_weights`: KV below the device may be of weights that come back.
        """
        self.forget_device()
        for follower in self.followers:
            follower.flushed(new_weights=new_weights)

    def forget_device(self) -> None:
        """Forget the tokens of all blocks on the device; the memory below keeps its blocks."""
        self._generation += 1
        self._names = [None] * self.num_blocks
        self._forget_all()
        for follower in self.followers:
            follower.forgotten()

    def retire_adapter(self, adapter: str) -> None:
        """Report the blocks of an adapter as removed: its weights are replaced, so that no sequence
        finds them any more."""
        for names in [follower.retire(adapter) for follower in self.followers]:
            if names:
                # So that they are not stored below the device.
                self._names = [None if name in names else name for name in self._names]
            for follower in self.followers:
                follower.disown(names)

    # --- allocations --------------------------------------------------------------------------

    def match(self, allocation: Allocation) -> PrefixMatch:
        """Return what `start` would find and take now. Takes nothing."""
        prefix, num_needed, names = self._fit(allocation, len(self._free))
        num_cached = (len(prefix.block_ids) + len(names)) * self.block_size + prefix.num_partial
        gains = num_cached < len(allocation.token_ids) - 1 and not self.states.exists
        return PrefixMatch(num_cached, num_needed, self.next_run(allocation) if gains else None)

    def name_of(self, block_id: int) -> bytes | None:
        """Return the name of the full block whose KV is in a block, if it is known."""
        return self._names[block_id]

    def names_of(self, allocation: Allocation, num_blocks: int) -> list[bytes]:
        """Return the names of leading full blocks."""
        self._extend_names(allocation, num_blocks)
        return allocation.names[:num_blocks]

    def next_run(self, allocation: Allocation) -> Hashable:
        """Return a name for the first tokens, up to a block, that the cache doesn't hold.

        Two sequences with the same name are about to compute the same KV. None for an allocation
        that started before a flush, since its KV can't be shared.
        """
        if allocation.block_ids and not self.is_current(allocation):
            return None
        known = allocation.num_known
        start = known * self.block_size
        run = tuple(allocation.token_ids[start : start + self.block_size])
        return (self._end_of(allocation, known) if known else allocation.scope), run

    def is_current(self, allocation: Allocation) -> bool:
        """Whether KV that a started allocation computes can be shared: no flush came since."""
        return allocation.generation == self._generation

    def move(self, allocation: Allocation, scope: CacheScope) -> None:
        """Give an allocation another scope.

        Nothing that it computes before it starts again can be shared.
        """
        allocation.scope = scope
        allocation.generation = -1
        allocation.forget_known()

    def start(self, allocation: Allocation, num_blocks: int) -> CacheAllocation:
        """Take blocks for all tokens of a sequence, cached ones where possible.

        Args:
            allocation: Without blocks.
            num_blocks: The `num_needed` of its match: at most so many free blocks are taken.

        Raises:
            OutOfBlocks: Nothing was taken.
            ValueError: There is no token.
        """
        if not allocation.token_ids:
            raise ValueError("a sequence must hold at least one token")
        prefix, _, names = self._fit(allocation, num_blocks)
        shared = len(prefix.block_ids)
        if allocation.num_found > shared + len(names):
            self._pass_over(allocation, shared)
        num_fresh = -(-len(allocation.token_ids) // self.block_size) - shared
        held = [*prefix.block_ids, prefix.source] if prefix.num_partial else prefix.block_ids
        self._require(num_fresh + sum(not self._ref_counts[block_id] for block_id in held))
        # Hold every block of the prefix before the first fresh block evicts one of them.
        for block_id in held:
            self._free.pop(block_id, None)
            self._ref_counts[block_id] += 1
        with self.below.pinned(names):
            allocation.block_ids = [
                *prefix.block_ids,
                *(self._take_free() for _ in range(num_fresh)),
            ]
        self.below.started(allocation, names, shared)
        allocation.generation = self._generation
        copies: tuple[tuple[int, int], ...] = ()
        if prefix.num_partial:
            allocation.source = prefix.source
            copies = ((prefix.source, allocation.block_ids[shared]),)
        cached_length = (shared + len(names)) * self.block_size + prefix.num_partial
        return CacheAllocation(tuple(allocation.block_ids), cached_length, copies)

    def extend(self, allocation: Allocation) -> int:
        """Append one block to write to, and return it.

        Raises:
            OutOfBlocks: None is free.
        """
        self._require(1)
        block_id = self._take_free()
        allocation.block_ids.append(block_id)
        return block_id

    def share(self, allocation: Allocation, other: Allocation) -> None:
        """Take the blocks of another allocation with the same tokens, whether computed yet or not.

        Full blocks are shared; the last one is copied on write. If it isn't full, the allocation
        gets a block of its own and holds the other's as `source` until the first `commit`. The
        caller copies the block after its tokens are computed and before any token after them.

        Args:
            allocation: Without blocks.
            other: With exactly the blocks that its tokens need.

        Raises:
            OutOfBlocks: Nothing was taken.
            ValueError: Tokens or scopes differ, or some tokens have no block.
        """
        num_tokens = len(allocation.token_ids)
        same = allocation.scope == other.scope and allocation.token_ids == other.token_ids
        if not same or len(other.block_ids) != -(-num_tokens // self.block_size):
            raise ValueError("only all tokens of another sequence can be shared, with their blocks")
        held = list(other.block_ids)
        if num_tokens % self.block_size:
            self._require(1)
            allocation.source = held[-1]
        for block_id in held:
            self._ref_counts[block_id] += 1
        allocation.block_ids = held if allocation.source < 0 else [*held[:-1], self._take_free()]
        allocation.generation = other.generation
        allocation.root, allocation.names = other.root, other.names[:]
        allocation.nodes, allocation.num_known = other.nodes[:], other.num_known

    def commit(self, allocation: Allocation, num_tokens: int) -> None:
        """Add the first `num_tokens` tokens to the index: their KV has been computed.

        Raises:
            ValueError: The allocation has fewer tokens, or holds no block for some of them.
        """
        block_ids, size = allocation.block_ids, self.block_size
        if num_tokens > min(len(allocation.token_ids), len(block_ids) * size):
            raise ValueError(f"{num_tokens} tokens can't be computed without a block for each")
        new = block_ids[allocation.num_known : -(-num_tokens // size)]
        if not all(map(self._ref_counts.__getitem__, new)):
            raise ValueError("KV can't be computed in a free block")
        self._drop_source(allocation)
        if allocation.generation == self._generation:  # `is_current`, without a call
            first = self._index(allocation, num_tokens)
            if self.followers:
                self._set_names(allocation, first, num_tokens // size)

    def release(self, allocation: Allocation) -> None:
        """Give back all blocks of an allocation.

        Raises:
            ValueError: One of them is free already.
        """
        self._drop_source(allocation)
        self._drop(allocation.block_ids)
        allocation.block_ids = []

    # --- blocks without a sequence ------------------------------------------------------------

    def hold(self, allocation: Allocation) -> None:
        """Hold all leading full blocks of an allocation's tokens that `start` would share.

        The last token is left out.

        Args:
            allocation: Without blocks, and of no sequence.
        """
        allocation.block_ids = self._fit(allocation, 0)[0].block_ids
        for block_id in allocation.block_ids:
            self._free.pop(block_id, None)
            self._ref_counts[block_id] += 1
        allocation.generation = self._generation

    def trim(self, allocation: Allocation, num_blocks: int) -> None:
        """Give back all blocks of an allocation but so many leading ones."""
        self._drop(allocation.block_ids[num_blocks:])
        del allocation.block_ids[num_blocks:]

    def evict_next(self, block_ids: Sequence[int], *, stores: bool) -> None:
        """Let leading blocks of a sequence be evicted next, the last one first, unless held.

        Until then they can be found. `stores`: whether to store them below the device now.
        """
        for block_id in block_ids:
            name = self._names[block_id]
            if stores and name is not None:
                self.below.store(name, block_id)
            self._demote(block_id)

    def held_prefix(self, allocation: Allocation) -> frozenset[int]:
        """Return the held blocks that `start` would share: they take no free block."""
        block_ids = self._fit(allocation, 0)[0].block_ids
        return frozenset(takewhile(self._ref_counts.__getitem__, block_ids))

    def held_alone(self, counts: Mapping[int, int]) -> set[int]:
        """Return the blocks that have no other holders than these numbers of them, by block."""
        return {
            block_id for block_id, count in counts.items() if self._ref_counts[block_id] == count
        }

    def num_reclaimable(self, allocation: Allocation) -> int:
        """Return the number of blocks that releasing the allocation would free."""
        return sum(self._ref_counts[block_id] == 1 for block_id in allocation.held())

    # --- checks -------------------------------------------------------------------------------

    def check(self, allocations: Iterable[Allocation]) -> None:
        """Check that reference counts and free blocks match all allocations.

        Raises:
            AssertionError: A block is lost, held without a holder, or both free and held.
        """
        held = Counter(block_id for allocation in allocations for block_id in allocation.held())
        # By the held blocks, since the others can be many, and are counted without Python code.
        num_free, counts, free = self.num_blocks - len(held), self._ref_counts, self._free.keys()
        right = all(counts[block_id] == count for block_id, count in held.items())
        assert right, "reference counts do not match the block tables"
        assert counts.count(0) == num_free, "a block without a holder has references"
        assert len(free) == num_free, "free blocks are not exactly those without a holder"
        assert free.isdisjoint(held), "a block is both free and held"
        for follower in self.followers:
            follower.check()

    @abstractmethod
    def num_cached_blocks(self) -> int:
        """Return the number of blocks in the index, held or free. Counted at each call."""

    # --- the index, implemented by subclasses --------------------------------------------------

    @abstractmethod
    def is_indexed_whole(self, block_id: int) -> bool:
        """Whether the block, a full one, can be found with all of its tokens."""

    @abstractmethod
    def _find(self, allocation: Allocation) -> Prefix:
        """Return the longest cached prefix, at most all tokens but one; set `num_known`."""

    @abstractmethod
    def _index(self, allocation: Allocation, num_tokens: int) -> int:
        """Add leading tokens; set `num_known`. Tokens that are indexed already stay as they are.

        Returns:
            The number of leading blocks that were indexed before.
        """

    @abstractmethod
    def _end_of(self, allocation: Allocation, num_known: int) -> Hashable:
        """Return what the index has at the end of so many known blocks, at least one."""

    @abstractmethod
    def _is_indexed(self, block_id: int) -> bool:
        """Whether the block can be found."""

    @abstractmethod
    def _forget(self, block_id: int) -> None:
        """Remove a block from the index."""

    @abstractmethod
    def _forget_all(self) -> None:
        """Make the index empty; the constructor calls it first."""

    # --- internals ----------------------------------------------------------------------------

    def _fit(self, allocation: Allocation, room: int) -> tuple[Prefix, int, Sequence[bytes]]:
        """Return the prefix to start with, the free blocks that starting takes, and the names of
        the blocks after the prefix that are loaded from below the device.

        Holding the source of a copy may take one more free block. Without room for it nothing is
        copied: a sequence that fits must never wait for an optional block.
        """
        num_needed = -(-len(allocation.token_ids) // self.block_size)
        if not allocation.may_reuse:
            allocation.forget_known()
            return Prefix([]), num_needed, ()
        prefix = self._find(allocation)
        if allocation.whole_blocks:
            prefix = Prefix(prefix.block_ids)
        names = self.below.ready(allocation, len(prefix.block_ids))
        if self.states.exists:
            shared = len(prefix.block_ids)
            number = self.states.usable(allocation, shared + len(names))
            prefix, names = Prefix(prefix.block_ids[:number]), names[: max(number - shared, 0)]
        for block_id in prefix.block_ids:
            # Held blocks after a free one don't count: another start in the same plan may evict
            # the free one, and then they aren't found any more.
            if not self._ref_counts[block_id]:
                break
            num_needed -= 1
        if names:
            return Prefix(prefix.block_ids), num_needed, names
        if prefix.num_partial and not self._ref_counts[prefix.source]:
            if num_needed < room:
                return prefix, num_needed + 1, ()
            return Prefix(prefix.block_ids), num_needed, ()
        return prefix, num_needed, ()

    def _pass_over(self, allocation: Allocation, shared: int) -> None:
        """Compute blocks anew that were found, after so many shared ones.

        They are as recently used as if they were shared: the next sequence starts with them.
        """
        for block_id in reversed(self._find(allocation).block_ids[shared:]):
            if block_id in self._free:
                self._free.move_to_end(block_id)
        allocation.num_known = shared
        del allocation.nodes[shared:]

    def _extend_names(self, allocation: Allocation, num_blocks: int) -> int:
        """Name so many leading full blocks; return the root of the chain."""
        root = self.root(self.weight_version, allocation.scope)
        if allocation.root != root:
            # A new allocation, or another version of the weights.
            allocation.names.clear()
            allocation.root = root
        if len(allocation.names) < num_blocks:
            token_ids = allocation.token_ids
            extend_chain(allocation.names, token_ids, self.block_size, num_blocks, root)
        return root

    def _set_names(self, allocation: Allocation, first: int, end: int) -> None:
        """Note the names of full blocks, from `first` to `end`, that are in the index."""
        if first >= end:
            return
        names, new = self.names_of(allocation, end), []
        for index in range(first, end):
            block_id = allocation.block_ids[index]
            if self._is_indexed(block_id) and self._names[block_id] != names[index]:
                self._names[block_id] = names[index]
                new.append(block_id)
        for follower in self.followers:
            follower.named(allocation, first, end, new)

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
            for follower in self.followers:
                follower.evicted(block_id, name)
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

    def _drop_source(self, allocation: Allocation) -> None:
        if allocation.source >= 0:
            self._drop((allocation.source,))
            allocation.source = -1

    def _hide(self, block_id: int) -> None:
        """Evict a block next that has left the index with a block before it."""
        self._demote(block_id)
        for follower in self.followers:
            follower.hidden(block_id)

    def _demote(self, block_id: int) -> None:
        """Evict a block next, if it is free."""
        if block_id in self._free:
            self._free.move_to_end(block_id, last=False)
