"""Several replicas behind one queue: the choice of a replica, and replicas that join."""

from __future__ import annotations

import pytest

from nano_inference.bus.messages import (
    DEFAULT_SCOPE,
    AdmittedRequest,
    CacheScope,
    Credit,
    ResumeSequences,
)
from nano_inference.config import FairnessConfig
from nano_inference.stages.fairness import FairnessCore, Replica, choose_replica
from nano_inference.stages.fairness.replicas import CHUNK_TOKENS, PrefixIndex, prefix_chain

from .requests import request

PROMPT = tuple(range(5 * CHUNK_TOKENS))


def replica(name: str, credits: int = 1, load: int = 0, prefix: int = 0) -> Replica:
    """A replica with credits, running sequences, and a cached prefix of the prompt."""
    made = Replica(name)
    made.credits = credits
    made.running = dict.fromkeys(range(load))  # type: ignore[arg-type]
    made.prefixes.add(prefix_chain(PROMPT[:prefix], DEFAULT_SCOPE))
    return made


@pytest.mark.parametrize(
    ("replicas", "wanted"),
    [
        ([], None),
        ([replica("a", credits=0)], None),
        ([replica("a", credits=0, prefix=320), replica("b")], "b"),
        ([replica("a", prefix=128), replica("b", prefix=256)], "b"),
        ([replica("a", prefix=256, load=9), replica("b", load=1)], "a"),
        ([replica("a", load=3), replica("b", load=1)], "b"),
        ([replica("a", credits=1), replica("b", credits=5)], "b"),
    ],
)
def test_the_longest_prefix_then_the_least_load(
    replicas: list[Replica], wanted: str | None
) -> None:
    chosen = choose_replica(replicas, prefix_chain(PROMPT, DEFAULT_SCOPE))
    assert (chosen.name if chosen else None) == wanted


def test_a_replica_gets_requests_from_its_first_credit_on() -> None:
    core = FairnessCore(FairnessConfig())
    core.absorb(Credit(1), 0, "west")
    for number in range(3):
        core.push(request(str(number)), number)
    assert sent(core) == [("west", "0")]
    core.absorb(Credit(2), 1, "east")
    assert sent(core) == [("east", "1"), ("east", "2")]


def test_requests_that_share_a_prompt_go_where_it_is() -> None:
    core = FairnessCore(FairnessConfig(), replicas=2)
    core.absorb(Credit(8), 0, "west")
    core.absorb(Credit(8), 0, "east")
    for number in range(8):
        prompt = tuple(range(number // 4 * 1000, number // 4 * 1000 + 5 * CHUNK_TOKENS))
        core.push(request(str(number), prompt=(*prompt, number)), number)
    went = dict(sent(core, swap=True))
    assert {went[str(number)] for number in (0, 1, 2, 3)} == {went["0"]}
    assert {went[str(number)] for number in (4, 5, 6, 7)} == {went["4"]}
    assert went["0"] != went["4"], "the second prompt went to the replica with less to do"


@pytest.mark.parametrize("keeps_cache", [True, False])
def test_after_a_failure_requests_go_where_their_prompt_is_cached(keeps_cache: bool) -> None:
    core = FairnessCore(FairnessConfig(), replicas=2)
    core.absorb(Credit(8), 0, "west")
    core.push(request("first", prompt=PROMPT), 0)
    assert sent(core) == [("west", "first")]
    core.reset()
    core.absorb(Credit(8), 0, "east")
    core.absorb(Credit(4, keeps_cache=keeps_cache), 0, "west")
    core.push(request("again", prompt=PROMPT), 1)
    assert sent(core) == [("west" if keeps_cache else "east", "again")]


def test_a_cancellation_goes_to_every_replica_that_has_a_part() -> None:
    core = FairnessCore(FairnessConfig())
    assert core.replicas_of("any") == [], "no replica has come yet"
    for name in ("west", "east", "north"):
        core.absorb(Credit(2), 0, name)
    core.push(request("wide", samples=4), 0)
    core.push(request("narrow"), 1)
    went = sent(core)
    assert sorted(core.replicas_of("wide")) == sorted(
        replica for replica, name in went if name == "wide"
    )
    assert core.replicas_of("narrow") == [replica for replica, name in went if name == "narrow"]
    assert len(core.replicas_of("unknown")) == 1, "any one passes it on to streaming"


def test_a_sequence_waiting_for_a_full_replica_leaves_no_other_idle() -> None:
    """A paused sequence resumes on its replica; places elsewhere go to requests after it."""
    core = FairnessCore(FairnessConfig(max_timeslice_tokens=4))
    core.absorb(Credit(1, kv_free=10**9), 0, "west")
    core.push(request("a", tenant="a"), 0)
    assert sent(core) == [("west", "a")]
    core.push(request("b", tenant="b"), 1)
    (first,) = core.replicas["west"].running
    core.absorb(Credit(0, steps=((first,),) * 8, kv_free=10**9), 2, "west")
    (running,) = core.ask_to_pause(3)
    assert (running.replica, running.spec.seq_id) == ("west", first)
    core.absorb(Credit(1, paused=(first,), kv_free=10**9), 4, "west")
    assert sent(core) == [("west", "b")]
    # Tenant "a" has been served less by now, so it goes first.
    (second,) = core.replicas["west"].running
    core.absorb(Credit(0, steps=((second,),) * 30, kv_free=10**9), 5, "west")
    core.absorb(Credit(1, kv_free=10**9), 6, "east")
    core.push(request("c", tenant="b"), 7)
    assert core.pop(8) is not None, "a place is free in the east"
    assert len(core.replicas["east"].running) == 1
    assert core.pop(9) is None
    (running,) = core.ask_to_pause(10)
    assert (running.replica, running.spec.seq_id) == ("west", second), "for what resumes there"
    core.absorb(Credit(1, paused=(second,), kv_free=10**9), 11, "west")
    dispatched = core.pop(12)
    assert dispatched is not None
    assert (dispatched.replica, dispatched.request.info.request_id) == ("west", "a")


def test_a_paused_sequence_resumes_on_its_replica() -> None:
    core = FairnessCore(FairnessConfig(enable_preemption=True))
    for name in ("west", "east"):
        core.absorb(Credit(1), 0, name)
    core.push(request("first"), 0)
    core.push(request("second"), 1)
    where = dict(sent(core, swap=True))
    core.push(request("urgent", priority=9), 2)
    (running,) = core.ask_to_pause(3)
    name = running.replica
    assert name == where["second"], "of equals the last one dispatched"
    core.absorb(Credit(1, paused=(running.spec.seq_id,)), 4, name)
    assert sent(core) == [(name, "urgent")]
    core.absorb(Credit(1, ended=(next(iter(core.replicas[name].running)),)), 5, name)
    dispatched = core.pop(6)
    assert dispatched is not None
    assert dispatched.replica == name
    assert dispatched.message == ResumeSequences((running.spec.seq_id,), dispatched.message.rank)


def test_the_prefix_index_is_bounded_and_forgets_the_least_recently_used() -> None:
    index = PrefixIndex(most_tokens=4 * CHUNK_TOKENS)
    first, second = (
        prefix_chain(PROMPT[:192], DEFAULT_SCOPE),
        prefix_chain(PROMPT[1:193], DEFAULT_SCOPE),
    )
    index.add(first)
    assert index.match(first) == 3 * CHUNK_TOKENS
    index.add(second)
    assert len(index._known) == 4
    assert index.match(second) == 3 * CHUNK_TOKENS
    assert index.match(first) == 0, "its beginning is gone, and so all of it"


def test_cache_scopes_share_no_prefix() -> None:
    index = PrefixIndex()
    index.add(prefix_chain(PROMPT, CacheScope(salt="mine")))
    assert index.match(prefix_chain(PROMPT, CacheScope(salt="mine"))) == len(PROMPT)
    assert index.match(prefix_chain(PROMPT, DEFAULT_SCOPE)) == 0


def sent(core: FairnessCore, *, swap: bool = False) -> list[tuple[str, str]]:
    """(replica, request) of all dispatches now, or swapped."""
    found = []
    while (dispatched := core.pop(10)) is not None:
        assert isinstance(dispatched.message, AdmittedRequest)
        pair = dispatched.replica, dispatched.request.info.request_id
        found.append(pair[::-1] if swap else pair)
    return found
