"""Effects that another mechanism repairs, counted and compared with the faults of the story."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from nano_inference.bus.dead_letters import DeadLetter
from nano_inference.bus.public import Completion
from nano_inference.config import AdmissionConfig
from nano_inference.stages.actor import Actor
from nano_inference.stages.admission.requests import entry_deadline_ns

from .calls import Call
from .environment import EPOCH_NS
from .gateway_checks import is_lossy
from .redis.data import Stream
from .redis.network import MS, Network
from .story import LEASE_MS, Story

MOST_FAILURES = AdmissionConfig().max_lane_deaths
"""A request in which a lane fails so often is given up."""

CANCELLED_MS = 1000
"""Within this time a cancellation is with admission, if nothing goes wrong."""

_DISPLACING = ("kill", "double", "pause", "cut", "reset", "vanish", "clock", "restart", "failover")
"""Faults after which another admission may give up a request, too."""

_NEUTRAL = ("garbage", "flush", "hold", "weights", "adapter")


class EffectsWorld(Protocol):
    """The parts of a simulation that these checks read.

    Attributes:
        failures: Times of failures of each lane, when a stage of it has failed by an error.
        given_up: How often admission has given up each request.
    """

    story: Story
    network: Network
    calls: dict[str, Call]
    failures: dict[str, list[int]]
    given_up: Counter[str]


def may_be_given_up(world: EffectsWorld, call: Call) -> bool:
    """Return whether one lane has failed so often during a request. A process that ends without an
    error is not counted: no request can be its cause."""
    since_ns = call.request.at_ms * MS
    return any(
        sum(at_ns >= since_ns for at_ns in times) >= MOST_FAILURES
        for times in world.failures.values()
    )


def check_claims(world: EffectsWorld) -> Iterator[str]:
    """Check that no lane has taken over an entry before its lease was over."""
    claims = world.network.node.engine.claims
    for entry_id, before, owner, age_ms in claims:
        if age_ms < LEASE_MS:
            yield (
                f"{owner.decode()} took over {entry_id.decode()} from {before.decode()} after "
                f"{age_ms} ms of {LEASE_MS}"
            )
    claims.clear()


def check_segments(world: EffectsWorld) -> Iterator[str]:
    """Check that a segment of a batch has one result: its lines are answered once."""
    for key, field in world.network.node.engine.replaced:
        if field.startswith(b"done:"):
            yield f"{key.decode()} has two results of its segment {field[5:].decode()}"


def check_leases(world: EffectsWorld) -> Iterator[str]:
    """Check that a lane renews the leases of its entries in time, if nothing keeps it from that."""
    if not _is_undisturbed(world.story):
        return
    engine = world.network.node.engine
    stream = engine.data.values.get(b"nano:requests")
    for group in stream.groups.values() if isinstance(stream, Stream) else ():
        since_ms = min((since for _, since in group.pending.values()), default=engine.now_ms)
        if engine.now_ms - since_ms > LEASE_MS * 2 // 3:
            yield f"a lease is {engine.now_ms - since_ms} ms old; it ends after {LEASE_MS}"


def _is_undisturbed(story: Story) -> bool:
    """Return whether no fault keeps a lane from its work."""
    return not story.noise and all(fault.kind in _NEUTRAL for fault in story.faults)


def check_timers(actor: Actor) -> Iterator[str]:
    """Check that admission wakes up for the next deadline of a request that is not in the lane."""
    epochs: Any = actor.epochs  # type: ignore[attr-defined]
    if epochs._all_in_lane:
        return
    deadlines = [entry_deadline_ns(*each) for each in epochs.requests.inherited]
    deadlines += [item.deadline_ns for item in epochs.requests.ledger if item.end is None]
    first = min((at_ns for at_ns in deadlines if at_ns is not None), default=None)
    wake_at = actor.wake_at_ns()
    if first is not None and (wake_at is None or wake_at > first):
        yield f"{actor.role} wakes up at {wake_at}, and a request's time is over at {first}"


def check_letters(world: EffectsWorld) -> Iterator[str]:
    """Check that each request that was given up has a dead letter, and one only."""
    kinds = {fault.kind for fault in world.story.faults}
    displaced = kinds & {*_DISPLACING} or world.story.noise
    for request_id, number in world.given_up.items():
        if number > 1 and not displaced:
            yield f"{request_id} was given up {number} times"
    stream = world.network.node.engine.data.values.get(b"nano:dead")
    if world.story.bus == "memory" or is_lossy(world.story):
        return
    letters: Counter[str] = Counter()
    for fields in stream.fields.values() if isinstance(stream, Stream) else ():
        letter = msgspec.json.decode(fields[fields.index(b"json") + 1], type=DeadLetter)
        letters[letter.request.request_id] += 1
    for request_id, number in letters.items():
        if number > 1 and not displaced:
            yield f"{request_id} has {number} dead letters"
    for name, call in world.calls.items():
        end = call.outputs[-1] if call.outputs else None
        given_up = isinstance(end, Completion) and end.error and end.error.code == "lane_failed"
        if given_up and call.request.interface == "bus" and not letters[name]:
            yield f"{name} was given up, and has no dead letter"


def check_cancelled(world: EffectsWorld, ends: Iterator[Completion]) -> Iterator[str]:
    """Check that a request whose client has left is not begun after that."""
    if not _is_undisturbed(world.story):
        return
    for end in ends:
        call = world.calls.get(end.request_id)
        if call is None or not call.left or call.request.interface != "bus":
            continue
        admitted = end.timings.of("admission")
        late_ms = 0
        if admitted is not None:
            late_ms = (admitted.end_ns - EPOCH_NS - call.ended_ns) // MS
        if late_ms > CANCELLED_MS:
            yield f"{end.request_id} was begun {late_ms} ms after its client had left"
