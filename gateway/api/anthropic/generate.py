"""`/v1/messages`: at once, or as a stream of events; and how many tokens a prompt has."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from ....bus.public import GenerateRequest
from ....text.messages import ToolUse
from ...call import Call
from ...server.http import (
    EventStream,
    JsonResponse,
    Response,
    SendEvent,
    connected,
    read_object,
)
from ...serving.begun_calls import BodyCall, keyed
from ...serving.chat_templates import Conversation
from ...serving.fields import Body, read_part
from ...serving.message_parts import MessageParts
from ...serving.model_names import adapter_of
from ...serving.prepared import (
    Prepared,
    about_tools,
    check_request,
    conversation_tokens,
    prepare,
)
from ...serving.rendered import rendered
from ...serving.services import Services
from ...serving.streamed import streamed
from .answers import Answer, MessageWriter
from .bodies import CountBody, MessagesBody
from .conversation import read_conversation
from .edits import Count, Edited, edit
from .errors import error_event, named
from .requests import (
    budget_of,
    check_thinking,
    check_version,
    read_messages,
    request_of,
    sampling_of,
)

# Where nothing else is to be said.
_PING = b'event: ping\ndata: {"type":"ping"}'


class MessageCalls:
    """The endpoints."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def count_tokens(self, call: Call) -> Response:
        check_version(call)
        services, body = self._services, await self._body(call)
        fields = read_part(body, CountBody)
        await services.served.check(fields.model, call.caller)
        check_thinking(fields)
        async with connected(call.cancelled):
            edited, use = await self._conversation(call, fields)
            count = self._count(call, use)
            counted: Answer = {"input_tokens": await count(edited.conversation)}
            if edited.applied is not None:
                before = await count(edited.before)
                counted["context_management"] = {"original_input_tokens": before}
        return named(call, JsonResponse(counted))

    async def messages(self, call: Call) -> Response:
        check_version(call)
        services, body = self._services, await self._body(call)
        key = keyed(call, body)
        # First of all: with another model no field matters.
        if isinstance(model := body.get("model"), str):
            await services.served.check(model, call.caller)
        fields = read_messages(body)
        edited, prepared = await self._prepared(call, body, fields)
        asked = request_of(fields, prepared, call.tenant, services.config)
        await check_request(services, asked)
        call.begin(fields.budget_ms, fields.model)
        services.submissions.check_priority(call.caller, asked.priority)
        begun = await services.keyed.begin(call, key, [asked])
        (asked,) = begun.requests
        writer = await self._writer(asked, fields, prepared, edited)
        if fields.stream:
            return named(call, self._streamed(call, begun, writer, prepared))
        async with connected(call.cancelled), begun.attach() as attachment:
            with about_tools(prepared.reading):
                (completion,) = await services.submissions.run(call, [asked], attachment=attachment)
        return named(call, JsonResponse(writer.whole(completion)))

    async def render(self, call: Call) -> Response:
        """Return the body of `/inference/v1/generate` for a message."""
        check_version(call)
        services, body = self._services, await self._body(call)
        fields = read_messages(body)
        await services.served.check(fields.model, call.caller)
        _, prepared = await self._prepared(call, body, fields)
        asked = request_of(fields, prepared, call.tenant, services.config)
        return named(call, JsonResponse(await rendered(services, asked, self._model(fields))))

    async def _body(self, call: Call) -> Body:
        return await read_object(call, self._services.config.gateway.max_body_bytes)

    async def _conversation(self, call: Call, fields: CountBody) -> tuple[Edited, ToolUse]:
        conversation, use = read_conversation(fields, call.tenant)
        edited = await edit(conversation, fields.context_management, self._count(call, use))
        return edited, use

    async def _prepared(
        self, call: Call, body: Body, fields: MessagesBody
    ) -> tuple[Edited, Prepared]:
        async with connected(call.cancelled):
            edited, use = await self._conversation(call, fields)
        prepared = await prepare(
            call,
            self._services,
            edited.conversation,
            use,
            sampling_of(body, fields),
            reasoning_budget=budget_of(fields),
            budget_param="thinking.budget_tokens",
        )
        return edited, prepared

    def _model(self, fields: MessagesBody) -> str:
        config = self._services.config
        return adapter_of(fields.model, config) or config.engine.model_name

    def _count(self, call: Call, use: ToolUse) -> Count:
        async def count(conversation: Conversation) -> int:
            offered = replace(conversation, tools=use.usable)
            return len(await conversation_tokens(self._services, offered, call.tenant))

        return count

    async def _writer(
        self, asked: GenerateRequest, fields: MessagesBody, prepared: Prepared, edited: Edited
    ) -> MessageWriter:
        services, reading = self._services, prepared.reading
        more: Answer = {}
        if edited.applied is not None:
            more["context_management"] = {"applied_edits": edited.applied}
        if fields.diagnostics:
            # Of a difference to a former prompt, which is not kept.
            more["diagnostics"] = {"cache_miss_reason": {"type": "unavailable"}}
        tokenizer = await services.tokenizer.required()
        thinking = fields.thinking
        parts = MessageParts(
            tokenizer,
            asked.sampling,
            prepared.form,
            reading,
            # The ids of calls are made of it.
            f"{asked.request_id}/0",
            by_tokens=False,
            measures=services.measures,
        )
        return MessageWriter(
            asked,
            self._model(fields),
            tokenizer,
            parts,
            counts_thinking=reading is not None and reading.separates_reasoning,
            shows_thinking=thinking is None or thinking.display != "omitted",
            more=more,
        )

    def _streamed(
        self, call: Call, begun: BodyCall, writer: MessageWriter, prepared: Prepared
    ) -> Response:
        async def send_event(send: SendEvent, event: Answer) -> None:
            await send(msgspec.json.encode(event), name=event["type"])

        comment_s = self._services.config.gateway.comment_s
        return streamed(
            self._services,
            call,
            begun,
            writer,
            prepared.reading,
            stream_of=lambda produce: EventStream(produce, comment_s, _PING),
            send_part=send_event,
            failure=lambda error: error_event(error, call.id),
        )
