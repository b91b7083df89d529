"""Released memory: no step is planned, no KV is found, and all sequences continue afterwards."""

from __future__ import annotations

import pytest

from nano_inference.bus.control import Cancel

from ...sections import read
from .replica import CacheType, FakeReplica, expected

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
BOTH = ("weights", "kv_cache")


@pytest.fixture
def replica(cache_type: CacheType) -> FakeReplica:
    """Three sequences have run for some steps, the last of them in flight; a fourth waits."""
    replica = FakeReplica(cache_type=cache_type, max_batch_size=3)
    replica.add(PROMPT, (1, 2), max_tokens=20)
    replica.add([*PROMPT, 7], 3, name="b", max_tokens=20)
    replica.steps(6)
    replica.add([5, 5], 4, max_tokens=4)
    assert replica.plans, "a plan is in flight"
    return replica


def check_outputs(replica: FakeReplica) -> None:
    assert replica.outputs[1] == replica.outputs[2] == expected(PROMPT, 20)
    assert replica.outputs[3] == expected([*PROMPT, 7], 20)
    assert replica.outputs[4] == expected([5, 5], 4)
    assert replica.core.idle
    replica.check()


def test_the_kv_cache_is_released_after_all_plans_and_computed_again(
    replica: FakeReplica,
) -> None:
    replica.change_memory(("kv_cache",), ("kv_cache",))
    assert not replica.plan(), "plans are in flight"
    replica.run()
    assert read(replica.log[-1]).release == ("kv_cache",)
    assert set(replica.log[-1].finished) == {1, 2, 3}
    load = replica.core.load()
    assert (load["running"], load["waiting"]) == (0, 4)
    assert (load["kv_free"], load["kv_cached"]) == (load["kv_total"], 0)
    assert not replica.plan(), "nothing can run"
    replica.change_memory((), ())
    replica.run()
    check_outputs(replica)


def test_releasing_weights_keeps_kv(replica: FakeReplica) -> None:
    replica.change_memory(("weights",), ("weights",))
    replica.run()
    assert read(replica.log[-1]).release == ("weights",)
    assert (replica.core.load()["running"], replica.log[-1].finished) == (3, ())
    started = len([new for plan in replica.log for new in plan.new])
    replica.change_weights(1, "keep")
    replica.run()
    check_outputs(replica)
    assert len([new for plan in replica.log for new in plan.new]) == started + 1


def test_no_step_is_planned_until_weights_arrive(replica: FakeReplica) -> None:
    replica.change_memory(BOTH, BOTH)
    replica.run()
    replica.change_memory(("weights",), ())
    assert not replica.plan()
    replica.change_weights(1, "keep")
    replica.run()
    assert [read(plan).weight_version for plan in replica.log].count(1) == 1
    check_outputs(replica)


def test_new_weights_do_not_resume_the_kv_cache(replica: FakeReplica) -> None:
    replica.change_memory(BOTH, BOTH)
    replica.run()
    replica.change_memory(BOTH, ())
    replica.change_weights(1, "keep")
    replica.run()
    assert read(replica.log[-1]).weight_version == 1
    assert replica.core.lacks == ("kv_cache",)
    replica.change_memory((), ())
    replica.run()
    check_outputs(replica)


def test_requests_end_while_memory_is_released(replica: FakeReplica) -> None:
    replica.add([8], 5, name="late", deadline_ns=100, stop=True)
    replica.change_memory(BOTH, BOTH)
    replica.run()
    replica.core.cancel(Cancel("b", "b", "cancelled", "cancelled", ""))
    assert replica.plan(now_ns=200)
    replica.run()
    assert replica.ended == ["b", "late"]


def test_a_pause_and_a_release_are_independent(replica: FakeReplica) -> None:
    replica.core.paused = True
    replica.change_memory(("kv_cache",), ("kv_cache",))
    replica.run()
    assert replica.core.at_rest
    replica.change_memory((), ())
    assert not replica.plan()
    replica.change_memory(("kv_cache",), ("kv_cache",))
    replica.run()
    replica.core.paused = False
    assert not replica.plan()
    replica.change_memory((), ())
    replica.run()
    check_outputs(replica)
