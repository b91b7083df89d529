"""`/api/chat` and `/api/generate`: at once, or as a stream of lines."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from ....text.messages import ToolUse
from ...call import Call
from ...server.http import (
    JsonResponse,
    LineStream,
    Response,
    SendEvent,
    connected,
    field_error,
    read_object,
)
from ...serving.begun_calls import BodyCall, keyed
from ...serving.durable_calls import IdempotencyKey
from ...serving.fields import ignore, read_part
from ...serving.logprobs import TokenNames
from ...serving.message_parts import MessageParts
from ...serving.prepared import Prepared, about_tools, check_request, prepare
from ...serving.services import Services
from ...serving.streamed import streamed
from .answers import Answer, AnswerWriter, without_tokens
from .bodies import AnswerBody, ChatBody, GenerateBody
from .errors import error_line
from .models import ModelCalls
from .requests import (
    conversation_of,
    ends_now,
    model_of,
    prompt_conversation,
    request_of,
    sampling_of,
    use_of,
)

Fields = TypeVar("Fields", bound=AnswerBody)


class AnswerCalls:
    """The endpoints. `models`: loads and unloads them."""

    def __init__(self, services: Services, models: ModelCalls) -> None:
        self._services = services
        self._models = models

    async def chat(self, call: Call) -> Response:
        services = self._services
        fields, key = await self._read(call, ChatBody)
        if not fields.messages:
            return await self._without_prompt(call, fields, chat=True)
        sampling = sampling_of(fields, await services.length.get())
        prepared = await prepare(
            call,
            services,
            conversation_of(fields),
            use_of(fields),
            sampling,
        )
        return await self._answer(call, key, fields, prepared, chat=True)

    async def generate(self, call: Call) -> Response:
        services = self._services
        fields, key = await self._read(call, GenerateBody)
        if not fields.prompt:
            return await self._without_prompt(call, fields, chat=False)
        sampling = sampling_of(fields, await services.length.get())
        tokenizer = await services.tokenizer.required()
        if fields.raw:
            _check_raw(fields)
        # Ollama's template of a model without one is the prompt itself.
        if fields.raw or not (tokenizer.transformers.chat_template or fields.system):
            _check_plain(fields)
            prepared = Prepared(fields.prompt, sampling, None, None)
            return await self._answer(call, key, fields, prepared, chat=False, plain=True)
        prepared = await prepare(call, services, prompt_conversation(fields), ToolUse(), sampling)
        if fields.context:
            if isinstance(prepared.prompt, str):
                raise field_error("context", "is of tokens, and images have none; leave one out")
            first = tokenizer.transformers.bos_token_id
            own = prepared.prompt[prepared.prompt[:1] == (first,) :]
            prepared = prepared._replace(prompt=(*fields.context, *own))
        return await self._answer(call, key, fields, prepared, chat=False)

    async def _read(self, call: Call, kind: type[Fields]) -> tuple[Fields, IdempotencyKey | None]:
        config = self._services.config
        body = await read_object(call, config.gateway.max_body_bytes)
        key = keyed(call, body)
        # First of all: with another model no field matters.
        if isinstance(name := body.get("model"), str):
            await self._services.served.check(model_of(name, config), call.caller)
        fields = read_part(body, kind)
        if fields.keep_alive is not None and not ends_now(fields.keep_alive):
            ignore("keep_alive")
        return fields, key

    async def _without_prompt(self, call: Call, fields: AnswerBody, *, chat: bool) -> Response:
        config = self._services.config
        call.begin(fields.budget_ms, fields.model)
        reason = "load"
        if ends_now(fields.keep_alive):
            reason = "unload"
            await self._models.unload(call, model_of(fields.model, config))
        name = fields.model or config.engine.model_name
        return JsonResponse(without_tokens(name, chat, reason))

    async def _answer(
        self,
        call: Call,
        key: IdempotencyKey | None,
        fields: AnswerBody,
        prepared: Prepared,
        *,
        chat: bool,
        plain: bool = False,
    ) -> Response:
        services = self._services
        asked = request_of(fields, prepared, call.tenant, services.config, plain=plain)
        await check_request(services, asked)
        call.begin(fields.budget_ms, fields.model)
        services.submissions.check_priority(call.caller, asked.priority)
        begun = await services.keyed.begin(call, key, [asked])
        (asked,) = begun.requests
        tokenizer = await services.tokenizer.required()
        parts = MessageParts(
            tokenizer,
            asked.sampling,
            prepared.form,
            prepared.reading,
            # The ids of calls are made of it.
            f"{asked.request_id}/0",
            by_tokens=fields.logprobs,
            measures=services.measures,
        )
        writer = AnswerWriter(
            fields.model or services.config.engine.model_name,
            begun.created,
            chat,
            parts,
            TokenNames(tokenizer, as_ids=False) if fields.logprobs else None,
            shows_context=not (chat or plain or prepared.images),
        )
        if fields.stream:
            return self._streamed(call, begun, writer, prepared)
        async with connected(call.cancelled), begun.attach() as attachment:
            with about_tools(prepared.reading):
                (completion,) = await services.submissions.run(call, [asked], attachment=attachment)
        return JsonResponse(writer.whole(completion))

    def _streamed(
        self, call: Call, begun: BodyCall, writer: AnswerWriter, prepared: Prepared
    ) -> Response:
        async def send_line(send: SendEvent, line: Answer) -> None:
            await send(msgspec.json.encode(line))

        comment_s = self._services.config.gateway.comment_s
        return streamed(
            self._services,
            call,
            begun,
            writer,
            prepared.reading,
            stream_of=lambda produce: LineStream(produce, comment_s, writer.quiet()),
            send_part=send_line,
            failure=error_line,
        )


def _check_raw(fields: GenerateBody) -> None:
    """Raises FieldError: a field changes the prompt, which is raw."""
    for name in ("system", "context"):
        if getattr(fields, name):
            raise field_error(name, "has no effect with raw: true; leave one of them out")


def _check_plain(fields: GenerateBody) -> None:
    """Raises FieldError: a field takes the model's chat template."""
    if fields.images:
        raise field_error(
            "images", "take the model's chat template; send them without raw", code="unsupported"
        )
    if fields.think:
        raise field_error(
            "think", "takes the model's chat template; leave it out", code="unsupported"
        )
