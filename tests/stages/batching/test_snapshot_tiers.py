"""Snapshots of recurrent state below the device, against an executor that detects a foreign one."""

from __future__ import annotations

import random

import pytest

from nano_inference.bus.control import Cancel, TiersChanged
from nano_inference.bus.public import KVSession
from nano_inference.stages.batching import Allocation
from nano_inference.stages.batching.parts.tiers.part import Tiers
from nano_inference.stages.batching.parts.tiers.tiers import KVTiers, TierCounts
from nano_inference.store.loaded_adapter import LoadedAdapter

from ...soaking import in_soak
from .replica import CACHE_TYPES, CacheType, FakeReplica, expected
from .states import RuleSnapshotTiers
from .test_handover import PROMPT, Pair

SIZE = 4


def replica_of(cache_type: CacheType = "radix", **settings: int) -> FakeReplica:
    """A replica whose tiers hold more than its device."""
    defaults: dict[str, int] = {"num_snapshots": 2, "host_slots": 64, "state_slots": 8}
    chosen: dict[str, object] = {"cache_type": cache_type, **defaults, **settings}
    return FakeReplica(block_size=SIZE, **chosen)  # type: ignore[arg-type]


def states_of(replica: FakeReplica) -> KVTiers:
    states = replica.core.part(Tiers).states
    assert states is not None
    return states.units


def below_of(replica: FakeReplica) -> RuleSnapshotTiers:
    assert replica.executor.states is not None
    return replica.executor.states.tiers


def counts(replica: FakeReplica) -> TierCounts:
    return states_of(replica).take_counts()


def prompt(number: int, length: int = 13) -> list[int]:
    return [(7 * number + position) % 47 for position in range(length)]


def run(replica: FakeReplica, seq_id: int, token_ids: list[int]) -> int:
    """Run a sequence alone; return how many of its tokens were cached."""
    replica.add(token_ids, seq_id, max_tokens=3)
    settle(replica)
    assert replica.outputs[seq_id] == expected(token_ids, 3)
    started = [new for plan in replica.log for new in plan.new if new.seq_id == seq_id]
    return started[0].num_cached


def settle(replica: FakeReplica) -> None:
    """Run until nothing is left to do, that of a replica at rest included."""
    while replica.change_tiers() or replica.plan() or replica.plans:
        replica.retire_all()
        replica.core.check()


@pytest.mark.parametrize("num_blocks", [12, 100], ids=["blocks below, too", "blocks on device"])
def test_a_snapshot_that_left_the_device_is_loaded_again(
    cache_type: CacheType, num_blocks: int
) -> None:
    replica = replica_of(cache_type, num_blocks=num_blocks)
    assert [run(replica, seq_id, prompt(seq_id)) for seq_id in range(6)] == [0] * 6
    assert [run(replica, 10 + seq_id, prompt(seq_id)) for seq_id in range(6)] == [12] * 6
    found = counts(replica)
    assert found.loaded >= 4
    assert found.audited
    assert not found.different


def test_blocks_without_a_snapshot_at_their_end_are_left_below(cache_type: CacheType) -> None:
    replica = replica_of(cache_type, num_blocks=12, state_slots=1)
    for seq_id in range(5):
        run(replica, seq_id, prompt(seq_id))
    blocks = replica.core.part(Tiers).blocks
    assert blocks.num_stored(replica.core.cache.names_of(Allocation(prompt(0)), 3)) == 3
    blocks.take_counts()
    assert run(replica, 10, prompt(0)) == 0
    assert blocks.take_counts().loaded == 0


def test_an_earlier_snapshot_is_loaded_if_the_last_one_is_gone(cache_type: CacheType) -> None:
    replica = replica_of(cache_type, num_blocks=12)
    long = prompt(0, 29)
    run(replica, 0, long[:13])
    run(replica, 1, long)
    for seq_id in range(2, 6):
        run(replica, seq_id, prompt(seq_id))
    states = states_of(replica)
    names = replica.core.cache.names_of(Allocation(long), 7)
    assert states.num_ready([names[6]])
    slot = states._slot_of.pop(names[6])
    states._host.remove(names[6])
    states._free_slots.append(slot)
    assert run(replica, 10, long) == 12


def test_snapshots_on_disk_are_found_by_another_start(cache_type: CacheType) -> None:
    first, second = (replica_of(cache_type, disk_blocks=100) for _ in range(2))
    for seq_id in range(4):
        run(first, seq_id, prompt(seq_id))
    second.executor.disk, below_of(second).disk = first.executor.disk, below_of(first).disk
    on_disk = TiersChanged(stored=tuple(below_of(first).disk), whole=True)
    whole = TiersChanged(stored=tuple(first.executor.disk), whole=True, states=on_disk)
    second.core.receive(whole, 0)
    assert [run(second, seq_id, prompt(seq_id)) for seq_id in range(4)] == [12] * 4
    assert counts(second).fetched == 4


def test_a_snapshot_that_does_not_come_from_disk_is_fetched_once(cache_type: CacheType) -> None:
    replica = replica_of(cache_type, disk_blocks=100, state_slots=2, num_blocks=12)
    for seq_id in range(6):
        run(replica, seq_id, prompt(seq_id))
    below_of(replica).disk.clear()
    counts(replica)
    assert run(replica, 10, prompt(0)) == 0
    assert counts(replica).lost == 1


def test_new_weights_and_flushes_end_snapshots_below(cache_type: CacheType) -> None:
    replica = replica_of(cache_type, disk_blocks=100)
    for seq_id in range(4):
        run(replica, seq_id, prompt(seq_id))
    replica.change_weights(1, "keep")
    settle(replica)
    assert run(replica, 10, prompt(0)) == 0
    replica.core.cache.flush()
    settle(replica)
    assert not below_of(replica).disk
    assert run(replica, 11, prompt(1)) == 0


def test_a_demoted_session_has_its_snapshot_below_the_device(cache_type: CacheType) -> None:
    replica = replica_of(cache_type, num_snapshots=4, num_blocks=100)
    replica.add(prompt(0), 1, max_tokens=4, session=KVSession(id="s", after="demote", ttl_s=60))
    settle(replica)
    names = replica.core.cache.names_of(Allocation([*prompt(0), *replica.outputs[1]]), 4)
    assert states_of(replica).num_ready(names[3:]) == 1
    assert run(replica, 2, [*prompt(0), *replica.outputs[1], 3]) == 16


@pytest.mark.parametrize("where", ["host", "disk"])
def test_the_audit_finds_a_snapshot_of_other_tokens(where: str, cache_type: CacheType) -> None:
    """The executor's own check is off: it starts in the wrong state, and computes the KV right."""
    disk = 100 if where == "disk" else 0
    replica = replica_of(cache_type, num_blocks=100, disk_blocks=disk, state_slots=8)
    for seq_id in range(6):
        run(replica, seq_id, prompt(seq_id))
    below = below_of(replica)
    for place in (below.host, below.disk):
        for key, state in place.items():
            assert state is not None
            place[key] = (*state[:-1], state[-1]._replace(token=state[-1].token + 1))  # type: ignore[index]
    assert replica.executor.states is not None
    replica.executor.states.trusts = True
    for seq_id in range(12):
        run(replica, 10 + seq_id, prompt(seq_id % 6))
        if states_of(replica).difference:
            break
    assert counts(replica).different == 1
    assert replica.core.part(Tiers).blocks.difference is not None, "all tiers are off"
    stored = replica.core.part(Tiers).blocks.take_counts().stored
    replica.executor.states.trusts = False
    for seq_id in range(6):
        run(replica, 30 + seq_id, prompt(seq_id))
    assert replica.core.part(Tiers).blocks.take_counts().stored == 0, stored
    assert (counts(replica).stored, counts(replica).loaded) == (0, 0)


@pytest.mark.parametrize("other", ["weights", "adapter"])
def test_names_that_leave_out_a_version_are_noticed(
    other: str, cache_type: CacheType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted defect: the root of all names is the same, and nothing is forgotten."""
    monkeypatch.setattr(KVTiers, "root", lambda tiers, version, scope: 1)
    monkeypatch.setattr(KVTiers, "forget_host", lambda tiers: None)
    replica = replica_of(cache_type, num_blocks=12)
    replica.set_adapters([LoadedAdapter("red", 1, "", 8)])
    replica.change_adapter("red", 2, "keep")
    adapter = "red" if other == "adapter" else ""
    for seq_id in range(5):
        replica.add(prompt(seq_id), seq_id, max_tokens=3, adapter=adapter)
        settle(replica)
    if other == "weights":
        replica.change_weights(1, "keep")
    with pytest.raises(AssertionError, match="a foreign state"):
        run(replica, 10, prompt(0))


# --- between executors -----------------------------------------------------------------------


@pytest.mark.parametrize("length", [20, 23, 24])
def test_a_handed_over_sequence_continues_from_its_last_snapshot(
    length: int, cache_type: CacheType
) -> None:
    pair = Pair(cache_type=cache_type, num_snapshots=4)
    token_ids = list(range(length))
    pair.add(token_ids, [1])
    pair.run()
    assert pair.outputs(1) == expected(token_ids, 8)
    (new,) = [new for plan in pair.taker.log for new in plan.new if new.seq_id == 1]
    assert new.num_cached == length // SIZE * SIZE
    assert counts(pair.giver).offered == counts(pair.taker).received == 1


def test_a_prompt_whose_snapshot_is_cached_is_handed_over_with_it(cache_type: CacheType) -> None:
    pair = Pair(cache_type=cache_type, num_snapshots=1)
    for seq_id in (1, 2, 3):
        pair.add(PROMPT, [seq_id])
        pair.run()
        assert pair.outputs(seq_id) == expected(PROMPT, 8)
        assert counts(pair.giver).offered == 1


def test_without_a_snapshot_the_taker_computes_the_prompt(cache_type: CacheType) -> None:
    pair = Pair(cache_type=cache_type, num_snapshots=0)
    pair.add(PROMPT, [1])
    pair.run()
    assert pair.outputs(1) == expected(PROMPT, 8)
    (new,) = [new for plan in pair.taker.log for new in plan.new if new.seq_id == 1]
    assert new.num_cached == 0


# --- random traces ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [*range(8), *map(in_soak, range(8, 60))])
def test_random_traces_start_sequences_in_the_state_of_their_tokens(seed: int) -> None:
    """Few numbers and slots, lost plans and files, flushes, new weights, preemptions."""
    draw = random.Random(seed)
    replica = replica_of(
        draw.choice(CACHE_TYPES),
        num_snapshots=draw.choice((1, 2, 5)),
        state_slots=draw.choice((1, 2, 8)),
        host_slots=draw.choice((4, 40)),
        disk_blocks=draw.choice((0, 6, 40)),
        num_blocks=draw.choice((14, 30)),
        max_tokens_per_batch=draw.choice((8, 32)),
        snapshot_blocks=draw.choice((0, 2)),
        kv_events=True,
    )
    wanted: dict[int, list[int]] = {}
    version = 0
    for _ in range(300):
        action = draw.choice(("add", "step", "step", "step", "tier", "tier", "odd"))
        if action == "add" and len(wanted) < 30:
            token_ids = prompt(draw.randrange(4), draw.choice((5, 13, 17, 22)))
            token_ids += [draw.randrange(2)] * draw.randrange(3)
            seq_ids = [len(wanted) + index for index in range(draw.randrange(1, 3))]
            number = draw.randrange(1, 9)
            replica.add(token_ids, seq_ids, max_tokens=number)
            wanted |= dict.fromkeys(seq_ids, expected(token_ids, number))
        elif action == "step":
            if not replica.plan() or draw.random() < 0.5:
                replica.retire()
        elif action == "tier":
            replica.change_tiers()
        elif action == "odd":
            match draw.randrange(7):
                case 0:
                    replica.lose_plans()
                case 1:
                    replica.core.cache.flush()
                case 2:
                    version += 1
                    replica.change_weights(version, "retract")
                case 3:
                    below_of(replica).disk.clear()
                case 4 if wanted:
                    name = str(draw.randrange(len(wanted)))
                    replica.core.cancel(Cancel(name, name, "cancelled", "cancelled", ""))
                case 5:
                    replica.core.pause_sequences([draw.randrange(30)])
                case _:
                    replica.core.resume_sequences(list(range(30)))
        replica.check()
    settle(replica)  # some pause only then
    replica.core.resume_sequences([*replica.core.index])
    settle(replica)
    assert not replica.core.index, "a sequence waits for ever"
    for seq_id, tokens in replica.outputs.items():
        assert set(tokens) <= set(wanted[seq_id]), "a token of a foreign state"
    found = counts(replica)
    assert (found.different, bool(found.stored)) == (0, True)
