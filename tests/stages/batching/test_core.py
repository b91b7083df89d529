"""The batch builder against an executor that notices every mix-up."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.bus.control import Cancel
from nano_inference.bus.messages import Credit
from nano_inference.stages.batching import Sequence
from nano_inference.stages.batching.report import REPORTED_STEPS
from nano_inference.stages.lazy_heap import LEFTOVERS_KEPT

from .replica import CacheType, FakeReplica, expected, reported

CACHE_TYPES: tuple[CacheType, ...] = ("paged", "radix")


@pytest.fixture(params=CACHE_TYPES)
def cache_type(request: pytest.FixtureRequest) -> CacheType:
    param: CacheType = request.param
    return param


def cancel(request_id: str) -> Cancel:
    return Cancel(request_id, request_id, "cancelled", "cancelled", "")


@pytest.mark.parametrize("steps_ahead", [1, 2, 3])
def test_many_sequences_give_what_each_gives_alone(steps_ahead: int, cache_type: CacheType) -> None:
    replica = FakeReplica(steps_ahead=steps_ahead, cache_type=cache_type)
    prompts = [[seed % 9, *range(seed % 13)] for seed in range(40)]
    for seq_id, prompt in enumerate(prompts):
        replica.add(prompt, request_id=str(seq_id), seq_ids=(seq_id,), max_tokens=1 + seq_id % 20)
    replica.run()
    for seq_id, prompt in enumerate(prompts):
        assert replica.outputs[seq_id] == expected(prompt, 1 + seq_id % 20)
    assert replica.core.idle
    replica.check()


def test_plans_run_one_step_ahead_of_results() -> None:
    replica = FakeReplica(steps_ahead=2)
    replica.add([1, 2, 3], request_id="a", seq_ids=(1,), stop=False)
    assert replica.plan()
    assert replica.plan(), "the second plan does not wait for the first result"
    assert not replica.plan(), "a third does"
    replica.retire()
    assert replica.plan()


def test_length_is_known_ahead_so_no_row_is_wasted_on_it() -> None:
    replica = FakeReplica(steps_ahead=2)
    replica.add([1, 2, 3], request_id="a", seq_ids=(1,), max_tokens=3, stop=False)
    replica.run()
    assert [sum(plan.num_tokens) for plan in replica.log] == [3, 1, 1]


def test_long_prefill_is_chunked_and_mixed_with_decodes() -> None:
    replica = FakeReplica(max_tokens_per_batch=8, max_batch_size=8)
    replica.add([1], request_id="short", seq_ids=(1,), max_tokens=12, stop=False)
    replica.plan()
    replica.add(list(range(30)), request_id="long", seq_ids=(2,), max_tokens=2, stop=False)
    replica.run()
    mixed = [plan for plan in replica.log if plan.seq_ids == (1, 2) and plan.num_tokens[1] > 1]
    assert mixed, "the decode goes on while the prompt is computed"
    assert all(sum(plan.num_tokens) <= 8 for plan in replica.log)
    assert replica.outputs[2] == expected(list(range(30)), 2, stop=False)


@pytest.mark.parametrize("length", [2, 3, 4, 5, 32, 33, 34, 36])
@pytest.mark.parametrize("chunk", [8, 64])
def test_siblings_compute_their_prompt_once(length: int, chunk: int, cache_type: CacheType) -> None:
    replica = FakeReplica(
        block_size=4, max_batch_size=8, max_tokens_per_batch=chunk, cache_type=cache_type
    )
    prompt = list(range(length))
    replica.add(prompt, request_id="a", seq_ids=tuple(range(8)), max_tokens=3, stop=False)
    replica.run()
    # The first computes all; the others fork: they share its full blocks, and copy the partial one
    # before the next step. Then each computes two of the three tokens that it sampled.
    assert replica.executor.num_computed == length + 8 * 2
    for seq_id in range(8):
        assert replica.outputs[seq_id] == expected(prompt, 3, stop=False)


def test_siblings_part_within_the_block_that_they_copied(cache_type: CacheType) -> None:
    replica = FakeReplica(block_size=4, cache_type=cache_type)
    prompt = [1, 2, 3, 4, 5, 6]
    replica.add(prompt, request_id="a", seq_ids=(1,), max_tokens=9, stop=False)
    replica.plan()
    replica.retire()
    # Behind the prompt of the first, which goes on writing to the block, come other tokens.
    replica.add([*prompt, 49], request_id="b", seq_ids=(2,), max_tokens=9, stop=False)
    replica.run()
    assert [new.num_cached for plan in replica.log for new in plan.new] == [0, 6]
    assert replica.outputs[1] == expected(prompt, 9, stop=False)
    assert replica.outputs[2] == expected([*prompt, 49], 9, stop=False)
    replica.check()


def test_the_source_of_a_copy_is_held_until_the_copy_is_made(cache_type: CacheType) -> None:
    replica = FakeReplica(num_blocks=8, block_size=4, cache_type=cache_type)
    replica.add([1, 2, 3], request_id="a", seq_ids=(1,), max_tokens=1, stop=False)
    replica.run()
    assert replica.core.cache.num_free_blocks() == 8
    replica.add([1, 2, 3, 4], request_id="b", seq_ids=(2,), max_tokens=9, stop=False)
    replica.plan()
    ((source, destination),) = replica.log[-1].copies
    assert source != destination
    assert replica.core.cache.num_free_blocks() == 6
    replica.plan()
    assert replica.log[-1].copies == ()
    num_free = replica.core.cache.num_free_blocks()
    replica.core.cancel(cancel("b"))
    assert replica.core.cache.num_free_blocks() == num_free, (
        "all is held while the plan is under way"
    )
    replica.retire()
    replica.retire()
    assert replica.core.cache.num_free_blocks() == 8
    replica.check()


def test_no_copy_where_there_is_no_room_for_its_source(cache_type: CacheType) -> None:
    replica = FakeReplica(num_blocks=2, block_size=4, cache_type=cache_type)
    replica.add([1, 2, 3, 4, 5, 6], request_id="a", seq_ids=(1,), max_tokens=1, stop=False)
    replica.run()
    replica.add([1, 2, 3, 4, 5, 9], request_id="b", seq_ids=(2,), max_tokens=1, stop=False)
    replica.run()
    assert [new.num_cached for new in replica.log[-1].new] == [4]
    assert replica.outputs[2] == expected([1, 2, 3, 4, 5, 9], 1, stop=False)


def test_what_began_before_a_flush_is_not_found_after_it(cache_type: CacheType) -> None:
    replica = FakeReplica(block_size=4, max_tokens_per_batch=8, cache_type=cache_type)
    replica.add(list(range(24)), request_id="a", seq_ids=(1,), max_tokens=2, stop=False)
    replica.plan()
    replica.retire()
    replica.core.cache.flush()
    replica.run()
    replica.add(list(range(24)), request_id="b", seq_ids=(2,), max_tokens=2, stop=False)
    replica.run()
    assert [new.num_cached for plan in replica.log for new in plan.new] == [0, 0]
    assert replica.core.cache.num_cached_blocks() > 0


def test_finished_sequences_stay_cached_for_the_next_turn(cache_type: CacheType) -> None:
    replica = FakeReplica(block_size=4, cache_type=cache_type)
    replica.add(list(range(10)), request_id="a", seq_ids=(1,), max_tokens=8, stop=False)
    replica.run()
    turn = [*range(10), *replica.outputs[1], 3, 4]
    before = replica.executor.num_computed
    replica.add(turn, request_id="b", seq_ids=(2,), max_tokens=1, stop=False)
    replica.run()
    # 17 of the 18 tokens before the new turn have their KV (the last was never fed back).
    assert replica.executor.num_computed - before == 3
    assert replica.outputs[2] == expected(turn, 1, stop=False)


def test_preemption_is_invisible_in_the_output(cache_type: CacheType) -> None:
    replica = FakeReplica(num_blocks=12, block_size=2, max_batch_size=8, cache_type=cache_type)
    for seq_id in range(6):
        replica.add(
            [seq_id, 1], request_id=str(seq_id), seq_ids=(seq_id,), max_tokens=18, stop=False
        )
    replica.run()
    resumed = [new for plan in replica.log for new in plan.new if new.num_generated]
    assert resumed, "the cache is too small for all, so someone was preempted and came back"
    for seq_id in range(6):
        assert replica.outputs[seq_id] == expected([seq_id, 1], 18, stop=False)
    replica.check()


def test_the_latest_of_the_lowest_priority_gives_way() -> None:
    replica = FakeReplica(num_blocks=6, block_size=2, max_batch_size=8)
    replica.add([1], request_id="low", seq_ids=(1,), max_tokens=8, stop=False, priority=0)
    replica.add([2], request_id="high", seq_ids=(2,), max_tokens=8, stop=False, priority=5)
    replica.run()
    assert {new.seq_id for plan in replica.log for new in plan.new if new.num_generated} == {1}


def test_cancel_frees_blocks_within_one_step(cache_type: CacheType) -> None:
    replica = FakeReplica(cache_type=cache_type)
    replica.add([1, 2, 3], request_id="a", seq_ids=(1, 2), max_tokens=100, stop=False)
    replica.plan()
    replica.plan()
    replica.core.cancel(cancel("a"))
    replica.retire()
    replica.retire()
    assert replica.core.cache.num_free_blocks() == 64
    replica.run()
    assert replica.ended == ["a"]
    assert replica.core.idle


@pytest.mark.parametrize(("planned", "unstarted"), [(False, True), (True, False)])
def test_cancel_says_whether_streaming_has_heard_of_the_request(
    planned: bool, unstarted: bool
) -> None:
    replica = FakeReplica()
    replica.add([1, 2, 3], request_id="a", seq_ids=(1,))
    if planned:
        replica.plan()
    replica.core.cancel(cancel("a"))
    replica.plan()
    assert replica.log[-1].ended[0].unstarted is unstarted


def test_cancel_of_an_unknown_request_is_passed_on_as_it_came() -> None:
    replica = FakeReplica()
    replica.core.cancel(cancel("gone"))
    replica.run()
    assert replica.log[-1].ended == (cancel("gone"),)


def test_expired_requests_end_in_the_next_plan() -> None:
    replica = FakeReplica()
    replica.add([1, 2], request_id="a", seq_ids=(1,), max_tokens=50, stop=False, deadline_ns=100)
    replica.plan()
    plan = replica.core.plan(100)
    assert plan is not None
    assert [(c.request_id, c.status) for c in plan.ended] == [("a", "expired")]


def test_expired_requests_free_their_blocks_within_a_step(cache_type: CacheType) -> None:
    """One runs and has all blocks, one waits for some; the time of both is over."""
    replica = FakeReplica(num_blocks=4, block_size=4, cache_type=cache_type)
    for name, seq_id in (("running", 1), ("waiting", 2)):
        prompt = [seq_id] * 12
        replica.add(prompt, request_id=name, seq_ids=(seq_id,), stop=False, deadline_ns=100)
    replica.plan()
    replica.plan()
    assert replica.core.cache.num_free_blocks() < 3
    assert replica.core.next_deadline_ns() == 100
    replica.retire()
    assert replica.plan(100)
    assert sorted(ended.request_id for ended in replica.log[-1].ended) == ["running", "waiting"]
    while replica.plans:  # the steps that were under way
        replica.retire()
    assert replica.core.idle
    assert replica.core.cache.num_free_blocks() == 4
    assert reported(replica).sequences == 2
    assert replica.core.next_deadline_ns() is None
    replica.check()


def test_deadlines_of_ended_requests_are_not_kept() -> None:
    replica = FakeReplica()
    for seq_id in range(2000):
        replica.add(
            [1], request_id=str(seq_id), seq_ids=(seq_id,), max_tokens=1, deadline_ns=10**18
        )
        replica.run()
    assert len(replica.core._index.deadlines) <= LEFTOVERS_KEPT + 2


def test_paused_core_plans_no_rows_but_still_passes_cancellations_on() -> None:
    replica = FakeReplica()
    replica.add([1, 2], request_id="a", seq_ids=(1,))
    replica.core.paused = True
    assert not replica.plan()
    replica.core.cancel(cancel("a"))
    assert replica.plan()
    assert replica.log[-1].seq_ids == ()


def test_every_slot_comes_back_as_a_credit() -> None:
    replica = FakeReplica(num_blocks=12, block_size=2)
    for seq_id in range(10):
        replica.add([seq_id], request_id=str(seq_id), seq_ids=(seq_id,), max_tokens=6, stop=False)
    replica.core.cancel(cancel("9"))
    replica.run()
    assert reported(replica).sequences == 10
    assert replica.core.take_report() is None


def test_the_report_tells_who_was_served() -> None:
    replica = FakeReplica(steps_ahead=1)
    replica.add([1, 2, 3], request_id="a", seq_ids=(1, 2), max_tokens=3, stop=False)
    replica.run()
    report = reported(replica)
    assert Counter(chain.from_iterable(report.steps)) == {1: 3, 2: 3}
    # The prompt was computed with the first sample.
    assert report.started == ((1, 3), (2, 0))
    assert sorted(report.ended) == [1, 2]
    assert report.paused == ()


def test_steps_are_reported_now_and_then_though_no_place_is_free() -> None:
    replica = FakeReplica(steps_ahead=1)
    replica.add([1, 2, 3], request_id="a", seq_ids=(1,), max_tokens=30, stop=False)
    for _ in range(REPORTED_STEPS):
        assert replica.core.take_report() is None
        replica.plan()
        replica.retire()
    assert reported(replica).steps == ((1,),) * REPORTED_STEPS


def test_prompts_in_progress_go_on_in_order() -> None:
    """A prompt that came later ranks before one that has begun."""
    replica = FakeReplica(max_tokens_per_batch=9)
    with patch("nano_inference.stages.batching.schedule.MAX_SCORED_TOKENS", 4):
        replica.add([1] * 20, request_id="a", seq_ids=(1,), rank=5, prompt_logprobs=0)
        replica.plan()
        replica.retire()
        replica.add([2] * 20, request_id="b", seq_ids=(2,), rank=0)
        for _ in range(3):
            replica.plan()
            replica.retire()
    rows = [dict(zip(plan.seq_ids, plan.num_tokens, strict=True)) for plan in replica.log]
    assert rows == [{1: 4}, {1: 4, 2: 5}, {2: 9}, {2: 6, 1: 3}]
    replica.run()
    for seq_id in (1, 2):
        assert replica.outputs[seq_id] == expected([seq_id] * 20, 8)


def test_a_result_out_of_order_is_refused() -> None:
    replica = FakeReplica()
    replica.add([1, 2], request_id="a", seq_ids=(1,), stop=False)
    replica.plan()
    replica.plan()
    late = replica.executor.execute(replica.plans[0])
    replica.core.absorb(late)
    with pytest.raises(ValueError, match="out of order"):
        replica.core.absorb(late)


def test_append_token_refuses_a_sequence_that_is_not_running() -> None:
    replica = FakeReplica()
    replica.add([1], request_id="a", seq_ids=(1,))
    waiting: Sequence = replica.core._waiting[0]
    with pytest.raises(ValueError, match="waiting"):
        waiting.append_token(3)


arrivals = st.lists(
    st.tuples(
        st.integers(1, 24),  # prompt length
        st.integers(0, 3),  # which common prefix
        st.integers(1, 10),  # max_tokens
        st.integers(1, 3),  # samples
        st.integers(0, 2),  # priority
    ),
    min_size=1,
    max_size=12,
)
ACTIONS = ("plan", "retire", "cancel", "flush", "stop", "retract", "make room", "go on")
actions = st.lists(st.sampled_from(ACTIONS), max_size=60)


@pytest.mark.soak
@given(
    arrivals,
    actions,
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    st.sampled_from(CACHE_TYPES),
)
def test_random_traces_conserve_blocks_and_outputs(
    arrivals: list[tuple[int, int, int, int, int]],
    actions: list[str],
    block_size: int,
    steps_ahead: int,
    cache_type: CacheType,
) -> None:
    replica = FakeReplica(
        cache_type=cache_type,
        num_blocks=-(-40 // block_size),
        block_size=block_size,
        max_batch_size=5,
        max_tokens_per_batch=9,
        steps_ahead=steps_ahead,
    )
    wanted: dict[int, list[int]] = {}
    cut_short: set[int] = set()
    members: dict[str, tuple[int, ...]] = {}
    seq_id = 0
    places = 0
    paused: list[int] = []
    queue = list(arrivals)
    for action in [*actions, *["plan"] * len(arrivals)]:
        if queue and action == "plan":
            length, prefix, max_tokens, samples, priority = queue.pop()
            prompt = [prefix * 5 + i % 7 for i in range(length)]
            seq_ids = tuple(range(seq_id, seq_id + samples))
            seq_id += samples
            request_id = f"r{seq_ids[0]}"
            members[request_id] = seq_ids
            replica.add(
                prompt,
                request_id=request_id,
                seq_ids=seq_ids,
                max_tokens=max_tokens,
                priority=priority,
            )
            wanted |= dict.fromkeys(seq_ids, expected(prompt, max_tokens))
        match action:
            case "plan":
                replica.plan()
            case "retire":
                replica.retire()
            case "flush":
                replica.core.cache.flush()
            case "retract":
                replica.retract()
            case "cancel" if members:
                request_id, seq_ids = members.popitem()
                replica.core.cancel(cancel(request_id))
                cut_short.update(seq_ids)
            case "stop" if members:
                victim = next(iter(members.values()))[0]
                replica.core.stop([victim])
                cut_short.add(victim)
            case "make room" if members:
                replica.core.pause_sequences([*next(iter(members.values())), 10**6])
            case "go on" if paused:
                replica.core.resume_sequences(paused)
                places -= len(paused)
                paused = []
        if (report := replica.core.take_report()) is not None:
            places += report.sequences
            paused = [each for each in (*paused, *report.paused) if each not in report.ended]
        replica.check()
    replica.run()
    report = replica.core.take_report() or Credit(0)
    places += report.sequences
    paused = [each for each in (*paused, *report.paused) if each not in report.ended]
    replica.core.resume_sequences(paused)
    places -= len(paused)
    replica.run()
    replica.check()
    assert replica.core.idle
    for each, tokens in wanted.items():
        got = replica.outputs.get(each, [])
        if each in cut_short:
            assert got == tokens[: len(got)]
        else:
            assert got == tokens
    assert places + (replica.core.take_report() or Credit(0)).sequences == seq_id
    assert replica.core.cache.num_free_blocks() == replica.core.cache.num_blocks
