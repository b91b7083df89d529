"""A model without weights: each token is a hash of all tokens before it.

A token depends on the sample's seed, the scope of its KV, every token before it, and the weights.
So whoever has the output can tell whether each of its tokens is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from zlib import crc32

from ..bus.messages import CacheScope

VOCAB_SIZE = 768
"""As the bundled model, whose tokenizer it has."""

FIRST_TOKEN, NUM_TOKENS = 16, 64
"""Tokens are from this range, so that a few stop ids end many samples."""

MASK = (1 << 60) - 1


def begin(scope: CacheScope) -> int:
    """Return the hash before the first token of a scope."""
    return crc32(repr((scope.tenant, scope.salt, scope.adapter)).encode())


def extend(chain: int, token: int) -> int:
    """Return the hash of the tokens so far and one more: what a position's KV holds."""
    return hash((chain, token)) & MASK


def sample(chain: int, seed: int, weights: int, avoided: Iterable[int] = ()) -> tuple[int, float]:
    """Return the next token and its logprob.

    Args:
        chain: The hash of all tokens before.
        seed: Of the sample.
        weights: The number that they consist of.
        avoided: Tokens that must not come yet.
    """
    value = hash((chain, seed, weights)) & MASK
    token = value % NUM_TOKENS
    while token + FIRST_TOKEN in avoided:
        token = (token + 1) % NUM_TOKENS
    return token + FIRST_TOKEN, -((value >> 20) % 4096) / 256


def chain_of(scope: CacheScope, tokens: Sequence[int]) -> int:
    """Return the hash of all tokens."""
    chain = begin(scope)
    for token in tokens:
        chain = extend(chain, token)
    return chain
