"""Which prefixes a replica has probably cached, as far as can be told from what was sent there."""

from __future__ import annotations

from collections import OrderedDict

from ...bus.messages import CacheScope

CHUNK_TOKENS = 64
"""Prefixes are compared in steps of so many tokens."""

MOST_CHUNKS = 64
"""No more of a prompt's beginning is looked at."""

PrefixChain = tuple[int, ...]


def prefix_chain(token_ids: tuple[int, ...], scope: CacheScope) -> PrefixChain:
    """Return one hash for each full chunk of a prompt, which covers all chunks before it."""
    chain: list[int] = []
    name = hash(scope)
    for start in range(
        0, min(len(token_ids) // CHUNK_TOKENS, MOST_CHUNKS) * CHUNK_TOKENS, CHUNK_TOKENS
    ):
        name = hash((name, token_ids[start : start + CHUNK_TOKENS]))
        chain.append(name)
    return tuple(chain)


class PrefixIndex:
    """The prefixes last sent to one replica, least recently used ones forgotten first.

    A guess: the replica may have evicted some, or not have computed them yet. Guessing wrong costs
    a hit, never an answer.
    """

    def __init__(self, most_tokens: int = 1 << 20) -> None:
        self._most = max(1, most_tokens // CHUNK_TOKENS)
        self._known: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def match(self, chain: PrefixChain) -> int:
        """Tokens at the beginning that are probably cached."""
        for number, name in enumerate(chain):
            if name not in self._known:
                return number * CHUNK_TOKENS
        return len(chain) * CHUNK_TOKENS

    def clear(self) -> None:
        """The replica has lost all that it had cached."""
        self._known.clear()

    def add(self, chain: PrefixChain) -> None:
        """The replica is about to compute these."""
        for name in chain:
            self._known[name] = None
            self._known.move_to_end(name)
        while len(self._known) > self._most:
            self._known.popitem(last=False)
