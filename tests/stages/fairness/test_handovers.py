"""Replicas with roles: where prompts start, where sequences continue, and what is charged."""

from __future__ import annotations

from typing import Any

import pytest

from nano_inference.bus.messages import AdmittedRequest, Credit, Handover, RemoteBlocks
from nano_inference.config import FairnessConfig, ReplicaRole
from nano_inference.stages.fairness import FairnessCore
from nano_inference.stages.fairness.core import Dispatched

from .requests import cancel, request, served

BLOCKS = RemoteBlocks("there", "layout", "weights", 0, 0, ((b"n" * 16, 3),))
PREFILL, DECODE = "batching", "batching.1"


def core_of(
    *roles: ReplicaRole, places: int = 4, config: FairnessConfig | None = None
) -> FairnessCore:
    core = FairnessCore(config or FairnessConfig(), replicas=len(roles), roles=roles)
    for number in range(len(roles)):
        name = f"batching.{number}" if number else "batching"
        core.absorb(Credit(places), 0, name)
    return core


def dispatches(core: FairnessCore, now_ns: int = 10) -> list[Dispatched]:
    found = []
    while (dispatched := core.pop(now_ns)) is not None:
        found.append(dispatched)
    return found


def where(found: list[Dispatched]) -> list[tuple[str, str]]:
    return [(each.replica, each.request.info.request_id) for each in found]


def hand_over(core: FairnessCore, seq_id: int, replica: str = PREFILL, **report: Any) -> None:
    """A sequence has its first token: the report of the work on it, then the handover."""
    prompt = len(core._replicas[replica].running[seq_id].request.prompt.token_ids)
    report = {"steps": ((seq_id,),), "started": ((seq_id, prompt),), **report}
    core.absorb(Credit(1, **report), 20, replica)
    core.hand_over(Handover(seq_id, (7,), BLOCKS), 20, replica)


def ids(admitted: AdmittedRequest) -> list[int]:
    return [spec.seq_id for spec in admitted.sequences]


def test_a_prompt_starts_where_prompts_are_computed_and_continues_elsewhere() -> None:
    core = core_of("prefill", "decode")
    core.push(asked := request("a", prompt=(1, 2, 3)), 0)
    (first,) = dispatches(core)
    assert isinstance(first.message, AdmittedRequest)
    assert (first.replica, first.message.hands_over, first.message.remote) == (PREFILL, True, None)
    hand_over(core, *ids(asked))
    (second,) = dispatches(core)
    assert isinstance(second.message, AdmittedRequest)
    assert (second.replica, second.message.hands_over) == (DECODE, False)
    assert second.message.remote == BLOCKS
    assert [spec.generated for spec in second.message.sequences] == [(7,)]
    assert second.message.rank == first.message.rank
    assert core.replicas_of("a") == [DECODE]
    core.absorb(Credit(1, ended=tuple(ids(asked))), 30, DECODE)
    assert [each.credits for each in core._replicas.values()] == [4, 4]
    assert core.counts.handovers == 1


def test_replicas_that_do_both_keep_their_sequences() -> None:
    core = core_of("both", "both")
    core.push(request("a", samples=3), 0)
    assert not any(each.message.hands_over for each in dispatches(core))  # type: ignore[union-attr]


@pytest.mark.parametrize("roles", [("prefill", "prefill"), ("decode", "decode")])
def test_without_replicas_for_one_half_each_does_both(roles: tuple[ReplicaRole, ...]) -> None:
    """As when the others are gone."""
    core = core_of(*roles)
    core.push(request("a", samples=8), 0)
    found = dispatches(core)
    assert sum(len(each.message.sequences) for each in found) == 8  # type: ignore[union-attr]
    assert not any(each.message.hands_over for each in found)  # type: ignore[union-attr]


def test_no_prompt_starts_without_a_place_where_it_continues() -> None:
    core = core_of("prefill", "decode", places=2)
    core.push(asked := request("a", samples=5), 0)
    (first,) = dispatches(core)
    assert len(first.message.sequences) == 2  # type: ignore[union-attr]
    for seq_id in ids(asked)[:2]:
        hand_over(core, seq_id)
    assert [each.replica for each in dispatches(core)] == [DECODE] * 2
    assert core._replicas[PREFILL].credits == 2
    core.absorb(Credit(1, ended=(ids(asked)[0],)), 30, DECODE)
    (third,) = dispatches(core)
    assert (third.replica, len(third.message.sequences)) == (PREFILL, 1)  # type: ignore[union-attr]


def test_a_replica_that_does_both_takes_prompts_when_no_place_is_left_elsewhere() -> None:
    core = core_of("prefill", "both", places=1)
    core.push(request("a", samples=3), 0)
    found = dispatches(core)
    assert sorted(each.replica for each in found) == [PREFILL, DECODE]
    assert core.num_queued == 1


def test_handed_over_sequences_wait_for_a_place_and_go_before_prompts() -> None:
    core = core_of("prefill", "decode", places=2)
    core.push(asked := request("a", samples=2), 0)
    dispatches(core)
    core._replicas[DECODE].credits = 0  # the places that were free are not, any more
    hand_over(core, ids(asked)[0])
    hand_over(core, ids(asked)[1])
    core.push(request("b"), 25)
    assert dispatches(core) == []
    core.absorb(Credit(2), 30, DECODE)
    assert where(dispatches(core)) == [(DECODE, "a"), (DECODE, "a")]
    core.absorb(Credit(1), 40, DECODE)
    assert where(dispatches(core)) == [(PREFILL, "b")]


def test_the_replica_with_the_same_prompt_continues_it() -> None:
    core = core_of("prefill", "decode", "decode")
    prompt = tuple(range(200))
    went = []
    for name in ("a", "b", "c"):
        core.push(asked := request(name, prompt=prompt), 0)
        dispatches(core)
        hand_over(core, *ids(asked))
        went += [each.replica for each in dispatches(core)]
    assert len(set(went)) == 1


def test_a_prompt_is_charged_once() -> None:
    config = FairnessConfig(prefill_weight=1.0, decode_weight=2.0)
    core = core_of("prefill", "decode", config=config)
    core.push(asked := request("a", prompt=(1,) * 100), 0)
    dispatches(core)
    (seq_id,) = ids(asked)
    hand_over(core, seq_id)
    dispatches(core)
    core.absorb(Credit(0, started=((seq_id, 5),), steps=((seq_id,),) * 3), 30, DECODE)
    assert served(core) == {(0, "default"): 100 + 2 * (1 + 3)}


@pytest.mark.parametrize("how", ["started", "ended", "cancelled", "expired"])
def test_blocks_are_released_when_they_are_not_needed(how: str) -> None:
    core = core_of("prefill", "decode")
    core.push(asked := request("a"), 0, 50 if how == "expired" else None)
    dispatches(core)
    (seq_id,) = ids(asked)
    hand_over(core, seq_id)
    assert core.take_releases() == {}
    if how == "cancelled":
        core.cancel(cancel("a"))
    elif how == "expired":
        assert core.next_deadline_ns() == 50
        assert [each.status for each in core.expire(51)] == ["expired"]
        assert core.expire(52) == []
    else:
        dispatches(core)
        core.absorb(
            Credit(0, **{how: ((seq_id, 1),) if how == "started" else (seq_id,)}), 30, DECODE
        )
    assert core.take_releases() == {PREFILL: [seq_id]}
    assert core.take_releases() == {}
    if how in ("cancelled", "expired"):
        assert dispatches(core) == []
        assert served(core) == {} or all(
            not flow.num_running for each in core._queue._classes.values() for flow in each.flows()
        )


def test_a_handover_of_a_sequence_that_has_ended_is_ignored() -> None:
    core = core_of("prefill", "decode")
    core.push(asked := request("a"), 0)
    dispatches(core)
    core.absorb(Credit(1, ended=tuple(ids(asked))), 15, PREFILL)
    core.hand_over(Handover(*ids(asked), (7,), BLOCKS), 20, PREFILL)
    core.hand_over(Handover(99, (7,), BLOCKS), 20, "batching.9")
    assert dispatches(core) == []


def test_roles_change_while_sequences_run() -> None:
    core = core_of("prefill", "decode")
    core.push(asked := request("a"), 0)
    dispatches(core)
    core.set_roles(("decode", "prefill"))
    core.push(request("b"), 1)
    assert where(dispatches(core)) == [(DECODE, "b")]
    hand_over(core, *ids(asked))
    assert where(dispatches(core)) == [(PREFILL, "a")], "back to where it came from"
    core.set_roles(())
    core.push(request("c", samples=6), 2)
    assert {each.replica for each in dispatches(core)} == {PREFILL, DECODE}


def test_a_new_epoch_drops_what_was_handed_over() -> None:
    core = core_of("prefill", "decode")
    core.push(asked := request("a"), 0)
    dispatches(core)
    hand_over(core, *ids(asked))
    core.reset()
    core.absorb(Credit(4), 0, DECODE)
    assert dispatches(core) == []
    assert core.roles == ("prefill", "decode")
