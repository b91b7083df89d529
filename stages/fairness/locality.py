"""Which prefixes a replica has probably cached, as far as can be told from what was sent there."""

from __future__ import annotations

from collections import OrderedDict

CHUNK_TOKENS = 64
"""Prefixes are compared in steps of so many tokens."""

MOST_CHUNKS = 64
"""No more of a prompt's beginning is looked at."""

Trail = tuple[int, ...]


def trail_of(token_ids: tuple[int, ...], salt: str, adapter: str = "") -> Trail:
    """Names a prompt's prefixes: one hash for each full chunk, which covers all before it."""
    trail: list[int] = []
    name = hash((salt, adapter))
    for start in range(
        0, min(len(token_ids) // CHUNK_TOKENS, MOST_CHUNKS) * CHUNK_TOKENS, CHUNK_TOKENS
    ):
        name = hash((name, token_ids[start : start + CHUNK_TOKENS]))
        trail.append(name)
    return tuple(trail)


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

    def match(self, trail: Trail) -> int:
        """Tokens at the beginning that are probably cached."""
        for number, name in enumerate(trail):
            if name not in self._known:
                return number * CHUNK_TOKENS
        return len(trail) * CHUNK_TOKENS

    def clear(self) -> None:
        """The replica has lost all that it had cached."""
        self._known.clear()

    def add(self, trail: Trail) -> None:
        """The replica is about to compute these."""
        for name in trail:
            self._known[name] = None
            self._known.move_to_end(name)
        while len(self._known) > self._most:
            self._known.popitem(last=False)
