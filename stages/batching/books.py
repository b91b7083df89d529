"""The conservation check: where every sequence and every block is."""

from __future__ import annotations

from collections.abc import Collection

from .cache import KVCacheManager
from .index import SequenceIndex
from .running import RunningBatch
from .sequence import Sequence


def check_books(
    cache: KVCacheManager,
    index: SequenceIndex,
    running: RunningBatch,
    *,
    waiting: Collection[Sequence],
    leaving: Collection[Sequence],
    pausing: Collection[Sequence],
    paused: Collection[Sequence],
    under_way: bool,
) -> None:
    """Holds the books of a BatchingCore against each other; `under_way`: whether a plan is.

    Raises:
        AssertionError: They are wrong.
    """
    cache.check(seq.lease for seq in (*running, *leaving, *pausing))
    running.check()
    alive = [*waiting, *running, *pausing, *paused]
    assert len(alive) == len(index), "a sequence is lost, or in two places"
    assert set(index) == set(alive), "a sequence is not where it can be found"
    if not under_way:
        assert not leaving, "a sequence is kept though no plan names it"
        assert not pausing, "a sequence is not paused though no plan names it"
