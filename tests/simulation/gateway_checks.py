"""Invariants of calls over gateways: one run, one answer, and an end for calls without a reader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from nano_inference.bus.public import Completion

from .calls import Call
from .environment import EPOCH_NS
from .redis.data import SortedSet
from .redis.network import MS, Network
from .story import Request, Story

_LOSSY = ("restart", "failover")

_ROUGH = ("pause", "cut", "double", "clock", "vanish", *_LOSSY)
"""Faults by which a gateway's claim on its calls may end while their clients wait."""

_NEUTRAL = ("garbage", "flush", "weights", "adapter")
"""Faults in which what no one reads ends in time; and kills of gateways."""

_ORDERS = ("weights", "adapter", "hold")

LEFT_MS = 300
"""Within this time a request ends whose cancellation was sent."""

_LOST = ("stream_not_found", "unknown_response", "unknown_request", "idempotency_key_reused")


class GatewaysWorld(Protocol):
    """The parts of a simulation that these checks read."""

    story: Story
    network: Network
    calls: dict[str, Call]
    answers: dict[str, Request]
    ran: dict[int, set[str]]


def is_lossy(story: Story) -> bool:
    """Return whether a server may lose what it has replied to."""
    return any(fault.kind in _LOSSY for fault in story.faults)


def may_be_refused(story: Story, code: str) -> bool:
    """Return whether a gateway may refuse a call with an error."""
    return code in _LOST and is_lossy(story)


def may_be_ended(story: Story, call: Call) -> bool:
    """Return whether gateways may end a call of which the client has not left."""
    return (
        any(fault.kind in _ROUGH for fault in story.faults)
        or story.noise > 3
        or call.alone_ns > (story.grace_ms - 100) * MS
    )


def may_run_again(story: Story, call: Call) -> bool:
    """Return whether a line of a batch may run once more after its segment has ended, when its key
    is forgotten: by a gateway that stood still meanwhile. That answer doesn't count."""
    stills = ("pause", "double", "cut", "clock")
    return call.request.interface == "batch" and any(
        fault.kind in stills and fault.target.startswith("gateway") for fault in story.faults
    )


def check_ends(world: GatewaysWorld, ends: Iterable[Completion]) -> Iterator[str]:
    """Compare what clients of gateways have read with the results stream."""
    story, lossy = world.story, is_lossy(world.story)
    found: dict[str, list[Completion]] = {}
    for end in ends:
        if end.error is None or end.error.code != "duplicate_request":
            found.setdefault(end.request_id, []).append(end)
    for answer_id in world.answers if not lossy else ():
        if len(own := found.get(answer_id, [])) != 1:
            yield f"{answer_id} has {len(own)} terminal messages"
    for name, call in world.calls.items():
        request = call.request
        if request.interface == "bus":
            continue
        ids = world.ran.get(request.seed, set())
        if request.keyed and not lossy:
            # A call that has failed is made anew.
            failed = {each for each in ids if (ends := found.get(each)) and ends[0].error}
            if len(ids - failed) > 1 and not may_run_again(story, call):
                yield f"{name} has run {len(ids)} times: {sorted(ids)}"
            if len(call.answers - failed) > 1:
                yield f"{name} has the answers {sorted(call.answers)}"
        for answer_id in sorted(call.answers) if not lossy else ():
            for end in found.get(answer_id, [])[:1]:
                yield from _check_answer(name, call, end)
        if call.left or not call.ended:
            ends_of = (end for each in sorted(ids) for end in found.get(each, ()))
            yield from _check_left(story, name, call, ends_of)


def _check_answer(name: str, call: Call, end: Completion) -> Iterator[str]:
    """Check that what a client has read is what the engine has made."""
    tokens = {each.sample_index: each.token_ids for each in end.samples}
    last = call.outputs[-1] if call.outputs else None
    if isinstance(last, Completion):
        for sample in last.samples:
            if sample.token_ids != tokens.get(sample.sample_index, ()):
                yield (
                    f"{name} has read {sample.token_ids} of sample {sample.sample_index}, not "
                    f"{tokens.get(sample.sample_index)}"
                )
    if call.response is not None and end.status == "done":
        text = "".join(
            part["text"]
            for item in call.response["output"]
            for part in item.get("content", ())
            if part["type"] == "output_text"
        )
        if text != end.samples[0].text:
            yield f"{name} has read {text!r}, not {end.samples[0].text!r}"


def _check_left(story: Story, name: str, call: Call, ends: Iterable[Completion]) -> Iterator[str]:
    """Check that a request ends soon when its client has left."""
    kills = [fault.lasts_ms for fault in story.faults if fault.target.startswith("gateway")]
    others = [fault for fault in story.faults if not fault.target.startswith("gateway")]
    rough = any(fault.kind in _ROUGH for fault in story.faults)
    if story.noise or rough or any(fault.kind not in _NEUTRAL for fault in others):
        return
    limit_ms = LEFT_MS
    if call.request.keyed or kills:
        # It may come back; a round of the watchers is a quarter of the grace.
        limit_ms += story.grace_ms * 3 // 2 + 1000 + max(kills, default=0)
    for end in ends:
        late_ms = (end.timings.finished_ns - EPOCH_NS - call.ended_ns) // MS
        if late_ms > limit_ms:
            yield f"{name} ran {late_ms} ms longer than its client, and not {limit_ms}"


def check_attached(world: GatewaysWorld) -> Iterator[str]:
    """Check that no gateway holds on to a call that has ended."""
    if any(fault.kind == "clock" and not fault.target for fault in world.story.faults):
        return  # by the server's clock, an attachment may end a minute later
    attended = world.network.node.engine.data.values.get(b"nano:attended")
    if isinstance(attended, SortedSet) and attended.scores and world.story.gateways:
        yield f"{len(attended.scores)} calls are still attached: {sorted(attended.scores)}"


def check_response(story: Story, call: Call) -> Iterator[str]:
    """Return what is wrong with a response in the background, which goes on without its client."""
    if call.response is None:
        yield "it has no response"
        return
    status, kinds = call.response["status"], {fault.kind for fault in story.faults}
    aborts = any(fault.mode == "abort" for fault in story.faults) and kinds & set(_ORDERS)
    fails = kinds - {"garbage", "flush", "slow", "clock"} or any(e.fatal for e in story.requests)
    allowed = ["completed", "incomplete", *(["cancelled"] if aborts else [])]
    if status not in (*allowed, *(["failed"] if fails else [])):
        yield f"its response is {status}: {call.response['error']}"
