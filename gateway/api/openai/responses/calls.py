"""The endpoints of `/v1/responses`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .....bus.public import Completion, Output
from .....config import Config, NanoInferenceError
from .....store.calls import DurableCall
from ....policy.caller import Caller, caller_of
from ....server.http import (
    CLIENT_LEFT,
    EventStream,
    FieldError,
    JsonResponse,
    SendEvent,
    answer_while_connected,
    read_object,
    while_connected,
)
from ....serving.account import Account
from ....serving.chat_templates import ChatTemplates
from ....serving.durable_calls import Attachment, DurableCalls
from ....serving.lane_state import ModelLength, ServedModels
from ....serving.origin import Origin, origin_of, tenant_of
from ....serving.prepared import Prepared, of_tools, prepare
from ....serving.submissions import Submissions
from ....serving.words import LazyWords
from ..errors import as_openai
from ..idempotency import keyed
from ..resuming import Found, last_event_id
from .answers import Answers
from .events import NOTHING, Events, read_number, response_of
from .items import Item, check_calls, page_of
from .queries import read_page, read_retrieval
from .records import NeverBegun, Record
from .requests import ResponseCall, conversation_of, read_response
from .running import Background, run_request, send_outputs
from .stored import StoredResponses, as_response_error
from .tools import use_of

Attach = Callable[[], AbstractAsyncContextManager[Attachment | None]]
"""Attach to a response while the context is open, if the response is durable."""

_SOON_S = 0.05
"""How long one in the background may take to be published before its client is answered; where it
waits for a place, its client does not."""


class ResponseCalls:
    """The endpoints.

    Attributes:
        conversation_of: Finds the conversation that a new response goes on with, as `conversation`
            does; where there are several models, another may have made that.
    """

    def __init__(
        self,
        submissions: Submissions,
        kept: DurableCalls,
        config: Config,
        words: LazyWords,
        templates: ChatTemplates,
        length: ModelLength,
        served: ServedModels,
    ) -> None:
        self._submissions = submissions
        self._kept = kept
        self._config = config
        self._words = words
        self._templates = templates
        self._length = length
        self._served = served
        self._background = Background(submissions, kept, config, self._read)
        self._stored = StoredResponses(
            kept, submissions, self._background, words, templates, config
        )
        self.conversation_of: Callable[[str, str, Caller], Awaitable[list[Item]]] = (
            self._stored.conversation
        )

    async def conversation(self, response_id: str, tenant: str, caller: Caller) -> list[Item]:
        """All items of a response that this model has made, which has ended.

        Raises:
            FieldError: It is not known, or has not ended well.
        """
        return await self._stored.conversation(response_id, tenant, caller)

    async def create(self, request: Request) -> Response:
        tenant = tenant_of(request)
        body = await read_object(request, self._config.gateway.max_body_bytes)
        call, items = read_response(body, self._config, await self._length.get())
        again = keyed(request, tenant, body)
        if call.fields.stream and (event_id := last_event_id(request)):
            response_id = response_of(event_id)
            found = await self._stored.find(response_id, tenant, caller_of(request), again)
            return await self._again(request, found, read_number(event_id, response_id))
        if again is None:
            # Before what may be said of the conversation.
            await self._served.check(call.fields.model, caller_of(request))
        items = await self._whole(request, call, items)
        origin = origin_of(request, tenant, call.fields.budget_ms, call.fields.model)
        record = Record(
            tenant=tenant,
            call=call,
            items=items,
            prompt=(),
            deadline_ns=origin.deadline_ns,
            caller=origin.caller,
            keyed=again,
        )
        prepared = await self._prepared(request, record)
        if prepared is None:
            return Response(status_code=CLIENT_LEFT)
        record = prepared
        await self._check(record)
        answers = await self._stored.answers(record, first=True)
        if again is not None and (begun := await self._stored.claim(record)) is not None:
            return await self._again(request, begun)
        if record.background:
            return await self._in_background(request, origin, answers)
        attach: Attach = _unattached
        if record.kept:
            attach = partial(self._kept.begun, record.id, record.encode(), [record.id], record.name)
        if call.fields.stream:
            return self._streamed(origin, answers, attach)
        return await self._in_one_piece(request, origin, answers, attach)

    async def input_tokens(self, request: Request) -> Response:
        """How many tokens the prompt of a response would have; the body is that of `create`."""
        tenant = tenant_of(request)
        body = await read_object(request, self._config.gateway.max_body_bytes)
        call, items = read_response(body, self._config, await self._length.get())
        await self._served.check(call.fields.model, caller_of(request))
        items = await self._whole(request, call, items)
        record = Record(tenant=tenant, call=call, items=items, prompt=())
        prepared = await self._prepared(request, record)
        if prepared is None:
            return Response(status_code=CLIENT_LEFT)
        told = {"object": "response.input_tokens", "input_tokens": len(prepared.prompt)}
        return JsonResponse(told)

    async def retrieve(self, request: Request) -> Response:
        """A response as it is now, or as a stream that ends with it."""
        asked = read_retrieval(request)
        found = await self._found(request)
        if asked.stream:
            after, event_id = asked.after, last_event_id(request)
            if after == NOTHING and event_id:
                after = read_number(event_id, found.shape.id)
            return await self._streamed_again(request, found, after, retrieved=True)
        return JsonResponse(await self._stored.known(found))

    async def delete(self, request: Request) -> Response:
        found = await self._found(request)
        await self._stored.delete(found)
        return JsonResponse({"id": found.shape.id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        return JsonResponse(await self._stored.cancel(await self._found(request)))

    async def stream(self, request: Request) -> Response:
        """As `retrieve`, for who reads it as any other stream."""
        event_id = request.query_params.get("after") or last_event_id(request)
        found = await self._found(request)
        after = read_number(event_id, found.shape.id) if event_id else NOTHING
        return await self._streamed_again(request, found, after, retrieved=True)

    async def end(self, request: Request) -> Response:
        """Ends one, in the background or not; one that has ended is left alone."""
        found = await self._found(request)
        await self._stored.end(found)
        return JsonResponse({"id": found.shape.id, "object": "stream.cancelled", "cancelled": True})

    async def items(self, request: Request) -> Response:
        """What stood before a response's output."""
        page = read_page(request)
        found = await self._found(request)
        return JsonResponse(page_of(found.shape.items, *page))

    async def _found(self, request: Request) -> Found[Record]:
        named = request.path_params
        response_id = named.get("response_id") or named["stream"]
        return await self._stored.find(response_id, tenant_of(request), caller_of(request))

    # --- making one ---------------------------------------------------------------------------

    async def _whole(self, request: Request, call: ResponseCall, items: list[Item]) -> list[Item]:
        """The items of a call behind those of the response that it goes on with."""
        before: list[Item] = []
        if previous := call.fields.previous_response_id:
            before = await self.conversation_of(previous, tenant_of(request), caller_of(request))
        items = [*before, *items]
        check_calls(items, len(before))
        return items

    async def _prepared(self, request: Request, record: Record) -> Record | None:
        """A record with its prompt, and what that means for its output; None when the client has
        gone meanwhile."""
        fields = record.call.fields
        use = use_of(fields)
        conversation = conversation_of(fields, record.items)
        asked = record.request(self._config).sampling
        found: list[Prepared] = []

        async def work() -> None:
            budget = fields.thinking_token_budget
            found.append(
                await prepare(
                    self._templates,
                    self._words,
                    conversation,
                    use,
                    asked,
                    record.tenant,
                    reasoning_budget=budget,
                )
            )

        # It may have to wait for other templates.
        await while_connected(request.receive, work)
        if not found:
            return None
        ready = found[0]
        constraint = ready.sampling.constraint
        return msgspec.structs.replace(
            record,
            prompt=ready.token_ids,
            reading=ready.reading,
            constraint=None if constraint == asked.constraint else constraint,
        )

    async def _check(self, record: Record) -> None:
        """Refuses what would be refused later, before any of it is there."""
        self._submissions.check_ready()
        asked = record.request(self._config)
        self._submissions.check_priority(record.caller, asked)
        self._submissions.check_size(asked, await self._submissions.length.get())
        self._submissions.check_encoded(asked)
        size, most = len(record.encode()), self._config.bus.max_request_bytes
        if record.kept and size > most:
            raise FieldError(
                f"the conversation with all that is kept of it has {size} bytes, and may have "
                f"{most} (bus.max_request_bytes); send less, or store: false",
                param="input",
                code="request_too_large",
            )

    async def _read(self, record: Record, completion: Completion) -> None:
        """One in the background, which nobody may ever ask for, is told of all the same."""
        if record.reading is not None:
            answers = await self._stored.answers(record, first=True)
            await self._stored.ended(answers, completion)

    async def _in_background(self, request: Request, origin: Origin, answers: Answers) -> Response:
        """One of which nothing need have come."""
        record = answers.record
        kept = DurableCall(record.encode())
        if record.keyed is None:
            await self._kept.keep(record.id, kept.record)
        account = Account(background=True)
        account.headers = origin.account.headers  # what is said when it begins
        run = self._background.begin(record, origin._replace(account=account), kept)
        with anyio.move_on_after(_SOON_S):
            await run.settled.wait()
        if run.failure is not None:
            await self._kept.forget(record.id, record.name)
            raise run.failure
        if record.call.fields.stream:
            return await self._streamed_again(request, Found(record, kept))
        return JsonResponse(answers.begun("queued"))

    async def _again(
        self, request: Request, found: Found[Record], after: int = NOTHING
    ) -> Response:
        """The answer to a call that was begun before, perhaps from behind an event on."""
        record = found.shape
        if record.call.fields.stream:
            return await self._streamed_again(request, found, after)
        if record.background:
            return JsonResponse(await self._stored.known(found))
        origin = _origin(request, record)
        answers = await self._stored.answers(record)
        return await self._in_one_piece(request, origin, answers, self._attach_again(found))

    async def _streamed_again(
        self,
        request: Request,
        found: Found[Record],
        after: int = NOTHING,
        *,
        retrieved: bool = False,
    ) -> Response:
        record = found.shape
        origin = _origin(request, record)
        answers = await self._stored.answers(record)
        attach = self._attach_again(found)
        return self._streamed(origin, answers, attach, after, retrieved=retrieved)

    def _attach_again(self, found: Found[Record]) -> Attach:
        record = found.shape

        @asynccontextmanager
        async def attach() -> AsyncIterator[Attachment]:
            kept = await self._stored.settled(found)
            async with self._kept.resumed(
                record.id, kept, [record.id], record.name, background=record.background
            ) as attachment:
                yield attachment

        return attach

    async def _in_one_piece(
        self, request: Request, origin: Origin, answers: Answers, attach: Attach
    ) -> Response:
        ended: list[Completion] = []

        async def take(output: Output) -> None:
            if isinstance(output, Completion):
                ended.append(output)

        async def work() -> Response:
            asked = answers.record.request(self._config)
            async with attach() as attachment:
                try:
                    await run_request(self._submissions, origin, asked, attachment, take)
                except NanoInferenceError as error:
                    if attachment is not None:
                        attachment.fail(error)
                    raise _told(error, answers.record) from None
            return JsonResponse(await self._stored.ended(answers, ended[0]))

        return await answer_while_connected(request, work)

    def _streamed(
        self,
        origin: Origin,
        answers: Answers,
        attach: Attach,
        after: int = NOTHING,
        *,
        retrieved: bool = False,
    ) -> Response:
        """Args: when it is `retrieved`, it is no error that the response is one."""
        record = answers.record
        asked = record.request(self._config)

        async def produce(send: SendEvent) -> None:
            ids = self._config.gateway.event_ids and record.call.fields.store
            events = Events(answers, send, self._stored.beside, after, ids=ids)
            if record.background:
                await events.create()
            failure: NanoInferenceError | None
            try:
                async with attach() as attachment:
                    failure = await send_outputs(
                        self._submissions, origin, asked, attachment, events.take
                    )
                    if failure is not None and attachment is not None:
                        attachment.fail(failure)
                    lasts = attachment is None or attachment.ended
            except NeverBegun as error:
                failure, lasts = error, True
            if failure is None:
                return
            told = _told(failure, record)
            if not stream.committed and not (retrieved and lasts):
                raise as_openai(told, "responses")
            await (events.fail(told) if lasts else events.interrupt(told))

        stream = EventStream(produce, self._config.gateway.comment_s)
        return stream


def _origin(request: Request, record: Record) -> Origin:
    """That of a call which attaches to a response."""
    fields = record.call.fields
    return origin_of(request, record.tenant, fields.budget_ms, fields.model)


def _told(error: NanoInferenceError, record: Record) -> NanoInferenceError:
    """An error in words of responses."""
    about_tools = of_tools(error, record.reading)
    return as_response_error(error, record.id) if about_tools is error else about_tools


@asynccontextmanager
async def _unattached() -> AsyncIterator[None]:
    """Of a response that ends with its connection."""
    yield
