"""The block-hash chain: names of full blocks by their tokens and all tokens before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import xxhash

from ...bus.messages import DEFAULT_SCOPE, CacheScope

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
    tokens = array("q", token_ids).tobytes()
    return int.from_bytes(_hash(tokens, _name(prefix_hash)), "little")


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
    before = names[-1] if names else _name(root)
    tokens = array("q", token_ids[len(names) * block_size : num_blocks * block_size]).tobytes()
    length = 8 * block_size
    for start in range(0, len(tokens), length):
        before = _hash(tokens[start : start + length], before)
        names.append(before)


def _name(hash: int) -> bytes:
    return b"" if hash == NO_PREFIX else hash.to_bytes(16, "little")


def _hash(tokens: bytes, before: bytes) -> bytes:
    # The digest is big-endian.
    return xxhash.xxh3_128_digest(tokens + before)[::-1]


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the number of equal leading tokens."""
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        length += 1
    return length
