"""Completions, chats, and tokens in and out: at once, or as a stream of chunks."""

from __future__ import annotations

from contextlib import aclosing
from functools import partial

import anyio
import anyio.lowlevel
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...bus.public import Completion, GenerateRequest
from ...config import Config, NanoInferenceError
from ..chat_templates import ChatTemplates
from ..http import (
    CLIENT_LEFT,
    EventStream,
    JsonResponse,
    SendEvent,
    answer_while_connected,
    error_body,
    read_object,
    while_connected,
)
from ..origin import Origin, origin_of
from ..submissions import AT_ONCE, Submissions
from ..tenants import tenant_of
from ..words import LazyWords
from .answers import Answer, Answers
from .errors import as_openai
from .messages import conversation_of
from .requests import Call, Prompt, read_chat, read_completion, read_generate
from .streams import Chunks

_DONE = b"[DONE]"

# An answer that is written at once, in tokens, those of logprobs included; more take a thread.
_SHORT_ANSWER = 4096


class GenerationCalls:
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

    async def completions(self, request: Request) -> Response:
        tenant = tenant_of(request)
        body = await read_object(request, self._config.gateway.max_body_bytes)
        call, prompts = read_completion(body, self._config)
        return await self._answer(request, tenant, call, prompts)

    async def chat(self, request: Request) -> Response:
        tenant = tenant_of(request)
        body = await read_object(request, self._config.gateway.max_body_bytes)
        call, fields = read_chat(body, self._config)
        conversation = conversation_of(fields)
        prompts: list[Prompt] = []

        async def render() -> None:
            prompts.append(await self._templates.token_ids(conversation))

        # It may have to wait for other templates.
        await while_connected(request.receive, render)
        if not prompts:
            return Response(status_code=CLIENT_LEFT)
        return await self._answer(request, tenant, call, prompts)

    async def tokens(self, request: Request) -> Response:
        tenant = tenant_of(request)
        body = await read_object(request, self._config.gateway.max_body_bytes)
        call, prompt = read_generate(body, self._config)
        return await self._answer(request, tenant, call, [prompt])

    async def _answer(
        self, request: Request, tenant: str, call: Call, prompts: list[Prompt]
    ) -> Response:
        origin = origin_of(request, tenant, call.budget_ms)
        requests, answers = await self._ready(call, prompts, tenant)
        if call.stream:
            return self._streamed(origin, requests, answers)

        async def work() -> Response:
            return JsonResponse(await self._complete(origin, requests, answers))

        return await answer_while_connected(request, work)

    async def _ready(
        self, call: Call, prompts: list[Prompt], tenant: str
    ) -> tuple[list[GenerateRequest], Answers]:
        """What is submitted, and what writes the answer."""
        words = await self._words.required() if call.needs_words else None
        requests: list[GenerateRequest] = []
        known: list[Prompt] = []
        for place, prompt in enumerate(prompts):
            request = call.request(place, len(prompts), prompt, tenant)
            self._submissions.check_size(request)
            if words is not None and call.needs_prompt_ids and isinstance(prompt, str):
                words.check_fits(prompt, self._config.engine.max_model_len)
                token_ids = await self._words.token_ids(prompt)
                request = msgspec.structs.replace(request, prompt=None, prompt_token_ids=token_ids)
            self._submissions.check_encoded(request)
            known.append(request.prompt_token_ids or prompt)
            requests.append(request)
            if len(requests) % AT_ONCE == 0:
                await anyio.lowlevel.checkpoint()
        # What is echoed is the text as it came.
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
        return requests, Answers(call, known, texts, words)

    async def _complete(
        self, origin: Origin, requests: list[GenerateRequest], answers: Answers
    ) -> Answer:
        """The whole answer. The first error ends the other requests as well."""
        completions: dict[int, Completion] = {}

        async def run(index: int, begun: bool) -> None:
            async with aclosing(
                self._submissions.outputs(origin, requests[index], begun)
            ) as outputs:
                async for output in outputs:
                    if isinstance(output, Completion):
                        completions[index] = output

        await self._submissions.run(origin, [each.request_id for each in requests], run)
        ordered = [completions[index] for index in range(len(requests))]
        size = sum(each.usage.completion_tokens for each in ordered)
        size += sum(len(each.prompt_logprobs or ()) for each in ordered)
        if size * (1 + (answers.call.logprobs or 0)) <= _SHORT_ANSWER:
            return answers.whole(ordered)
        return await self._words.beside(partial(answers.whole, ordered))

    def _streamed(
        self, origin: Origin, requests: list[GenerateRequest], answers: Answers
    ) -> Response:
        async def produce(send: SendEvent) -> None:
            failure = await self._send_chunks(origin, requests, Chunks(answers, send))
            if failure is not None:
                error = as_openai(failure, answers.call.kind)
                if not stream.committed:
                    raise error
                await send(msgspec.json.encode(error_body(error)))
            await send(_DONE)

        stream = EventStream(produce, self._config.gateway.comment_s)
        return stream

    async def _send_chunks(
        self, origin: Origin, requests: list[GenerateRequest], chunks: Chunks
    ) -> NanoInferenceError | None:
        """Chunks of all prompts as they come. Gives the error that ended them."""

        async def run(index: int, begun: bool) -> None:
            async with aclosing(
                self._submissions.outputs(origin, requests[index], begun)
            ) as outputs:
                async for output in outputs:
                    chunks.put(index, output)
                    await anyio.lowlevel.checkpoint()

        failure: NanoInferenceError | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(chunks.send_all)
            try:
                await self._submissions.run(origin, [each.request_id for each in requests], run)
            except NanoInferenceError as error:
                failure = error
            chunks.close()
        if failure is None:
            await chunks.send_usage()
        return failure
