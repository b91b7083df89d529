"""Responses on their way through the engine: with a client, or in the background."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel

from .....bus.public import Completion, Output
from .....config import BusError, ChannelClosed, NanoInferenceError
from .....store.calls import DurableCall
from .....telemetry import TraceContext
from ....serving.account import Account
from ....serving.durable_calls import Attachment
from ....serving.origin import Origin
from ....serving.services import Services
from ..records import decode_record
from .requests import ResponseRecord

MOST_UNSENT = 4096
"""Outputs that wait here for a client that does not read. The others wait on the bus."""

_BUS_AWAY_S = 1.0
"""Seconds between attempts to reach a lost bus."""

Take = Callable[[Output], Awaitable[None]]
Ended = Callable[[ResponseRecord, Completion], Awaitable[None]]


async def run_response(
    services: Services,
    origin: Origin,
    record: ResponseRecord,
    attachment: Attachment | None,
    take: Take,
) -> None:
    """Run a response's request, or follow one that was begun before.

    Args:
        attachment: None for a response that ends with its connection.
        take: Awaited with all outputs, from the first one on.

    Raises:
        NanoInferenceError: The engine did not do it.
    """

    async def take_one(index: int, output: Output) -> None:
        await take(output)

    requests = [record.request(services.config)]
    await services.submissions.run(origin, requests, take_one, attachment)


async def send_outputs(
    services: Services,
    origin: Origin,
    record: ResponseRecord,
    attachment: Attachment | None,
    take: Take,
) -> NanoInferenceError | None:
    """As `run_response`, for a client that may read slowly without delaying the others.

    Returns:
        The error that ended it, once all outputs before it were taken.
    """
    failure: NanoInferenceError | None = None
    put, got = anyio.create_memory_object_stream[Output](MOST_UNSENT)

    async def take_all() -> None:
        async with got:
            async for output in got:
                await take(output)
                # The server takes what fits its buffers without a pause.
                await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group, put:
        group.start_soon(take_all)
        try:
            await run_response(services, origin, record, attachment, put.send)
        except NanoInferenceError as error:
            # Not through the group, which would wrap it.
            failure = error
    return failure


class Run:
    """A response that this gateway runs in the background.

    Attributes:
        settled: Set when it is published, or will not be.
        failure: The reason why it will not be published.
    """

    def __init__(self) -> None:
        self.settled = anyio.Event()
        self.failure: NanoInferenceError | None = None


class BackgroundResponses:
    """The responses that this gateway runs without a client, or has taken over.

    The record of a response has all that a gateway needs to run it. The gateway that began it stays
    attached until its end; an orphaned one, whose gateway was killed, is taken over by another.
    """

    def __init__(self, services: Services, ended: Ended) -> None:
        """Args: `ended` is awaited with each response that has ended here."""
        self._ended = ended
        self._services = services
        self._running: dict[str, Run] = {}
        services.durable.taken_over_by(self._take_over)

    def begin(self, record: ResponseRecord, origin: Origin, kept: DurableCall) -> Run:
        """Run a response that the bus keeps."""
        run = self._running[record.id] = Run()
        self._services.durable.begin(self._run(run, record, origin, kept))
        return run

    def running(self, response_id: str) -> Run | None:
        """Return the run of a response of this gateway."""
        return self._running.get(response_id)

    def _take_over(self, response_id: str, kept: DurableCall) -> bool:
        record = decode_record(kept.record, ResponseRecord)
        if record is None or not record.background:
            return False
        # A response of this gateway may be unattached while the bus is away.
        if record.failure is None and record.id not in self._running:
            origin = Origin(
                record.tenant,
                TraceContext(),
                record.deadline_ns,
                Account(background=True),
                record.caller,
                record.call.fields.model,
            )
            self.begin(record, origin, kept)
        return True

    async def _run(
        self, run: Run, record: ResponseRecord, origin: Origin, kept: DurableCall | None
    ) -> None:
        try:
            while not await self._attach(run, record, origin, kept):
                await anyio.sleep(_BUS_AWAY_S)
                kept = None
        finally:
            self._running.pop(record.id, None)
            run.settled.set()

    async def _attach(
        self, run: Run, record: ResponseRecord, origin: Origin, kept: DurableCall | None
    ) -> bool:
        """Run a response, or follow it. Returns False if the bus is away: try again."""
        durable = self._services.durable

        async def take(output: Output) -> None:
            if isinstance(output, Completion):
                await self._ended(record, output)

        try:
            kept = kept or await durable.find(record.id)
            if kept is None:
                return True
            async with durable.resumed(
                record.id, kept, [record.id], record.name, background=True
            ) as attachment:
                attachment.noted = run.settled.set
                try:
                    await run_response(self._services, origin, record, attachment, take)
                except NanoInferenceError as error:
                    await self._fail(run, record, attachment, error)
            return True
        except BusError as error:
            return isinstance(error, ChannelClosed) or error.code != BusError.code

    async def _fail(
        self, run: Run, record: ResponseRecord, attachment: Attachment, error: NanoInferenceError
    ) -> None:
        if attachment.ended:
            return  # its outputs have the error
        if error.code in (BusError.code, "shutting_down"):
            attachment.fail(error)
            if isinstance(error, BusError):
                raise error
            return
        if not attachment.entries:
            run.failure = error
            await self._services.durable.replace(record.id, record.failed(error).encode())
        attachment.end()
