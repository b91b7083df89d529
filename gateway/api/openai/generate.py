"""Completions, chats, and tokens in and out: at once, or as a stream of chunks."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import msgspec

from ....bus.public import Completion, ImageInput
from ....config import NanoInferenceError
from ...call import Call
from ...server.http import (
    EventStream,
    JsonResponse,
    Response,
    SendEvent,
    connected,
    error_body,
    field_error,
    read_object,
)
from ...serving.begun_calls import (
    Attach,
    BegunCalls,
    Found,
    call_of_key,
    keyed,
    last_event_id,
    reads_event_ids,
)
from ...serving.durable_calls import Attachment, IdempotencyKey, not_found
from ...serving.fields import Body, engine_priority
from ...serving.prepared import Prepared, about_tools, check_request, prepare, truncated
from ...serving.request_ids import ids_of
from ...serving.services import Services
from ...serving.submissions import Take
from .answers import Answer, ChoicesWriter
from .bodies import ChatBody
from .errors import as_openai
from .messages import conversation_of, custom_names, tool_use
from .positions import Position, answer_of, read_position
from .requests import ChoicesCall, ChoicesRecord, Prompt, read_chat, read_completion, read_generate
from .streams import Chunks

_DONE = b"[DONE]"


class _Asked(NamedTuple):
    """A call as it came.

    Attributes:
        key: None without an idempotency key.
    """

    call: Call
    body: Body
    key: IdempotencyKey | None


class _RunningChoices(NamedTuple):
    """A call whose answer is on its way."""

    call: Call
    record: ChoicesRecord
    answers: ChoicesWriter
    attach: Attach


async def prepared_chat(
    call: Call, services: Services, wanted: ChoicesCall, fields: ChatBody
) -> tuple[ChoicesCall, Prepared]:
    """Prepare a chat; as `prepare`. Return the call with what was derived of it."""
    budget_param, budget = fields.budget
    conversation = conversation_of(fields)
    # The reading of custom tools' grammars takes the format.
    form = await services.templates.form(wanted.template, call.tenant) if fields.tools else None
    prepared = await prepare(
        call,
        services,
        conversation,
        tool_use(fields, form),
        wanted.sampling,
        reasoning_budget=budget,
        budget_param=budget_param,
        separates_reasoning=fields.separate_reasoning,
    )
    wanted = msgspec.structs.replace(
        wanted,
        sampling=prepared.sampling,
        reading=prepared.reading,
        custom_tools=custom_names(fields.tools),
    )
    return wanted, prepared


def check_whole(wanted: ChoicesCall) -> None:
    """Refuse a call that cuts a prompt with images.

    Raises:
        FieldError: invalid_request.
    """
    if wanted.truncation is not None:
        raise field_error(
            "truncate_prompt_tokens", "could cut an image; leave it out, or the images"
        )


async def prompts_cut(
    services: Services, wanted: ChoicesCall, prompts: list[Prompt]
) -> list[Prompt]:
    """Return the prompts of a call, with as many tokens as it wants."""
    if (most := wanted.truncation) is None:
        return prompts
    cut = partial(
        truncated,
        services,
        most=most,
        max_tokens=wanted.sampling.max_tokens,
        side=wanted.truncation_side,
        add_special=wanted.add_special_tokens,
    )
    return [await cut(each) for each in prompts]


async def forked(services: Services, call: Call, wanted: ChoicesCall) -> ChoicesCall:
    """Return a call; a fork with its parent's id on the bus, of which the caller knows its name."""
    if (fork := wanted.fork) is None:
        return wanted
    results, ids = services.client.bus.results, ids_of(call.caller, fork.request_id)
    found = [id for id in ids if await results.last(id, "") is not None]
    fork = msgspec.structs.replace(fork, request_id=(found or ids[-1:])[0])
    return msgspec.structs.replace(wanted, fork=fork)


class GenerationCalls:
    """The endpoints."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._begun = BegunCalls(services.durable, ChoicesRecord)

    async def completions(self, call: Call) -> Response:
        services, asked = self._services, await self._asked(call)
        wanted, prompts = read_completion(asked.body, services.config)
        wanted = await forked(services, call, wanted)
        return await self._resumed(asked, wanted) or await self._answer(asked, wanted, prompts)

    async def chat(self, call: Call) -> Response:
        services, asked = self._services, await self._asked(call)
        wanted, fields = read_chat(asked.body, services.config, await services.length.get())
        if (resumed := await self._resumed(asked, wanted)) is not None:
            return resumed
        if asked.key is None:
            # Errors of the conversation would otherwise come first.
            await services.served.check(fields.model, call.caller)
        wanted, prepared = await prepared_chat(call, services, wanted, fields)
        return await self._answer(asked, wanted, [prepared.prompt], prepared.images)

    async def tokens(self, call: Call) -> Response:
        services, asked = self._services, await self._asked(call)
        length = await services.length.get()
        wanted, prompt, sources = read_generate(asked.body, services.config, length)
        wanted = await forked(services, call, wanted)
        if (resumed := await self._resumed(asked, wanted)) is not None:
            return resumed
        images: tuple[ImageInput, ...] = ()
        if sources:
            await services.served.check(wanted.fields.model, call.caller)
            services.images.check(sources, await services.tokenizer.required())
            images = await services.images.load(sources, call.tenant)
        if images and wanted.places is not None:
            prompt, places = await services.images.located(
                services.tokenizer, prompt, images, call.tenant
            )
            wanted = msgspec.structs.replace(wanted, places=tuple(places))
        return await self._answer(asked, wanted, [prompt], images)

    async def stream(self, call: Call) -> Response:
        """Send a stream that was begun before: all of it, or the part after an event."""
        event_id = call.query.get("after") or last_event_id(call)
        return await self._resume(call, call.params["stream"], event_id)

    async def cancel(self, call: Call) -> Response:
        """Cancel a call by its answer's id. A call that has ended stays as it is."""
        call_id = call.params["stream"]
        await self._begun.find(call, call_id)
        self._services.submissions.end_waiting(call_id)
        await self._services.durable.cancel(call_id)
        return _cancelled(call_id)

    async def cancel_keyed(self, call: Call) -> Response:
        """Cancel the call of an idempotency key, of any interface, perhaps before its client has
        an id of it."""
        call_id = await call_of_key(self._services.client.bus.store.calls, call)
        self._services.submissions.end_waiting(call_id)
        await self._services.durable.cancel(call_id)
        return _cancelled(call_id)

    async def _asked(self, call: Call) -> _Asked:
        body = await read_object(call, self._services.config.gateway.max_body_bytes)
        return _Asked(call, body, keyed(call, body))

    async def _resumed(self, asked: _Asked, wanted: ChoicesCall) -> Response | None:
        """Resume the stream of a call that comes again with the id of its last event."""
        if not (wanted.fields.stream and (event_id := last_event_id(asked.call))):
            return None
        return await self._resume(asked.call, answer_of(event_id), event_id, asked.key)

    async def _answer(
        self,
        asked: _Asked,
        wanted: ChoicesCall,
        prompts: list[Prompt],
        images: tuple[ImageInput, ...] = (),
    ) -> Response:
        services, (call, _, key) = self._services, asked
        call.begin(wanted.fields.budget_ms, wanted.fields.model)
        if images:
            check_whole(wanted)
        prompts = await prompts_cut(services, wanted, prompts)
        record = await self._record(wanted, prompts, images, call.tenant, key)
        answers = await self._answers(record)
        services.submissions.check_priority(call.caller, engine_priority(wanted.fields.priority))
        begun = None
        if key is not None:
            record, begun = await self._begun.claim(call, record)
        if begun is not None:
            return await self._again(call, begun)
        attach: Attach = partial(services.durable.begun, record)
        return await self._respond(_RunningChoices(call, record, answers, attach))

    async def _resume(
        self, call: Call, call_id: str, event_id: str, again: IdempotencyKey | None = None
    ) -> Response:
        found = await self._begun.find(call, call_id, again)
        wanted = found.record.call
        if not wanted.fields.stream:
            raise not_found(call_id)
        call.begin(wanted.fields.budget_ms, wanted.fields.model)
        return await self._again(call, found, event_id)

    async def _again(self, call: Call, found: Found[ChoicesRecord], event_id: str = "") -> Response:
        """Answer a call that was begun before, perhaps after an event."""
        record = found.record
        wanted = record.call
        choices = len(record.prompts) * wanted.n
        after = read_position(event_id, wanted.id, choices) if event_id else None
        answers = await self._answers(record)
        running = _RunningChoices(call, record, answers, partial(self._begun.attach, found))
        return await self._respond(running, after)

    async def _answers(self, record: ChoicesRecord) -> ChoicesWriter:
        """Return the writer of the answer. Every gateway reads messages alike.

        Raises:
            RequestError: unsupported: the gateway lacks the tokenizer.
        """
        services, wanted = self._services, record.call
        tokenizer = await services.tokenizer.required() if wanted.needs_tokenizer else None
        form = None
        if wanted.reading is not None:
            form = await services.templates.form(wanted.template, record.tenant)
        return ChoicesWriter(
            wanted, record.prompts, record.texts, tokenizer, form, services.submissions.measures
        )

    async def _record(
        self,
        wanted: ChoicesCall,
        prompts: list[Prompt],
        images: tuple[ImageInput, ...],
        tenant: str,
        key: IdempotencyKey | None,
    ) -> ChoicesRecord:
        """Check all requests of a call, and return its record."""
        submitted: list[Prompt] = []
        for place, prompt in enumerate(prompts):
            request = await check_request(
                self._services,
                wanted.request(place, len(prompts), prompt, tenant, images),
                as_tokens=wanted.needs_prompt_ids,
            )
            submitted.append(request.prompt_token_ids or prompt)
        return ChoicesRecord(
            tenant=tenant,
            call=wanted,
            prompts=submitted,
            # An echo is the text as it came.
            texts=[prompt if isinstance(prompt, str) else None for prompt in prompts],
            images=images,
            # A single request is published before the client sees anything of the answer.
            has_prompts=len(prompts) > 1 or wanted.needs_prompt_ids or key is not None,
            keyed=key,
        )

    async def _respond(self, running: _RunningChoices, after: Position | None = None) -> Response:
        if running.record.call.fields.stream:
            return self._streamed(running, after)
        async with connected(running.call.cancelled), running.attach() as attachment:
            return JsonResponse(await self._complete(running, attachment))

    async def _complete(self, running: _RunningChoices, attachment: Attachment | None) -> Answer:
        """Return the whole answer. The first error ends the other requests as well."""
        completions = await self._run(running, attachment)
        write = partial(running.answers.whole, completions)
        return await self._services.tokenizer.process(running.answers.work(completions), write)

    async def _run(
        self, running: _RunningChoices, attachment: Attachment | None, take: Take | None = None
    ) -> list[Completion]:
        """Run all requests.

        Raises:
            NanoInferenceError: The error that ended them.
        """
        call, record, answers, _ = running
        requests = [record.request(place) for place in range(len(record.prompts))]
        submissions = self._services.submissions
        with about_tools(record.call.reading):
            return await submissions.run(call, requests, take, attachment, answers.echoed)

    def _streamed(self, running: _RunningChoices, after: Position | None) -> Response:
        gateway = self._services.config.gateway

        async def produce(send: SendEvent) -> None:
            chunks = Chunks(running.answers, send, after)
            try:
                async with running.attach() as attachment:
                    # Without room for the call no client can resume it.
                    stream.ids = stream.ids and attachment is not None
                    run = partial(self._run, running, attachment, chunks.take)
                    completions = await chunks.send_while(run)
                    await chunks.send_usage(completions, running.call.account)
            except NanoInferenceError as error:
                failure = as_openai(error, running.record.call.kind)
                if not stream.committed:
                    raise failure from None
                # Without tokens the position stays: after an error the client may come back.
                await send(msgspec.json.encode(error_body(failure)), chunks.position.event_id)
            await send(_DONE, chunks.position.event_id)

        may_resume = gateway.event_ids
        if may_resume == "auto":
            # Clients that read only lines of data fail on an id.
            may_resume = running.record.keyed is not None or reads_event_ids(running.call)
        stream = EventStream(produce, gateway.comment_s, ids=may_resume)
        return stream


def _cancelled(call_id: str) -> Response:
    return JsonResponse({"id": call_id, "object": "stream.cancelled", "cancelled": True})
