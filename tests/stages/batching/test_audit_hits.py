"""A wrong block is hit about `kv_audit_every` times before the self-audit computes it again."""

from __future__ import annotations

import pytest

from nano_inference.bus.control import TierCapacity
from nano_inference.stages.batching.parts.tiers.tiers import KVTiers

from ...soaking import in_soak

EVERY, LIVES = 50, 300


def hits_until_chosen(every: int, blocks: int, wrong: int, life: int) -> int:
    """A prompt of so many blocks is loaded again and again, and one of its blocks is wrong."""
    capacity = TierCapacity(blocks, 0, "layout", "weights", 0, f"executor {life}", 1, 1, 1000)
    tiers = KVTiers(capacity, 16, "lru", every)
    names = [number.to_bytes(16, "little") for number in range(blocks)]
    for name in names:
        tiers.store(name, 0)
    for hits in range(1, 100 * every):
        for number, name in enumerate(names):
            if tiers.load(name, 0):
                tiers.end_audit()
                if number == wrong:
                    return hits
        tiers.take_moves()
    raise AssertionError("it is never computed again")


@pytest.mark.parametrize(
    ("blocks", "wrong"),
    [(1, 0), (7, 3), (10, 3), (25, 24), in_soak(50, 0), in_soak(50, 20)],
)
def test_a_wrong_block_is_found_wherever_it_lies(blocks: int, wrong: int) -> None:
    """Also in a prompt whose number of blocks divides `kv_audit_every`."""
    hits = [hits_until_chosen(EVERY, blocks, wrong, life) for life in range(LIVES)]
    assert 0.8 * EVERY < sum(hits) / LIVES < 1.2 * EVERY


def test_every_block_is_audited_if_configured() -> None:
    assert all(hits_until_chosen(1, 5, wrong, 0) == 1 for wrong in range(5))
