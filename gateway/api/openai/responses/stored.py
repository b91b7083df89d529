"""Responses on the bus: found, read, continued, cancelled, deleted, and run in the background."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import anyio
import msgspec

from .....bus.public import Completion
from .....config import BusError, ChannelClosed, NanoInferenceError, shown
from .....store.calls import DurableCall
from ....call import Call
from ....server.http import EngineError, FieldError, field_error
from ....serving.begun_calls import BegunCalls, Found, decode_record, pauses_s
from ....serving.durable_calls import Attachment, IdempotencyKey
from ....serving.services import Services
from ....serving.sessions import session_of
from ....serving.tokenizer import READING
from .conversations import Conversations
from .items import Item, answered
from .output import UNENDED, Answer, ResponseWriter
from .requests import NeverBegun, ResponseCall, ResponseRecord

_BUS_AWAY_S = 1.0
"""Seconds between attempts to reach a lost bus."""

T = TypeVar("T")

_PREVIOUS = "previous_response_id"
_NOT_FOUND, _UNFINISHED = "previous_response_not_found", "previous_response_unfinished"
_CONTINUED = ("completed", "incomplete")

_CANCEL_TIMEOUT_S = 10.0
"""Time for a cancelled response to end before its state is returned."""

_LONGEST_WAIT_S = 0.5


class StoredResponses(BegunCalls[ResponseRecord]):
    """The responses of all gateways."""

    def __init__(self, services: Services) -> None:
        super().__init__(services.durable, ResponseRecord, unknown)
        self._services = services
        self.conversations = Conversations(services)

    async def find_stored(
        self, call: Call, response_id: str, again: IdempotencyKey | None = None
    ) -> Found[ResponseRecord]:
        """Find a response, unless it has store: false; see `find`.

        Raises:
            RequestError: unknown_response, idempotency_key_reused.
        """
        found = await self.find(call, response_id, again)
        if not found.record.call.fields.store:
            raise unknown(response_id)
        return found

    async def writer(self, record: ResponseRecord, *, first: bool = False) -> ResponseWriter:
        """Return the writer of a response.

        Args:
            first: No other reader has read the output, so that metrics count it.

        Raises:
            RequestError: unsupported: the gateway lacks the tokenizer.
        """
        services = self._services
        form = await services.tokenizer.message_format()
        measures = services.measures if first else None
        return ResponseWriter(record, await services.tokenizer.required(), form, measures)

    async def known(self, found: Found[ResponseRecord]) -> Answer:
        """Return the present state of a response, without waiting.

        Raises:
            RequestError: unknown_response.
        """
        record, kept = found
        if record.answer is not None:
            return record.answer
        services = self._services
        try:
            last = await services.durable.last_output(record.id, kept)
        except EngineError as error:
            raise as_response_error(error, record.id) from None
        if isinstance(last, Completion):
            request = record.request(services.config)
            last = await services.submissions.filtered_end(_call_of(record), request, last)
        writer = await self.writer(record)
        made = last.usage.completion_tokens if isinstance(last, Completion) else 0
        answer = await self.beside(made, partial(writer.known, kept, last))
        await self.conversations.add_response(record, answer)
        return answer

    async def ended(self, writer: ResponseWriter, completion: Completion) -> Answer:
        """Return a response that has ended, once its conversation has it."""
        made = completion.usage.completion_tokens
        answer = await self.beside(made, partial(writer.ended, completion))
        await self.conversations.add_response(writer.record, answer)
        return answer

    async def beside(self, tokens: int, work: Callable[[], T]) -> T:
        """Read so many tokens of an output, many of them in a thread."""
        return await self._services.tokenizer.process(tokens * READING, work)

    async def conversation(self, call: Call, response_id: str) -> list[Item]:
        """Return all items of a response that has ended, with its output.

        Raises:
            FieldError: It is unknown, or has not ended well.
        """
        try:
            found = await self.find_stored(call, response_id)
            answer = await self.known(found)
        except EngineError as error:
            raise field_error(_PREVIOUS, f": {error.message}", code=_NOT_FOUND) from None
        if answer["status"] not in _CONTINUED:
            raise field_error(
                _PREVIOUS,
                f": the response is {answer['status']}; one that is completed or "
                "incomplete can be continued",
                code=_UNFINISHED,
            )
        return [*found.record.items, *answered(answer["output"])]

    async def session_of(self, call: Call, wanted: ResponseCall) -> str:
        """Return the session of a new response: the one that its call names, or its conversation,
        or that of the response before, whose first response names it; "" for none.

        Raises:
            RequestError: invalid_session.
        """
        trees, fields = self._services.client.bus.store.trees, wanted.fields
        if named := session_of(call, trees):
            return named
        if not trees.enabled:
            return ""
        if previous := fields.previous_response_id:
            try:
                found = await self.find_stored(call, previous)
            except EngineError:  # another model's
                return previous
            return found.record.session or previous
        return fields.conversation_id or (wanted.id if fields.store else "")

    async def cancel(self, found: Found[ResponseRecord]) -> Answer:
        """Cancel a background response. Its output so far stays.

        Raises:
            RequestError: unknown_response; the response can't be cancelled.
        """
        if not found.record.background:
            raise FieldError(
                "only a response with background: true can be cancelled; any other ends when its "
                "connection is closed",
                param=None,
            )
        answer = await self.known(found)
        if answer["status"] in UNENDED:
            await self.end(found)
            answer = await self._ended(found, answer)
        elif answer["status"] != "cancelled":
            raise FieldError(
                f"the response is {answer['status']}; one that has ended can't be cancelled",
                param=None,
                remedy="leave it as it is",
            )
        return answer

    async def end(self, found: Found[ResponseRecord]) -> None:
        """End a response; see `DurableCalls.cancel`."""
        self._services.submissions.end_waiting(found.record.id)
        await self._services.durable.cancel(found.record.id)

    async def delete(self, found: Found[ResponseRecord]) -> None:
        """Delete a response. In the background it ends; another one's client still gets it.

        Raises:
            BusError: The bus can't be reached.
        """
        record = found.record
        if (await self.known(found))["status"] not in UNENDED:
            await self._services.durable.forget(record)
            return
        if record.background:
            await self.end(found)
        # The mark "cancelled" stays, for a gateway that is about to publish it.
        await self._services.durable.replace(record.id, b"")

    async def _ended(self, found: Found[ResponseRecord], answer: Answer) -> Answer:
        """Wait until a response has ended, or should have."""
        with anyio.move_on_after(_CANCEL_TIMEOUT_S):
            for pause_s in pauses_s(_LONGEST_WAIT_S):
                answer = await self.known(await self.look(found.record.id, found.record.tenant))
                if answer["status"] not in UNENDED:
                    break
                await anyio.sleep(pause_s)
        return answer


class Run:
    """A response that this gateway runs in the background.

    Attributes:
        kept: The response as the bus keeps it; None if that is to be read again.
        settled: Set when it is published, or can't be any more.
        failure: The reason why it will not be published.
    """

    def __init__(self, record: ResponseRecord, call: Call, kept: DurableCall) -> None:
        self.record = record
        self.call = call
        self.kept: DurableCall | None = kept
        self.settled = anyio.Event()
        self.failure: NanoInferenceError | None = None


class BackgroundResponses(StoredResponses):
    """Also the responses that this gateway runs without a client, or has taken over.

    The record of a response has all that a gateway needs to run it. The gateway that began it stays
    attached until its end; an orphaned one, whose gateway was killed, is taken over by another.
    """

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._running: dict[str, Run] = {}
        services.durable.taken_over_by(self._take_over)

    def begin(self, record: ResponseRecord, call: Call, kept: DurableCall) -> Run:
        """Run a response that the bus keeps."""
        run = self._running[record.id] = Run(record, call, kept)
        self._services.durable.begin(self._run(run))
        return run

    async def published(self, found: Found[ResponseRecord]) -> DurableCall:
        """Wait until a response is published, or could have been by the gateway that began it.

        A background response may wait long for its place.

        Raises:
            NeverBegun: It will not be published.
            RequestError: unknown_response: it was deleted meanwhile.
        """
        if not found.record.background:
            return await super().published(found)
        pauses = pauses_s(_LONGEST_WAIT_S)
        while not found.kept.entries and "cancelled" not in found.kept.marks:
            if (failure := found.record.failure) is not None:
                raise NeverBegun(failure.message, code=failure.code)
            run = self._running.get(found.record.id)
            if run is not None:
                await run.settled.wait()
            else:
                await anyio.sleep(next(pauses))
            found = await self.look(found.record.id, found.record.tenant)
        return found.kept

    def _take_over(self, response_id: str, kept: DurableCall) -> bool:
        record = decode_record(kept.record, ResponseRecord)
        if record is not None and record.answer is not None:
            self._services.durable.begin(self._lost(record, record.answer))
            return True
        if record is None or not record.background:
            return False
        # A response of this gateway may be unattached while the bus is away.
        if record.failure is None and record.id not in self._running:
            call = _call_of(record)
            call.deadline_ns, call.requested_model = record.deadline_ns, record.call.fields.model
            call.account.background = True
            self.begin(record, call, kept)
        return True

    async def _lost(self, record: ResponseRecord, answer: Answer) -> None:
        """End a response of several requests whose gateway was killed: none is made again, since
        tools were called between them."""
        if answer["status"] in UNENDED:
            error = {
                "code": "response_interrupted",
                "message": "the gateway that made the response was stopped; calls of tools in the "
                "output may have had their effect, and nothing was called again",
            }
            answer |= {"status": "failed", "error": error}
            record = msgspec.structs.replace(record, answer=answer)
            await self._services.durable.replace(record.id, record.encode())

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
        durable, record = self._services.durable, run.record
        request = record.request(self._services.config)
        try:
            kept = run.kept or await durable.find(record.id)
            if kept is None:
                return True
            async with durable.resumed(record, kept) as attachment:
                attachment.noted = run.settled.set
                try:
                    (completion,) = await self._services.submissions.run(
                        run.call, [request], attachment=attachment
                    )
                    if record.reading is not None or record.call.fields.conversation_id:
                        # No client may ever read the message, which is to be counted and kept.
                        await self.ended(await self.writer(record, first=True), completion)
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


def _call_of(record: ResponseRecord) -> Call:
    """Return the call of a response that no connection waits for."""
    call = Call(caller=record.caller)
    call.tenant, call.session = record.tenant, record.session
    return call


def check_streams(record: ResponseRecord) -> None:
    """Raises FieldError: The events of a response are sent once."""
    if record.answer is not None:
        raise field_error(
            "stream",
            ": the events of a response with tools of MCP servers are sent once; read "
            f"{record.id} without stream",
            code="unsupported",
        )


def unknown(response_id: str) -> EngineError:
    """There is no such response, or the caller may not see it."""
    return EngineError(
        f"there is no response {shown(response_id)} here: it was not stored, was deleted, is "
        "another tenant's (X-Tenant) or by a model that the key is not for, or ended longer ago "
        "than its results are kept (bus.results_ttl_s); send the call again",
        code="unknown_response",
    )


def as_response_error(error: NanoInferenceError, response_id: str) -> NanoInferenceError:
    """Return an error about a stream as one about a response."""
    return unknown(response_id) if error.code == "stream_not_found" else error
