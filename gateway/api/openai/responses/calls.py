"""The endpoints of `/v1/responses`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from copy import copy
from functools import partial
from typing import NamedTuple

import anyio
import msgspec

from .....config import NanoInferenceError
from .....store.calls import DurableCall
from ....call import Account, Call
from ....server.http import (
    EventStream,
    FieldError,
    JsonResponse,
    Response,
    SendEvent,
    connected,
    field_error,
    read_object,
)
from ....serving.begun_calls import Attach, Found, keyed, last_event_id
from ....serving.durable_calls import Attachment
from ....serving.fields import Body, read_query
from ....serving.prepared import about_tools, check_request, prepare, tokens_of
from ....serving.samples import SampleChunks, stream_unsent
from ....serving.services import Services
from ..errors import as_openai
from ..messages import tool_use
from .events import NOTHING, ResponseEvents, read_number, response_of
from .items import Item, check_calls, page_of
from .output import ResponseWriter
from .requests import (
    ItemsQuery,
    NeverBegun,
    ResponseCall,
    ResponseRecord,
    RetrieveQuery,
    conversation_of,
    read_response,
)
from .stored import BackgroundResponses, as_response_error

_SOON_S = 0.05
"""Time for a background response to be published before its client is answered. A response that
waits for a place is published later."""


Conversations = Callable[[Call, str], Awaitable[list[Item]]]
"""Returns the conversation of a stored response."""


class _RunningResponse(NamedTuple):
    """A response that is written for a client.

    Attributes:
        after: The number of the last event that the client has.
        retrieved: Whether a failed response is no error of the call.
    """

    call: Call
    writer: ResponseWriter
    attach: Attach
    after: int = NOTHING
    retrieved: bool = False


class ResponseCalls:
    """The endpoints.

    Attributes:
        stored: The responses of this model.
        conversation_of: Finds the conversation that a new response continues. With several models
            another one may have made it.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self.stored = BackgroundResponses(services)
        self.conversation_of: Conversations = self.stored.conversation

    async def create(self, call: Call) -> Response:
        body, wanted, items = await self._read(call)
        again = keyed(call, body)
        if wanted.fields.stream and (event_id := last_event_id(call)):
            response_id = response_of(event_id)
            found = await self.stored.find_stored(call, response_id, again)
            return await self._again(call, found, read_number(event_id, response_id))
        if again is None:
            # Errors of the conversation would otherwise come first.
            await self._services.served.check(wanted.fields.model, call.caller)
        items = await self._whole(call, wanted, items)
        call.begin(wanted.fields.budget_ms, wanted.fields.model)
        record = await self._prepared(
            call,
            ResponseRecord(
                tenant=call.tenant,
                call=wanted,
                items=items,
                deadline_ns=call.deadline_ns,
                caller=call.caller,
                keyed=again,
            ),
        )
        await self._check(record)
        if again is not None:
            record, begun = await self.stored.claim(call, record)
            if begun is not None:
                return await self._again(call, begun)
        writer = await self.stored.writer(record, first=True)
        if record.background:
            return await self._in_background(call, writer)
        attach: Attach = partial(self._services.durable.begun, record)
        return await self._respond(_RunningResponse(call, writer, attach))

    async def input_tokens(self, call: Call) -> Response:
        """Count the tokens of a response's prompt; the body is that of `create`."""
        _, wanted, items = await self._read(call)
        await self._services.served.check(wanted.fields.model, call.caller)
        items = await self._whole(call, wanted, items)
        record = ResponseRecord(tenant=call.tenant, call=wanted, items=items)
        record = await self._prepared(call, record)
        tokens = await tokens_of(self._services, record.prompt, record.images, record.tenant)
        return JsonResponse({"object": "response.input_tokens", "input_tokens": len(tokens)})

    async def retrieve(self, call: Call) -> Response:
        """Return a response as it is now, or its stream."""
        query = read_query(call, RetrieveQuery)
        if query.starting_after is not None and not query.stream:
            raise field_error("starting_after", "takes stream=true")
        found = await self._found(call)
        if not query.stream:
            return JsonResponse(await self.stored.known(found))
        return await self._followed(call, found, query.starting_after, last_event_id(call))

    async def delete(self, call: Call) -> Response:
        found = await self._found(call)
        await self.stored.delete(found)
        return JsonResponse({"id": found.record.id, "object": "response", "deleted": True})

    async def cancel(self, call: Call) -> Response:
        return JsonResponse(await self.stored.cancel(await self._found(call)))

    async def stream(self, call: Call) -> Response:
        """Stream a response like `retrieve`, by the endpoint of all streams."""
        event_id = call.query.get("after") or last_event_id(call)
        return await self._followed(call, await self._found(call), None, event_id)

    async def end(self, call: Call) -> Response:
        """End a response, in the background or not. A response that has ended stays as it is."""
        found = await self._found(call)
        await self.stored.end(found)
        return JsonResponse(
            {"id": found.record.id, "object": "stream.cancelled", "cancelled": True}
        )

    async def items(self, call: Call) -> Response:
        """List the items before a response's output."""
        query = read_query(call, ItemsQuery)
        found = await self._found(call)
        return JsonResponse(page_of(found.record.items, query.order, query.after, query.limit))

    async def _found(self, call: Call) -> Found[ResponseRecord]:
        named = call.params
        response_id = named.get("response_id") or named["stream"]
        return await self.stored.find_stored(call, response_id)

    # --- making one ---------------------------------------------------------------------------

    async def _read(self, call: Call) -> tuple[Body, ResponseCall, list[Item]]:
        config = self._services.config
        body = await read_object(call, config.gateway.max_body_bytes)
        return body, *read_response(body, config, await self._services.length.get())

    async def _whole(self, call: Call, wanted: ResponseCall, items: list[Item]) -> list[Item]:
        """Return the items of a call, after those of the response that it continues."""
        before: list[Item] = []
        if previous := wanted.fields.previous_response_id:
            before = await self.conversation_of(call, previous)
        items = [*before, *items]
        check_calls(items, len(before))
        return items

    async def _prepared(self, call: Call, record: ResponseRecord) -> ResponseRecord:
        """Add the prompt, and what it implies for the output."""
        fields, sampling = record.call.fields, record.call.sampling
        prepared = await prepare(
            call,
            self._services,
            conversation_of(fields, record.items),
            tool_use(fields),
            sampling,
            reasoning_budget=fields.thinking_token_budget,
        )
        constraint = prepared.sampling.constraint
        return msgspec.structs.replace(
            record,
            prompt=prepared.prompt,
            images=prepared.images,
            reading=prepared.reading,
            constraint=None if constraint == sampling.constraint else constraint,
        )

    async def _check(self, record: ResponseRecord) -> None:
        """Refuse here what the bus or admission would refuse."""
        services = self._services
        request = record.request(services.config)
        services.submissions.check_ready()
        services.submissions.check_priority(record.caller, request)
        await check_request(services, request)
        size, most = len(record.encode()), services.config.bus.max_request_bytes
        if record.is_durable and size > most:
            raise FieldError(
                f"the conversation with all that is kept of it has {size} bytes, and may have "
                f"{most} (bus.max_request_bytes); send less, or store: false",
                param="input",
                code="request_too_large",
            )

    async def _in_background(self, call: Call, writer: ResponseWriter) -> Response:
        record, durable = writer.record, self._services.durable
        kept = DurableCall(record.encode())
        if record.keyed is None:
            await durable.keep(record)
        apart = copy(call)
        # The headers are set when it begins.
        apart.account = Account(background=True, headers=call.account.headers)
        run = self.stored.begin(record, apart, kept)
        with anyio.move_on_after(_SOON_S):
            await run.settled.wait()
        if run.failure is not None:
            await durable.forget(record)
            raise run.failure
        if record.call.fields.stream:
            return await self._again(call, Found(record, kept))
        return JsonResponse(writer.begun("queued"))

    async def _again(
        self, call: Call, found: Found[ResponseRecord], after: int = NOTHING
    ) -> Response:
        """Answer a call that was begun before, perhaps after an event."""
        fields = found.record.call.fields
        if fields.background and not fields.stream:
            return JsonResponse(await self.stored.known(found))
        return await self._respond(await self._attached(call, found, after))

    async def _followed(
        self, call: Call, found: Found[ResponseRecord], after: int | None, event_id: str
    ) -> Response:
        """Stream a stored response, after an event."""
        if after is None:
            after = read_number(event_id, found.record.id) if event_id else NOTHING
        running = await self._attached(call, found, after)
        return self._streamed(running._replace(retrieved=True))

    async def _attached(
        self, call: Call, found: Found[ResponseRecord], after: int
    ) -> _RunningResponse:
        record = found.record
        fields = record.call.fields
        call.begin(fields.budget_ms, fields.model)
        return _RunningResponse(
            call, await self.stored.writer(record), partial(self.stored.attach, found), after
        )

    async def _respond(self, running: _RunningResponse) -> Response:
        record = running.writer.record
        if record.call.fields.stream:
            return self._streamed(running)
        submissions, asked = self._services.submissions, record.request(self._services.config)
        async with connected(running.call.cancelled):
            try:
                async with running.attach() as attachment:
                    with about_tools(record.reading):
                        (completion,) = await submissions.run(
                            running.call, [asked], attachment=attachment
                        )
            except NanoInferenceError as error:
                raise as_response_error(error, record.id) from None
            return JsonResponse(await self.stored.ended(running.writer, completion))

    def _streamed(self, running: _RunningResponse) -> Response:
        call, writer, attach, after, retrieved = running
        record, gateway = writer.record, self._services.config.gateway
        submissions, asked = self._services.submissions, record.request(self._services.config)

        async def produce(send: SendEvent) -> None:
            events = ResponseEvents(writer, send, self.stored.beside, after)
            if record.background:
                await events.create()
            attachment: Attachment | None = None
            try:
                async with attach() as attachment:
                    with about_tools(record.reading):
                        unsent = SampleChunks(events.add)
                        completion = await stream_unsent(
                            submissions, call, asked, unsent, attachment
                        )
            except NanoInferenceError as error:
                failure = as_response_error(error, record.id)
                has_ended = (
                    isinstance(error, NeverBegun)
                    or not record.is_durable
                    or (attachment is not None and attachment.ended)
                )
                if not stream.committed and not (retrieved and has_ended):
                    raise as_openai(failure, "responses") from None
                await (events.fail(failure) if has_ended else events.interrupt(failure))
            else:
                await events.end(completion)

        ids = gateway.event_ids and record.call.fields.store
        stream = EventStream(produce, gateway.comment_s, ids=ids)
        return stream
