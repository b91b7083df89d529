"""Several plans in flight, one for each pipeline stage, with different sequences."""

from __future__ import annotations

from collections import Counter

import pytest

from ...sections import read
from .replica import CACHE_TYPES, CacheType, FakeReplica, expected
from .test_core import cancel


def replica_of(stages: int, **settings: int) -> FakeReplica:
    return FakeReplica(
        pipeline_stages=stages, **{"num_blocks": 200, "max_batch_size": 12, **settings}
    )


def fill(replica: FakeReplica) -> None:
    while replica.plan():
        pass


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_every_stage_has_a_plan_with_an_even_share(stages: int) -> None:
    replica = replica_of(stages)
    for seq_id in range(12):
        replica.add([seq_id] * 3, seq_id, max_tokens=20)
    fill(replica)
    for _ in range(20):
        assert [len(plan.seq_ids) for plan in replica.plans] == [12 // stages] * stages
        replica.retire()  # `plan` of the replica checks that no sequence is in two of them
        fill(replica)
    replica.run()
    assert replica.outputs == {i: expected([i] * 3, 20) for i in range(12)}


def test_uneven_plans_become_even_and_no_sequence_starves() -> None:
    replica = replica_of(2)
    for seq_id in range(4):
        replica.add([seq_id] * 3, seq_id, max_tokens=40)
    fill(replica)
    for seq_id in range(4, 10):
        replica.add([seq_id] * 3, seq_id, max_tokens=40)
    for _ in range(6):
        replica.retire()
        fill(replica)
    assert [len(plan.seq_ids) for plan in replica.plans] == [5, 5]
    seen = Counter(seq_id for plan in replica.log[-6:] for seq_id in plan.seq_ids)
    assert set(seen.values()) == {3}
    assert len(seen) == 10


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_remaining_rows_are_in_one_of_the_next_plans(stages: int) -> None:
    """While sequences come, end, and leave shares that are too large or too small."""
    replica = replica_of(stages)
    came = 0
    last_seen: dict[int, int] = {}
    for step in range(120):
        for _ in range(step % 3):
            # Short and long ones, of several ranks.
            replica.add([came % 50] * 3, came, max_tokens=2 + came * 7 % 23, rank=-came % 5)
            came += 1
        fill(replica)
        for plan in replica.plans:
            last_seen |= dict.fromkeys(plan.seq_ids, step)
        assert all(step - last_seen[s.seq_id] <= stages for s in replica.core.running)
        replica.retire()
    replica.run()
    assert len(replica.outputs) == came


def test_one_sequence_waits_for_its_own_token() -> None:
    replica = replica_of(2)
    replica.add([1, 2, 3], 0, max_tokens=3)
    assert replica.plan()
    assert not replica.plan()
    assert replica.retire()
    assert replica.plan()


def test_chunks_of_a_prompt_are_in_one_plan_at_a_time() -> None:
    replica = replica_of(2, max_tokens_per_batch=12)
    prompt = [i % 11 for i in range(40)]
    replica.add(prompt, 0, max_tokens=2)
    replica.add([5, 6], 1, max_tokens=30)
    replica.run()
    chunks = [dict(zip(plan.seq_ids, plan.num_tokens, strict=True)) for plan in replica.log]
    assert [chunk[0] for chunk in chunks if 0 in chunk] == [12, 12, 12, 4, 1]
    assert replica.outputs == {0: expected(prompt, 2), 1: expected([5, 6], 30)}


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_preemption_waits_for_all_plans_in_flight(cache_type: CacheType) -> None:
    replica = FakeReplica(pipeline_stages=2, num_blocks=9, max_batch_size=4, cache_type=cache_type)
    for seq_id in range(4):
        replica.add([seq_id] * 3, seq_id, max_tokens=12, priority=-seq_id)
    preempted = False
    for _ in range(200):
        fill(replica)
        replica.check()
        if not replica.retire():
            break
        again = Counter(new.seq_id for plan in replica.log for new in plan.new)
        preempted = preempted or max(again.values()) > 1
    assert preempted
    assert replica.outputs == {i: expected([i] * 3, 12) for i in range(4)}
    first = next(plan for plan in replica.log if plan.finished)
    assert first.finished == (3,), "the last in order gives up its blocks first"


@pytest.mark.parametrize("in_flight", ["keep", "retract"])
def test_new_weights_come_between_two_plans(in_flight: str) -> None:
    replica = replica_of(2)
    for seq_id in range(4):
        replica.add([seq_id] * 3, seq_id, max_tokens=12)
    fill(replica)
    assert len(replica.plans) == 2
    replica.change_weights(1, in_flight)
    fill(replica)
    if in_flight == "keep":
        # The change itself needs no sequence, and goes ahead of those in flight.
        assert [read(plan).weight_version for plan in replica.plans] == [0, 0, 1]
        assert replica.plans[-1].seq_ids == ()
    else:
        assert len(replica.plans) == 2
    replica.run()
    assert [read(plan).weight_version for plan in replica.log].count(1) == 1
    assert replica.outputs == {i: expected([i] * 3, 12) for i in range(4)}


def test_a_paused_core_comes_to_rest_and_goes_on() -> None:
    replica = replica_of(2)
    for seq_id in range(4):
        replica.add([seq_id] * 3, seq_id, max_tokens=12)
    fill(replica)
    replica.core.paused = True
    replica.retire_all()
    assert not replica.plan()
    assert replica.core.at_rest
    replica.core.paused = False
    fill(replica)
    assert len(replica.plans) == 2
    replica.core.cancel(cancel("0"))
    replica.lose_plans()
    replica.run()
    replica.check()
    assert {i: replica.outputs[i] for i in (1, 2, 3)} == {
        i: expected([i] * 3, 12) for i in (1, 2, 3)
    }


def test_a_caller_without_plans_ahead_gets_all_sequences_in_one() -> None:
    replica = FakeReplica(pipeline_stages=2, steps_ahead=1)
    for seq_id in range(4):
        replica.add([seq_id] * 3, seq_id)
    assert replica.plan()
    assert len(replica.plans[0].seq_ids) == 4
