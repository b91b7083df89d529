"""Plans' entries for the accounts of time (docs/time.md)."""

from __future__ import annotations

from ...sections import read
from .replica import FakeReplica
from .test_pause_sequences import come_to_rest, replica_with_one


def test_a_plan_names_sequences_that_left_with_the_reason() -> None:
    replica = replica_with_one()
    for leave, why in (
        (lambda: replica.core.pause_sequences([1]), "preemption"),
        (replica.core.recompute, "weights"),
    ):
        replica.retire_all()
        leave()
        replica.core.resume_sequences([1])
        assert replica.plan()
        assert read(replica.plans[-1]).times.left == ((1, why),)
        replica.retire_all()
        assert replica.plan()
        assert read(replica.plans[-1]).times.left == ()


def test_a_preempted_sequence_left() -> None:
    replica = FakeReplica(num_blocks=4, block_size=4)
    for seq_id in (1, 2):
        replica.add([3, 1, 4], seq_id, name=f"r{seq_id}", max_tokens=10)
    left: list[tuple[int, str]] = []
    while replica.plan() or replica.retire():
        left += read(replica.plans[-1]).times.left if replica.plans else ()
    assert (2, "preemption") in left


def test_a_plan_says_how_many_rows_decode_and_since_when_none_could() -> None:
    replica = replica_with_one()
    replica.retire_all()
    replica.add([2, 7, 1], 2, name="b", max_tokens=4)
    assert replica.plan()
    assert read(replica.plans[-1]).times.num_decodes == 1
    assert replica.plans[-1].seq_ids == (1, 2)
    assert read(replica.plans[-1]).times.held_ns is None
    replica.core.paused = True
    come_to_rest(replica)
    assert replica.core.plan(7_000) is None
    replica.core.paused = False
    plan = replica.core.plan(9_000)
    assert plan is not None
    assert read(plan).times.held_ns is not None
    assert read(plan).times.held_ns[0] <= 7_000
    assert read(plan).times.held_ns[1] == 9_000
