"""vLLM's `render` and `derender`: a call as the tokens of `/inference/v1/generate`, and back.

A router renders a conversation here, has its tokens continued anywhere, and makes the answer of
the tokens here. Neither runs a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from ....bus.public import (
    Completion,
    CompletionSample,
    FinishReason,
    ImageInput,
    TokenLogprob,
    Usage,
)
from ...call import Call
from ...server.http import FieldError, JsonResponse, Response, connected, field_error, read_object
from ...serving.fields import Body, read_part
from ...serving.rendered import rendered
from ...serving.services import Services
from ...serving.tokenizer import READING, Tokenizer, first_stop, free_of_stops, is_stop_token
from .answers import Answer, ChoicesWriter, usage_of
from .bodies import DerenderChatBody, DerenderTextBody, Generated, GeneratedChoice
from .generate import check_whole, prepared_chat, prompts_cut
from .requests import ChoicesCall, Prompt, read_chat, read_completion

_TOKEN = "token_id:"


class RenderCalls:
    """The endpoints."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def chat(self, call: Call) -> Response:
        """Return the body of `/inference/v1/generate` for a chat."""
        wanted, prompt, images = await self._read_chat(call, await self._body(call))
        return JsonResponse(await self._rendered(call, wanted, 0, 1, prompt, images))

    async def completions(self, call: Call) -> Response:
        """Return a body of `/inference/v1/generate` for each prompt of a completion."""
        wanted, prompts = read_completion(await self._body(call), self._services.config)
        await self._services.served.check(wanted.fields.model, call.caller)
        async with connected(call.cancelled):
            prompts = await prompts_cut(self._services, wanted, prompts)
            return JsonResponse(
                [
                    await self._rendered(call, wanted, place, len(prompts), prompt)
                    for place, prompt in enumerate(prompts)
                ]
            )

    async def chat_of_tokens(self, call: Call) -> Response:
        """Return a chat's answer for one of `/inference/v1/generate`."""
        fields = read_part(await self._body(call), DerenderChatBody)
        await self._services.served.check(fields.model, call.caller)
        if fields.chat_request is None:
            raise field_error("chat_request", "is missing; give the body that was rendered")
        wanted, _, _ = await self._read_chat(call, fields.chat_request)
        made = fields.generate_response
        return await self._answer(
            wanted,
            call.tenant,
            [made],
            [fields.prompt_token_ids],
            [fields.prompt_tokens],
            "generate_response",
        )

    async def text_of_tokens(self, call: Call) -> Response:
        """Return a completion's answer for those of `/inference/v1/generate`, one a prompt."""
        fields = read_part(await self._body(call), DerenderTextBody)
        await self._services.served.check(fields.model, call.caller)
        body = {"prompt": [0]} | (fields.completion_request or {})
        wanted, _ = read_completion(body, self._services.config)
        number = len(fields.generate_responses)
        lists: list[list[Any]] = []
        for name in ("prompt_token_ids", "prompt_tokens"):
            given = getattr(fields, name)
            if given is not None and len(given) != number:
                raise field_error(
                    name,
                    f"has {len(given)} entries, and generate_responses has {number}",
                    remedy="give one for each",
                )
            lists.append([None] * number if given is None else given)
        ids, texts = lists
        answers = fields.generate_responses
        return await self._answer(wanted, call.tenant, answers, ids, texts, "generate_responses")

    async def _body(self, call: Call) -> Body:
        return await read_object(call, self._services.config.gateway.max_body_bytes)

    async def _read_chat(
        self, call: Call, body: Body
    ) -> tuple[ChoicesCall, Prompt, tuple[ImageInput, ...]]:
        services = self._services
        wanted, fields = read_chat(body, services.config, await services.length.get())
        await services.served.check(fields.model, call.caller)
        wanted, prepared = await prepared_chat(call, services, wanted, fields)
        if prepared.images:
            check_whole(wanted)
            return wanted, prepared.prompt, prepared.images
        (prompt,) = await prompts_cut(services, wanted, [prepared.prompt])
        return wanted, prompt, ()

    async def _rendered(
        self,
        call: Call,
        wanted: ChoicesCall,
        place: int,
        prompts: int,
        prompt: Prompt,
        images: tuple[ImageInput, ...] = (),
    ) -> Answer:
        services = self._services
        name = wanted.named or wanted.id
        found = await rendered(
            services,
            wanted.request(place, prompts, prompt, call.tenant, images),
            wanted.model,
            name=name if prompts == 1 else f"{name}-{place}",
            logprobs=wanted.logprobs,
        )
        if wanted.fields.stream:
            found["stream_options"] = wanted.fields.stream_options
        return found

    async def _answer(
        self,
        wanted: ChoicesCall,
        tenant: str,
        generated: Sequence[Generated],
        prompts: Sequence[Sequence[int] | None],
        prompt_tokens: Sequence[int | None],
        where: str,
    ) -> Response:
        services = self._services
        if not generated:
            raise field_error(where, "is empty; give an answer of /inference/v1/generate")
        tokenizer, form = await services.tokenizer.required(), None
        if wanted.reading is not None:
            form = await services.templates.form(wanted.template, tenant)
        each_n = {len(each.choices) for each in generated}
        n, most = max(each_n), services.config.gateway.max_prompts
        if len(each_n) > 1 or not 0 < n * len(generated) <= most:
            raise field_error(
                f"{where}.choices",
                f"are none, of different numbers, or more than {most} (gateway.max_prompts)",
                remedy="send the choices of one call",
            )
        length = await services.length.get()
        self._check_tokens(tokenizer, [*filter(None, prompts)], "prompt_token_ids", length)
        for each in generated:
            tokens = [choice.token_ids for choice in each.choices]
            self._check_tokens(tokenizer, tokens, f"{where}.choices[].token_ids", length)
        if wanted.echo and not all(prompts):
            raise field_error(
                "prompt_token_ids",
                "are missing, which echo shows",
                remedy="send those of the rendered call",
            )
        first = generated[0]
        wanted = replace(wanted, id=first.request_id or first.id or wanted.id, n=n, named="")
        # The prompt's logprobs are passed on as they are.
        wanted = replace(wanted, prompt_logprobs=False)
        shown: list[Prompt] = [tuple(each or ()) for each in prompts]
        writer = ChoicesWriter(wanted, shown, [None] * len(shown), tokenizer, form)

        def write() -> Answer:
            made = [completion_of(each, wanted, tokenizer) for each in generated]
            answer = writer.whole(made)
            counted = sum(
                len(ids or ()) if given is None else given
                for ids, given in zip(prompts, prompt_tokens, strict=True)
            )
            completed = sum(each.usage.completion_tokens for each in made)
            details = answer["usage"].get("completion_tokens_details", {})
            answer["usage"] = usage_of(counted, completed, 0, details.get("reasoning_tokens"))
            answer["system_fingerprint"] = first.system_fingerprint
            scored = [each.prompt_logprobs for each in generated]
            if wanted.chat:
                answer["prompt_logprobs"] = scored[0]
            else:
                for choice in answer["choices"]:
                    choice["prompt_logprobs"] = scored[choice["index"] // n]
            return answer

        tokens_made = sum(len(choice.token_ids) for each in generated for choice in each.choices)
        return JsonResponse(await services.tokenizer.process(tokens_made * READING, write))

    @staticmethod
    def _check_tokens(
        tokenizer: Tokenizer, lists: Sequence[Sequence[int]], where: str, longest: int
    ) -> None:
        """Raises FieldError unless all are tokens, and no list is longer than the model's."""
        most = len(tokenizer.transformers) - 1
        for each in lists:
            if len(each) > longest:
                raise field_error(where, f"are more than the model's length, {longest}; send fewer")
            if any(not 0 <= token_id <= most for token_id in each):
                raise field_error(
                    where,
                    f"holds an id that is none; the tokenizer's are 0 to {most}; send only those",
                    code="invalid_token_ids",
                )


# --- and back ---------------------------------------------------------------------------------


def completion_of(made: Generated, wanted: ChoicesCall, tokenizer: Tokenizer) -> Completion:
    """Return the completion whose tokens an answer of `/inference/v1/generate` has.

    Raises:
        FieldError: Its logprobs are missing, or not those of its tokens.
    """
    samples = [
        _sample(place, choice, wanted, tokenizer) for place, choice in enumerate(made.choices)
    ]
    tokens = sum(len(each.token_ids) for each in samples)
    return Completion(
        request_id=made.request_id,
        entry_id="",
        status="done",
        samples=tuple(samples),
        usage=Usage(completion_tokens=tokens),
    )


def _sample(
    place: int, choice: GeneratedChoice, wanted: ChoicesCall, tokenizer: Tokenizer
) -> CompletionSample:
    token_ids, sampling = choice.token_ids, wanted.sampling
    reason: FinishReason = choice.finish_reason or "abort"
    text = tokenizer.text(token_ids, skip_special=True)
    if reason == "stop" and token_ids:
        if is_stop_token(token_ids[-1], sampling, tokenizer):
            text = tokenizer.text(token_ids[:-1], skip_special=True)
        else:
            free = free_of_stops(token_ids, sampling, tokenizer, skip_special=True)
            text = text[: free + first_stop(text[free:], sampling.stop)[1]]
    logprobs = (0.0,) * len(token_ids)
    tops: tuple[tuple[TokenLogprob, ...], ...] | None = None
    if wanted.logprobs is not None:
        content = choice.logprobs.content if choice.logprobs is not None else []
        if len(content) != len(token_ids):
            raise field_error(
                f"choices[{place}].logprobs",
                f"has {len(content)} entries for {len(token_ids)} tokens; render and send the "
                "call with logprobs",
            )
        logprobs = tuple(each.logprob for each in content)
        number = wanted.logprobs
        tops = tuple(
            tuple(
                TokenLogprob(token_id=_id_of(top.token), logprob=top.logprob)
                for top in each.top_logprobs[:number]
            )
            for each in content
        )
    return CompletionSample(
        sample_index=place,
        text=text,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=reason,
        weight_version=0,
        top_logprobs=tops,
    )


def _id_of(name: str) -> int:
    number = name.removeprefix(_TOKEN)
    if not (number.isascii() and number.isdecimal() and len(number) < 10):
        raise FieldError(
            f"a token of logprobs is {name!r:.40}; it must be as {_TOKEN}17",
            param="logprobs",
        )
    return int(number)
