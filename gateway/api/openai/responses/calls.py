"""The endpoints of `/v1/responses`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from copy import copy
from functools import partial
from typing import NamedTuple

import anyio
import msgspec

from .....config import NanoInferenceError, shown
from .....store.calls import DurableCall
from .....text.messages import ToolUse
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
from ....serving.fields import Body, ignore, read_query
from ....serving.prepared import about_tools, check_request, prepare, tokens_of
from ....serving.rendered import rendered
from ....serving.samples import SampleChunks, stream_unsent
from ....serving.services import Services
from ..errors import as_openai
from .compaction import compact
from .events import NOTHING, ResponseEvents, read_number, response_of
from .items import REFERENCE, Item, check_calls, page_of
from .output import ResponseWriter, response_with
from .requests import (
    ItemsQuery,
    NeverBegun,
    ResponseCall,
    ResponseRecord,
    RetrieveQuery,
    conversation_of,
    read_response,
)
from .stored import BackgroundResponses, as_response_error, check_streams
from .tools import has_servers, tool_use

_SOON_S = 0.05
"""Time for a background response to be published before its client is answered. A response that
waits for a place is published later."""

_SHARE_OF_OUTPUT = 8
"""With `truncation: auto` and no `max_output_tokens`, this part of a model's length stays free."""

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
        if self._services.config.mcp.enabled and has_servers(wanted.fields.tools):
            # Imported for such calls alone.
            from .mcp_calls import create

            return await create(self._services, self, call, wanted, items, again)
        if wanted.fields.max_tool_calls is not None:
            ignore("max_tool_calls")
        if wanted.fields.stream and (event_id := last_event_id(call)):
            response_id = response_of(event_id)
            found = await self.stored.find_stored(call, response_id, again)
            return await self._again(call, found, read_number(event_id, response_id))
        if again is None:
            # Errors of the conversation would otherwise come first.
            await self._services.served.check(wanted.fields.model, call.caller)
        whole = await self.whole(call, wanted, items)
        call.session = await self.stored.session_of(call, wanted)
        call.begin(wanted.fields.budget_ms, wanted.fields.model)
        record = msgspec.structs.replace(
            await self.prepared(call, whole),
            deadline_ns=call.deadline_ns,
            caller=call.caller,
            keyed=again,
            session=call.session,
        )
        await self.check(record)
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
        record = await self.prepared(call, await self.whole(call, wanted, items))
        tokens = await self._num_tokens(record)
        return JsonResponse({"object": "response.input_tokens", "input_tokens": tokens})

    async def render(self, call: Call) -> Response:
        """Return the body of `/inference/v1/generate` for a response."""
        services = self._services
        _, wanted, items = await self._read(call)
        await services.served.check(wanted.fields.model, call.caller)
        record = await self.prepared(call, await self.whole(call, wanted, items))
        logprobs = wanted.fields.top_logprobs or 0 if wanted.logprobs else None
        request = record.request(services.config)
        return JsonResponse(await rendered(services, request, wanted.model, logprobs=logprobs))

    async def compact(self, call: Call) -> Response:
        """Compact a conversation."""
        return await compact(self._services, self, call)

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
        length = await self._services.length.get()
        return body, *read_response(body, config, length, call.tenant)

    async def whole(self, call: Call, wanted: ResponseCall, items: list[Item]) -> ResponseRecord:
        """Return the record of a call, with the items before its own, and no prompt yet."""
        before: list[Item] = []
        fields = wanted.fields
        if previous := fields.previous_response_id:
            before = await self.conversation_of(call, previous)
        elif conversation_id := fields.conversation_id:
            conversations = self.stored.conversations
            found = await conversations.find(call.caller, call.tenant, conversation_id)
            before = found.items
        items = [*before, *await self.resolved(call, before, items)]
        # A program that looks whether a model answers sends nothing, and takes one token.
        if not (items or fields.instructions or fields.max_output_tokens == 1):
            raise field_error("input", "is empty; give a text or messages")
        check_calls(items, len(before))
        return ResponseRecord(tenant=call.tenant, call=wanted, items=items, num_before=len(before))

    async def resolved(self, call: Call, before: list[Item], items: list[Item]) -> list[Item]:
        """Return items with the stored ones in place of references to them.

        Args:
            before: Items before them. A reference to one of them adds nothing.
        """
        known = {item["id"] for item in before}
        found: list[Item] = []
        stored: dict[str, Item] = {}
        for place, item in enumerate(items):
            item_id = item["id"]
            if item["type"] != REFERENCE:
                found.append(item)
            elif item_id not in known:
                if item_id not in stored and (response_id := response_with(item_id)):
                    with suppress(FieldError):
                        made = await self.conversation_of(call, response_id)
                        stored |= {each["id"]: each for each in made}
                if item_id not in stored:
                    raise field_error(
                        f"input[{place}].id",
                        f": there is no item {shown(item_id)} here: it is of no stored response "
                        "that is completed, or came from a client; send the item itself",
                        code="unknown_item",
                    )
                found.append(stored[item_id])
            known.add(item_id)
        return found

    async def prepared(self, call: Call, record: ResponseRecord) -> ResponseRecord:
        """Add the prompt, and what it implies for the output."""
        fields = record.call.fields
        use = tool_use(fields, await self._services.tokenizer.message_format())
        make = partial(self._with_prompt, call, record, use)
        if fields.truncation == "disabled":
            return await make(record.items)
        length = await self._services.length.get()
        room = fields.max_output_tokens or length // _SHARE_OF_OUTPUT
        found = await self._first_that_fits(make, record, max(1, length - room))
        call.session_note = ""  # that of the prompt which was tried last
        return found

    async def _first_that_fits(
        self,
        make: Callable[[list[Item]], Awaitable[ResponseRecord]],
        record: ResponseRecord,
        most: int,
    ) -> ResponseRecord:
        """Return the response whose prompt has as many of the last items as fit; with the fewest
        if none fits, which is then refused like any other.

        Args:
            make: Returns the response with a prompt of some items.
            most: The most tokens of a prompt.
        """
        # The prompt may begin with any message of a user, so that calls stay with their results.
        starts = [
            place
            for place, item in enumerate(record.items)
            if place and item["type"] == "message" and item["role"] == "user"
        ]
        best = await make(record.items)
        if await self._num_tokens(best) <= most or not starts:
            return best
        low, high = 0, len(starts) - 1
        best = await make(record.items[starts[-1] :])
        while low < high:
            middle = (low + high) // 2
            tried = await make(record.items[starts[middle] :])
            if await self._num_tokens(tried) <= most:
                best, high = tried, middle
            else:
                low = middle + 1
        return best

    async def _num_tokens(self, record: ResponseRecord) -> int:
        services = self._services
        return len(await tokens_of(services, record.prompt, record.images, record.tenant))

    async def _with_prompt(
        self, call: Call, record: ResponseRecord, use: ToolUse, items: list[Item]
    ) -> ResponseRecord:
        fields, sampling = record.call.fields, record.call.sampling
        prepared = await prepare(
            call,
            self._services,
            conversation_of(fields, items),
            use,
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

    async def check(self, record: ResponseRecord) -> None:
        """Refuse here what the bus or admission would refuse."""
        services = self._services
        request = record.request(services.config)
        services.submissions.check_ready()
        services.submissions.check_priority(record.caller, request.priority)
        await self._check_compaction(record)
        await check_request(services, request)
        size, most = len(record.encode()), services.config.bus.max_request_bytes
        if record.is_durable and size > most:
            raise FieldError(
                f"the conversation with all that is kept of it has {size} bytes, and may have "
                f"{most} (bus.max_request_bytes); send less, or store: false",
                param="input",
                code="request_too_large",
            )

    async def _check_compaction(self, record: ResponseRecord) -> None:
        """Refuse a prompt that its call would have compacted. Other rules change nothing."""
        rules = record.call.fields.context_management
        limits = [each.compact_threshold for each in rules if each.compact_threshold is not None]
        if rules:
            ignore("context_management")
        if limits and (tokens := await self._num_tokens(record)) > min(limits):
            raise field_error(
                "context_management",
                f": the prompt has {tokens} tokens, more than compact_threshold, and nothing is "
                "compacted by itself here; send the output of /v1/responses/compact, have old "
                'turns left out by truncation "auto", or leave context_management out',
                code="unsupported",
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
        check_streams(found.record)
        return await self._respond(await self._attached(call, found, after))

    async def _followed(
        self, call: Call, found: Found[ResponseRecord], after: int | None, event_id: str
    ) -> Response:
        """Stream a stored response, after an event."""
        check_streams(found.record)
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
            keep = self.stored.conversations.add_response
            events = ResponseEvents(writer, send, self.stored.beside, keep, after)
            if record.background:
                await events.create()
            attachment: Attachment | None = None
            try:
                async with attach() as attachment:
                    with about_tools(record.reading):
                        unsent = SampleChunks(events.add)
                        try:
                            completion = await stream_unsent(
                                submissions, call, asked, unsent, attachment
                            )
                        finally:
                            if attachment is not None and call.may_return():
                                attachment.resumable = True
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
                try:
                    await events.end(completion)
                except NanoInferenceError as error:
                    # Its conversation has no room for it.
                    await events.interrupt(as_response_error(error, record.id))

        ids = bool(gateway.event_ids) and record.call.fields.store
        stream = EventStream(produce, gateway.comment_s, ids=ids)
        return stream
