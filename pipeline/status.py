"""The state of a whole deployment at one moment: lanes, stages, and waiting requests."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import PurePath

import msgspec
from msgspec.structs import replace

from ..config import BusError
from ..store.batches import BatchProgress
from ..store.board import StageReport
from ..store.registry import ModelState
from ..store.store import Store
from .client import BusClient
from .health import LaneHealth, held_of, lanes_of, reason_of
from .progress import Progress, progress_of

MOST_BATCHES = 32
"""Batches of a status."""


class PipelineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a pipeline, or of the pipelines of several models.

    Attributes:
        ready: Whether every stage of at least one lane takes part.
        reason: The reason if not, in one sentence.
        held: Why some lane computes no step, as "generation is paused"; "" if none is held.
        url: The bus of the snapshot, without password; "" in an answer of a gateway.
        waiting: Requests that no lane has taken.
        in_flight: Requests taken and not yet answered.
        queue_length: Requests of which no sample has begun, taken or not; about a second old.
        dead_letters: Requests in the dead letters; see `nano-inference dlq`.
        lanes: The lanes, with the last report of each stage.
        models: The states of several models; the numbers above are their sums.
        stall_timeout_s: Time without a token or a step after which a lane is stalled.
        progress: Progress of the lanes with their requests.
        open_batches: Unfinished batches of all tenants.
        batches: Of those that gateways have begun to run, the oldest.
    """

    ready: bool
    reason: str
    held: str = ""
    url: str = ""
    waiting: int
    in_flight: int
    queue_length: int
    dead_letters: int
    lanes: list[LaneHealth]
    models: dict[str, ModelState] = {}
    stall_timeout_s: float
    progress: Progress
    open_batches: int = 0
    batches: list[BatchProgress] = []


async def pipeline_status(
    client: BusClient,
    stall_timeout_s: float,
    *,
    for_operator: bool = False,
    with_tenants: bool = False,
) -> PipelineStatus:
    """Return a snapshot over any bus, of the client's model or of all.

    Args:
        client: The client.
        stall_timeout_s: As `pipeline.stall_timeout_s`.
        for_operator: Whether the stages' loads have settings, of which those of fairness name
            tenants, and adapters the paths of their folders. All keys of a gateway may read a
            status without them; and the causes of restarts.
        with_tenants: Whether fairness's load has the tenants without `for_operator` too.

    Raises:
        BusError: The bus can't be reached.
    """
    store = client.bus.store
    records, reports, backlog, (open_batches, batches) = await asyncio.gather(
        store.models.read(),
        client.deployment.reports(),
        client.deployment.backlog(),
        _batches(store),
    )
    lanes = lanes_of(
        reports
        if for_operator
        else (_for_everyone(report, with_tenants=with_tenants) for report in reports)
    )
    states = {id: record.state for id, record in records.items()}
    reason = reason_of(states, lanes)
    return PipelineStatus(
        ready=not reason,
        reason=reason,
        held=held_of(lanes),
        waiting=backlog.waiting,
        in_flight=backlog.pending,
        queue_length=backlog.queue_length,
        dead_letters=backlog.dead,
        lanes=lanes,
        models=states,
        stall_timeout_s=stall_timeout_s,
        progress=progress_of(lanes, stall_timeout_s),
        open_batches=open_batches,
        batches=batches[:MOST_BATCHES],
    )


async def _batches(store: Store) -> tuple[int, list[BatchProgress]]:
    """Return the number of open batches and their progress; nothing where the user of the bus may
    not read them: they name other tenants."""
    try:
        return await store.batches.progress()
    except BusError as error:
        if error.code != "not_permitted":
            raise
        return 0, []


def _for_everyone(report: StageReport, *, with_tenants: bool) -> StageReport:
    hidden = ("settings",) if with_tenants else ("settings", "tenants")
    return replace(
        report,
        restarts=replace(report.restarts, cause=""),
        load={name: report.load[name] for name in report.load if name not in hidden},
        adapters=tuple(
            replace(each, folder=PurePath(each.folder).name) for each in report.adapters
        ),
    )


def of_tenant(status: PipelineStatus, tenant: str | None) -> PipelineStatus:
    """Return the status with a tenant's batches only; None for all. The numbers remain."""
    if tenant is None:
        return status
    own = [each for each in status.batches if each.tenant == tenant]
    return replace(status, batches=own)


def of_models(status: PipelineStatus, models: Collection[str]) -> PipelineStatus:
    """Return the status of some of several models. The counts remain those of all."""
    states = {id: state for id, state in status.models.items() if id in models}
    lanes = [lane for lane in status.lanes if lane.model in states]
    reason = reason_of(states, lanes)
    progress = progress_of(lanes, status.stall_timeout_s)
    return replace(
        status,
        ready=not reason,
        reason=reason,
        held=held_of(lanes),
        lanes=lanes,
        models=states,
        progress=progress,
    )
