"""Responses on their way through the engine: while somebody waits, or in the background."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing

import anyio
import anyio.lowlevel

from .....bus.public import Completion, GenerateRequest, Output
from .....config import BusError, ChannelClosed, Config, NanoInferenceError
from .....store.calls import DurableCall
from .....telemetry import TraceContext
from ....serving.account import Account
from ....serving.durable_calls import Attachment, DurableCalls
from ....serving.origin import Origin
from ....serving.submissions import Submissions
from .records import Record, decode_record

MOST_UNSENT = 4096
"""Outputs that wait here for a client that does not read. The others wait on the bus."""

_BUS_AWAY_S = 1.0
"""After so long it is looked whether the bus is back."""

Take = Callable[[Output], Awaitable[None]]
Ended = Callable[[Record, Completion], Awaitable[None]]


async def run_request(
    submissions: Submissions,
    origin: Origin,
    request: GenerateRequest,
    attachment: Attachment | None,
    take: Take,
) -> None:
    """Runs a response's request, or follows it, where it was begun before.

    Args:
        attachment: In the response; None of one that ends with its connection.
        take: Is given all outputs in order, from the first one on.

    Raises:
        NanoInferenceError: The engine did not do it.
    """

    async def run(index: int, begun: bool) -> None:
        async with aclosing(submissions.outputs(origin, request, begun, attachment)) as outputs:
            async for output in outputs:
                await take(output)
                await anyio.lowlevel.checkpoint()

    published = () if attachment is None else attachment.begun_before
    await submissions.run(origin, [request], run, published)


async def send_outputs(
    submissions: Submissions,
    origin: Origin,
    request: GenerateRequest,
    attachment: Attachment | None,
    take: Take,
) -> NanoInferenceError | None:
    """As `run_request`, for a client that may read slowly: the others are not delayed by that.

    Gives the error that ended it, when all that came before was taken.
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
            await run_request(submissions, origin, request, attachment, put.send)
        except NanoInferenceError as error:
            # Not through the group, which would wrap it.
            failure = error
    return failure


class Run:
    """A response that is run in the background by this gateway.

    Attributes:
        settled: Set when it is published, or will not be.
        failure: Why it will not be.
    """

    def __init__(self) -> None:
        self.settled = anyio.Event()
        self.failure: NanoInferenceError | None = None


class Background:
    """The responses that this gateway runs, or goes on with for another one, for nobody who waits.

    A response is kept with all that it takes to run it. The gateway that began it stays attached
    until its end; an orphaned one, whose gateway was killed, is taken over by another gateway.
    """

    def __init__(
        self, submissions: Submissions, kept: DurableCalls, config: Config, ended: Ended
    ) -> None:
        """Args: `ended` is told of each that has ended here."""
        self._ended = ended
        self._submissions = submissions
        self._kept = kept
        self._config = config
        self._running: dict[str, Run] = {}
        kept.taken_over_by(self._take_over)

    def begin(self, record: Record, origin: Origin, kept: DurableCall) -> Run:
        """Runs a response that is kept."""
        run = self._running[record.id] = Run()
        self._kept.begin(self._run(run, record, origin, kept))
        return run

    def running(self, response_id: str) -> Run | None:
        """One that is run here."""
        return self._running.get(response_id)

    def _take_over(self, response_id: str, kept: DurableCall) -> bool:
        record = decode_record(kept.record)
        if record is None or not record.background:
            return False
        # One that is run here may be unattached while the bus is away.
        if record.failure is None and record.id not in self._running:
            account = Account(background=True)
            origin = Origin(
                *(record.tenant, TraceContext(), record.deadline_ns, account),
                record.caller,
                record.call.fields.model,
            )
            self.begin(record, origin, kept)
        return True

    async def _run(
        self, run: Run, record: Record, origin: Origin, kept: DurableCall | None
    ) -> None:
        try:
            while not await self._attach(run, record, origin, kept):
                await anyio.sleep(_BUS_AWAY_S)
                kept = None
        finally:
            self._running.pop(record.id, None)
            run.settled.set()

    async def _attach(
        self, run: Run, record: Record, origin: Origin, kept: DurableCall | None
    ) -> bool:
        """Runs one, or goes on with it; returns False when the bus is away, and it is to be tried
        again.

        Args:
            kept: None when that has to be looked up.
        """
        try:
            kept = kept or await self._kept.find(record.id)
            if kept is None:
                return True
            async with self._kept.resumed(
                record.id, kept, [record.id], record.name, background=True
            ) as attachment:
                attachment.noted = run.settled.set
                request = record.request(self._config)

                async def take(output: Output) -> None:
                    """Whoever wants to read it follows it."""
                    if isinstance(output, Completion):
                        await self._ended(record, output)

                try:
                    await run_request(self._submissions, origin, request, attachment, take)
                except NanoInferenceError as error:
                    await self._fail(run, record, attachment, error)
            return True
        except BusError as error:
            return isinstance(error, ChannelClosed) or error.code != BusError.code

    async def _fail(
        self, run: Run, record: Record, attachment: Attachment, error: NanoInferenceError
    ) -> None:
        if attachment.ended:
            return  # its outputs tell why
        if error.code in (BusError.code, "shutting_down"):
            attachment.fail(error)
            if isinstance(error, BusError):
                raise error
            return
        if not attachment.entries:
            run.failure = error
            await self._kept.replace(record.id, record.failed(error).encode())
        attachment.end()
