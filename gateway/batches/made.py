"""A tenant's batches: made, found, and cancelled."""

from __future__ import annotations

import time

from msgspec.structs import replace

from ...config import RequestError, shown
from ...store.batches import ENDED, BatchState, StoredBatch
from ..server.http import EngineError
from .runner import BatchRunner


async def begin(runner: BatchRunner, state: BatchState) -> None:
    """Store a new batch, which gateways then run. Raises RequestError: too_many_batches."""
    found = await runner.store.listed(state.tenant)
    most = runner.config.max_open
    if sum(each.state.status not in ENDED for each in found) >= most:
        raise EngineError(
            f"you have {most} batches that have not ended, which is the most (batches.max_open)",
            remedy="wait for the end of one",
            code="too_many_batches",
            retry_after_s=60.0,
        )
    window_s = state.expires_s - state.created_s
    await runner.store.create(state, window_s + 2 * runner.config.files_ttl_s)
    runner.wake()


async def find(
    runner: BatchRunner, tenant: str, batch_id: str, interface: str = "openai"
) -> StoredBatch:
    """Return a tenant's batch. Raises RequestError: unknown_batch."""
    found = await runner.store.read(batch_id)
    if found is None or (found.state.tenant, found.state.interface) != (tenant, interface):
        raise EngineError(
            f"there is no batch {shown(batch_id)} here: it was never made, was forgotten, or is "
            "another tenant's (X-Tenant)",
            remedy="list your batches",
            code="unknown_batch",
        )
    if found.state.status not in ENDED:
        # A server that came back without its last writes may have lost that it is unfinished.
        await runner.store.reopen(found.state)
    return found


async def cancelled(
    runner: BatchRunner, tenant: str, batch_id: str, interface: str = "openai"
) -> None:
    """Let a batch's lines run no further. Raises RequestError: unknown_batch, batch_ended."""
    while True:
        found = await find(runner, tenant, batch_id, interface)
        if found.state.status == "cancelling":
            return
        if found.state.status not in ("validating", "in_progress"):
            raise RequestError(
                f"batch {batch_id} is {found.state.status}, so that no line is left to cancel",
                remedy="read its results",
                code="batch_ended",
            )
        state = replace(found.state, status="cancelling", cancelling_s=int(time.time()))
        if await runner.store.replace(found, state) is not None:
            runner.wake()
            return
