"""Completions, chats, and tokens in and out: at once, or as a stream of chunks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

import anyio
import anyio.lowlevel
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....bus.public import Completion, Output
from ....config import NanoInferenceError
from ...policy.caller import caller_of
from ...server.http import (
    EventStream,
    JsonResponse,
    SendEvent,
    error_body,
    read_object,
    while_connected,
)
from ...serving.durable_calls import Attachment, not_found
from ...serving.fields import Body
from ...serving.origin import Origin, origin_of, tenant_of
from ...serving.prepared import of_tools, prepare
from ...serving.services import Services
from ...serving.submissions import AT_ONCE
from ...serving.words import Words
from .answers import Answer, ChoicesWriter
from .errors import as_openai
from .messages import conversation_of
from .positions import Position, answer_of, read_position
from .records import Attach, BegunCalls, Found, IdempotencyKey, keyed, last_event_id, unattached
from .requests import (
    ChoicesCall,
    ChoicesRecord,
    Prompt,
    read_chat,
    read_completion,
    read_generate,
)
from .streams import Chunks
from .tools import chat_tool_use

_DONE = b"[DONE]"

# An answer that is written at once, in tokens, those of logprobs included; more take a thread.
_SHORT_ANSWER = 4096


class _HttpCall(NamedTuple):
    """A call as it came.

    Attributes:
        key: None without an idempotency key.
    """

    request: Request
    tenant: str
    body: Body
    key: IdempotencyKey | None


class _RunningChoices(NamedTuple):
    """A call whose answer is on its way."""

    origin: Origin
    record: ChoicesRecord
    answers: ChoicesWriter
    attach: Attach


class GenerationCalls:
    """The endpoints."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._begun = BegunCalls(services.durable, ChoicesRecord)

    async def completions(self, request: Request) -> Response:
        asked = await self._asked(request)
        call, prompts = read_completion(asked.body, self._services.config)
        return await self._resumed(asked, call) or await self._answer(asked, call, prompts)

    async def chat(self, request: Request) -> Response:
        services, asked = self._services, await self._asked(request)
        call, fields = read_chat(asked.body, services.config, await services.length.get())
        if (resumed := await self._resumed(asked, call)) is not None:
            return resumed
        if asked.key is None:
            # Errors of the conversation would otherwise come first.
            await services.served.check(fields.model, caller_of(request))
        prepared = await prepare(
            request,
            services,
            conversation_of(fields),
            chat_tool_use(fields),
            call.sampling,
            reasoning_budget=fields.thinking_token_budget,
            separates_reasoning=fields.separate_reasoning,
        )
        call = msgspec.structs.replace(call, sampling=prepared.sampling, reading=prepared.reading)
        return await self._answer(asked, call, [prepared.token_ids])

    async def tokens(self, request: Request) -> Response:
        services, asked = self._services, await self._asked(request)
        call, prompt = read_generate(asked.body, services.config, await services.length.get())
        return await self._resumed(asked, call) or await self._answer(asked, call, [prompt])

    async def stream(self, request: Request) -> Response:
        """Send a stream that was begun before: all of it, or the part behind an event."""
        event_id = request.query_params.get("after") or last_event_id(request)
        return await self._resume(request, request.path_params["stream"], event_id)

    async def cancel(self, request: Request) -> Response:
        """Cancel a call by its answer's id. A call that has ended stays as it is."""
        call_id = request.path_params["stream"]
        await self._begun.find(call_id, tenant_of(request), caller_of(request))
        self._services.submissions.end_waiting(call_id)
        await self._services.durable.cancel(call_id)
        return JsonResponse({"id": call_id, "object": "stream.cancelled", "cancelled": True})

    async def _asked(self, request: Request) -> _HttpCall:
        body = await read_object(request, self._services.config.gateway.max_body_bytes)
        tenant = tenant_of(request)
        return _HttpCall(request, tenant, body, keyed(request, tenant, body))

    async def _resumed(self, asked: _HttpCall, call: ChoicesCall) -> Response | None:
        """Resume the stream of a call that comes again with the id of its last event."""
        if not (call.stream and (event_id := last_event_id(asked.request))):
            return None
        return await self._resume(asked.request, answer_of(event_id), event_id, asked.key)

    async def _answer(self, asked: _HttpCall, call: ChoicesCall, prompts: list[Prompt]) -> Response:
        services, (request, tenant, _, key) = self._services, asked
        origin = origin_of(request, tenant, call.budget_ms, call.requested_model)
        words = await services.words.required() if call.needs_words else None
        record = await self._record(call, prompts, tenant, words, key)
        services.submissions.check_priority(origin.caller, record.request(0))
        begun = None if key is None else await self._begun.claim(record, origin.caller)
        if begun is not None:
            return await self._again(request, origin, begun)
        attach: Attach = partial(
            services.durable.begun, call.id, record.encode(), record.request_ids, record.name
        )
        if not call.stream and key is None:
            # No client knows the id of such an answer before it is there.
            attach = unattached
        running = _RunningChoices(origin, record, await self._answers(record, words), attach)
        return await self._respond(request, running)

    async def _resume(
        self, request: Request, call_id: str, event_id: str, again: IdempotencyKey | None = None
    ) -> Response:
        tenant = tenant_of(request)
        found = await self._begun.find(call_id, tenant, caller_of(request), again)
        call = found.record.call
        if not call.stream:
            raise not_found(call_id)
        origin = origin_of(request, tenant, call.budget_ms, call.requested_model)
        return await self._again(request, origin, found, event_id)

    async def _again(
        self, request: Request, origin: Origin, found: Found[ChoicesRecord], event_id: str = ""
    ) -> Response:
        """Answer a call that was begun before, perhaps from behind an event on."""
        record = found.record
        call = record.call
        words = await self._services.words.required() if call.needs_words else None
        choices = len(record.prompts) * call.n
        after = read_position(event_id, call.id, choices) if event_id else None

        answers = await self._answers(record, words)
        running = _RunningChoices(origin, record, answers, self._begun.attach(found))
        return await self._respond(request, running, after)

    async def _answers(self, record: ChoicesRecord, words: Words | None) -> ChoicesWriter:
        """Return the writer of the answer. Every gateway reads messages alike."""
        services = self._services
        reads = record.call.reading is not None
        form = await services.words.message_format() if reads else None
        return ChoicesWriter(
            record.call, record.prompts, record.texts, words, form, services.submissions.measures
        )

    async def _record(
        self,
        call: ChoicesCall,
        prompts: list[Prompt],
        tenant: str,
        words: Words | None,
        key: IdempotencyKey | None,
    ) -> ChoicesRecord:
        """Check all requests of a call, and return its record."""
        services = self._services
        submitted: list[Prompt] = []
        length = await services.length.get()
        for place, prompt in enumerate(prompts):
            request = call.request(place, len(prompts), prompt, tenant)
            services.submissions.check_size(request, length)
            if words is not None and call.needs_prompt_ids and isinstance(prompt, str):
                words.check_fits(prompt, length)
                token_ids = await services.words.token_ids(prompt)
                request = msgspec.structs.replace(request, prompt=None, prompt_token_ids=token_ids)
            services.submissions.check_encoded(request)
            submitted.append(request.prompt_token_ids or prompt)
            if len(submitted) % AT_ONCE == 0:
                await anyio.lowlevel.checkpoint()
        return ChoicesRecord(
            tenant=tenant,
            call=call,
            prompts=submitted,
            # An echo is the text as it came.
            texts=[prompt if isinstance(prompt, str) else None for prompt in prompts],
            # A single request is published before the client sees anything of the answer.
            has_prompts=len(prompts) > 1 or call.needs_prompt_ids or key is not None,
            keyed=key,
        )

    async def _respond(
        self, request: Request, running: _RunningChoices, after: Position | None = None
    ) -> Response:
        if running.record.call.stream:
            return self._streamed(running, after)

        async def work() -> Response:
            async with running.attach() as attachment:
                return JsonResponse(await self._complete(running, attachment))

        return await while_connected(request.receive, work)

    async def _complete(self, running: _RunningChoices, attachment: Attachment | None) -> Answer:
        """Return the whole answer. The first error ends the other requests as well."""
        completions: dict[int, Completion] = {}

        async def take(index: int, output: Output) -> None:
            if isinstance(output, Completion):
                completions[index] = output

        failure = await self._run(running, attachment, take)
        if failure is not None:
            raise failure
        ordered = [completions[index] for index in range(len(completions))]
        if running.answers.work(ordered) <= _SHORT_ANSWER:
            return running.answers.whole(ordered)
        return await self._services.words.beside(partial(running.answers.whole, ordered))

    async def _run(
        self,
        running: _RunningChoices,
        attachment: Attachment | None,
        take: Callable[[int, Output], Awaitable[None]],
    ) -> NanoInferenceError | None:
        """Run all requests. Returns the error that ended them."""
        origin, record, answers, _ = running
        requests = [record.request(place) for place in range(len(record.prompts))]
        try:
            await self._services.submissions.run(origin, requests, take, attachment, answers.echoed)
        except NanoInferenceError as error:
            failure = of_tools(error, record.call.reading)
            if attachment is not None:
                attachment.fail(failure)
            return failure
        return None

    def _streamed(self, running: _RunningChoices, after: Position | None) -> Response:
        gateway = self._services.config.gateway

        async def produce(send_event: SendEvent) -> None:
            async def send(data: bytes, event_id: str = "", *, name: str = "") -> None:
                await send_event(data, event_id if gateway.event_ids else "", name=name)

            chunks = Chunks(running.answers, send, after)
            async with running.attach() as attachment:
                failure = await self._send_chunks(running, chunks, attachment)
            # Without tokens the position stays: behind an error the client may come back.
            event_id = chunks.position.event_id
            if failure is not None:
                error = as_openai(failure, running.record.call.kind)
                if not stream.committed:
                    raise error
                await send(msgspec.json.encode(error_body(error)), event_id)
            await send(_DONE, event_id)

        stream = EventStream(produce, gateway.comment_s)
        return stream

    async def _send_chunks(
        self, running: _RunningChoices, chunks: Chunks, attachment: Attachment | None
    ) -> NanoInferenceError | None:
        """Send the chunks of all prompts as they come. Returns the error that ended them."""

        async def take(index: int, output: Output) -> None:
            chunks.put(index, output)
            await chunks.room()

        async with anyio.create_task_group() as group:
            group.start_soon(chunks.send_all)
            failure = await self._run(running, attachment, take)
            chunks.close()
        if failure is None:
            await chunks.send_usage()
        return failure
