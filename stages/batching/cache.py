"""The KV cache's accounting: which block belongs to whom, and what every prefix cache can do.

The KV tensors themselves are the executor's; here a block is a number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from ...bus.messages import DEFAULT_SCOPE, CacheScope
from ...config import NanoInferenceError


class OutOfBlocks(NanoInferenceError):
    """More blocks were asked for than are free. The scheduler never lets this happen."""

    code = "out_of_blocks"


class CacheAllocation(msgspec.Struct, frozen=True):
    """The blocks of a sequence.

    Attributes:
        block_ids: In order.
        cached_length: Leading tokens that need no computing.
        copies: (source, destination) blocks to copy before the first of the other tokens is
            computed: `cached_length` ends within the destination.
    """

    block_ids: tuple[int, ...]
    cached_length: int
    copies: tuple[tuple[int, int], ...] = ()


class PrefixMatch(msgspec.Struct, frozen=True):
    """What starting a sequence would find and take.

    Attributes:
        num_cached: Leading tokens that would need no computing.
        num_needed: Free blocks that it would take.
        next_run: Names what it would compute first, as `KVCacheManager.next_run` does; None when
            all is cached but the one token that has to be computed in any case.
    """

    num_cached: int
    num_needed: int
    next_run: Hashable


class Lease:
    """What one sequence has of a cache; made for its tokens before it has any block.

    Attributes:
        token_ids: The sequence's own list, which it may extend.
        scope: Only leases of the same scope find each other's tokens.
        may_reuse: Whether it may start with cached blocks; what it computes is found by others
            in any case.
        block_ids: The block table, extended in place; empty while the sequence does not run.
        source: A block held until the copy from it has been made, or -1.
        generation: The cache's generation when the blocks were taken.
        num_known: Leading blocks whose tokens the cache knows, as far as was looked.
        root: The cache's own note: what the chain begins with.
        chain: The cache's own notes: for each leading block, what names it.
    """

    __slots__ = (
        "block_ids",
        "chain",
        "generation",
        "may_reuse",
        "num_known",
        "root",
        "scope",
        "source",
        "token_ids",
    )

    def __init__(self, token_ids: Sequence[int], scope: CacheScope = DEFAULT_SCOPE) -> None:
        self.token_ids = token_ids
        self.scope = scope
        self.may_reuse = True
        self.root: Hashable = None
        self.block_ids: list[int] = []
        self.source = -1
        self.generation = 0
        self.num_known = 0
        self.chain: list[Any] = []


class Prefix(NamedTuple):
    """A cached prefix: whole blocks to share, then `num_partial` tokens of `source` to copy."""

    block_ids: list[int]
    source: int = -1
    num_partial: int = 0


class KVCacheManager(ABC):
    """Blocks of fixed size, reference-counted, whose tokens can be found again.

    A block is held or free. A free block whose KV was computed can still be found until it is
    taken for something else, least recently freed first. Whole blocks are shared; of a block that
    a prompt meets only partly, the first tokens are copied. A block can be found only after
    `commit`, that is once its KV has been computed, and a sequence never finds all of its tokens:
    sampling needs one to compute.

    The life of a lease: `match` as often as wanted, `start`, then `extend` and `commit` as it
    grows, `release`; then it may start again. `allocate`, `insert` and `deallocate` do the same
    for callers who keep their block ids themselves. Subclasses say how tokens are found.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Args: the number of blocks and the tokens in each, both at least 1."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError("a cache needs at least one block of at least one token")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_counts = [0] * num_blocks
        # Least recently freed first. A block that can't be found goes to the front: nothing is
        # lost by taking it. A prefix is freed after its continuation, so leaves go before roots.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._generation = 0
        # Of the weights that compute what the cache is told of.
        self.weight_version = 0
        self._num_evicted = 0

    # --- for callers who keep block ids -------------------------------------------------------

    def allocate(self, token_ids: Sequence[int]) -> CacheAllocation:
        """Takes blocks for all tokens of a sequence, cached whole blocks where there are any.

        Raises:
            OutOfBlocks: Nothing was taken.
            ValueError: There is no token.
        """
        lease = Lease(token_ids)
        return self._take(lease, Prefix(self._look_up(lease).block_ids))

    def insert(self, token_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """The KV of these tokens has been computed in these blocks: they can be found now."""
        lease = Lease(token_ids)
        lease.block_ids = list(block_ids)
        lease.generation = self._generation
        self.commit(lease, len(token_ids))

    def deallocate(self, block_ids: Sequence[int]) -> None:
        """Gives up one hold on each block. What nobody holds any more becomes free.

        Raises:
            ValueError: Nobody holds one of them.
        """
        # The end of a sequence is freed first, so that it is reused first: a prefix is of use
        # without its continuation, but not the other way round.
        for block_id in reversed(block_ids):
            if self._ref_counts[block_id] < 1:
                raise ValueError(f"block {block_id} was freed twice")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                if not self._is_named(block_id):
                    self._free.move_to_end(block_id, last=False)

    def take_evicted(self) -> int:
        """Cached blocks that were taken for something else since the last call."""
        evicted, self._num_evicted = self._num_evicted, 0
        return evicted

    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, cached ones among them."""
        return len(self._free)

    def begin_weight_version(self, version: int) -> None:
        """What is computed from now on comes from these weights; all from others is forgotten.

        The version is part of every name as well, so that names kept elsewhere can't be mistaken.
        """
        self.weight_version = version
        self.flush()

    def flush(self) -> None:
        """Forgets all tokens. Blocks in use stay in use.

        What their holders compute from now on is not remembered either, since it rests on KV
        from before the flush.
        """
        self._generation += 1
        self._forget_all()

    # --- by lease -----------------------------------------------------------------------------

    def match(self, lease: Lease) -> PrefixMatch:
        """What `start` would find and take now. Takes nothing."""
        prefix, num_needed = self._fit(lease, len(self._free))
        num_cached = len(prefix.block_ids) * self.block_size + prefix.num_partial
        gains = num_cached < len(lease.token_ids) - 1
        return PrefixMatch(num_cached, num_needed, self.next_run(lease) if gains else None)

    def next_run(self, lease: Lease) -> Hashable:
        """Names the first tokens, up to a block, that the cache does not know of a sequence.

        Two sequences with the same name here are about to compute the same KV. None for one that
        started before a flush: nobody will find what it computes.
        """
        if lease.block_ids and not self.is_current(lease):
            return None
        known = lease.num_known
        start = known * self.block_size
        run = tuple(lease.token_ids[start : start + self.block_size])
        return (lease.chain[known - 1] if known else lease.scope), run

    def is_current(self, lease: Lease) -> bool:
        """Whether others may find what a lease with blocks computes: no flush came since then."""
        return lease.generation == self._generation

    def move(self, lease: Lease, scope: CacheScope) -> None:
        """Give a lease another scope. Blocks that it has computed, or computes before it starts
        again, can't be found by others.
        """
        lease.scope = scope
        lease.root = None
        lease.chain.clear()
        lease.num_known = 0
        lease.generation = -1

    def start(self, lease: Lease, num_blocks: int) -> CacheAllocation:
        """Takes blocks for all tokens of a sequence, cached ones where there are any.

        Args:
            lease: Without blocks.
            num_blocks: The `num_needed` of its match; not more free blocks than that are taken.

        Raises:
            OutOfBlocks: Nothing was taken.
            ValueError: There is no token.
        """
        return self._take(lease, self._fit(lease, num_blocks)[0])

    def extend(self, lease: Lease) -> int:
        """Appends one block to write to, and returns it.

        Raises:
            OutOfBlocks: None is free.
        """
        if not self._free:
            raise OutOfBlocks("1 block is needed and 0 are free")
        block_id = self._take_free()
        lease.block_ids.append(block_id)
        return block_id

    def fork(self, lease: Lease, leader: Lease) -> None:
        """Takes the blocks of another lease with the same tokens, whether computed yet or not.

        Full blocks are shared. The tokens behind them get a block of their own, and that of the
        leader is the lease's `source` until the first `commit`: the caller has it copied once these
        tokens are computed, and before any behind them.

        Args:
            lease: Without blocks.
            leader: With a block for each token, and no more.

        Raises:
            OutOfBlocks: Nothing was taken.
            ValueError: The two have different tokens or scopes, or some have no block.
        """
        same = lease.scope == leader.scope and lease.token_ids == leader.token_ids
        if not same or len(leader.block_ids) != -(-len(lease.token_ids) // self.block_size):
            raise ValueError("only all tokens of another sequence can be shared, with their blocks")
        held = list(leader.block_ids)
        if len(lease.token_ids) % self.block_size:
            if not self._free:
                raise OutOfBlocks("1 block is needed and 0 are free")
            lease.source = held[-1]
        for block_id in held:
            self._ref_counts[block_id] += 1
        lease.block_ids = held if lease.source < 0 else [*held[:-1], self._take_free()]
        lease.generation = leader.generation
        lease.root, lease.chain, lease.num_known = leader.root, leader.chain[:], leader.num_known

    def commit(self, lease: Lease, num_tokens: int) -> None:
        """The KV of the first `num_tokens` tokens is computed: from now on it can be found.

        Raises:
            ValueError: The lease has fewer tokens, or holds no block for some of them.
        """
        if num_tokens > min(len(lease.token_ids), len(lease.block_ids) * self.block_size):
            raise ValueError(f"{num_tokens} tokens can't be computed without a block for each")
        new = lease.block_ids[lease.num_known : -(-num_tokens // self.block_size)]
        if not all(map(self._ref_counts.__getitem__, new)):
            raise ValueError("a block that nobody holds can't have been computed")
        self._drop_source(lease)
        if self.is_current(lease):
            self._index(lease, num_tokens)

    def release(self, lease: Lease) -> None:
        """Gives up all blocks of a lease."""
        self._drop_source(lease)
        self.deallocate(lease.block_ids)
        lease.block_ids = []

    def num_reclaimable(self, lease: Lease) -> int:
        """How many blocks would become free if the lease gave them up."""
        counts = self._ref_counts
        own = sum(counts[block_id] == 1 for block_id in lease.block_ids)
        return own + (lease.source >= 0 and counts[lease.source] == 1)

    # --- checks -------------------------------------------------------------------------------

    def check(self, leases: Iterable[Lease]) -> None:
        """Holds the books against all that hold blocks.

        Raises:
            AssertionError: A block is lost, held without a holder, or both free and held.
        """
        held = [0] * self.num_blocks
        for lease in leases:
            for block_id in chain(lease.block_ids, (lease.source,) if lease.source >= 0 else ()):
                held[block_id] += 1
        assert held == self._ref_counts, "reference counts do not match the block tables"
        free = {block_id for block_id, count in enumerate(held) if count == 0}
        assert free == self._free.keys(), "free blocks are not exactly those that nobody holds"

    @abstractmethod
    def check_index(self) -> None:
        """Looks through all that can be found, in time that grows with it; for tests.

        Raises:
            AssertionError: The index contradicts itself.
        """

    @abstractmethod
    def num_cached_blocks(self) -> int:
        """Blocks that can be found, held or free. Counted at each call."""

    # --- what a subclass provides -------------------------------------------------------------

    @abstractmethod
    def _find(self, lease: Lease) -> Prefix:
        """The longest cached prefix, at most all tokens but one; sets `num_known`."""

    @abstractmethod
    def _index(self, lease: Lease, num_tokens: int) -> None:
        """Makes leading tokens known, or finds that they are; sets `num_known`."""

    @abstractmethod
    def _is_named(self, block_id: int) -> bool:
        """Whether the block can be found."""

    @abstractmethod
    def _forget(self, block_id: int) -> None:
        """The block can't be found any more."""

    @abstractmethod
    def _forget_all(self) -> None:
        """No block can be found any more."""

    # --- inside -------------------------------------------------------------------------------

    def _look_up(self, lease: Lease) -> Prefix:
        if lease.may_reuse:
            return self._find(lease)
        lease.chain.clear()
        lease.num_known = 0
        return Prefix([])

    def _fit(self, lease: Lease, room: int) -> tuple[Prefix, int]:
        """The prefix to start with, and the free blocks that this takes.

        Holding the source of a copy may take a free block more. Where the room is too tight for
        that there is no copy: a sequence that fits must never wait for a block it can do without.
        """
        prefix = self._look_up(lease)
        num_needed = -(-len(lease.token_ids) // self.block_size)
        for block_id in prefix.block_ids:
            # Held blocks behind a free one are not counted: they are found only as long as the
            # free one is not taken, which a start before this one in the same plan may do.
            if not self._ref_counts[block_id]:
                break
            num_needed -= 1
        if prefix.num_partial and not self._ref_counts[prefix.source]:
            if num_needed < room:
                return prefix, num_needed + 1
            return Prefix(prefix.block_ids), num_needed
        return prefix, num_needed

    def _take(self, lease: Lease, prefix: Prefix) -> CacheAllocation:
        if not lease.token_ids:
            raise ValueError("a sequence must hold at least one token")
        shared = len(prefix.block_ids)
        num_fresh = -(-len(lease.token_ids) // self.block_size) - shared
        held = [*prefix.block_ids, prefix.source] if prefix.num_partial else prefix.block_ids
        num_needed = num_fresh + sum(not self._ref_counts[block_id] for block_id in held)
        if num_needed > len(self._free):
            raise OutOfBlocks(f"{num_needed} blocks are needed and {len(self._free)} are free")
        # All that is to be kept is held before the first fresh block is taken.
        for block_id in held:
            self._free.pop(block_id, None)
            self._ref_counts[block_id] += 1
        lease.block_ids = [*prefix.block_ids, *(self._take_free() for _ in range(num_fresh))]
        lease.generation = self._generation
        copies: tuple[tuple[int, int], ...] = ()
        if prefix.num_partial:
            lease.source = prefix.source
            copies = ((prefix.source, lease.block_ids[shared]),)
        cached_length = shared * self.block_size + prefix.num_partial
        return CacheAllocation(tuple(lease.block_ids), cached_length, copies)

    def _take_free(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        self._num_evicted += self._is_named(block_id)
        self._forget(block_id)
        self._ref_counts[block_id] = 1
        return block_id

    def _drop_source(self, lease: Lease) -> None:
        if lease.source >= 0:
            self.deallocate((lease.source,))
            lease.source = -1

    def _demote(self, block_id: int) -> None:
        """A block lost its name: if it is free, it is the next to be taken."""
        if block_id in self._free:
            self._free.move_to_end(block_id, last=False)


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        length += 1
    return length
