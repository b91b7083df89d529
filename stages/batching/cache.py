"""The KV cache's accounting: which block belongs to whom, and which prefix lies in which block.

The KV tensors themselves are the executor's; here a block is a number.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec
import xxhash

from ...config import NanoInferenceError


class OutOfBlocks(NanoInferenceError):
    """More blocks were asked for than are free. The scheduler never lets this happen."""

    code = "out_of_blocks"


class CacheAllocation(msgspec.Struct, frozen=True):
    """The blocks of a sequence, in order, and how many leading tokens in them are computed."""

    block_ids: tuple[int, ...]
    cached_length: int


class PrefixMatch(msgspec.Struct, frozen=True):
    """A cached prefix.

    Attributes:
        num_blocks: Leading blocks that are cached.
        num_shared: Those of them that are in use by others, so that using them takes no free block.
    """

    num_blocks: int
    num_shared: int


def compute_block_hash(token_ids: Sequence[int], prefix_hash: int = -1) -> int:
    """Names a full block by its tokens and, through `prefix_hash`, by all that stands before it.

    Args:
        token_ids: The tokens of the block; any integers of 64 bits.
        prefix_hash: The hash of the block before, or the root of a chain; -1 for none.

    Returns:
        128 bits (XXH3), wide enough that two prefixes never share a name by chance.

    Raises:
        ValueError: `token_ids` is empty.
    """
    if not token_ids:
        raise ValueError("a block must hold at least one token")
    state = xxhash.xxh3_128(array("q", token_ids).tobytes())
    if prefix_hash != -1:
        state.update(prefix_hash.to_bytes(16, "little"))
    return state.intdigest()


def extend_block_hashes(
    hashes: list[int], token_ids: Sequence[int], block_size: int, root: int = -1
) -> None:
    """Appends the hashes of those full blocks of `token_ids` that `hashes` does not hold yet."""
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        prefix_hash = hashes[-1] if hashes else root
        hashes.append(compute_block_hash(token_ids[start : start + block_size], prefix_hash))


class PagedKVCache:
    """Blocks of fixed size, reference-counted, found again by a hash chain.

    A block is in use (someone holds it) or free. A free block that was computed keeps its name
    until it is taken for something else, least recently freed first. A block gets its name only
    through `commit`, once its KV has been computed.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Args: the number of blocks and the tokens in each, both at least 1."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError("a cache needs at least one block of at least one token")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_counts = [0] * num_blocks
        self._hashes = [-1] * num_blocks
        self._block_of: dict[int, int] = {}
        # Least recently freed first. A block without a name goes to the front: nothing is lost
        # by taking it.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, cached ones among them."""
        return len(self._free)

    def num_cached_blocks(self) -> int:
        """Blocks that can be found by their hash, held or free."""
        return len(self._block_of)

    def match(self, hashes: Sequence[int], num_tokens: int) -> PrefixMatch:
        """The longest cached prefix of a sequence, without taking it.

        At least one of the `num_tokens` tokens is left over: sampling needs a token to compute.
        """
        num_blocks = num_shared = 0
        for block_hash in hashes[: max(num_tokens - 1, 0) // self.block_size]:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            num_blocks += 1
            num_shared += self._ref_counts[block_id] > 0
        return PrefixMatch(num_blocks, num_shared)

    def allocate(
        self, token_ids: Sequence[int], hashes: Sequence[int] | None = None
    ) -> CacheAllocation:
        """Takes blocks for all tokens of a sequence, cached ones where there are any.

        Args:
            token_ids: The tokens, at least one.
            hashes: Those of its full blocks, when the caller has them.

        Raises:
            OutOfBlocks: Nothing was taken.
        """
        if not token_ids:
            raise ValueError("a sequence must hold at least one token")
        if hashes is None:
            hashes = []
            extend_block_hashes(hashes, token_ids, self.block_size)
        total = -(-len(token_ids) // self.block_size)
        found = self.match(hashes, len(token_ids))
        fresh = total - found.num_blocks
        if total - found.num_shared > len(self._free):
            raise OutOfBlocks(
                f"{total - found.num_shared} blocks are needed and {len(self._free)} are free"
            )
        block_ids = [self._block_of[block_hash] for block_hash in hashes[: found.num_blocks]]
        for block_id in block_ids:
            self._free.pop(block_id, None)
            self._ref_counts[block_id] += 1
        block_ids.extend(self.append_block() for _ in range(fresh))
        return CacheAllocation(tuple(block_ids), found.num_blocks * self.block_size)

    def append_block(self) -> int:
        """Takes one block to write to.

        Raises:
            OutOfBlocks: None is free.
        """
        if not self._free:
            raise OutOfBlocks("1 block is needed and 0 are free")
        block_id, _ = self._free.popitem(last=False)
        self._forget(block_id)
        self._ref_counts[block_id] = 1
        return block_id

    def commit(self, block_id: int, block_hash: int) -> None:
        """The KV of a full block is computed: from now on it can be found.

        When another block already has this name, that one stays the one that is found.
        """
        if self._ref_counts[block_id] < 1:
            raise ValueError(f"block {block_id} is not held, so it can't have been computed")
        if block_hash not in self._block_of:
            self._forget(block_id)
            self._block_of[block_hash] = block_id
            self._hashes[block_id] = block_hash

    def deallocate(self, block_ids: Sequence[int]) -> None:
        """Gives up one hold on each block. What nobody holds any more becomes free."""
        # The end of a chain is freed first, so that it is reused first: a prefix is of use
        # without its continuation, but not the other way round.
        for block_id in reversed(block_ids):
            if self._ref_counts[block_id] < 1:
                raise ValueError(f"block {block_id} was freed twice")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                if self._hashes[block_id] == -1:
                    self._free.move_to_end(block_id, last=False)

    def num_reclaimable(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks would become free if their holder gave them up."""
        return sum(self._ref_counts[block_id] == 1 for block_id in block_ids)

    def flush(self) -> None:
        """Forgets all names. Blocks in use stay in use."""
        for block_id in list(self._block_of.values()):
            self._hashes[block_id] = -1
        self._block_of.clear()

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Holds the books against the block tables of all sequences.

        Raises:
            AssertionError: A block is lost, held without a holder, or both free and held.
        """
        held = [0] * self.num_blocks
        for table in tables:
            for block_id in table:
                held[block_id] += 1
        assert held == self._ref_counts, "reference counts do not match the block tables"
        free = {block_id for block_id, count in enumerate(held) if count == 0}
        assert free == set(self._free), "free blocks are not exactly those that nobody holds"
        named = {b: h for b, h in enumerate(self._hashes) if h != -1}
        assert named == {b: h for h, b in self._block_of.items()}, "names do not match blocks"

    def _forget(self, block_id: int) -> None:
        if self._hashes[block_id] != -1:
            del self._block_of[self._hashes[block_id]]
            self._hashes[block_id] = -1
