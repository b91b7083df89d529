"""`/v1/messages`: at once, or as a stream of events; and how many tokens a prompt has."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...bus.public import GenerateRequest
from ...config import Config, NanoInferenceError
from ..chat_templates import ChatTemplates, Conversation
from ..http import (
    CLIENT_LEFT,
    EventStream,
    JsonResponse,
    SendEvent,
    answer_while_connected,
    call_id_of,
    read_object,
    while_connected,
)
from ..origin import Origin, origin_of
from ..samples import Piece, complete_sample, stream_sample
from ..submissions import Submissions
from ..tenants import tenant_of
from ..words import LazyWords
from .answers import Answer, Answers
from .errors import error_event, named
from .messages import conversation_of
from .requests import check_version, read_count, read_messages, request_of

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
    ) -> None:
        self._submissions = submissions
        self._config = config
        self._words = words
        self._templates = templates

    async def count_tokens(self, request: Request) -> Response:
        check_version(request)
        body = await read_object(request, self._config.gateway.max_body_bytes)
        fields = read_count(body, self._config)
        token_ids = await self._rendered(request, conversation_of(fields))
        if token_ids is None:
            return Response(status_code=CLIENT_LEFT)
        return named(request, JsonResponse({"input_tokens": len(token_ids)}))

    async def messages(self, request: Request) -> Response:
        check_version(request)
        tenant = tenant_of(request)
        body = await read_object(request, self._config.gateway.max_body_bytes)
        fields = read_messages(body, self._config)
        token_ids = await self._rendered(request, conversation_of(fields))
        if token_ids is None:
            return Response(status_code=CLIENT_LEFT)
        asked = request_of(fields, token_ids, tenant, self._config)
        self._submissions.check_size(asked)
        self._submissions.check_encoded(asked)
        origin = origin_of(request, tenant, fields.budget_ms)
        answers = Answers(asked, self._config.engine.model_name, await self._words.required())
        if fields.stream:
            return named(request, self._streamed(request, origin, asked, answers))

        async def work() -> Response:
            return JsonResponse(
                answers.whole(await complete_sample(self._submissions, origin, asked))
            )

        return named(request, await answer_while_connected(request, work))

    async def _rendered(
        self, request: Request, conversation: Conversation
    ) -> tuple[int, ...] | None:
        """A prompt's tokens; None when the client has gone meanwhile."""
        prompts: list[tuple[int, ...]] = []

        async def render() -> None:
            prompts.append(await self._templates.token_ids(conversation))

        # It may have to wait for other templates.
        await while_connected(request.receive, render)
        return prompts[0] if prompts else None

    def _streamed(
        self, request: Request, origin: Origin, asked: GenerateRequest, answers: Answers
    ) -> Response:
        begun = False

        async def produce(send: SendEvent) -> None:
            async def tell(event: Answer) -> None:
                await send(msgspec.json.encode(event), name=event["type"])

            async def begin() -> None:
                nonlocal begun
                if not begun:
                    begun = True
                    await tell(answers.start())
                    await tell(answers.block_start())
                    await tell(answers.ping())

            async def take(piece: Piece) -> None:
                await begin()
                if piece.text:
                    await tell(answers.delta(piece.text))

            try:
                completion = await stream_sample(self._submissions, origin, asked, take)
            except NanoInferenceError as error:
                if not stream.committed:
                    raise
                await tell(error_event(error, call_id_of(request.scope)))
                return
            await begin()
            await tell(answers.block_stop())
            await tell(answers.message_delta(completion))
            await tell(answers.stop())

        stream = EventStream(produce, self._config.gateway.comment_s, _PING)
        return stream
