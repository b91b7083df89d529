"""The block-hash chain: names of full blocks by their tokens and all tokens before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import xxhash

from ..bus.messages import DEFAULT_SCOPE, CacheScope

NO_PREFIX = -1
"""The root of a block-hash chain in the default scope."""


def chain_root(weight_version: int, scope: CacheScope) -> int:
    """Return the root of a block-hash chain, which keeps versions and scopes apart."""
    if not weight_version and scope == DEFAULT_SCOPE:
        return NO_PREFIX
    return xxhash.xxh3_128_intdigest(repr((weight_version, *scope)).encode())


def compute_block_hash(token_ids: Sequence[int], prefix_hash: int = NO_PREFIX) -> int:
    """Return the hash of a full block, which covers all blocks before it through `prefix_hash`.

    Args:
        token_ids: The tokens of the block; any integers of 64 bits.
        prefix_hash: The hash of the block before, or the root of the chain; -1 for none.

    Returns:
        128 bits (XXH3), wide enough that two prefixes never have the same hash by chance.

    Raises:
        ValueError: `token_ids` is empty.
    """
    if not token_ids:
        raise ValueError("a block must hold at least one token")
    state = xxhash.xxh3_128(array("q", token_ids).tobytes())
    if prefix_hash != NO_PREFIX:
        state.update(prefix_hash.to_bytes(16, "little"))
    return state.intdigest()


def extend_chain(
    names: list[bytes], token_ids: Sequence[int], block_size: int, num_blocks: int, root: int
) -> None:
    """Append the names of further leading blocks, up to `num_blocks`, to a block-hash chain.

    Args:
        names: The block hashes so far, each as 16 bytes.
        token_ids: At least the tokens of these blocks.
        block_size: Tokens of a block.
        num_blocks: The length of the chain afterwards, if it is not longer already.
        root: As returned by `chain_root`.
    """
    for index in range(len(names), num_blocks):
        before = int.from_bytes(names[-1], "little") if names else root
        run = token_ids[index * block_size : (index + 1) * block_size]
        names.append(compute_block_hash(run, before).to_bytes(16, "little"))


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the number of equal leading tokens."""
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        length += 1
    return length
