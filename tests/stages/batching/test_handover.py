"""A sequence that is handed over goes on after its first token, with its blocks or without."""

from __future__ import annotations

import random
from collections import deque

import msgspec
import pytest

from nano_inference.bus.control import Cancel
from nano_inference.bus.messages import (
    AnnounceBlocks,
    AnnounceSequence,
    Handover,
    ReleaseBlocks,
)
from nano_inference.bus.parts.handover import HandoverRoute
from nano_inference.bus.sections import with_sections
from nano_inference.stages.batching.parts.handover.arrivals import Arrivals
from nano_inference.stages.batching.parts.handover.departures import Departure
from nano_inference.stages.batching.parts.tiers.tiers import OFFER_S, KVTiers

from .replica import CACHE_TYPES, CacheType, FakeReplica, expected, reported

PROMPT = list(range(20, 43))  # five full blocks of four tokens, and three tokens


def replica(address: str, **settings: int | str | None) -> FakeReplica:
    return FakeReplica(**{"host_slots": 16, "address": address, **settings})  # type: ignore[arg-type]


def tiers_of(replica: FakeReplica) -> KVTiers:
    assert replica.tiers is not None
    return replica.tiers


def num_computed(replica: FakeReplica) -> int:
    """The tokens computed for requests."""
    counters = replica.core.take_counters()
    return counters.prefilled + counters.decoded


class Pair:
    """A replica that prefills, and one that decodes; messages between them come late.

    Attributes:
        messages: On their way, in order.
        draw: If set, first tokens, which the executor sends, overtake messages of batching.
    """

    draw: random.Random | None = None

    def __init__(self, **settings: int | str | None) -> None:
        self.giver, self.taker = replica("giver", **settings), replica("taker", **settings)
        self.taker.executor.peers = {"giver": self.giver.executor}
        self.requests: dict[int, str] = {}
        self.messages: deque[Departure] = deque()

    def add(self, prompt: list[int], seq_ids: list[int], **fields: object) -> None:
        successors = (1,) * len(seq_ids)
        self.giver.add(prompt, seq_ids, successors=successors, **fields)  # type: ignore[arg-type]
        self.requests |= dict.fromkeys(seq_ids, str(seq_ids[0]))

    def collect(self) -> None:
        """Take the messages, all for the other replica."""
        departures = self.giver.take_departures()
        tokens = [Departure(*each) for each in self.giver.take_first_tokens()]
        assert all(each.successor == 1 for each in (*departures, *tokens))
        self.messages += departures
        for each in tokens:
            place = self.draw.randrange(len(self.messages) + 1) if self.draw else len(self.messages)
            self.messages.insert(place, each)

    @property
    def handovers(self) -> list[Handover]:
        """The sequences that are handed over by messages on their way."""
        messages = (each.message for each in self.messages)
        return [message for message in messages if isinstance(message, Handover)]

    def pass_on(self) -> None:
        """Pass on the oldest message."""
        departure = self.messages.popleft()
        self.taker.core.receive(departure.message, 0, departure.deadline_ns)

    def pass_all(self) -> None:
        """Pass on all messages."""
        self.collect()
        while self.messages:
            self.pass_on()

    def run(self) -> None:
        self.giver.run()
        self.pass_all()
        self.taker.run()
        self.giver.core.receive(ReleaseBlocks(tuple(self.requests)), 0)

    def outputs(self, seq_id: int) -> list[int]:
        return [
            *self.giver.outputs.get(seq_id, []),
            *self.taker.outputs.get(seq_id, []),
        ]

    def check(self) -> None:
        self.giver.check()
        self.taker.check()


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_the_taker_computes_only_tokens_outside_full_blocks(cache_type: CacheType) -> None:
    pair = Pair(cache_type=cache_type)
    pair.add(PROMPT, [1])
    pair.run()
    assert pair.giver.outputs == {1: expected(PROMPT, 1)}
    assert pair.outputs(1) == expected(PROMPT, 8)
    # Three tokens after the full blocks, the first generated one, and six more.
    assert num_computed(pair.taker) == 3 + 1 + 6
    assert tiers_of(pair.giver).take_counts().offered == 5
    assert tiers_of(pair.taker).take_counts().received == 5
    pair.check()


def test_samples_of_one_request_are_handed_over_one_by_one() -> None:
    pair = Pair()
    pair.add(PROMPT, [1, 2, 3])
    pair.run()
    assert all(pair.outputs(seq_id) == expected(PROMPT, 8) for seq_id in (1, 2, 3))
    assert num_computed(pair.giver) == len(PROMPT)
    assert tiers_of(pair.taker).take_counts().received == 5, "each block came once"


def test_a_sequence_that_ends_with_its_first_token_stays() -> None:
    pair = Pair()
    pair.add(PROMPT, [1], max_tokens=1)
    pair.run()
    assert pair.giver.reasons == {1: "length"}
    assert not tiers_of(pair.giver).has_offers
    assert not pair.taker.log or not any(plan.new for plan in pair.taker.log)
    assert reported(pair.giver).ended == (1,)
    assert pair.taker.core.take_report() is None, "fairness frees the place"


def test_a_sequence_without_its_first_token_gives_its_slots_back() -> None:
    """The executor has ended it, as where its grammar can't be followed; streaming halts it."""
    pair = Pair()
    pair.add(PROMPT, [1])
    pair.giver.plan()
    plan = pair.giver.plans.popleft()
    result = pair.giver.executor.execute(plan)
    nothing = msgspec.structs.replace(result, seq_ids=(), token_ids=(), finish_reasons=())
    pair.giver.absorb(plan, nothing)
    pair.collect()
    assert not pair.handovers
    assert not tiers_of(pair.giver).has_offers
    pair.giver.core.stop([1])
    pair.run()
    assert pair.giver.core.idle
    assert not pair.taker.core.part(Arrivals).requests()


def test_a_handover_frees_its_place_and_is_not_an_end() -> None:
    pair = Pair()
    pair.add(PROMPT, [1])
    pair.giver.run()
    report = reported(pair.giver)
    assert (report.sequences, report.ended, report.left) == (1, (), (1,))
    assert (report.started, report.steps) == (((1, len(PROMPT)),), ((1,),))
    pair.collect()
    (handover,) = pair.handovers
    assert handover.token_ids == tuple(expected(PROMPT, 1))
    assert pair.giver.core.idle


def test_blocks_are_there_with_the_first_token() -> None:
    """Those of a prompt of several steps come while its last step is computed."""
    pair = Pair(max_tokens_per_batch=8)
    pair.taker.executor.is_patient = True
    pair.add(PROMPT, [1])
    announced = []
    while not pair.handovers:
        pair.giver.plan()
        pair.collect()
        while pair.messages:
            announced.append(type(pair.messages[0].message))
            pair.pass_on()
        pair.taker.run()
        pair.giver.retire()
        pair.collect()
    assert announced == [AnnounceSequence, AnnounceBlocks, AnnounceBlocks]
    pair.taker.run()
    assert tiers_of(pair.taker).take_counts().received == 5
    assert pair.taker.core.idle, "it waits for no token"
    pair.pass_all()
    assert pair.taker.plan(), "the sequence starts at once"
    assert [new.num_cached for new in pair.taker.log[-1].new] == [20]
    pair.run()
    assert pair.outputs(1) == expected(PROMPT, 8)
    pair.check()


@pytest.mark.parametrize("prompt_logprobs", [None, 1])
def test_a_prompt_of_full_blocks_is_fetched_whole(prompt_logprobs: int | None) -> None:
    """Also if it is scored, which the other replica has done."""
    pair = Pair()
    pair.add(PROMPT[:20], [1], prompt_logprobs=prompt_logprobs)
    pair.giver.run()
    pair.collect()
    pair.pass_on()
    pair.taker.run()
    assert tiers_of(pair.taker).take_counts().received == 5
    pair.run()
    assert pair.outputs(1) == expected(PROMPT[:20], 8)
    assert num_computed(pair.taker) == 1 + 6


@pytest.mark.parametrize("is_announced", [False, True])
def test_a_request_that_ends_on_both_sides_frees_both_places(is_announced: bool) -> None:
    """Its cancellation overtakes the messages of the other replica, or comes in between."""
    pair = Pair()
    pair.add(PROMPT, [1])
    pair.giver.run()
    pair.collect()
    if is_announced:
        pair.pass_on()
    end = Cancel("1", "1", "cancelled", "cancelled", "")
    for each in (pair.giver, pair.taker):
        each.core.cancel(end)
    pair.run()
    assert reported(pair.giver).left == (1,)
    if is_announced:
        assert 1 not in pair.taker.outputs
    else:
        # It runs until streaming, which has ended the request, halts it.
        pair.taker.core.stop([1])
    report = reported(pair.taker)
    assert (report.sequences, report.ended) == (1, (1,))
    pair.check()


@pytest.mark.parametrize("max_tokens", [8, 1])
def test_a_request_that_ends_while_its_first_token_is_computed_frees_both_places(
    max_tokens: int,
) -> None:
    """Batching on the first replica has not yet received whether that token is handed over."""
    pair = Pair()
    pair.add(PROMPT, [1], max_tokens=max_tokens)
    pair.giver.plan()
    pair.pass_all()
    for each in (pair.giver, pair.taker):
        each.core.cancel(Cancel("1", "1", "cancelled", "cancelled", ""))
    pair.run()
    given, taken = reported(pair.giver), pair.taker.core.take_report()
    if max_tokens > 1:
        assert (given.left, given.ended) == ((1,), ())
        assert taken is not None
        assert taken.ended == (1,)
    else:
        assert (given.left, given.ended) == ((), (1,))
        assert taken is None, "fairness frees the place"
    assert 1 not in pair.taker.outputs
    assert not pair.taker.core.part(Arrivals).requests()
    pair.check()


def test_a_first_token_that_overtakes_its_announcement_waits_for_it() -> None:
    pair = Pair(max_tokens_per_batch=8)
    pair.add(PROMPT, [1])
    pair.giver.run()
    pair.collect()
    pair.messages.rotate(1)
    assert len(pair.handovers) == 1
    for _ in range(3):
        pair.pass_on()
        assert not pair.taker.plan() or not pair.taker.log[-1].new
    pair.run()
    assert pair.outputs(1) == expected(PROMPT, 8)
    assert tiers_of(pair.taker).take_counts().received == 5
    pair.check()


def test_offered_blocks_keep_their_slots_until_they_are_released() -> None:
    pair = Pair(host_slots=6, num_blocks=8)
    pair.add(PROMPT, [1])
    pair.giver.run()
    for seq_id in range(2, 9):
        pair.giver.add([seq_id] * 16, seq_id)  # each evicts blocks, which want slots
        pair.giver.run()
    pair.pass_all()
    pair.taker.run()
    assert tiers_of(pair.taker).take_counts().received == 5
    pair.giver.core.receive(ReleaseBlocks((1,)), 0)
    assert not tiers_of(pair.giver).has_offers
    pair.check()


def test_an_offer_ends_by_itself() -> None:
    pair = Pair()
    pair.add(PROMPT, [1])
    pair.giver.run()
    end_ns = int(OFFER_S * 1e9)
    pair.giver.core.plan(end_ns - 1)
    assert tiers_of(pair.giver).has_offers
    pair.giver.core.plan(end_ns)
    assert not tiers_of(pair.giver).has_offers


def test_without_room_the_leading_blocks_are_offered() -> None:
    pair = Pair(host_slots=3)
    pair.add(PROMPT, [1])
    pair.run()
    assert pair.outputs(1) == expected(PROMPT, 8)
    assert tiers_of(pair.giver).take_counts().offered == 3
    pair.check()


def test_without_tiers_the_taker_computes_all() -> None:
    pair = Pair(host_slots=0)
    pair.add(PROMPT, [1])
    pair.run()
    assert pair.outputs(1) == expected(PROMPT, 8)
    assert num_computed(pair.taker) == len(PROMPT) + 7


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_blocks_that_were_handed_over_are_on_disk_on_both_sides(cache_type: CacheType) -> None:
    """While nothing else runs, though they are in host slots already."""
    pair = Pair(cache_type=cache_type, disk_blocks=100)
    pair.add(PROMPT, [1])
    pair.run()
    pair.giver.run()
    prompt, rest = set(pair.giver.executor.disk), set(pair.taker.executor.disk)
    assert len(prompt) == 5
    assert len(prompt & rest) == 5
    pair.check()


@pytest.mark.parametrize("difference", ["layout", "model", "weight_version", "adapter_version"])
def test_a_difference_in_one_field_is_a_miss(difference: str) -> None:
    pair = Pair()
    pair.add(PROMPT, [1])
    pair.giver.run()
    pair.collect()
    announced = pair.messages[0].message
    assert isinstance(announced, AnnounceSequence)
    value: str | int = 7 if difference.endswith("version") else "other"
    route = HandoverRoute.find(announced.request.parts)
    assert route is not None
    assert route.remote is not None
    blocks = msgspec.structs.replace(route.remote, **{difference: value})
    request = with_sections(announced.request, HandoverRoute(remote=blocks))
    pair.messages[0].message = AnnounceSequence(request)
    pair.run()
    assert pair.outputs(1) == expected(PROMPT, 8)
    assert tiers_of(pair.taker).take_counts().received == 0


def test_new_weights_at_the_taker_make_the_blocks_useless() -> None:
    """They came with the same version number, before the taker's change."""
    pair = Pair()
    pair.add(PROMPT, [1])
    pair.giver.run()
    pair.pass_all()
    pair.taker.change_weights(1, "keep")
    pair.taker.run()
    assert pair.outputs(1) == expected(PROMPT, 8)
    assert tiers_of(pair.taker).take_counts().loaded == 0


def test_a_prompt_computed_across_new_weights_is_not_offered() -> None:
    pair = Pair(max_tokens_per_batch=8)
    pair.add(PROMPT, [1])
    pair.giver.steps(1)
    pair.giver.change_weights(1, "keep")
    pair.run()
    assert pair.outputs(1) == expected(PROMPT, 8)
    assert tiers_of(pair.giver).take_counts().offered == 4, "those of the steps before"
    assert tiers_of(pair.taker).take_counts().loaded == 4


def test_a_cancelled_sequence_that_was_handed_over_counts_as_begun() -> None:
    """Streaming has its first token."""
    pair = Pair()
    pair.add(PROMPT, [1])
    pair.giver.run()
    pair.pass_all()
    pair.taker.core.cancel(Cancel("1", "1", "cancelled", "cancelled", ""))
    pair.taker.run()
    (ended,) = [cancel for plan in pair.taker.log for cancel in plan.ended]
    assert not ended.unstarted


def test_a_paused_sequence_is_handed_over_after_its_next_token() -> None:
    pair = Pair()
    pair.add(PROMPT, [1])
    pair.giver.plan()
    pair.giver.core.pause_sequences([1])
    pair.giver.retire_all()
    pair.collect()
    if not pair.handovers:  # it paused with its first token
        pair.giver.core.resume_sequences([1])
    pair.run()
    assert pair.outputs(1) == expected(PROMPT, 8)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_the_tokens_are_the_same(seed: int) -> None:
    """Lost blocks, lost plans, new weights, preemptions, cancellations, full slots."""
    draw = random.Random(seed)
    pair = Pair(
        host_slots=draw.choice((0, 3, 8, 40)),
        num_blocks=draw.choice((14, 30)),
        disk_blocks=draw.choice((0, 6)),
        cache_type=draw.choice(CACHE_TYPES),
        max_tokens_per_batch=draw.choice((8, 32)),
        max_draft_tokens=0,
        num_snapshots=draw.choice((None, None, 2, 9)),
        state_slots=draw.choice((1, 4)),
    )
    pair.draw = draw
    shared = [draw.randrange(50) for _ in range(16)]
    prompts: dict[int, list[int]] = {}
    lengths: dict[int, int] = {}
    cancelled: set[int] = set()
    for _ in range(400):
        action = draw.choice(("add", "step", "step", "step", "pass", "tier", "tier", "odd"))
        if action == "add" and len(prompts) < 24:
            prompt = shared[: draw.randrange(17)] + [draw.randrange(50) for _ in range(9)]
            seq_ids = [len(prompts) + index for index in range(draw.randrange(1, 3))]
            length = draw.randrange(1, 8)
            prompts |= dict.fromkeys(seq_ids, prompt)
            lengths |= dict.fromkeys(seq_ids, length)
            pair.add(prompt, seq_ids, max_tokens=length)
        elif action == "step":
            each = draw.choice((pair.giver, pair.taker))
            if not each.plan() or draw.random() < 0.5:
                each.retire()
            pair.collect()
        elif action == "pass" and pair.messages:
            pair.pass_on()
        elif action == "tier":
            pair.taker.executor.is_patient = draw.random() < 0.8
            draw.choice((pair.giver, pair.taker)).change_tiers()
        elif action == "odd":
            odd = draw.randrange(8)
            if odd == 0:
                pair.giver.core.receive(
                    ReleaseBlocks(tuple(range(len(prompts)))), 0
                )  # too early for some
            elif odd == 1:
                pair.taker.lose_plans()
            elif odd == 2:
                draw.choice((pair.giver, pair.taker)).core.cache.flush()
            elif odd == 3 and not pair.giver.plans:
                pair.giver.executor.offered.clear()  # another process took its memory away
            elif odd == 4 and prompts:
                seq_id = draw.choice(list(prompts))
                name = pair.requests[seq_id]
                cancelled |= {s for s, each in pair.requests.items() if each == name}
                for each in (pair.giver, pair.taker):
                    each.core.cancel(Cancel(name, name, "cancelled", "cancelled", ""))
            elif odd == 5:
                pair.giver.lose_plans()
        pair.check()
    pair.taker.executor.is_patient = False
    pair.run()
    pair.check()
    for seq_id, prompt in prompts.items():
        wanted = expected(prompt, lengths[seq_id])
        found = pair.outputs(seq_id)
        # A lost plan's tokens are made again.
        assert found[-len(wanted) :] == wanted or seq_id in cancelled, seq_id
    assert pair.giver.core.idle
    assert pair.taker.core.idle
    assert not tiers_of(pair.giver).has_offers if pair.giver.tiers else True
