"""Pooled prompts: they end with their prompt, and some can't be split."""

from __future__ import annotations

import random

import pytest

from nano_inference.bus.pooling import Pooling
from nano_inference.store.loaded_adapter import LoadedAdapter

from ...sections import read
from .replica import CacheType, FakeReplica, expected, reported

MEAN = Pooling("mean", True, 4)
LAST = Pooling("last", True, 4)
WHOLE = Pooling("last", True, 4, whole=True)


def embed(
    replica: FakeReplica, seq_id: int, prompt: list[int], pooling: Pooling, *, adapter: str = ""
) -> None:
    replica.add(
        prompt, seq_id, name=f"e{seq_id}", max_tokens=1, pooling=pooling, adapter=adapter, stop=True
    )


def rows_of(replica: FakeReplica, seq_id: int) -> list[int]:
    """Return the number of a sequence's tokens that each step computed."""
    return [
        count
        for plan in replica.log
        for each, count in zip(plan.seq_ids, plan.num_tokens, strict=True)
        if each == seq_id
    ]


@pytest.mark.parametrize("steps_ahead", [1, 2])
def test_pooled_prompts_run_beside_others_and_end_with_their_prompt(
    cache_type: CacheType, steps_ahead: int
) -> None:
    rng = random.Random(1)
    replica = FakeReplica(cache_type=cache_type, steps_ahead=steps_ahead, num_blocks=40)
    prompts = {
        seq_id: [rng.randrange(50) for _ in range(rng.randrange(1, 70))] for seq_id in range(30)
    }
    for seq_id, prompt in prompts.items():
        if seq_id % 3:
            embed(replica, seq_id, prompt, (MEAN, LAST)[seq_id % 2])
        else:
            replica.add(prompt, seq_id, name=f"g{seq_id}", stop=True)
    replica.run()
    replica.check()
    assert replica.core.idle
    assert sorted(replica.pooled) == [seq_id for seq_id in prompts if seq_id % 3]
    assert replica.outputs == {
        seq_id: expected(prompt, 8, stop=True)
        for seq_id, prompt in prompts.items()
        if not seq_id % 3
    }
    report = reported(replica)
    assert (report.sequences, sorted(report.ended)) == (30, list(prompts))
    assert not {seq for step in report.steps for seq in step} & set(replica.pooled)


def test_only_pooling_of_the_last_token_uses_a_cached_prefix() -> None:
    replica = FakeReplica()
    prompt = list(range(20))
    for seq_id, pooling in enumerate((LAST, LAST, MEAN)):
        embed(replica, seq_id, prompt, pooling)
        replica.run()
    assert [rows_of(replica, seq_id) for seq_id in range(3)] == [[20], [1], [20]]


def test_whole_prompts_are_computed_in_one_step_and_in_order() -> None:
    """A step has 32 tokens: the second waits for the next one, and the third does not pass it."""
    replica = FakeReplica(num_blocks=64)
    lengths = [20, 30, 5, 2, 32, 1]
    for seq_id, length in enumerate(lengths):
        embed(replica, seq_id, [seq_id] * length, WHOLE)
    replica.run()
    assert [plan.seq_ids for plan in replica.log] == [(0,), (1,), (2, 3), (4,), (5,)]
    assert [rows_of(replica, seq_id) for seq_id in range(6)] == [[length] for length in lengths]
    assert replica.core.cache.num_cached_blocks() == 0, "there is no KV that others could find"


def test_new_weights_restart_pooled_prompts_alone() -> None:
    replica = FakeReplica(max_tokens_per_batch=8)
    replica.add([1, 2, 3], 1, max_tokens=30)
    embed(replica, 2, [4] * 30, MEAN)
    for _ in range(3):
        assert replica.plan()
        replica.retire()
    begun = sum(rows_of(replica, 2))
    replica.change_weights(1, "keep")
    replica.run()
    replica.check()
    assert 0 < begun < 30
    assert sum(rows_of(replica, 2)) == begun + 30
    (changed,) = [plan for plan in replica.log if read(plan).weight_version]
    assert changed.finished == (2,)
    assert replica.outputs[1] == expected([1, 2, 3], 30)


def test_new_adapter_weights_restart_its_pooled_prompts_alone() -> None:
    replica = FakeReplica(max_tokens_per_batch=12)
    replica.set_adapters([LoadedAdapter("a", 1), LoadedAdapter("b", 1)])
    replica.add([1, 2], 1, max_tokens=30, adapter="a")
    embed(replica, 2, [4] * 30, MEAN, adapter="a")
    embed(replica, 3, [5] * 30, MEAN, adapter="b")
    for _ in range(2):
        assert replica.plan()
        replica.retire()
    begun = sum(rows_of(replica, 2))
    replica.change_adapter("a", 2, "keep")
    replica.run()
    replica.check()
    assert begun > 0
    assert [sum(rows_of(replica, seq_id)) for seq_id in (2, 3)] == [begun + 30, 30]
    (changed,) = [plan for plan in replica.log if read(plan).adapters]
    assert (read(changed).adapters, changed.finished) == ((("a", 2),), (2,))
    assert replica.outputs[1] == expected([1, 2], 30)
    assert sorted(replica.pooled) == [2, 3]
