"""Completions, chats, and tokens in and out: at once, or as a stream of chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import partial

import anyio
import anyio.lowlevel
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....bus.public import Completion, GenerateRequest, Output
from ....config import Config, NanoInferenceError
from ...policy.caller import caller_of
from ...server.http import (
    CLIENT_LEFT,
    EventStream,
    JsonResponse,
    SendEvent,
    answer_while_connected,
    error_body,
    read_object,
    while_connected,
)
from ...serving.chat_templates import ChatTemplates
from ...serving.durable_calls import Attachment, DurableCalls, not_found
from ...serving.lane_state import ModelLength, ServedModels
from ...serving.origin import Origin, origin_of, tenant_of
from ...serving.prepared import Prepared, of_tools, prepare
from ...serving.submissions import AT_ONCE, Submissions
from ...serving.words import LazyWords, Words
from .answers import Answer, Answers
from .errors import as_openai
from .idempotency import Keyed, keyed
from .messages import conversation_of
from .positions import Position, answer_of, read_position
from .requests import Call, Prompt, read_chat, read_completion, read_generate
from .resuming import BegunAnswers, Found, last_event_id
from .shapes import Shape, decode_shape
from .streams import Chunks
from .tools import chat_tool_use

_DONE = b"[DONE]"

Attach = Callable[[], AbstractAsyncContextManager[Attachment | None]]
"""Attach to a call while the context is open, if the call is durable."""

# An answer that is written at once, in tokens, those of logprobs included; more take a thread.
_SHORT_ANSWER = 4096


class GenerationCalls:
    """The endpoints."""

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
        self._served = served
        self._submissions = submissions
        self._kept = kept
        self._begun = BegunAnswers(kept, decode_shape)
        self._config = config
        self._words = words
        self._templates = templates
        self._length = length

    async def completions(self, request: Request) -> Response:
        tenant = tenant_of(request)
        body = await read_object(request, self._config.gateway.max_body_bytes)
        call, prompts = read_completion(body, self._config)
        again = keyed(request, tenant, body)
        if call.stream and (event_id := last_event_id(request)):
            return await self._resume(request, tenant, answer_of(event_id), event_id, again)
        return await self._answer(request, tenant, call, prompts, again)

    async def chat(self, request: Request) -> Response:
        tenant = tenant_of(request)
        body = await read_object(request, self._config.gateway.max_body_bytes)
        call, fields = read_chat(body, self._config, await self._length.get())
        again = keyed(request, tenant, body)
        if call.stream and (event_id := last_event_id(request)):
            return await self._resume(request, tenant, answer_of(event_id), event_id, again)
        if again is None:
            # Before what may be said of the conversation.
            await self._served.check(fields.model, caller_of(request))
        conversation, use = conversation_of(fields), chat_tool_use(fields)
        found: list[Prepared] = []

        async def render() -> None:
            found.append(
                await prepare(
                    self._templates,
                    self._words,
                    conversation,
                    use,
                    call.sampling,
                    tenant,
                    reasoning_budget=fields.thinking_token_budget,
                    separates_reasoning=fields.separate_reasoning,
                )
            )

        # It may have to wait for other templates.
        await while_connected(request.receive, render)
        if not found:
            return Response(status_code=CLIENT_LEFT)
        (prepared,) = found
        call = msgspec.structs.replace(call, sampling=prepared.sampling, reading=prepared.reading)
        return await self._answer(request, tenant, call, [prepared.token_ids], again)

    async def stream(self, request: Request) -> Response:
        """A stream that was begun before, all of it or what stands behind an event."""
        event_id = request.query_params.get("after") or last_event_id(request)
        call_id = request.path_params["stream"]
        return await self._resume(request, tenant_of(request), call_id, event_id)

    async def cancel(self, request: Request) -> Response:
        """Ends a call by its answer's id; one that has ended is left alone."""
        call_id = request.path_params["stream"]
        await self._begun.find(call_id, tenant_of(request), caller_of(request))
        self._submissions.end_waiting(call_id)
        await self._kept.cancel(call_id)
        return JsonResponse({"id": call_id, "object": "stream.cancelled", "cancelled": True})

    async def tokens(self, request: Request) -> Response:
        tenant = tenant_of(request)
        body = await read_object(request, self._config.gateway.max_body_bytes)
        call, prompt = read_generate(body, self._config, await self._length.get())
        again = keyed(request, tenant, body)
        if call.stream and (event_id := last_event_id(request)):
            return await self._resume(request, tenant, answer_of(event_id), event_id, again)
        return await self._answer(request, tenant, call, [prompt], again)

    async def _answer(
        self, request: Request, tenant: str, call: Call, prompts: list[Prompt], key: Keyed | None
    ) -> Response:
        origin = origin_of(request, tenant, call.budget_ms, call.requested_model)
        words = await self._words.required() if call.needs_words else None
        shape, requests = await self._ready(call, prompts, tenant, words, key)
        self._submissions.check_priority(origin.caller, requests[0])
        name = ""
        if key is not None:
            if (found := await self._begun.claim(shape, origin.caller)) is not None:
                return await self._again(request, origin, found)
            name = key.name
        attach = partial(self._kept.begun, call.id, shape.encode(), shape.request_ids, name)
        answers = await self._answers(shape, words)
        if call.stream:
            return self._streamed(origin, requests, answers, attach)
        # Nobody knows the id of an answer in one piece before it is there.
        return await self._in_one_piece(
            request, origin, requests, answers, attach if key is not None else _unattached
        )

    async def _resume(
        self,
        request: Request,
        tenant: str,
        call_id: str,
        event_id: str,
        again: Keyed | None = None,
    ) -> Response:
        """What stands behind an event of a stream; all of it, when there is none."""
        found = await self._begun.find(call_id, tenant, caller_of(request), again)
        if not found.shape.call.stream:
            raise not_found(call_id)
        call = found.shape.call
        origin = origin_of(request, tenant, call.budget_ms, call.requested_model)
        return await self._again(request, origin, found, event_id)

    async def _again(
        self, request: Request, origin: Origin, found: Found[Shape], event_id: str = ""
    ) -> Response:
        """The answer to a call that was begun before, perhaps from behind an event on."""
        shape = found.shape
        call = shape.call
        words = await self._words.required() if call.needs_words else None
        choices = shape.number * call.n
        after = read_position(event_id, call.id, choices) if event_id else None
        name = shape.keyed.name if shape.keyed else ""

        @asynccontextmanager
        async def attach() -> AsyncIterator[Attachment]:
            kept = await self._begun.published(found)
            async with self._kept.resumed(call.id, kept, shape.request_ids, name) as attachment:
                yield attachment

        requests, answers = shape.requests(), await self._answers(shape, words)
        if call.stream:
            return self._streamed(origin, requests, answers, attach, after)
        return await self._in_one_piece(request, origin, requests, answers, attach)

    async def _answers(self, shape: Shape, words: Words | None) -> Answers:
        """What writes the answer. Messages are read alike at every gateway."""
        reads = shape.call.reading is not None
        form = await self._templates.message_format() if reads else None
        return shape.answers(words, form, self._submissions.measures)

    async def _ready(
        self,
        call: Call,
        prompts: list[Prompt],
        tenant: str,
        words: Words | None,
        key: Keyed | None,
    ) -> tuple[Shape, list[GenerateRequest]]:
        """What the answer is made of, and what is submitted."""
        requests: list[GenerateRequest] = []
        known: list[Prompt] = []
        length = await self._length.get()
        for place, prompt in enumerate(prompts):
            request = call.request(place, len(prompts), prompt, tenant)
            self._submissions.check_size(request, length)
            if words is not None and call.needs_prompt_ids and isinstance(prompt, str):
                words.check_fits(prompt, length)
                token_ids = await self._words.token_ids(prompt)
                request = msgspec.structs.replace(request, prompt=None, prompt_token_ids=token_ids)
            self._submissions.check_encoded(request)
            known.append(request.prompt_token_ids or prompt)
            requests.append(request)
            if len(requests) % AT_ONCE == 0:
                await anyio.lowlevel.checkpoint()
        shape = Shape(
            tenant=tenant,
            call=call,
            prompts=known,
            # What is echoed is the text as it came.
            texts=[prompt if isinstance(prompt, str) else None for prompt in prompts],
            # One alone is published before anything of it is seen.
            whole=len(prompts) > 1 or call.needs_prompt_ids or key is not None,
            keyed=key,
        )
        return shape, requests

    async def _in_one_piece(
        self,
        request: Request,
        origin: Origin,
        requests: list[GenerateRequest],
        answers: Answers,
        attach: Attach,
    ) -> Response:
        async def work() -> Response:
            async with attach() as attachment:
                return JsonResponse(await self._complete(origin, requests, answers, attachment))

        return await answer_while_connected(request, work)

    async def _complete(
        self,
        origin: Origin,
        requests: list[GenerateRequest],
        answers: Answers,
        attachment: Attachment | None,
    ) -> Answer:
        """The whole answer. The first error ends the other requests as well."""
        completions: dict[int, Completion] = {}

        async def take(index: int, output: Output) -> None:
            if isinstance(output, Completion):
                completions[index] = output

        failure = await self._run(origin, requests, answers, attachment, take)
        if failure is not None:
            raise failure
        ordered = [completions[index] for index in range(len(requests))]
        if answers.work(ordered) <= _SHORT_ANSWER:
            return answers.whole(ordered)
        return await self._words.beside(partial(answers.whole, ordered))

    async def _run(
        self,
        origin: Origin,
        requests: list[GenerateRequest],
        answers: Answers,
        attachment: Attachment | None,
        take: Callable[[int, Output], Awaitable[None]],
    ) -> NanoInferenceError | None:
        """Gives the outputs of all prompts as they come. Returns the error that ended them."""

        async def run(index: int, begun: bool) -> None:
            async with aclosing(
                self._submissions.outputs(
                    origin, requests[index], begun, attachment, answers.echoed(index)
                )
            ) as outputs:
                async for output in outputs:
                    await take(index, output)
                    await anyio.lowlevel.checkpoint()

        published = () if attachment is None else attachment.begun_before
        try:
            await self._submissions.run(origin, requests, run, published)
        except NanoInferenceError as error:
            failure = of_tools(error, answers.call.reading)
            if attachment is not None:
                attachment.fail(failure)
            return failure
        return None

    def _streamed(
        self,
        origin: Origin,
        requests: list[GenerateRequest],
        answers: Answers,
        attach: Attach,
        after: Position | None = None,
    ) -> Response:
        async def produce(send_event: SendEvent) -> None:
            async def send(data: bytes, event_id: str = "", *, name: str = "") -> None:
                shown = event_id if self._config.gateway.event_ids else ""
                await send_event(data, shown, name=name)

            chunks = Chunks(answers, send, after)
            async with attach() as attachment:
                failure = await self._send_chunks(origin, requests, answers, chunks, attachment)
            # What has no tokens leaves the client where it was: behind an error it may come back.
            event_id = chunks.position.event_id
            if failure is not None:
                error = as_openai(failure, answers.call.kind)
                if not stream.committed:
                    raise error
                await send(msgspec.json.encode(error_body(error)), event_id)
            await send(_DONE, event_id)

        stream = EventStream(produce, self._config.gateway.comment_s)
        return stream

    async def _send_chunks(
        self,
        origin: Origin,
        requests: list[GenerateRequest],
        answers: Answers,
        chunks: Chunks,
        attachment: Attachment | None,
    ) -> NanoInferenceError | None:
        """Chunks of all prompts as they come. Gives the error that ended them."""

        async def take(index: int, output: Output) -> None:
            chunks.put(index, output)
            await chunks.room()

        async with anyio.create_task_group() as group:
            group.start_soon(chunks.send_all)
            failure = await self._run(origin, requests, answers, attachment, take)
            chunks.close()
        if failure is None:
            await chunks.send_usage()
        return failure


@asynccontextmanager
async def _unattached() -> AsyncIterator[None]:
    """Of a call that ends with its connection."""
    yield
