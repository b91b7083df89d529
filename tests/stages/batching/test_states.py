"""Snapshots of recurrent state, against an executor that detects a foreign state."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.bus.control import Cancel
from nano_inference.bus.parts.states import StatePlan
from nano_inference.bus.public import KVSession
from nano_inference.store.loaded_adapter import LoadedAdapter

from .replica import CACHE_TYPES, CacheType, FakeReplica, expected

SIZE = 4


def replica_of(cache_type: CacheType, num_snapshots: int = 16, **settings: int) -> FakeReplica:
    return FakeReplica(
        cache_type=cache_type, block_size=SIZE, num_snapshots=num_snapshots, **settings
    )


def cached(replica: FakeReplica) -> list[int]:
    """Cached tokens of each sequence that has started, in order."""
    return [new.num_cached for plan in replica.log for new in plan.new]


def saves(replica: FakeReplica) -> list[tuple[int, int]]:
    """The sequence and the number of tokens of each snapshot so far, in order."""
    found = (StatePlan.find(plan.parts) for plan in replica.log)
    return [(each.seq_id, each.num_tokens) for plan in found if plan for each in plan.saves]


def finish(replica: FakeReplica, prompts: dict[int, list[int]], max_tokens: int = 8) -> None:
    """Run all, and check tokens and places."""
    replica.run()
    replica.check()
    for seq_id, prompt in prompts.items():
        assert replica.outputs[seq_id] == expected(prompt, max_tokens)


# --- hits ------------------------------------------------------------------------------------


def test_the_same_prompt_starts_after_its_last_block_that_leaves_a_token(
    cache_type: CacheType,
) -> None:
    for length, right in ((13, 12), (16, 12), (4, 0), (3, 0)):
        replica, prompt = replica_of(cache_type), list(range(length))
        for seq_id in (1, 2):
            replica.add(prompt, seq_id)
            finish(replica, {seq_id: prompt})
        assert cached(replica) == [0, right]


def test_the_second_to_share_a_beginning_pays_for_it_and_the_third_starts_there(
    cache_type: CacheType,
) -> None:
    replica = replica_of(cache_type)
    prompts = {seq_id: [*range(10), 20 + seq_id, *range(9)] for seq_id in (1, 2, 3)}
    for seq_id, prompt in prompts.items():
        replica.add(prompt, seq_id)
        replica.run()
    finish(replica, prompts)
    assert cached(replica) == [0, 0, 8]
    counts = replica.core.take_counts()["states"]
    assert (counts["hits"], counts["recomputed_tokens"]) == (1, 8)
    assert replica.core.load()["state_snapshots"] == replica.executor.states.num_saved - sum(
        # One of the generated tokens is given up for the next.
        number > 1
        for number in (2, 2, 2)
    )


def test_the_next_turn_starts_after_the_last_block_that_was_generated(
    cache_type: CacheType,
) -> None:
    replica, prompt = replica_of(cache_type), list(range(10))
    replica.add(prompt, 1, max_tokens=12)
    replica.run()
    turn = [*prompt, *replica.outputs[1], 1, 2, 3]
    replica.add(turn, 2)
    finish(replica, {2: turn})
    assert cached(replica) == [0, 20], "all but the last token was computed"


def test_a_long_prompt_is_saved_at_regular_places(cache_type: CacheType) -> None:
    replica = replica_of(cache_type, snapshot_blocks=3, max_tokens_per_batch=64)
    prompt = list(range(42))
    replica.add(prompt, 1, max_tokens=1)
    replica.run()
    # At most a quarter of all snapshots are such, the last ones; and the prompt's end.
    assert saves(replica) == [(1, 12), (1, 24), (1, 36), (1, 40)]
    replica.add([*prompt[:27], 49], 2)
    replica.run()
    assert cached(replica) == [0, 24]


def test_without_snapshots_nothing_is_found_and_all_is_right(cache_type: CacheType) -> None:
    replica = replica_of(cache_type, num_snapshots=0)
    prompts = {seq_id: [*range(10), seq_id] for seq_id in range(4)}
    for seq_id, prompt in prompts.items():
        replica.add(prompt, seq_id)
    replica.add(prompts[0], 4)
    finish(replica, prompts | {4: prompts[0]})
    assert set(cached(replica)) <= {0, 11}


# --- siblings --------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 3, 4, 5, 32, 33, 36])
@pytest.mark.parametrize("chunk", [8, 64])
def test_samples_compute_their_prompt_once(length: int, chunk: int, cache_type: CacheType) -> None:
    replica = replica_of(cache_type, max_tokens_per_batch=chunk)
    prompt = list(range(length))
    replica.add(prompt, tuple(range(8)), max_tokens=3)
    finish(replica, dict.fromkeys(range(8), prompt), 3)
    assert replica.executor.num_computed == length + 8 * 2


@pytest.mark.parametrize("steps", range(6))
def test_one_that_shares_a_beginning_waits_while_it_is_computed(
    steps: int, cache_type: CacheType
) -> None:
    """A snapshot is made where the prompts part, as long as that is not planned yet."""
    replica = replica_of(cache_type, max_tokens_per_batch=8)
    prompts = {1: [*range(40)], 2: [*range(23), 48, 49]}
    replica.add(prompts[1], 1)
    for _ in range(steps):
        replica.plan()
        replica.retire()
    replica.add(prompts[2], 2)
    finish(replica, prompts)
    assert cached(replica)[1] == (20 if steps < 3 else 0)


def test_no_sequence_waits_for_a_snapshot_that_will_not_come(cache_type: CacheType) -> None:
    for ends in ("cancel", "pause", "flush", "lose"):
        replica = replica_of(cache_type, max_tokens_per_batch=8)
        replica.add([*range(40)], 1)
        replica.add([*range(30), 48, 49], 2)
        replica.plan()
        assert replica.core.index[2].status.name == "WAITING"
        match ends:
            case "cancel":
                replica.core.cancel(Cancel("1", "1", "cancelled", "cancelled", ""))
            case "pause":
                replica.core.pause_sequences([1])
            case "flush":
                replica.core.cache.flush()
            case _:
                replica.lose_plans()
        replica.run()
        replica.check()
        assert replica.outputs[2] == expected([*range(30), 48, 49], 8)


def test_where_no_number_is_left_siblings_go_on_without(cache_type: CacheType) -> None:
    replica = replica_of(cache_type, num_snapshots=1, max_tokens_per_batch=16)
    prompts = {seq_id: [*range(16), 20 + seq_id, *range(seq_id)] for seq_id in range(6)}
    for seq_id, prompt in prompts.items():
        replica.add(prompt, seq_id)
    finish(replica, prompts)


# --- what ends snapshots ---------------------------------------------------------------------


def test_a_snapshot_is_found_once_its_step_is_back(cache_type: CacheType) -> None:
    replica, prompt = replica_of(cache_type), list(range(13))
    replica.add(prompt, 1, max_tokens=1)
    replica.plan()
    assert len(replica.states.snapshots) == 0
    replica.core.check()
    replica.retire()
    assert len(replica.states.snapshots) == 1


def test_a_sequence_that_has_ended_leaves_no_snapshot_of_a_dropped_row(
    cache_type: CacheType,
) -> None:
    replica = replica_of(cache_type)
    # It samples STOP at the end of a block, and the row of the next one is dropped.
    prompt = next(
        p
        for p in ([a, b, c] for a in range(50) for b in range(50) for c in range(9))
        if (tokens := expected(p, 9, stop=True))[-1] == 7 and len(tokens) == 5
    )
    replica.add(prompt, 1, max_tokens=30, stop=True)
    replica.run()
    replica.check()
    assert saves(replica)[-1] == (1, 8)
    assert len(replica.states.snapshots) == 1, "the state after 4 tokens"


def test_flush_weights_memory_and_adapters_end_snapshots(cache_type: CacheType) -> None:
    prompt = list(range(13))
    for ends in ("flush", "weights", "memory", "adapter"):
        replica = replica_of(cache_type)
        replica.set_adapters([LoadedAdapter("red", 1, "", 8)])
        adapter = "red" if ends == "adapter" else ""
        replica.add(prompt, 1, adapter=adapter, max_tokens=40)
        replica.steps(12)
        assert len(replica.states.snapshots) > 1
        match ends:
            case "flush":
                replica.core.cache.flush()
            case "weights":
                replica.change_weights(1, "keep")
            case "memory":
                replica.change_memory(("kv_cache",), ("kv_cache",))
                replica.run()
                assert len(replica.states.snapshots) == 0
                replica.change_memory((), ())
            case _:
                replica.change_adapter("red", 2, "keep")
        replica.run()
        replica.check()
        assert len(replica.states.snapshots) == 0 or ends == "memory", ends
        replica.add(prompt, 2, adapter=adapter)
        replica.add(prompt, 3)
        replica.run()
        replica.check()
        assert cached(replica)[-2] == 0 or ends == "memory", ends


@pytest.mark.parametrize("change", ["weights", "adapter"])
def test_states_that_older_weights_began_are_not_found(change: str, cache_type: CacheType) -> None:
    replica, prompt = replica_of(cache_type, max_tokens_per_batch=8), list(range(21))
    replica.set_adapters([LoadedAdapter("red", 1, "", 8)])
    adapter = "red" if change == "adapter" else ""
    replica.add(prompt, 1, adapter=adapter)
    replica.plan()
    replica.retire()
    if change == "weights":
        replica.change_weights(1, "keep")
    else:
        replica.change_adapter("red", 2, "keep")
    turn = [*prompt, *expected(prompt, 8), 1]
    for seq_id, again in ((2, prompt), (3, prompt), (4, turn)):
        replica.run()
        replica.add(again, seq_id, adapter=adapter)
    finish(replica, {**dict.fromkeys((1, 2, 3), prompt), 4: turn})
    assert cached(replica) == [0, 0, 20, 28]


def test_plans_that_are_lost_give_back_their_numbers(cache_type: CacheType) -> None:
    replica, prompt = replica_of(cache_type), list(range(13))
    replica.add(prompt, 1, max_tokens=20)
    replica.steps(6)
    replica.plan()
    replica.plan()
    replica.lose_plans()
    replica.check()
    finish(replica, {1: prompt}, 20)
    # Its last snapshot is the newest one whose step was back.
    assert cached(replica) == [0, 16]


def test_a_snapshot_goes_with_its_block(cache_type: CacheType) -> None:
    replica = replica_of(cache_type, num_blocks=6)
    replica.add(list(range(13)), 1, max_tokens=1)
    replica.run()
    replica.add(list(range(20, 43)), 2, max_tokens=1)
    replica.run()
    assert len(replica.states.snapshots) == 1
    replica.check()


# --- the choice ------------------------------------------------------------------------------


def test_a_sequence_resumes_from_its_newest_snapshot(cache_type: CacheType) -> None:
    replica, prompt = replica_of(cache_type), list(range(9))
    replica.add(prompt, 1, max_tokens=30)
    replica.steps(10)
    replica.core.pause_sequences([1])
    replica.run()
    num_tokens = len(replica.core.index[1].token_ids)
    replica.core.resume_sequences([1])
    finish(replica, {1: prompt}, 30)
    assert cached(replica) == [0, (num_tokens - 1) // SIZE * SIZE]


def test_running_sequences_leave_half_of_the_snapshots_to_prompts(cache_type: CacheType) -> None:
    replica = replica_of(cache_type, num_snapshots=4, num_blocks=256)
    kept = [*range(30, 43)]
    replica.add(kept, 0, max_tokens=1)
    replica.run()
    prompts = {seq_id: [seq_id] for seq_id in range(1, 9)}
    for seq_id, prompt in prompts.items():
        replica.add(prompt, seq_id, max_tokens=60)
    finish(replica, prompts, 60)
    replica.add(kept, 9)
    replica.run()
    assert cached(replica)[-1] == 12


def test_a_session_holds_the_snapshot_at_its_end(cache_type: CacheType) -> None:
    replica = replica_of(cache_type, num_snapshots=4, num_blocks=256)
    prompt, session = list(range(10)), KVSession(id="s", after="pin", ttl_s=60)
    replica.add(prompt, 1, max_tokens=7, session=session)
    replica.run()
    for seq_id in range(2, 12):
        replica.add([seq_id] * 9, seq_id, max_tokens=9)
        replica.run()
    replica.check()
    turn = [*prompt, *replica.outputs[1], 1]
    replica.add(turn, 20, session=session)
    finish(replica, {20: turn})
    assert cached(replica)[-1] == 16


# --- random traces ---------------------------------------------------------------------------

prompts = st.builds(
    lambda head, tail: [*range(head), *tail],
    st.sampled_from([0, 3, 8, 17]),
    st.lists(st.integers(0, 3), min_size=1, max_size=14),
)
operations = st.one_of(
    st.tuples(st.just("add"), prompts, st.integers(1, 3), st.integers(1, 20)),
    st.tuples(st.just("plan")),
    st.tuples(st.just("retire")),
    st.tuples(st.just("steps"), st.integers(1, 8)),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("pause"), st.integers(0, 20)),
    st.tuples(st.just("resume"), st.integers(0, 20)),
    st.tuples(st.just("flush")),
    st.tuples(st.just("weights"), st.sampled_from(["keep", "retract", "abort"])),
    st.tuples(st.just("adapter"), st.sampled_from(["keep", "retract", "abort"])),
    st.tuples(st.just("lose")),
)


@pytest.mark.soak
@given(
    cache_type=st.sampled_from(CACHE_TYPES),
    num_snapshots=st.sampled_from([0, 1, 2, 5, 40]),
    num_blocks=st.sampled_from([14, 24, 60]),
    block_size=st.sampled_from([1, 2, 4]),
    snapshot_blocks=st.sampled_from([0, 2]),
    trace=st.lists(operations, max_size=30),
)
def test_random_traces_start_in_the_state_of_their_tokens(
    cache_type: CacheType,
    num_snapshots: int,
    num_blocks: int,
    block_size: int,
    snapshot_blocks: int,
    trace: list[tuple],
) -> None:
    replica = FakeReplica(
        cache_type=cache_type,
        block_size=block_size,
        num_blocks=num_blocks * 4 // block_size,
        max_batch_size=4,
        max_tokens_per_batch=8,
        num_snapshots=num_snapshots,
        snapshot_blocks=snapshot_blocks,
    )
    replica.set_adapters([LoadedAdapter("red", 1, "", 8)])
    wanted: dict[int, list[int]] = {}
    version, next_id = 1, 1
    for name, *arguments in trace:
        match name:
            case "add":
                prompt, number, max_tokens = arguments
                ids = tuple(range(next_id, next_id + number))
                next_id += number
                adapter = "red" if number == 2 else ""
                replica.add(prompt, ids, max_tokens=max_tokens, adapter=adapter)
                wanted |= {seq_id: expected(prompt, max_tokens) for seq_id in ids}
            case "plan":
                replica.plan()
            case "retire":
                replica.retire()
            case "steps":
                replica.steps(arguments[0])
            case "cancel":
                request = str(arguments[0])
                replica.core.cancel(Cancel(request, request, "cancelled", "cancelled", ""))
            case "pause":
                replica.core.pause_sequences(arguments)
            case "resume":
                replica.core.resume_sequences(arguments)
            case "flush":
                replica.core.cache.flush()
            case "weights":
                version += 1
                replica.change_weights(version, arguments[0])
            case "adapter":
                version += 1
                replica.change_adapter("red", version, arguments[0])
            case _:
                replica.lose_plans()
        replica.core.check()
    replica.run()
    replica.core.resume_sequences([*replica.core.index])
    replica.run()
    replica.check()
    for seq_id, tokens in replica.outputs.items():
        assert tokens == wanted[seq_id][: len(tokens)]
    assert not replica.core.index, "a sequence waits for ever"
