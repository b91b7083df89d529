"""Memory that is released: no step is planned, no KV is found, and all goes on afterwards."""

from __future__ import annotations

import pytest

from nano_inference.bus.control import Cancel

from .lane import CacheType, Lane, expected

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
BOTH = ("weights", "kv_cache")


@pytest.fixture(params=["paged", "radix"])
def lane(request: pytest.FixtureRequest) -> Lane:
    """Three sequences have gone some steps, the last of them still under way; a fourth waits."""
    cache_type: CacheType = request.param
    lane = Lane(cache_type=cache_type, max_batch_size=3)
    lane.add(PROMPT, request_id="a", seq_ids=(1, 2), max_tokens=20, stop=False)
    lane.add([*PROMPT, 7], request_id="b", seq_ids=(3,), max_tokens=20, stop=False)
    for _ in range(6):
        lane.plan()
        lane.plan()
        lane.retire()
    lane.add([5, 5], request_id="c", seq_ids=(4,), max_tokens=4, stop=False)
    assert lane.plans, "a plan is under way"
    return lane


def check_outputs(lane: Lane) -> None:
    assert lane.outputs[1] == lane.outputs[2] == expected(PROMPT, 20, stop=False)
    assert lane.outputs[3] == expected([*PROMPT, 7], 20, stop=False)
    assert lane.outputs[4] == expected([5, 5], 4, stop=False)
    assert lane.core.idle
    lane.check()


def test_the_kv_cache_goes_when_no_plan_names_it_and_is_computed_again(lane: Lane) -> None:
    lane.core.change_memory(("kv_cache",), ("kv_cache",))
    assert not lane.plan(), "plans are under way"
    lane.run()
    assert lane.log[-1].release == ("kv_cache",)
    assert set(lane.log[-1].finished) == {1, 2, 3}
    load = lane.core.load()
    assert (load["running"], load["waiting"]) == (0, 4)
    assert (load["kv_free"], load["kv_cached"]) == (load["kv_total"], 0)
    assert not lane.plan(), "nothing can run"
    lane.core.change_memory((), ())
    lane.run()
    check_outputs(lane)


def test_kv_stays_when_only_the_weights_go(lane: Lane) -> None:
    lane.core.change_memory(("weights",), ("weights",))
    lane.run()
    assert lane.log[-1].release == ("weights",)
    assert (lane.core.load()["running"], lane.log[-1].finished) == (3, ())
    started = len([new for plan in lane.log for new in plan.new])
    lane.core.change_weights(1, "keep")
    lane.run()
    check_outputs(lane)
    assert len([new for plan in lane.log for new in plan.new]) == started + 1


def test_weights_that_hold_nothing_are_waited_for(lane: Lane) -> None:
    lane.core.change_memory(BOTH, BOTH)
    lane.run()
    lane.core.change_memory(("weights",), ())
    assert not lane.plan()
    lane.core.change_weights(1, "keep")
    lane.run()
    assert [plan.weight_version for plan in lane.log].count(1) == 1
    check_outputs(lane)


def test_new_weights_don_t_bring_the_kv_cache_back(lane: Lane) -> None:
    lane.core.change_memory(BOTH, BOTH)
    lane.run()
    lane.core.change_memory(BOTH, ())
    lane.core.change_weights(1, "keep")
    lane.run()
    assert lane.log[-1].weight_version == 1
    assert lane.core.lacks == ("kv_cache",)
    lane.core.change_memory((), ())
    lane.run()
    check_outputs(lane)


def test_a_request_can_end_meanwhile(lane: Lane) -> None:
    lane.add([8], request_id="late", seq_ids=(5,), deadline_ns=100)
    lane.core.change_memory(BOTH, BOTH)
    lane.run()
    lane.core.cancel(Cancel("b", "b", "cancelled", "cancelled", ""))
    assert lane.plan(now_ns=200)
    lane.run()
    assert lane.ended == ["b", "late"]


def test_a_pause_and_a_release_don_t_undo_each_other(lane: Lane) -> None:
    lane.core.paused = True
    lane.core.change_memory(("kv_cache",), ("kv_cache",))
    lane.run()
    assert lane.core.at_rest
    lane.core.change_memory((), ())
    assert not lane.plan()
    lane.core.change_memory(("kv_cache",), ("kv_cache",))
    lane.run()
    lane.core.paused = False
    assert not lane.plan()
    lane.core.change_memory((), ())
    lane.run()
    check_outputs(lane)
