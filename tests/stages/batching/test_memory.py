"""Memory that is released: no step is planned, no KV is found, and all goes on afterwards."""

from __future__ import annotations

import pytest

from nano_inference.bus.control import Cancel

from .replica import CacheType, FakeReplica, expected

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
BOTH = ("weights", "kv_cache")


@pytest.fixture(params=["paged", "radix"])
def replica(request: pytest.FixtureRequest) -> FakeReplica:
    """Three sequences have gone some steps, the last of them still under way; a fourth waits."""
    cache_type: CacheType = request.param
    replica = FakeReplica(cache_type=cache_type, max_batch_size=3)
    replica.add(PROMPT, request_id="a", seq_ids=(1, 2), max_tokens=20, stop=False)
    replica.add([*PROMPT, 7], request_id="b", seq_ids=(3,), max_tokens=20, stop=False)
    for _ in range(6):
        replica.plan()
        replica.plan()
        replica.retire()
    replica.add([5, 5], request_id="c", seq_ids=(4,), max_tokens=4, stop=False)
    assert replica.plans, "a plan is under way"
    return replica


def check_outputs(replica: FakeReplica) -> None:
    assert replica.outputs[1] == replica.outputs[2] == expected(PROMPT, 20, stop=False)
    assert replica.outputs[3] == expected([*PROMPT, 7], 20, stop=False)
    assert replica.outputs[4] == expected([5, 5], 4, stop=False)
    assert replica.core.idle
    replica.check()


def test_the_kv_cache_goes_when_no_plan_names_it_and_is_computed_again(
    replica: FakeReplica,
) -> None:
    replica.core.change_memory(("kv_cache",), ("kv_cache",))
    assert not replica.plan(), "plans are under way"
    replica.run()
    assert replica.log[-1].release == ("kv_cache",)
    assert set(replica.log[-1].finished) == {1, 2, 3}
    load = replica.core.load()
    assert (load["running"], load["waiting"]) == (0, 4)
    assert (load["kv_free"], load["kv_cached"]) == (load["kv_total"], 0)
    assert not replica.plan(), "nothing can run"
    replica.core.change_memory((), ())
    replica.run()
    check_outputs(replica)


def test_kv_stays_when_only_the_weights_go(replica: FakeReplica) -> None:
    replica.core.change_memory(("weights",), ("weights",))
    replica.run()
    assert replica.log[-1].release == ("weights",)
    assert (replica.core.load()["running"], replica.log[-1].finished) == (3, ())
    started = len([new for plan in replica.log for new in plan.new])
    replica.core.change_weights(1, "keep")
    replica.run()
    check_outputs(replica)
    assert len([new for plan in replica.log for new in plan.new]) == started + 1


def test_weights_that_hold_nothing_are_waited_for(replica: FakeReplica) -> None:
    replica.core.change_memory(BOTH, BOTH)
    replica.run()
    replica.core.change_memory(("weights",), ())
    assert not replica.plan()
    replica.core.change_weights(1, "keep")
    replica.run()
    assert [plan.weight_version for plan in replica.log].count(1) == 1
    check_outputs(replica)


def test_new_weights_don_t_bring_the_kv_cache_back(replica: FakeReplica) -> None:
    replica.core.change_memory(BOTH, BOTH)
    replica.run()
    replica.core.change_memory(BOTH, ())
    replica.core.change_weights(1, "keep")
    replica.run()
    assert replica.log[-1].weight_version == 1
    assert replica.core.lacks == ("kv_cache",)
    replica.core.change_memory((), ())
    replica.run()
    check_outputs(replica)


def test_a_request_can_end_meanwhile(replica: FakeReplica) -> None:
    replica.add([8], request_id="late", seq_ids=(5,), deadline_ns=100)
    replica.core.change_memory(BOTH, BOTH)
    replica.run()
    replica.core.cancel(Cancel("b", "b", "cancelled", "cancelled", ""))
    assert replica.plan(now_ns=200)
    replica.run()
    assert replica.ended == ["b", "late"]


def test_a_pause_and_a_release_don_t_undo_each_other(replica: FakeReplica) -> None:
    replica.core.paused = True
    replica.core.change_memory(("kv_cache",), ("kv_cache",))
    replica.run()
    assert replica.core.at_rest
    replica.core.change_memory((), ())
    assert not replica.plan()
    replica.core.change_memory(("kv_cache",), ("kv_cache",))
    replica.run()
    replica.core.paused = False
    assert not replica.plan()
    replica.core.change_memory((), ())
    replica.run()
    check_outputs(replica)
