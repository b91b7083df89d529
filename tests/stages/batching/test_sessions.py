"""Sessions in batching: the KV of conversations is pinned, gives way, moves and is forgotten."""

from __future__ import annotations

import math
from typing import Any

import pytest

from nano_inference.bus.parts.sessions import SessionGrant
from nano_inference.bus.public import KVSession, KVSessionResult, SessionAction
from nano_inference.bus.steps import NewSequence
from nano_inference.stages.batching.parts import sessions
from nano_inference.stages.batching.parts.sessions import SessionCall, SessionKey

from .replica import CacheType, FakeReplica, expected

SECOND = 1_000_000_000
SIZE = 4


class Agent:
    """A client of one session on a replica, whose prompts continue the conversation."""

    def __init__(
        self, replica: FakeReplica, id: str = "chat", *, tenant: str = "", start: int = 1
    ) -> None:
        self.replica, self.id, self.tenant = replica, id, tenant
        self.tokens = [(start * 7 + i) % 50 for i in range(15)]
        self.grants: list[KVSessionResult] = []

    def send(self, seq_id: int, *, max_tokens: int = 6, **session: Any) -> None:
        wish = KVSession(id=self.id, **session)
        options = {"max_tokens": max_tokens, "session": wish, "tenant": self.tenant}
        self.replica.add(self.tokens, seq_id, **options)

    def turn(self, seq_id: int, *, max_tokens: int = 6, **session: Any) -> KVSessionResult:
        """Run a turn; return what its completion says."""
        wanted = expected(self.tokens, max_tokens)
        self.send(seq_id, max_tokens=max_tokens, **session)
        self.replica.run()
        self.replica.check()
        assert self.replica.outputs[seq_id] == wanted
        self.tokens += wanted
        grant = SessionGrant.find(started(self.replica, seq_id).onward)
        assert grant is not None
        return grant.result(len(self.tokens))

    def call(self, action: SessionAction, ttl_s: float | None = None) -> KVSessionResult:
        replica = self.replica
        call = SessionCall(action, ttl_s)
        result = replica.sessions.call(SessionKey(self.tenant, self.id), call, replica.now_ns)
        replica.check()
        return result


def started(replica: FakeReplica, seq_id: int) -> NewSequence:
    """A sequence as it has started first."""
    return next(new for plan in replica.log for new in plan.new if new.seq_id == seq_id)


def cached(replica: FakeReplica, seq_id: int) -> int:
    return started(replica, seq_id).num_cached


def crowd_out(replica: FakeReplica, seq_id: int) -> None:
    """Run a request that takes every block that isn't pinned."""
    free = replica.core.cache.num_free_blocks()
    replica.add([(seq_id + i * i) % 50 for i in range(free * SIZE - 8)], seq_id, max_tokens=8)
    replica.run()
    replica.check()


@pytest.mark.parametrize(("after", "found"), [("pin", 20), ("release", 0), ("demote", 0)])
def test_a_pinned_conversation_survives_other_requests(
    cache_type: CacheType, after: str, found: int
) -> None:
    replica = FakeReplica(num_blocks=16, cache_type=cache_type)
    agent = Agent(replica)
    result = agent.turn(1, after=after)
    assert result.outcome == "accepted"
    assert result.num_tokens == (0 if after == "release" else 20)
    crowd_out(replica, 2)
    agent.turn(3)
    assert cached(replica, 3) == found


def test_the_pin_moves_on_with_the_conversation(cache_type: CacheType) -> None:
    replica = FakeReplica(num_blocks=32, cache_type=cache_type)
    agent = Agent(replica)
    for turn in range(1, 6):
        agent.turn(turn)
        assert len(replica.sessions.pins) == (len(agent.tokens) - 1) // SIZE
    assert agent.call("release").num_tokens == 44
    assert len(replica.sessions.pins) == 0


def test_beyond_the_share_a_leading_part_is_pinned(cache_type: CacheType) -> None:
    replica = FakeReplica(num_blocks=16, session_share=0.5, cache_type=cache_type)
    first, second, third = (Agent(replica, str(i), start=i) for i in range(3))
    assert first.turn(1).num_tokens == 20
    clipped = second.turn(2)
    assert (clipped.outcome, clipped.num_tokens) == ("clipped", 12)
    assert "kv_session_share" in clipped.reason
    assert third.turn(3).outcome == "rejected"
    assert len(replica.sessions.pins) == 8
    assert third.call("pin").outcome == "rejected"
    assert first.call("release").outcome == "accepted"
    assert third.call("pin").outcome == "accepted"


def test_a_shared_prompt_uses_the_share_once(cache_type: CacheType) -> None:
    replica = FakeReplica(num_blocks=16, session_share=0.5, cache_type=cache_type)
    for number in range(1, 5):
        assert Agent(replica, str(number)).turn(number).outcome == "accepted"
    assert len(replica.sessions.pins) == 5


def test_the_share_of_a_running_turn_is_reserved() -> None:
    replica = FakeReplica(num_blocks=32, session_share=0.25)
    first, second = Agent(replica, "1", start=1), Agent(replica, "2", start=2)
    first.send(1)
    second.send(2)
    replica.run()
    grants = [SessionGrant.find(started(replica, seq_id).onward) for seq_id in (1, 2)]
    assert [grant and grant.num_blocks for grant in grants] == [5, 3]
    assert len(replica.sessions.pins) == 8


def test_pins_give_way_to_a_waiting_request_the_first_to_expire_first(
    cache_type: CacheType,
) -> None:
    replica = FakeReplica(num_blocks=16, session_share=1.0, cache_type=cache_type)
    late, soon = Agent(replica, "late", start=1), Agent(replica, "soon", start=2)
    late.turn(1, ttl_s=100)
    soon.turn(2, ttl_s=50)
    assert len(replica.sessions.pins) == 10
    replica.add([5] * 32, 3, max_tokens=4)
    replica.run()
    assert replica.outputs[3] == expected([5] * 32, 4)
    assert len(replica.sessions.pins) == 5
    assert replica.sessions.take_counts()["sessions"]["gave_way"] == 1
    late.turn(4, ttl_s=100)
    assert cached(replica, 4) >= 20
    replica.add([6] * 60, 5, max_tokens=4)  # all blocks
    replica.run()
    assert replica.outputs[5] == expected([6] * 60, 4)
    assert len(replica.sessions.pins) == 0


def test_pins_give_way_before_a_running_sequence_is_preempted(cache_type: CacheType) -> None:
    replica = FakeReplica(num_blocks=12, session_share=1.0, cache_type=cache_type)
    Agent(replica).turn(1)
    for seq_id in (2, 3):
        replica.add([seq_id] * 4, seq_id, max_tokens=20)
    replica.run()
    assert replica.core.take_counters().preemptions == 0
    assert len(replica.sessions.pins) == 0


def test_a_turn_that_waits_keeps_the_pin_that_it_starts_with(cache_type: CacheType) -> None:
    """Dropping it would free no block for the turn itself; others' pins go first."""
    replica = FakeReplica(num_blocks=20, session_share=1.0, cache_type=cache_type)
    agent, other = Agent(replica), Agent(replica, "other", start=2)
    agent.turn(1, ttl_s=5)
    other.turn(2, ttl_s=50)
    replica.add([5] * 33, 3, max_tokens=6)
    replica.steps(2)
    assert len(replica.sessions.pins) == 10
    agent.send(4, max_tokens=2)
    replica.steps(2)
    assert len(replica.sessions.pins) == 5
    assert cached(replica, 4) == 20
    replica.run()
    assert replica.sessions.take_counts()["sessions"]["gave_way"] == 1
    assert other.call("pin").outcome != "accepted"


def test_a_turn_that_waits_for_running_sequences_keeps_its_pin(cache_type: CacheType) -> None:
    replica = FakeReplica(num_blocks=16, session_share=1.0, cache_type=cache_type)
    agent = Agent(replica)
    agent.turn(1)
    replica.add([5] * 36, 2, max_tokens=4)  # in the end 10 blocks
    replica.steps(3)
    agent.send(3, max_tokens=2)
    replica.steps(1)
    assert not replica.core.index[3].started
    assert len(replica.sessions.pins) == 5
    replica.run()
    assert cached(replica, 3) == 20
    assert not replica.sessions.take_counts()["sessions"]["gave_way"]


def test_a_scored_prompt_takes_the_blocks_of_its_own_session(cache_type: CacheType) -> None:
    """It computes all of its prompt, and uses no cached block."""
    replica = FakeReplica(num_blocks=8, session_share=1.0, cache_type=cache_type)
    agent = Agent(replica)
    agent.turn(1)
    wish = KVSession(id="chat")
    replica.add(agent.tokens, 2, max_tokens=2, prompt_logprobs=0, session=wish)
    replica.run()
    assert replica.outputs[2] == expected(agent.tokens, 2)


def test_turns_that_wait_for_the_pins_of_each_other_run(cache_type: CacheType) -> None:
    replica = FakeReplica(num_blocks=12, session_share=1.0, cache_type=cache_type)
    one, other = Agent(replica), Agent(replica, "other", start=2)
    one.turn(1)
    other.turn(2)
    expected_tokens = [expected(each.tokens, 12) for each in (one, other)]
    one.send(3, max_tokens=12)
    other.send(4, max_tokens=12)
    replica.run()
    assert [replica.outputs[seq_id] for seq_id in (3, 4)] == expected_tokens


def test_pins_stay_while_there_is_room(cache_type: CacheType) -> None:
    replica = FakeReplica(num_blocks=16, session_share=1.0, cache_type=cache_type)
    Agent(replica).turn(1)
    for seq_id in range(2, 8):  # more than fit in the batch's tokens, but not in the blocks
        replica.add([seq_id] * 7, seq_id, max_tokens=1)
        replica.run()
    assert len(replica.sessions.pins) == 5


def test_free_blocks_that_are_reported_include_pinned_ones() -> None:
    replica = FakeReplica(num_blocks=16)
    Agent(replica).turn(1)
    report = replica.core.take_report()
    assert report is not None
    assert report.kv_free == 16 * SIZE


def test_a_session_ends_with_its_time_to_live(cache_type: CacheType) -> None:
    replica = FakeReplica(num_blocks=32, cache_type=cache_type)
    agent = Agent(replica)
    agent.turn(1, ttl_s=10)
    assert replica.core.next_deadline_ns() == 10 * SECOND
    replica.now_ns = 9 * SECOND
    assert agent.call("pin", ttl_s=5).outcome == "accepted"
    replica.plan(13 * SECOND)
    assert len(replica.sessions.pins) == 5
    assert replica.core.next_deadline_ns() == 14 * SECOND
    replica.plan(14 * SECOND)
    assert len(replica.sessions.pins) == 0
    assert replica.core.next_deadline_ns() is None
    assert agent.call("pin").outcome == "missing"


@pytest.mark.parametrize("ttl_s", [0, -1, math.nan, math.inf, 3601])
def test_a_bad_time_to_live_is_rejected(ttl_s: float) -> None:
    replica = FakeReplica()
    agent = Agent(replica)
    result = agent.turn(1, ttl_s=ttl_s)
    assert result.outcome == "rejected"
    assert "engine.kv_session_ttl_s" in result.reason
    agent.turn(2)
    assert agent.call("pin", ttl_s=ttl_s).outcome == "rejected"


def test_without_a_share_nothing_is_pinned() -> None:
    replica = FakeReplica(session_share=0)
    agent = Agent(replica)
    assert agent.turn(1).outcome == "rejected"
    assert agent.turn(2, after="demote").outcome == "accepted"
    assert agent.call("pin").outcome == "rejected"
    assert agent.call("prefetch").outcome == "rejected"
    assert agent.call("release").outcome == "accepted"


def test_no_tenant_reaches_the_session_of_another() -> None:
    replica = FakeReplica()
    own, foreign = Agent(replica, tenant="a"), Agent(replica, tenant="b")
    own.turn(1)
    for action in ("pin", "release", "demote", "prefetch"):
        assert foreign.call(action).outcome == "missing"
    assert len(replica.sessions.pins) == 5


@pytest.mark.parametrize("forget", ["weights", "flush", "memory"])
def test_pins_of_older_kv_are_dropped(cache_type: CacheType, forget: str) -> None:
    replica = FakeReplica(num_blocks=16, cache_type=cache_type)
    agent = Agent(replica)
    agent.turn(1)
    match forget:
        case "weights":
            replica.change_weights(1, "keep")
        case "flush":
            replica.core.cache.flush()
        case "memory":
            replica.change_memory((), ("kv_cache",))
    replica.run()
    replica.plan()
    assert len(replica.sessions.pins) == 0
    assert replica.core.cache.num_free_blocks() == 16
    assert agent.call("prefetch").outcome == "missing"
    agent.turn(2)
    assert cached(replica, 2) == 0


def test_a_turn_across_new_weights_leaves_nothing_pinned(cache_type: CacheType) -> None:
    replica = FakeReplica(cache_type=cache_type)
    agent = Agent(replica)
    agent.send(1)
    replica.steps(3)
    replica.change_weights(1, "keep")
    replica.run()
    assert len(replica.sessions.pins) == 0


def test_new_weights_of_an_adapter_drop_its_pins_only() -> None:
    replica = FakeReplica()
    plain = Agent(replica, "plain")
    plain.turn(1)
    replica.change_adapter("sql", 1, "keep")
    wish = KVSession(id="sql")
    replica.add([3] * 16, 2, max_tokens=1, adapter="sql", session=wish)
    replica.run()
    assert len(replica.sessions.pins) == 9
    replica.change_adapter("sql", 2, "keep")
    assert len(replica.sessions.pins) == 5
    call = SessionCall("prefetch")
    assert replica.sessions.call(SessionKey("", "sql"), call, 0).outcome == "missing"


def test_calls_during_a_turn_are_carried_out_at_its_end(cache_type: CacheType) -> None:
    replica = FakeReplica(cache_type=cache_type)
    agent = Agent(replica)
    agent.send(1, after="release", ttl_s=5)
    replica.steps(2)
    assert agent.call("prefetch").outcome == "deferred"
    assert agent.call("pin", ttl_s=20).outcome == "deferred"
    replica.run()
    assert len(replica.sessions.pins) == 5
    replica.plan(0)
    assert replica.core.next_deadline_ns() == 20 * SECOND


def test_a_cancelled_turn_keeps_its_computed_tokens(cache_type: CacheType) -> None:
    replica = FakeReplica(cache_type=cache_type)
    agent = Agent(replica)
    agent.send(1)
    replica.steps(3)
    replica.core.stop([1])
    replica.run()
    assert len(replica.sessions.pins) == 4
    agent.send(2)
    replica.core.stop([2])  # before it has started
    assert len(replica.sessions.pins) == 4


def test_demoted_blocks_are_evicted_first(cache_type: CacheType) -> None:
    """Without tiers; those of another conversation, although older, stay."""
    replica = FakeReplica(num_blocks=16, cache_type=cache_type)
    old, young = Agent(replica, "old", start=1), Agent(replica, "young", start=2)
    old.turn(1, after="release")
    young.turn(2)
    assert young.call("demote").tier == "device"
    replica.add([9] * 36, 3, max_tokens=1)
    replica.run()
    replica.check()
    assert young.call("pin").outcome in ("clipped", "missing")
    assert old.call("pin").outcome == "accepted"


def test_a_demoted_conversation_is_loaded_from_host_memory(cache_type: CacheType) -> None:
    replica = FakeReplica(num_blocks=16, host_slots=64, cache_type=cache_type)
    agent = Agent(replica)
    result = agent.turn(1, after="demote")
    assert (result.outcome, result.num_tokens, result.tier) == ("accepted", 20, "host")
    crowd_out(replica, 2)
    assert agent.call("pin").tier == "host"
    result = agent.call("prefetch")
    assert (result.outcome, result.num_tokens, result.tier) == ("accepted", 20, "device")
    assert agent.call("prefetch").outcome == "deferred", "the plan with the loads isn't back"
    replica.run()
    assert agent.call("prefetch").outcome == "accepted"
    assert len(replica.sessions.pins) == 5
    replica.tiers.forget_host()
    agent.turn(3)
    assert cached(replica, 3) == 20


def test_a_conversation_is_fetched_from_disk_and_then_pinned(cache_type: CacheType) -> None:
    replica = FakeReplica(num_blocks=16, host_slots=16, disk_blocks=64, cache_type=cache_type)
    agent = Agent(replica)
    agent.turn(1, after="demote")
    crowd_out(replica, 2)
    replica.tiers.forget_host()
    assert agent.call("prefetch").outcome == "deferred"
    replica.run()
    result = agent.call("prefetch")
    assert (result.outcome, result.num_tokens) == ("accepted", 20)
    agent.turn(3)
    assert cached(replica, 3) == 20


def test_a_lost_plan_loads_nothing(cache_type: CacheType) -> None:
    replica = FakeReplica(num_blocks=16, host_slots=64, cache_type=cache_type)
    agent = Agent(replica)
    agent.turn(1, after="demote")
    crowd_out(replica, 2)
    agent.call("prefetch")
    replica.plan()
    replica.lose_plans()
    replica.check()
    assert len(replica.sessions.pins) == 0
    agent.turn(3)  # checks every block that it reads


def test_sessions_outlive_an_epoch_of_the_same_executor(cache_type: CacheType) -> None:
    replica = FakeReplica(num_blocks=16, cache_type=cache_type)
    agent, other = Agent(replica), Agent(replica, "other", start=3)
    agent.turn(1)
    other.send(2)
    replica.steps(2)
    replica.plans.clear()
    replica.executor.forget()
    replica.core.clear()
    replica.check()
    assert len(replica.sessions.pins) == 5
    other.turn(3)  # sent again
    assert len(replica.sessions.pins) == 8
    agent.turn(4)
    assert cached(replica, 4) == 20


def test_without_steps_no_block_is_moved() -> None:
    replica = FakeReplica(num_blocks=16, host_slots=64)
    agent = Agent(replica)
    agent.turn(1)
    replica.core.paused = True
    assert agent.call("demote").outcome == "rejected"
    assert agent.call("prefetch").outcome == "rejected"
    assert agent.call("release").outcome == "accepted"
    assert not replica.tiers.has_moves


def test_the_number_of_sessions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MOST_SESSIONS", 3)
    replica = FakeReplica(num_blocks=64)
    agents = [Agent(replica, str(number), start=number) for number in range(5)]
    for number, agent in enumerate(agents):
        agent.turn(number, ttl_s=60 - number)
    assert len(replica.sessions.known) == 3
    known = [agent.call("pin").outcome != "missing" for agent in agents]
    assert known == [True, True, False, False, True]


def test_results_are_counted() -> None:
    replica = FakeReplica(num_blocks=16, session_share=0.25)
    agent = Agent(replica)
    agent.turn(1)
    agent.call("release")
    Agent(replica, "unknown").call("pin")
    counts = replica.sessions.take_counts()["sessions"]
    assert counts == {"clipped": 1, "accepted": 1, "missing": 1}
    assert not replica.sessions.take_counts()["sessions"]


def test_a_session_that_ends_while_blocks_are_fetched_holds_none(cache_type: CacheType) -> None:
    replica = FakeReplica(num_blocks=16, host_slots=16, disk_blocks=64, cache_type=cache_type)
    agent = Agent(replica)
    agent.turn(1, after="demote", ttl_s=10)
    crowd_out(replica, 2)
    replica.tiers.forget_host()
    assert agent.call("prefetch").outcome == "deferred"
    replica.plan(11 * SECOND)
    replica.run()
    replica.check()
    assert not replica.sessions.pins
