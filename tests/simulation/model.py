"""A model without weights: each token is a hash of all tokens before it.

A token depends on the sample's seed, the scope of its KV, every token before it, and the weights.
So whoever has the output can tell whether each of its tokens is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from zlib import crc32

from nano_inference.bus.messages import CacheScope

VOCAB_SIZE = 768
"""The vocabulary size of the bundled model, whose tokenizer it has."""

FIRST_TOKEN, NUM_TOKENS = 16, 64
"""Tokens are from this range, so that a few stop ids end many samples."""

MASK = (1 << 60) - 1


def begin(scope: CacheScope) -> int:
    """Return the hash before the first token of a scope."""
    return _root(scope.tenant, scope.salt, scope.adapter)


@lru_cache(maxsize=256)
def _root(*scope: str) -> int:
    return crc32(repr(scope).encode())


def extend(chain: int, token: int) -> int:
    """Return the hash of the tokens so far and one more: what a position's KV holds."""
    return hash((chain, token)) & MASK


def sample(
    chain: int,
    seed: int,
    weights: tuple[int, int],
    avoided: Iterable[int] = (),
    allowed: Sequence[int] = (),
) -> tuple[int, float]:
    """Return the next token and its logprob.

    Args:
        chain: The hash of all tokens before.
        seed: Seed of the sample.
        weights: The numbers that weights and adapter consist of.
        avoided: Tokens that must not come yet.
        allowed: Tokens allowed to a constrained sample; () for any.
    """
    value = hash((chain, seed, weights)) & MASK
    if allowed:
        return allowed[value % len(allowed)], -((value >> 20) % 4096) / 256
    token = value % NUM_TOKENS
    while token + FIRST_TOKEN in avoided:
        token = (token + 1) % NUM_TOKENS
    return token + FIRST_TOKEN, -((value >> 20) % 4096) / 256


def chains_of(scope: CacheScope, tokens: Sequence[int]) -> list[int]:
    """Return the hashes before the first token and after each."""
    chain = begin(scope)
    chains = [chain]
    for token in tokens:
        chain = hash((chain, token)) & MASK
        chains.append(chain)
    return chains


def number_of(folder: str) -> int:
    """Return the number that weights or an adapter consist of, by which their folder is named."""
    return int(folder.rpartition("/")[2])
