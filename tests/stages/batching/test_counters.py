"""Counters of planned, cached, recomputed and wasted tokens."""

from __future__ import annotations

import pytest

from .replica import STOP, CacheType, FakeReplica, expected


def test_computed_tokens_are_counted_once(cache_type: CacheType) -> None:
    replica = FakeReplica(cache_type=cache_type)
    replica.add(list(range(10)), (1, 2, 3), max_tokens=5)
    replica.run()
    done = replica.core.take_counters()
    assert done.prefilled + done.decoded == replica.executor.num_computed
    assert done.decoded == 3 * 4
    assert done.prefilled + done.cached == 3 * 10
    assert (done.misses, done.partial_hits, done.full_hits) == (1, 0, 2)
    assert (done.recomputed, done.wasted, done.preemptions, done.resumes) == (0, 0, 0, 0)
    assert replica.core.take_counters().prefilled == 0, "taken once"


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        (list(range(10)), (0, 0, 1)),
        (list(range(9)), (0, 0, 1)),
        ([*range(8), 40, 41], (0, 1, 0)),
        (list(range(12)), (0, 1, 0)),
        ([0, 40], (0, 0, 1)),
        ([40, 41, 42], (1, 0, 0)),
        ([0], (1, 0, 0)),
    ],
)
def test_prefix_hits_are_counted(
    cache_type: CacheType, prompt: list[int], found: tuple[int, int, int]
) -> None:
    """A full hit leaves the last token, which is always computed."""
    replica = FakeReplica(cache_type=cache_type)
    replica.add(list(range(10)), 1, max_tokens=1, stop=True)
    replica.run()
    assert replica.core.take_counters().misses == 1
    replica.add(prompt, 2, max_tokens=1, stop=True)
    replica.run()
    done = replica.core.take_counters()
    assert (done.misses, done.partial_hits, done.full_hits) == found


def test_the_step_ahead_of_a_stop_token_is_wasted() -> None:
    # One that ends by itself, and not because it has all of its tokens.
    prompt = next([seed] for seed in range(50) if STOP in expected([seed], 8, stop=True)[:7])
    replica = FakeReplica(steps_ahead=2)
    replica.add(prompt, 1, max_tokens=8, stop=True)
    replica.run()
    assert replica.core.take_counters().wasted == 1


def test_the_cost_of_preemptions_is_counted() -> None:
    replica = FakeReplica(num_blocks=8, block_size=4, max_batch_size=4, cache_type="paged")
    for seq_id in range(4):
        prompt = [seq_id + 10] * 3
        replica.add(prompt, seq_id, max_tokens=16)
    replica.run()
    done = replica.core.take_counters()
    assert done.preemptions > 0
    assert done.resumes == done.preemptions, "each went on"
    assert done.recomputed > 0
    assert done.prefilled == 4 * 3 + done.recomputed
    assert replica.core.cache.take_evicted() > 0
    assert replica.core.cache.take_evicted() == 0, "taken once"
