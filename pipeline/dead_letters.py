"""Retrying dead letters."""

from __future__ import annotations

from contextlib import AsyncExitStack

from msgspec.structs import replace

from ..bus.dead_letters import DeadLetter
from .client import BusClient


async def retry_dead_letter(client: BusClient, letter: DeadLetter) -> str:
    """Publish the request of a dead letter again, to its model, and remove the letter.

    Returns:
        The id of the new request: the old id may still have its old answer.

    Raises:
        BusError: The bus can't be reached; the letter stays.
    """
    async with AsyncExitStack() as stack:
        bus = client.bus
        if letter.model != bus.model:
            bus = (await stack.enter_async_context(client.of_model(letter.model))).bus
        entry_id = await bus.requests.publish(
            replace(letter.request, request_id=""),
            traceparent=letter.traceparent,
            tracestate=letter.tracestate,
        )
    # Last, so that the letter stays if publishing fails.
    await client.bus.requests.drop_dead_letter(letter.letter_id)
    return entry_id
