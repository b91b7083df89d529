"""One sequence's part of the KV cache, and followers of the cache's blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ...bus.messages import DEFAULT_SCOPE, CacheScope, RemoteBlocks
from ...bus.sections import Sections
from ...bus.steps import KVMove

if TYPE_CHECKING:
    from ...bus.kv_events import Medium

NO_NAMES: Set[bytes] = frozenset()

UNLIMITED = 2**63 - 1
"""`max_reuse` of an allocation that may start with any cached tokens."""


@dataclass(slots=True, eq=False)
class Allocation:
    """One sequence's part of a cache; created before the sequence has any block.

    Attributes:
        token_ids: The ids by which KV is found: the sequence's own list, which it may extend. Any
            64-bit integers, so a hash of media can stand in place of its placeholder tokens.
        scope: Only allocations of the same scope find each other's tokens.
        max_reuse: Most leading tokens to take from the cache. Other sequences find what this one
            computes in any case.
        block_ids: The block table, extended in place; empty while the sequence does not run.
        source: A block held until it has been copied, or -1.
        generation: The cache's generation when the blocks were taken.
        num_known: Leading blocks found in the index when it was last searched.
        names: The block-hash chain: the names of leading full blocks, as far as they are needed.
        root: Root of this chain; None before it is known.
        nodes: For each leading block, its node in the radix tree (RadixKVCache).
        whole_blocks: Whether to start with whole blocks only, and copy no part of one.
        num_found: With recurrent state, leading blocks that the last search found; it may start
            with fewer.
        num_fetched: Leading blocks that were fetched since the allocation last held any.
        num_loaded: Blocks that were loaded from below the device at the start.
        fetching_since_ns: When it began to wait for blocks from below the device; 0 if it did not.
        remote: Blocks in another executor's memory, by their names here, until the start.
        remote_states: Snapshots there, likewise by the names of their blocks.
        fetched_states: Names of snapshots that were fetched since the allocation last held any.
    """

    token_ids: Sequence[int]
    scope: CacheScope = DEFAULT_SCOPE
    max_reuse: int = UNLIMITED
    block_ids: list[int] = field(default_factory=list)
    source: int = -1
    generation: int = 0
    num_known: int = 0
    names: list[bytes] = field(default_factory=list)
    root: int | None = None
    nodes: list[Any] = field(default_factory=list)
    num_fetched: int = 0
    num_loaded: int = 0
    fetching_since_ns: int = 0
    remote: Mapping[bytes, Any] = field(default_factory=dict)
    remote_states: Mapping[bytes, Any] = field(default_factory=dict)
    fetched_states: Set[bytes] = NO_NAMES
    whole_blocks: bool = False
    num_found: int = 0

    @property
    def may_reuse(self) -> bool:
        """Whether any cached token may be taken."""
        return self.max_reuse > 0

    @property
    def reuses_all(self) -> bool:
        """Whether all cached tokens may be taken."""
        return self.max_reuse == UNLIMITED

    def most_cached(self) -> int:
        """Return the most leading tokens to find: the last one is always computed."""
        return min(len(self.token_ids) - 1, self.max_reuse)

    def held(self) -> list[int]:
        """All blocks that the allocation holds."""
        return self.block_ids if self.source < 0 else [*self.block_ids, self.source]

    def forget_known(self) -> None:
        """Forget what was found in the index."""
        self.nodes.clear()
        self.num_known = 0


class UnitLog(Protocol):
    """A log of the blocks, or the snapshots, that can be found in a medium; see `KVEventLog`."""

    def store_below(self, medium: Medium, name: bytes) -> None: ...
    def remove_below(self, medium: Medium, name: bytes) -> None: ...
    def lose(self, medium: Medium) -> None: ...


class Follower:
    """Follows a cache's blocks by their names. The methods here do nothing."""

    def named(self, allocation: Allocation, first: int, end: int, named: Sequence[int]) -> None:
        """Full blocks of an allocation, from `first` to `end`, are computed and can be found.

        `named`: ids of these blocks that had other names before.
        """

    def evicted(self, block_id: int, name: bytes) -> None:
        """A block of this name is about to be written to."""

    def hidden(self, block_id: int) -> None:
        """A block can't be found any more."""

    def forgotten(self) -> None:
        """No block on the device can be found any more."""

    def flushed(self, *, new_weights: bool) -> None:
        """No block can be found any more, on the device or below it."""

    def retire(self, adapter: str) -> Set[bytes]:
        """Return the names of blocks that an adapter's former weights have computed."""
        return NO_NAMES

    def disown(self, names: Set[bytes]) -> None:
        """No sequence can find these blocks any more."""

    def check(self) -> None:
        """Check that each block is in one place.

        Raises:
            AssertionError: One is lost, or in two places.
        """


class States(Follower):
    """Snapshots of recurrent state: none, unless a part replaces this.

    Attributes:
        exists: Whether layers of the model have a recurrent state.
        log: Log of the snapshots that can be found; None for no log.
    """

    exists = False
    log: UnitLog | None = None

    def usable(self, allocation: Allocation, num_blocks: int) -> int:
        """Return how many of so many leading blocks that were found an allocation can start with:
        up to the last one at whose end the state is known.
        """
        return num_blocks

    def follows(self, allocation: Allocation, num_blocks: int) -> bool:
        """Return whether an allocation waits for a snapshot beyond so many blocks, which another
        one is about to make, or which there is no place to load to. Otherwise it is expected to
        start with the next plan.
        """
        return False

    def sections(self, allocation: Allocation, num_cached: int) -> Sections:
        """Return sections of the NewSequence that starts with so many leading tokens."""
        return ()

    def hold(self, allocation: Allocation) -> None:
        """Keep the snapshot at the end of the blocks that an allocation of no sequence holds."""

    def release(self, allocation: Allocation) -> None:
        """Keep the snapshot of `hold` no longer, if there is one."""

    def demote(self, allocation: Allocation, *, stores: bool) -> None:
        """Let the snapshot at the end of the blocks that an allocation holds be given out next.

        Until then it can be found. `stores`: whether to store it below the device now.
        """

    # --- for the memory below the device ------------------------------------------------------

    def number_of(self, name: bytes) -> int:
        """Return the number of the snapshot at the end of a block; -1 for none on the device."""
        return -1

    def name_of(self, number: int) -> bytes | None:
        """Return the name of the block at whose end a snapshot is, if it can be found."""
        return None

    def last(self, seq_id: int, allocation: Allocation, num_blocks: int) -> tuple[int, int]:
        """Return the last snapshot of so many leading blocks of a started sequence, also one that a
        plan so far makes: the blocks before it, and its number. 0 and -1 for none."""
        return 0, -1

    def audit(self, seq_id: int, num_tokens: int) -> int:
        """Have the next plan save the state of a sequence of no request, so that none finds it.

        Returns:
            The number, which is in use until `end_audit`; -1 if there is none.
        """
        return -1

    def end_audit(self) -> None:
        """Give back the number of `audit`, if there is one."""


class Below(Follower):
    """The memory below the device: none, unless a part replaces this.

    Attributes:
        exists: Whether there is any.
    """

    exists = False

    def ready(self, allocation: Allocation, first: int) -> Sequence[bytes]:
        """Return the names of an allocation's blocks from `first` on that are loaded at its start.

        The last token is left out, as in `KVCacheManager.start`.
        """
        return ()

    def pinned(self, names: Sequence[bytes]) -> AbstractContextManager[None]:
        """Keep these blocks in their places."""
        return nullcontext()

    def started(self, allocation: Allocation, names: Sequence[bytes], first: int) -> None:
        """An allocation has its blocks; load those of these names into them, from `first` on."""

    def fetch(self, allocation: Allocation, *, ahead: bool = False) -> bool:
        """Fetch an allocation's blocks from disk or another executor, if that pays.

        `ahead`: the token after the allocation's is not known yet.

        Returns:
            Whether the sequence has to wait for them.
        """
        return False

    def num_stored(self, allocation: Allocation) -> int:
        """Return the number of blocks here that follow those that an allocation holds."""
        return 0

    def load(self, allocation: Allocation, max_blocks: int) -> int:
        """Load blocks that follow those that an allocation holds, if that pays.

        They can be found after `commit`, once the plan with their moves is back.

        Args:
            allocation: Holds full blocks; its last token has no block.
            max_blocks: At most so many free blocks are taken.

        Returns:
            The number of blocks.
        """
        return 0

    def store(self, name: bytes, block_id: int) -> None:
        """Store a block of the device."""

    # --- the device's snapshots ---------------------------------------------------------------

    def reach(self, names: Sequence[bytes], num_blocks: int) -> int:
        """Return the number of leading names at whose end a snapshot is loaded at a start, if that
        pays, against computing the blocks after the first `num_blocks`; else that number."""
        return num_blocks

    def load_state(self, name: bytes, take: Callable[[], int]) -> None:
        """Load a snapshot that `reach` has found.

        Args:
            name: Its name.
            take: Returns the number of the device's snapshot to load it to, which may be stored
                before.
        """

    def store_state(self, name: bytes, number: int) -> None:
        """Store a snapshot of the device, whose number is about to be given out again."""

    def made_state(self, number: int, allocation: Allocation) -> None:
        """An allocation's new snapshot can be found on the device."""

    # --- between executors --------------------------------------------------------------------

    def describe(self) -> tuple[str, str, str, str]:
        """Return `address`, `layout`, `model` and `states_address` of RemoteBlocks."""
        return "", "", "", ""

    def expect(self, allocation: Allocation, remote: RemoteBlocks) -> None:
        """Let an allocation fetch blocks that another executor offers, if they are its own."""

    def offer(
        self, seq_id: int, allocation: Allocation, num_tokens: int, now_ns: int
    ) -> tuple[int, list[KVMove]]:
        """Offer the full blocks of a started sequence's leading tokens to another executor, and
        with the last one the last snapshot.

        Returns:
            The number of blocks offered before; and the moves of the others and of the snapshot,
            after the step that computes the last of these blocks.
        """
        return 0, []

    def release_offer(self, seq_id: int) -> None:
        """End an offer, if it has not ended."""
