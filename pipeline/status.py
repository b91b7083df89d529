"""The state of a whole deployment at one moment: lanes, stages, and what waits."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from ..store.registry import ModelState
from .client import BusClient
from .health import LaneHealth, lanes_of, verdict


class PipelineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What one look at a pipeline, or at those of several models, showed.

    Attributes:
        ready: Whether every stage of at least one lane is there and takes part.
        reason: Why not, in one sentence.
        url: Where the look was taken, without password; "" in an answer of a gateway.
        waiting: Requests that nobody has taken.
        in_flight: Requests taken and not yet answered.
        queue_length: Requests of which no sample has begun, whether they were taken or not; about a
            second old.
        dead_letters: Requests that were given up; see `nano-inference dlq`.
        lanes: The lanes, with what each stage told last.
        models: Of several models how each is; the numbers above are those of all together.
    """

    ready: bool
    reason: str
    url: str = ""
    waiting: int
    in_flight: int
    queue_length: int
    dead_letters: int
    lanes: list[LaneHealth]
    models: dict[str, ModelState] = {}


async def pipeline_status(client: BusClient) -> PipelineStatus:
    """Take one look over any bus.

    Settings are left out of the stages' loads, since those of fairness name tenants.

    Raises:
        BusError: The bus can't be reached.
    """
    records, reports, backlog = await asyncio.gather(
        client.bus.store.models.read(), client.reports(), client.backlog()
    )
    lanes = lanes_of(
        replace(each, load={name: each.load[name] for name in each.load if name != "settings"})
        for each in reports
    )
    states = {id: record.state for id, record in records.items()}
    reason = reason_of(states, lanes)
    return PipelineStatus(
        ready=not reason,
        reason=reason,
        waiting=backlog.waiting,
        in_flight=backlog.pending,
        queue_length=backlog.queue_length,
        dead_letters=backlog.dead,
        lanes=lanes,
        models=states,
    )


def reason_of(states: Mapping[str, ModelState], lanes: Sequence[LaneHealth]) -> str:
    """Why no request would be served, in one sentence; "" when some lane works.

    Args:
        states: Of several models; empty for a single one.
        lanes: Of all models.
    """
    if not states:
        return verdict(lanes)
    reasons: list[str] = []
    for model, state in states.items():
        own = [lane for lane in lanes if lane.model == model]
        why = verdict(own) if state in ("ready", "draining") else f"it is {state}"
        if not why:
            return ""
        reasons.append(f"model {model}: {why}")
    return "; ".join(reasons)


def of_models(found: PipelineStatus, models: Collection[str]) -> PipelineStatus:
    """What was seen of these alone, out of several models. The counts remain those of all."""
    states = {id: state for id, state in found.models.items() if id in models}
    lanes = [lane for lane in found.lanes if lane.model in states]
    reason = reason_of(states, lanes)
    return replace(found, ready=not reason, reason=reason, lanes=lanes, models=states)
