"""KV tiers below the cache."""

from __future__ import annotations

from ..sections import Section, Sections
from ..steps import KVMove


class TiersPlan(Section, frozen=True):
    """In StepPlan.

    Attributes:
        moves: Blocks to move between the KV cache and the tiers, in this order, before `copies`.
        offers: Blocks to offer to other executors, after the rows that compute them.
    """

    moves: tuple[KVMove, ...] = ()
    offers: tuple[KVMove, ...] = ()


class FetchedBlocks(Section, frozen=True):
    """In NewSequence and StartedSequence: the sequence waited for blocks from a tier.

    Attributes:
        since_ns: When it began to wait.
        num_loaded: Blocks that it loaded.
    """

    since_ns: int
    num_loaded: int


def moves_of(parts: Sections) -> tuple[KVMove, ...]:
    """Return a plan's moves, then its offers."""
    found = TiersPlan.find(parts)
    return (*found.moves, *found.offers) if found is not None else ()
