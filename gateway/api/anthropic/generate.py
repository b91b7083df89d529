"""`/v1/messages`: at once, or as a stream of events; and how many tokens a prompt has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from ....bus.public import CompletionChunk, GenerateRequest
from ....config import Config, NanoInferenceError
from ...policy.caller import caller_of
from ...server.http import (
    CLIENT_LEFT,
    EventStream,
    JsonResponse,
    SendEvent,
    answer_while_connected,
    call_id_of,
    read_object,
    while_connected,
)
from ...serving.chat_templates import ChatTemplates
from ...serving.fields import Body, adapter_of, read_part
from ...serving.lane_state import ServedModels
from ...serving.message_parts import MessageParts
from ...serving.origin import Origin, origin_of, tenant_of
from ...serving.prepared import Prepared, of_tools, prepare
from ...serving.samples import complete_sample, stream_sample
from ...serving.submissions import Submissions
from ...serving.words import LazyWords
from .answers import Answers
from .bodies import CountBody, MessagesBody
from .content import Answer
from .errors import error_event, named
from .messages import conversation_of
from .requests import check_version, read_messages, request_of, sampling_of
from .thinking import thinking_of
from .tools import use_of

T = TypeVar("T")

# Where nothing else is to be said.
_PING = b'event: ping\ndata: {"type":"ping"}'


class MessageCalls:
    """The endpoints."""

    def __init__(
        self,
        submissions: Submissions,
        config: Config,
        words: LazyWords,
        templates: ChatTemplates,
        served: ServedModels,
    ) -> None:
        self._submissions = submissions
        self._config = config
        self._words = words
        self._templates = templates
        self._served = served

    async def count_tokens(self, request: Request) -> Response:
        check_version(request)
        body = await read_object(request, self._config.gateway.max_body_bytes)
        fields = read_part(body, CountBody)
        await self._served.check(fields.model, caller_of(request))
        conversation = replace(conversation_of(fields), tools=use_of(fields).usable)
        render = partial(self._templates.render, conversation, tenant_of(request))
        rendered = await _while_there(request, render)
        if rendered is None:
            return Response(status_code=CLIENT_LEFT)
        return named(request, JsonResponse({"input_tokens": len(rendered.token_ids)}))

    async def messages(self, request: Request) -> Response:
        check_version(request)
        tenant = tenant_of(request)
        body = await read_object(request, self._config.gateway.max_body_bytes)
        # Whatever else may be wrong: nobody looks for a field when the model is another.
        if isinstance(model := body.get("model"), str):
            await self._served.check(model, caller_of(request))
        fields = read_messages(body)
        prepared = await _while_there(request, partial(self._prepared, body, fields, tenant))
        if prepared is None:
            return Response(status_code=CLIENT_LEFT)
        asked = request_of(fields, prepared, tenant, self._config)
        self._submissions.check_size(asked, await self._submissions.length.get())
        self._submissions.check_encoded(asked)
        origin = origin_of(request, tenant, fields.budget_ms, fields.model)
        self._submissions.check_priority(origin.caller, asked)
        answers = await self._answers(asked, fields, prepared)
        if fields.stream:
            return named(request, self._streamed(request, origin, asked, answers, prepared))

        async def work() -> Response:
            with _of_tools(prepared):
                completion = await complete_sample(self._submissions, origin, asked)
            return JsonResponse(answers.whole(completion))

        return named(request, await answer_while_connected(request, work))

    async def _prepared(self, body: Body, fields: MessagesBody, tenant: str) -> Prepared:
        """A body as it is submitted."""
        thinking = thinking_of(fields)
        return await prepare(
            self._templates,
            self._words,
            conversation_of(fields),
            use_of(fields),
            sampling_of(body, fields),
            tenant,
            reasoning_budget=None if thinking is None else thinking.budget_tokens,
            budget_param="thinking.budget_tokens",
        )

    async def _answers(
        self, asked: GenerateRequest, fields: MessagesBody, prepared: Prepared
    ) -> Answers:
        words, reading = await self._words.required(), prepared.reading
        thinking = thinking_of(fields)
        return Answers(
            asked,
            adapter_of(fields.model, self._config) or self._config.engine.model_name,
            words,
            MessageParts(
                words,
                asked.sampling,
                prepared.form,
                reading,
                # What the ids of calls are made of.
                f"{asked.request_id}/0",
                records=False,
                measures=self._submissions.measures,
            ),
            counts_thinking=reading is not None and reading.separates_reasoning,
            shows_thinking=thinking is None or thinking.display != "omitted",
        )

    def _streamed(
        self,
        request: Request,
        origin: Origin,
        asked: GenerateRequest,
        answers: Answers,
        prepared: Prepared,
    ) -> Response:
        async def produce(send: SendEvent) -> None:
            async def tell(events: list[Answer]) -> None:
                for event in events:
                    await send(msgspec.json.encode(event), name=event["type"])

            async def take(chunks: Sequence[CompletionChunk]) -> None:
                await tell(answers.add(chunks))

            try:
                with _of_tools(prepared):
                    completion = await stream_sample(self._submissions, origin, asked, take)
            except NanoInferenceError as error:
                if not stream.committed:
                    raise
                await tell([error_event(error, call_id_of(request.scope))])
                return
            await tell(answers.end(completion))

        stream = EventStream(produce, self._config.gateway.comment_s, _PING)
        return stream


@contextmanager
def _of_tools(prepared: Prepared) -> Iterator[None]:
    """Within it, an error about what was made of tools says so."""
    try:
        yield
    except NanoInferenceError as error:
        raise of_tools(error, prepared.reading) from None


async def _while_there(request: Request, work: Callable[[], Awaitable[T]]) -> T | None:
    """What comes of something that may have to wait for other templates; None when the client has
    gone meanwhile."""
    found: list[T] = []

    async def do() -> None:
        found.append(await work())

    await while_connected(request.receive, do)
    return found[0] if found else None
