"""Responses in the background."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from .....bus.public import Completion
from .....config import BusError, ChannelClosed, NanoInferenceError
from .....store.calls import DurableCall
from .....telemetry import TraceContext
from ....serving.account import Account
from ....serving.durable_calls import Attachment
from ....serving.origin import Origin
from ....serving.samples import complete_sample
from ....serving.services import Services
from ..records import decode_record
from .requests import ResponseRecord

_BUS_AWAY_S = 1.0
"""Seconds between attempts to reach a lost bus."""

Ended = Callable[[ResponseRecord, Completion], Awaitable[None]]


class Run:
    """A response that this gateway runs in the background.

    Attributes:
        kept: The response as the bus keeps it; None if that is to be read again.
        settled: Set when it is published, or will not be.
        failure: The reason why it will not be published.
    """

    def __init__(self, record: ResponseRecord, origin: Origin, kept: DurableCall) -> None:
        self.record = record
        self.origin = origin
        self.kept: DurableCall | None = kept
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
        run = self._running[record.id] = Run(record, origin, kept)
        self._services.durable.begin(self._run(run))
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

    async def _run(self, run: Run) -> None:
        try:
            while not await self._attach(run):
                await anyio.sleep(_BUS_AWAY_S)
                run.kept = None
        finally:
            self._running.pop(run.record.id, None)
            run.settled.set()

    async def _attach(self, run: Run) -> bool:
        """Run a response, or follow it. Returns False if the bus is away: try again."""
        durable, submissions, record = (
            self._services.durable,
            self._services.submissions,
            run.record,
        )
        request = record.request(self._services.config)
        try:
            kept = run.kept or await durable.find(record.id)
            if kept is None:
                return True
            async with durable.resumed(record, kept) as attachment:
                attachment.noted = run.settled.set
                try:
                    completion = await complete_sample(
                        submissions, run.origin, request, attachment=attachment
                    )
                    await self._ended(record, completion)
                except NanoInferenceError as error:
                    await self._fail(run, attachment, error)
            return True
        except BusError as error:
            return isinstance(error, ChannelClosed) or error.code != BusError.code

    async def _fail(self, run: Run, attachment: Attachment, error: NanoInferenceError) -> None:
        if attachment.ended:
            return  # its outputs have the error
        if error.code in (BusError.code, "shutting_down"):
            attachment.fail(error)
            if isinstance(error, BusError):
                raise error
            return
        if not attachment.entries:
            run.failure = error
            await self._services.durable.replace(run.record.id, run.record.failed(error).encode())
        attachment.end()
