"""Replicas with roles: where prompts start, where sequences continue, and what is charged."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from nano_inference.bus.messages import AdmittedRequest, Credit, ResumeSequences
from nano_inference.bus.pooling import Pooling
from nano_inference.config import FairnessConfig, ReplicaRole
from nano_inference.stages.fairness import FairnessCore
from nano_inference.stages.fairness.parts.handovers import Handovers
from nano_inference.stages.fairness.state import Dispatched

from ...sections import successors_of
from .requests import request, served

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
    """A replica reports that it has handed a sequence over, with the work on it."""
    of_giver = core.replicas[replica]
    running = of_giver.running.get(seq_id) or of_giver.gone[seq_id]
    prompt = len(running.request.prompt.token_ids)
    report = {"steps": ((seq_id,),), "started": ((seq_id, prompt),), **report}
    core.absorb(Credit(1, left=(seq_id,), **report), 20, replica)


def ids(admitted: AdmittedRequest) -> list[int]:
    return [spec.seq_id for spec in admitted.sequences]


def test_a_prompt_starts_where_prompts_are_computed_and_continues_elsewhere() -> None:
    core = core_of("prefill", "decode")
    core.push(asked := request("a", prompt=(1, 2, 3)), 0)
    (first,) = dispatches(core)
    assert isinstance(first.message, AdmittedRequest)
    assert (first.replica, successors_of(first.message)) == (PREFILL, (1,))
    assert [each.credits for each in core.replicas.values()] == [3, 3], "both places are taken"
    assert core.replicas_of("a") == [PREFILL, DECODE]
    hand_over(core, *ids(asked))
    assert dispatches(core) == []
    assert core.replicas_of("a") == [DECODE]
    core.absorb(Credit(1, ended=tuple(ids(asked))), 30, DECODE)
    assert [each.credits for each in core.replicas.values()] == [4, 4]
    assert core.counts.handovers == 1


@pytest.mark.parametrize("report", ["started", "ended"])
def test_reports_of_both_replicas_come_in_any_order(report: str) -> None:
    config = FairnessConfig(prefill_weight=1.0, decode_weight=2.0)
    core = core_of("prefill", "decode", config=config)
    core.push(asked := request("a", prompt=(1,) * 100), 0)
    dispatches(core)
    (seq_id,) = ids(asked)
    its = {"started": ((seq_id, 5),), "steps": ((seq_id,),) * 3}
    if report == "started":
        core.absorb(Credit(0, **its), 15, DECODE)
        assert core.replicas_of("a") == [DECODE]
        hand_over(core, seq_id)
        core.absorb(Credit(1, ended=(seq_id,)), 30, DECODE)
    else:
        core.absorb(Credit(1, **its, ended=(seq_id,)), 15, DECODE)
        hand_over(core, seq_id)
    assert served(core) == {} or served(core) == {(0, "default"): 100 + 2 * (1 + 3)}
    assert core.counts.tokens[0] == 4
    assert [each.credits for each in core.replicas.values()] == [4, 4]
    assert not any(each.gone or each.expected or each.running for each in core.replicas.values())
    assert core.counts.handovers == 1
    assert core.part(Handovers).take_releases() == {PREFILL: [seq_id]}


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_sequence_that_ends_where_it_began_frees_its_other_place(is_paused: bool) -> None:
    core = core_of("prefill", "decode")
    core.push(asked := request("a"), 0)
    dispatches(core)
    (seq_id,) = ids(asked)
    if is_paused:
        core.absorb(Credit(1, paused=(seq_id,)), 15, PREFILL)
    core.absorb(Credit(int(not is_paused), ended=(seq_id,)), 20, PREFILL)
    assert [each.credits for each in core.replicas.values()] == [4, 4]
    assert core.replicas_of("a") == [PREFILL], "any"
    assert core.counts.handovers == 0


def test_a_paused_sequence_resumes_though_no_place_to_continue_is_free() -> None:
    """Its own was promised when it started."""
    core = core_of("prefill", "decode", places=1)
    core.push(asked := request("a"), 0)
    dispatches(core)
    core.absorb(Credit(1, paused=tuple(ids(asked))), 15, PREFILL)
    (resumed,) = dispatches(core)
    assert isinstance(resumed.message, ResumeSequences)
    assert resumed.message.seq_ids == tuple(ids(asked))


def test_replicas_that_do_both_keep_their_sequences() -> None:
    core = core_of("both", "both")
    core.push(request("a", samples=3), 0)
    assert not any(successors_of(each.message) for each in dispatches(core))  # type: ignore[union-attr]


def test_a_prompt_for_embedding_is_not_handed_over() -> None:
    core = core_of("prefill", "decode")
    asked = request("a")
    info = msgspec.structs.replace(asked.info, pooling=Pooling("mean", True, 8))
    core.push(msgspec.structs.replace(asked, info=info), 0)
    (first,) = dispatches(core)
    assert (first.replica, successors_of(first.message)) == (PREFILL, ())  # type: ignore[union-attr]
    assert core.replicas[DECODE].credits == 4


@pytest.mark.parametrize("roles", [("prefill", "prefill"), ("decode", "decode")])
def test_without_replicas_for_one_half_each_does_both(roles: tuple[ReplicaRole, ...]) -> None:
    """The replicas for the other half are gone."""
    core = core_of(*roles)
    core.push(request("a", samples=8), 0)
    found = dispatches(core)
    assert sum(len(each.message.sequences) for each in found) == 8  # type: ignore[union-attr]
    assert not any(successors_of(each.message) for each in found)  # type: ignore[union-attr]


def test_no_prompt_starts_without_a_place_where_it_continues() -> None:
    core = core_of("prefill", "decode", places=2)
    core.push(asked := request("a", samples=5), 0)
    (first,) = dispatches(core)
    assert len(first.message.sequences) == 2  # type: ignore[union-attr]
    for seq_id in ids(asked)[:2]:
        hand_over(core, seq_id)
    assert dispatches(core) == []
    assert core.replicas[PREFILL].credits == 2
    core.absorb(Credit(1, ended=(ids(asked)[0],)), 30, DECODE)
    (third,) = dispatches(core)
    assert (third.replica, len(third.message.sequences)) == (PREFILL, 1)  # type: ignore[union-attr]


def test_a_place_where_sequences_continue_is_promised_once() -> None:
    core = core_of("prefill", "both", places=2)
    core.push(request("a", samples=3), 0)
    (first,) = dispatches(core)
    assert (first.replica, successors_of(first.message)) == (PREFILL, (1, 1))  # type: ignore[union-attr]
    assert core.num_queued == 1
    core.absorb(Credit(1), 20, DECODE)
    (second,) = dispatches(core)
    assert second.replica == DECODE, "it has room, and the other one none"


def test_the_replica_with_the_same_prompt_continues_it() -> None:
    core = core_of("prefill", "decode", "decode")
    prompt = tuple(range(200))
    went = []
    for name in ("a", "b", "c"):
        core.push(request(name, prompt=prompt), 0)
        went += [successors_of(each.message) for each in dispatches(core)]  # type: ignore[union-attr]
    assert len(set(went)) == 1


def test_sequences_are_spread_over_the_replicas_that_continue_them() -> None:
    core = core_of("prefill", "decode", "decode")
    core.push(request("a", samples=4), 0)
    (first,) = dispatches(core)
    assert sorted(successors_of(first.message)) == [1, 1, 2, 2]  # type: ignore[union-attr]


def test_a_prompt_is_charged_once() -> None:
    config = FairnessConfig(prefill_weight=1.0, decode_weight=2.0)
    core = core_of("prefill", "decode", config=config)
    core.push(asked := request("a", prompt=(1,) * 100), 0)
    dispatches(core)
    (seq_id,) = ids(asked)
    hand_over(core, seq_id)
    core.absorb(Credit(0, started=((seq_id, 5),), steps=((seq_id,),) * 3), 30, DECODE)
    assert served(core) == {(0, "default"): 100 + 2 * (1 + 3)}


@pytest.mark.parametrize("how", ["started", "ended"])
def test_blocks_are_released_when_they_are_not_needed(how: str) -> None:
    core = core_of("prefill", "decode")
    core.push(asked := request("a"), 0)
    dispatches(core)
    (seq_id,) = ids(asked)
    hand_over(core, seq_id)
    assert core.part(Handovers).take_releases() == {}
    about = {how: ((seq_id, 1),) if how == "started" else (seq_id,)}
    core.absorb(Credit(0, **about), 30, DECODE)  # type: ignore[arg-type]
    assert core.part(Handovers).take_releases() == {PREFILL: [seq_id]}
    assert core.part(Handovers).take_releases() == {}


def test_roles_change_while_sequences_run() -> None:
    core = core_of("prefill", "decode")
    core.push(asked := request("a"), 0)
    dispatches(core)
    core.part(Handovers).set_roles(("decode", "prefill"))
    core.push(request("b"), 1)
    assert where(dispatches(core)) == [(DECODE, "b")]
    hand_over(core, *ids(asked))
    assert core.replicas_of("a") == [DECODE], "where it was promised a place"
    core.part(Handovers).set_roles(())
    core.push(request("c", samples=5), 2)
    assert {each.replica for each in dispatches(core)} == {PREFILL, DECODE}


def test_a_new_epoch_drops_all_promises() -> None:
    core = core_of("prefill", "decode")
    core.push(request("a"), 0)
    dispatches(core)
    core.reset()
    core.absorb(Credit(4), 0, DECODE)
    assert dispatches(core) == []
    assert core.replicas_of("a") == [DECODE], "any"
    assert core.part(Handovers).roles == ("prefill", "decode")
