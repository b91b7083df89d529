"""The endpoints of `/v1/responses`."""

from __future__ import annotations

import anyio
from starlette.requests import Request
from starlette.responses import Response

from ....bus.public import GenerateRequest
from ....config import Config, NanoInferenceError
from ...chat_templates import ChatTemplates
from ...http import (
    CLIENT_LEFT,
    EventStream,
    FieldError,
    JsonResponse,
    SendEvent,
    answer_while_connected,
    field_name,
    read_object,
    while_connected,
)
from ...model_length import ModelLength
from ...origin import Origin, origin_of
from ...samples import complete_sample, stream_sample
from ...submissions import Submissions
from ...tenants import tenant_of
from ...words import LazyWords
from ..errors import as_openai
from .answers import Answers
from .events import Events
from .kept import KeptResponse, KeptResponses
from .requests import conversation_of, read_response

_CANCEL_TIMEOUT_S = 10.0
"""How long a cancelled response may take to end before what is known of it is told."""


class ResponseCalls:
    """The endpoints."""

    def __init__(
        self,
        submissions: Submissions,
        config: Config,
        words: LazyWords,
        templates: ChatTemplates,
        length: ModelLength,
    ) -> None:
        self._submissions = submissions
        self._config = config
        self._words = words
        self._templates = templates
        self._length = length
        self._kept = KeptResponses(config.bus.results_ttl_s)

    async def create(self, request: Request) -> Response:
        tenant = tenant_of(request)
        body = await read_object(request, self._config.gateway.max_body_bytes)
        call = read_response(body, self._config)
        conversation = conversation_of(call.fields)
        prompts: list[tuple[int, ...]] = []

        async def render() -> None:
            prompts.append(await self._templates.token_ids(conversation))

        # It may have to wait for other templates.
        await while_connected(request.receive, render)
        if not prompts:
            return Response(status_code=CLIENT_LEFT)
        asked = call.request(prompts[0], tenant, await self._length.get())
        self._submissions.check_size(asked)
        self._submissions.check_encoded(asked)
        origin = origin_of(request, tenant, call.fields.budget_ms)
        answers = Answers(call, await self._words.required())
        if call.fields.stream:
            return self._streamed(origin, asked, answers)

        async def work() -> Response:
            return await self._complete(origin, asked, answers)

        return await answer_while_connected(request, work)

    async def retrieve(self, request: Request) -> Response:
        for name, value in request.query_params.items():
            # OpenAI's clients write what they have no value for as false, or not at all.
            if name != "include" and value not in ("", "false"):
                param = field_name(name)
                raise FieldError(
                    f"{param} is not supported here: a stream can't be read again",
                    param=param,
                    code="unsupported",
                )
        return _json(self._kept.find(request.path_params["response_id"]))

    async def delete(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        self._kept.delete(response_id)
        return JsonResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """Ends one that is under way; what it has until then stays."""
        response_id = request.path_params["response_id"]
        kept = self._kept.under_way(response_id)
        if kept is None:
            kept = self._kept.find(response_id)
            if kept.status != "cancelled":
                raise FieldError(
                    f"the response is {kept.status}; one that has ended can't be cancelled",
                    param=None,
                )
            return _json(kept)
        await self._submissions.abort(response_id)
        with anyio.move_on_after(_CANCEL_TIMEOUT_S):
            await kept.ended.wait()
        return _json(kept)

    # --- making one ---------------------------------------------------------------------------

    async def _complete(self, origin: Origin, asked: GenerateRequest, answers: Answers) -> Response:
        self._kept.begin(answers.begun())
        try:
            completion = await complete_sample(self._submissions, origin, asked)
            response = answers.whole(completion)
            self._kept.end(response)
        finally:
            self._kept.drop(asked.request_id)
        return JsonResponse(response)

    def _streamed(self, origin: Origin, asked: GenerateRequest, answers: Answers) -> Response:
        async def produce(send: SendEvent) -> None:
            events = Events(answers, send)
            self._kept.begin(answers.begun())
            try:
                completion = await stream_sample(self._submissions, origin, asked, events.take)
                self._kept.end(await events.end(completion))
            except NanoInferenceError as error:
                failure = as_openai(error, "responses")
                if not stream.committed:
                    raise failure from error
                self._kept.end(await events.fail(failure))
            finally:
                self._kept.drop(asked.request_id)

        stream = EventStream(produce, self._config.gateway.comment_s)
        return stream


def _json(kept: KeptResponse) -> Response:
    return Response(kept.body, media_type="application/json")
