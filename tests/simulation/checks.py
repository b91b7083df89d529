"""The invariants of a simulation, during it and at its end."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Protocol

from nano_inference.bus.codec import decode_output
from nano_inference.bus.messages import CacheScope
from nano_inference.bus.public import Completion, CompletionChunk, CompletionSample
from nano_inference.config import Constraint
from nano_inference.stages.actor import Actor
from nano_inference.stages.admission.sampling import derive_seed
from nano_inference.stages.batching.parts.handover.arrivals import Arrivals
from nano_inference.stages.batching.parts.handover.departures import Departures
from nano_inference.stages.batching.parts.tiers.part import Tiers

from . import model
from .calls import Call
from .constraints import Constrained, stop_ids
from .effect_checks import (
    EffectsWorld,
    check_cancelled,
    check_claims,
    check_leases,
    check_letters,
    check_segments,
    check_timers,
    may_be_given_up,
)
from .gateway_checks import (
    GatewaysWorld,
    check_attached,
    check_ends,
    check_response,
    is_lossy,
    may_be_ended,
    may_be_refused,
)
from .redis.data import Stream
from .story import MOST_REQUESTS, Request, Story

LATE_MS = 1500
"""So long after its time limit a request ends at most, while admission and streaming run."""

QUICK_MS = 4000
"""A request takes less, on a quick device and if only replies are lost."""

_LATE_STAGES = ("fairness", "batching", "executor")


class World(GatewaysWorld, EffectsWorld, Protocol):
    """The parts of a simulation that the checks read; see its attributes."""

    longest_prefill: int
    longest_sample: int
    losable: set[str]
    weights: dict[tuple[str, int], set[int]]
    adapters: dict[tuple[str, int], set[int]]

    def actors(self) -> Iterator[Actor]:
        """Return the stages of all living programs."""


def check_call(world: World, call: Call) -> Iterator[str]:
    """Return what is wrong with the output of a request."""
    story = world.story
    chunks = [each for each in call.outputs if isinstance(each, CompletionChunk)]
    ends = [each for each in call.outputs if isinstance(each, Completion)]
    yield from _check_chunks(call.request, chunks)
    if call.left:
        return
    if call.error is not None:
        if not _may_be_lost(world, call):
            yield f"its client got {call.error.code}: {call.error.message}"
        return
    if call.request.interface == "background":
        yield from check_response(story, call)
        return
    if len(ends) != 1 or call.outputs[-1] is not ends[0]:
        yield f"it has {len(ends)} terminal messages"
        return
    for sample in ends[0].samples:
        yield from _check_tokens(world, call.request, sample, chunks)
    yield from _check_end(world, call, ends[0], chunks)
    if call.request.interface == "bus":
        yield from _check_time(story, call)
        yield from _check_delay(story, call)


def _may_be_lost(world: World, call: Call) -> bool:
    assert call.error is not None
    story = world.story
    if call.request.interface != "bus":
        return may_be_refused(story, call.error.code)
    broken = story.noise or any(
        fault.kind in ("reset", "cut", "pause", "double", "restart", "failover", "vanish")
        for fault in story.faults
    )
    # Whether a request was published is not known then; its client has no answer to wait for.
    return call.request.name in world.losable or (
        bool(broken) and call.error.code == "bus_unavailable"
    )


def _check_end(
    world: World, call: Call, end: Completion, chunks: list[CompletionChunk]
) -> Iterator[str]:
    request, story = call.request, world.story
    for sample in end.samples:
        if request.stream:
            own = [chunk for chunk in chunks if chunk.sample_index == sample.sample_index]
            streamed = tuple(token for chunk in own for token in chunk.token_ids)
            text = "".join(chunk.text for chunk in own)
            if end.status != "done" and is_lossy(story):
                # What a server has lost, its client may have read.
                streamed, text = streamed[: len(sample.token_ids)], text[: len(sample.text)]
            if streamed != sample.token_ids:
                yield f"sample {sample.sample_index} streamed {streamed}, not {sample.token_ids}"
            if text != sample.text:
                yield f"sample {sample.sample_index} streamed other text"
    match end.status:
        case "done":
            if request.fatal:
                yield "it is done, though it fails each step"
            if [sample.sample_index for sample in end.samples] != list(range(request.n)):
                yield f"it has samples {[s.sample_index for s in end.samples]}"
            for sample in end.samples:
                yield from _check_finish(request, sample)
        case "expired":
            if not request.budget_ms:
                yield "it expired without a budget"
        case "cancelled":
            aborts = any(
                f.mode == "abort" and f.kind in ("weights", "adapter", "hold") for f in story.faults
            )
            if not aborts and not (request.interface != "bus" and may_be_ended(story, call)):
                yield f"it was cancelled: {end.error}"
        case _:
            code = end.error.code if end.error is not None else ""
            if code != "lane_failed" or not may_be_given_up(world, call):
                yield f"it failed: {end.error}"


def _check_time(story: Story, call: Call) -> Iterator[str]:
    """Check that a time limit holds also while a stage is missing."""
    request = call.request
    undisturbed = all(
        fault.kind in ("hold", "flush", "garbage")
        or (fault.kind == "kill" and fault.target.endswith(_LATE_STAGES))
        for fault in story.faults
    )
    # What admission has not taken ends later, while the lane is full or closed.
    has_room = len(story.requests) <= min(MOST_REQUESTS, story.max_in_flight)
    late_ms = call.ended_ns // 1_000_000 - request.at_ms - request.budget_ms
    if request.budget_ms and undisturbed and has_room and late_ms > LATE_MS:
        yield f"it ended {late_ms} ms after its time limit"


def _check_delay(story: Story, call: Call) -> Iterator[str]:
    """Check that a lost reply delays a request less than the loss of a lane."""
    lasted_ms = call.ended_ns // 1_000_000 - call.request.at_ms
    quick = story.slowness == 1 and len(story.requests) <= MOST_REQUESTS and not story.faults
    if quick and lasted_ms >= QUICK_MS:
        yield f"it took {lasted_ms} ms"


def _check_chunks(request: Request, chunks: list[CompletionChunk]) -> Iterator[str]:
    offsets = [0] * request.n
    finished = [False] * request.n
    for chunk in chunks:
        index = chunk.sample_index
        if finished[index]:
            yield f"sample {index} goes on after its end"
        if chunk.token_offset != offsets[index]:
            yield f"sample {index} has offset {chunk.token_offset} after {offsets[index]} tokens"
        offsets[index] = chunk.token_offset + len(chunk.token_ids)
        finished[index] = chunk.finish_reason is not None


def _check_tokens(
    world: World, request: Request, sample: CompletionSample, chunks: list[CompletionChunk]
) -> Iterator[str]:
    """Compute each token again, with the versions that it is said to be of."""
    seed = derive_seed(str(request.seed), sample.sample_index) if request.temperature else 0
    scope = CacheScope(request.tenant, adapter=request.adapter)
    chain = model.chains_of(scope, request.prompt)[-1]
    starts = {start: version for version, start in sample.weight_versions}
    version = sample.weight_version
    numbers: dict[int, set[int]] = {0: {0}}
    for (_, each), found in world.weights.items():
        numbers.setdefault(each, set()).update(found)
    adapters = _adapters_of(world, request, sample, chunks)
    constrained = constrained_by(request)
    for position, token in enumerate(sample.token_ids):
        allowed = constrained.allowed() if constrained is not None else ()
        version = starts.get(position, version)
        early = position < request.min_tokens
        avoided = request.stop_ids if early else ()
        right = {
            model.sample(chain, seed, (number, adapter), avoided, allowed)
            for number in numbers.get(version, ())
            for adapter in adapters[position]
        }
        if (token, sample.logprobs[position]) not in right:
            yield (
                f"token {position} of sample {sample.sample_index} is {token}, not "
                f"{right} of version {version}"
            )
            return
        chain = model.extend(chain, token)
        if constrained is not None:
            constrained.advance(token)


def _adapters_of(
    world: World, request: Request, sample: CompletionSample, chunks: list[CompletionChunk]
) -> list[set[int]]:
    """Return for each token the numbers that its adapter may consist of."""
    number = len(sample.token_ids)
    if not request.adapter:
        return [{0}] * number
    known = {
        version: found for (id, version), found in world.adapters.items() if id == request.adapter
    }
    own = [chunk for chunk in chunks if chunk.sample_index == sample.sample_index]
    if request.stream:
        # A chunk's tokens are of one version.
        return [known.get(chunk.adapter_version, set()) for chunk in own for _ in chunk.token_ids]
    return [set().union(*known.values())] * number


def constrained_by(request: Request) -> Constrained | None:
    """Return the beginning of a sample's grammar."""
    return Constrained(Constraint(regex=request.constraint)) if request.constraint else None


def _check_finish(request: Request, sample: CompletionSample) -> Iterator[str]:
    tokens = sample.token_ids
    ends = stop_ids() if request.constraint else request.stop_ids
    if request.constraint and sample.finish_reason == "stop" and request.interface == "bus":
        valid = re.fullmatch(request.constraint, sample.text)
        if valid is None:
            yield f"sample {sample.sample_index} is {sample.text!r}, not {request.constraint}"
    stops = [
        position
        for position, token in enumerate(tokens)
        if token in ends and position >= request.min_tokens
    ]
    if stops:
        right, reason = stops[0] + 1, "stop"
    else:
        right, reason = request.max_tokens, "length"
    if len(tokens) != right or sample.finish_reason != reason:
        yield (
            f"sample {sample.sample_index} has {len(tokens)} tokens and ends by "
            f"{sample.finish_reason}; right are {right} and {reason}"
        )


def check_state(world: World) -> Iterator[str]:
    """Return what is wrong with the stages' state now."""
    for actor in world.actors():
        if actor.name == "batching" and actor.holds_all:
            core = actor._core  # type: ignore[attr-defined]
            if core is not None:
                tiers = core.find(Tiers)
                if tiers is not None and tiers.blocks.difference is not None:
                    yield f"a block that was loaded differs: {tiers.blocks.difference}"
                try:
                    core.check()
                except AssertionError as error:
                    yield f"batching: {error}"
        if actor.name == "fairness" and actor.holds_all:
            yield from _check_fairness(world, actor)
        if actor.name == "admission" and actor.holds_all:
            yield from check_timers(actor)
    yield from check_claims(world)
    yield from check_leases(world)


def _check_fairness(world: World, actor: Any) -> Iterator[str]:
    """Compare the service of tenants that wait: the bound U of docs/fairness.md."""
    story, config = world.story, actor.config.fairness
    batch = story.max_batch_size * story.replicas
    bound = config.prefill_weight * world.longest_prefill
    bound += config.decode_weight * batch * world.longest_sample
    for each in actor._core.queue._classes.values():
        counters = {flow.tenant: flow.counter for flow in each.flows() if flow.num_waiting}
        if counters and max(counters.values()) - min(counters.values()) > bound:
            yield f"tenants that wait were served {counters}, further apart than {bound}"


def _check_given_back(world: World) -> Iterator[str]:
    """Check that what was taken was given back."""
    story = world.story
    for actor in world.actors():
        if actor.name == "fairness":
            core: Any = actor._core  # type: ignore[attr-defined]
            for replica in core.replicas.values():
                if replica.credits != story.max_batch_size or replica.running or replica.paused:
                    yield (
                        f"{actor.role}: {replica.credits} of {story.max_batch_size} credits, "
                        f"{len(replica.running)} running, {len(replica.paused)} paused"
                    )
        # A request that the server has lost, and admission with it, is kept by streaming alone.
        lossy = is_lossy(story)
        if actor.name == "streaming" and not lossy and len(actor._core):  # type: ignore[attr-defined]
            yield f"streaming still has {len(actor._core)} requests"  # type: ignore[attr-defined]
        if actor.name == "batching":
            batching: Any = actor._core  # type: ignore[attr-defined]
            if batching.cache.num_free_blocks() != story.num_blocks:
                yield f"{batching.cache.num_free_blocks()} of {story.num_blocks} blocks are free"
            arrivals, departures = batching.find(Arrivals), batching.find(Departures)
            if (arrivals and arrivals._arrivals) or (departures and departures._leavers):
                yield f"{actor.role}: sequences are announced that have ended"


def is_at_rest(world: World) -> bool:
    """Return whether nothing is in flight anywhere, and what was taken was given back."""
    left = (*_check_given_back(world), *check_attached(world)) if _has_ended(world) else ("",)
    return not left


def _has_ended(world: World) -> bool:
    """Return whether no request is in flight anywhere."""
    for actor in world.actors():
        if not actor.holds_all:
            return False
        if actor.name == "admission" and len(actor.epochs.requests.ledger):  # type: ignore[attr-defined]
            return False
        if actor.name == "fairness" and actor._core.num_queued:  # type: ignore[attr-defined]
            return False
        if actor.name == "batching":
            core = actor._core  # type: ignore[attr-defined]
            if core is None or not core.idle:
                return False
    data = world.network.node.engine.data
    return not any(
        getattr(value, "ids", None) for key, value in data.values.items() if key == b"nano:requests"
    )


def _check_results(world: World) -> Iterator[str]:
    """Check that the results stream has one terminal message of each request."""
    stream = world.network.node.engine.data.values.get(b"nano:results")
    if not isinstance(stream, Stream):
        return
    ends = [decode_output(dict(_pairs(fields))[b"json"]) for fields in stream.fields.values()]
    yield from check_ends(world, (end for end in ends if isinstance(end, Completion)))
    yield from check_cancelled(world, (end for end in ends if isinstance(end, Completion)))
    # A server that lost its last second, and whose clock went back, gives an id again.
    numbers = Counter((end.entry_id, end.request_id) for end in ends)
    for (entry_id, request_id), number in numbers.items():
        if number > 1:
            yield f"the results stream has {number} terminal messages of {request_id}, {entry_id}"
    lossy = is_lossy(world.story)
    for call in () if lossy else world.calls.values():
        end = call.outputs[-1] if call.outputs else None
        if call.request.interface != "bus":
            continue
        if isinstance(end, Completion) and not numbers[end.entry_id, end.request_id]:
            yield f"the results stream has no terminal message of {call.request.name}"


def _check_streams(world: World) -> Iterator[str]:
    """Check each request's stream on the server: what followers would read from its beginning."""
    requests = {request.name: request for request in world.story.requests} | world.answers
    lossy = is_lossy(world.story)
    for key, value in world.network.node.engine.data.values.items():
        if not (key.startswith(b"nano:out:") and isinstance(value, Stream)):
            continue
        raw = [dict(_pairs(value.fields[id])).get(b"json") for id in value.ids]
        outputs = [decode_output(each) for each in raw if each is not None]
        chunks = [each for each in outputs if isinstance(each, CompletionChunk)]
        ends = [each for each in outputs if isinstance(each, Completion)]
        request = requests.get(outputs[0].request_id) if outputs else None
        if request is None:
            continue
        if not ends and not lossy:
            yield f"the stream of {request.name} has no end"
        if ends and [number for _, number in value.ids] != list(range(1, len(value.ids) + 1)):
            yield f"the stream of {request.name} has ended with the entries {value.ids}"
        for what in _check_chunks(request, chunks) if ends else ():
            yield f"the stream of {request.name}: {what}"
        if len(ends) > 1 or (ends and outputs[-1] is not ends[0]):
            yield f"the stream of {request.name} goes on after its end"


def _pairs(fields: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(fields[::2], fields[1::2], strict=True)


def check_end(world: World) -> Iterator[str]:
    """Return what is left though all requests have ended."""
    yield from _check_results(world)
    yield from _check_streams(world)
    yield from check_letters(world)
    yield from check_segments(world)
    if not _has_ended(world):
        for actor in world.actors():
            load = actor.load() if actor.holds_all else "not loaded"
            yield f"{actor.role} is not at rest: {actor.condition()} {load}"
        left = world.network.node.engine.data.values.get(b"nano:requests")
        yield f"the requests stream has {len(left.ids) if isinstance(left, Stream) else 0} entries"
    else:
        yield from _check_given_back(world)
        yield from check_attached(world)
    yield from check_state(world)
