"""`/generate` and `/encode`: submit the prompts of a call and answer, at once or in a stream."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import anyio.lowlevel
import msgspec

from ....bus.public import Completion, EmbedParams, GenerateRequest, ImageInput, Output
from ....config import Int64, NanoInferenceError
from ....pipeline.scoring import EmbeddedPrompt
from ...call import Call
from ...caller import Caller
from ...server.http import EventStream, JsonResponse, Response, SendEvent, connected, error_body
from ...serving.begun_calls import BodyCall, keyed
from ...serving.embedding import EmbedCall, answer_embedded
from ...serving.fields import read_part
from ...serving.prepared import as_submitted, check_length
from ...serving.request_ids import bus_id, name_of, named
from ...serving.services import Services
from ...serving.submissions import AT_ONCE
from .answers import Answer, PromptWriter, SampleEvents
from .requests import ROUTED_OR_LOGGED, PromptCall, read_call, read_prompts, read_sglang_object

_DONE = b"[DONE]"


class Generation:
    """The calls of `/generate` in flight."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._submissions = services.submissions
        self._labels = services.labels

    async def generate(self, call: Call) -> Response:
        """The endpoint."""
        gateway = self._services.config.gateway
        caller, tenant = call.caller, call.tenant
        body = await read_sglang_object(call, self._services.config)
        key = keyed(call, body)
        wanted = read_call(body, gateway.max_prompts)
        call.begin(wanted.budget_ms)
        writers = await self._writers(wanted.prompts, caller, tenant)
        for asked in _requests_of(writers[:1]):
            self._submissions.check_priority(call.caller, asked.priority, lower_first=False)
        begun = await self._services.keyed.begin(call, key, _requests_of(writers))
        for writer, asked in zip(writers, begun.requests, strict=True):
            writer.answers(asked, name_of(caller, asked.request_id))
        if wanted.stream:
            return EventStream(partial(self._stream, call, begun, writers, wanted.batch))
        async with connected(call.cancelled):
            answers = await self._complete_all(call, begun, writers)
            return JsonResponse(answers if wanted.batch else answers[0])

    # --- before -------------------------------------------------------------------------------

    async def _writers(
        self, prompts: Iterator[PromptCall], caller: Caller, tenant: str
    ) -> list[PromptWriter]:
        """Return the writer of each prompt's answer, with its request ready to submit."""
        services = self._services
        # All lengths first, so that no text is read for a call that is refused.
        fitting: list[PromptCall] = []
        for wanted in prompts:
            await check_length(services, wanted.request, as_tokens=wanted.needs_token_ids)
            fitting.append(wanted)
            if len(fitting) % AT_ONCE == 0:
                await anyio.lowlevel.checkpoint()
        writers: list[PromptWriter] = []
        for wanted in fitting:
            tokenizer = None
            if wanted.needs_tokenizer or wanted.needs_token_ids:
                tokenizer = await services.tokenizer.required()
            images = await self._images(wanted, tenant)
            request = msgspec.structs.replace(
                wanted.request, request_id=bus_id(caller, wanted.id), tenant=tenant, images=images
            )
            request = await as_submitted(services, request, as_tokens=wanted.needs_token_ids)
            wanted = msgspec.structs.replace(wanted, request=wanted.with_targets(request))
            writers.append(PromptWriter(wanted, tokenizer, self._labels))
            if len(writers) % AT_ONCE == 0:
                await anyio.lowlevel.checkpoint()
        return writers

    async def _images(self, wanted: PromptCall, tenant: str) -> tuple[ImageInput, ...]:
        """Return the files of a prompt's images."""
        if not wanted.images:
            return ()
        services = self._services
        services.images.check(wanted.images, await services.tokenizer.required())
        return await services.images.load(wanted.images, tenant)

    # --- after --------------------------------------------------------------------------------

    async def _complete_all(
        self, call: Call, begun: BodyCall, writers: list[PromptWriter]
    ) -> list[Answer]:
        """All answers, in order. The first error ends the other requests as well."""
        answers: list[list[Answer]] = [[] for _ in writers]

        async def take(index: int, output: Output) -> None:
            if isinstance(output, Completion):
                writer = writers[index]
                listed, write = writer.listed(output, output.samples), partial(writer.final, output)
                answers[index] = await self._services.tokenizer.process(listed, write)

        async with begun.attach() as attachment:
            await self._submissions.run(call, begun.requests, take, attachment)
        return [answer for each in answers for answer in each]

    async def _stream(
        self,
        call: Call,
        begun: BodyCall,
        writers: list[PromptWriter],
        batch: bool,
        send: SendEvent,
    ) -> None:
        """Events of all prompts as they come. The first error is the last of them.

        Raises:
            NanoInferenceError: The engine did not do it, and no event was sent.
        """
        process = self._services.tokenizer.process
        events = SampleEvents(send, writers, process, indexed=batch)
        try:
            async with begun.attach() as attachment:
                run = self._submissions.run
                await events.send_while(partial(run, call, begun.requests, events.take, attachment))
        except NanoInferenceError as error:
            if not events.any_sent:
                raise
            await send(msgspec.json.encode(error_body(error)))
        await send(_DONE)


def _requests_of(writers: list[PromptWriter]) -> list[GenerateRequest]:
    return [each.wanted.request for each in writers]


class EncodeBody(msgspec.Struct, frozen=True):
    """`/encode`: SGLang's EmbeddingReqInput."""

    NEUTRAL: ClassVar = dict.fromkeys(
        ("log_metrics", "background", "routing_key", "external_trace_header"), ROUTED_OR_LOGGED
    )

    rid: str | None = None
    text: str | list[str] | None = None
    input_ids: list[Int64 | list[Int64]] | None = None
    dimensions: Int64 | None = None
    priority: Int64 = 0
    # Not SGLang's.
    budget_ms: float | None = None


async def encode(services: Services, call: Call) -> Response:
    """Answer a text with an object, and a list with a list of objects."""
    found = await read_sglang_object(call, services.config)
    body = read_part(found, EncodeBody)
    prompts, batch = read_prompts(body.text, body.input_ids)
    caller = call.caller
    wanted = EmbedCall(
        id=bus_id(caller, named(body.rid, "rid")),
        params=EmbedParams(dimensions=body.dimensions),
        priority=body.priority,
        budget_ms=body.budget_ms,
        lower_first=False,
    )

    def write(embedded: list[EmbeddedPrompt], time: dict[str, Any]) -> Any:
        ids = [name_of(caller, each.request_id) for each in wanted.requests(prompts, "")]
        answers = [
            {
                "embedding": each.vector,
                "meta_info": {"id": name, "prompt_tokens": each.prompt_tokens} | time,
            }
            for name, each in zip(ids, embedded, strict=True)
        ]
        return answers if batch else answers[0]

    return await answer_embedded(call, services, wanted, prompts, write)
