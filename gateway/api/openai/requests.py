"""From OpenAI's bodies to our requests."""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec

from ....bus.public import Fork, GenerateRequest, ImageInput
from ....config import Config, RequestError, SamplingParams, shown
from ....text.messages import Reading
from ...server.http import FieldError, field_error
from ...serving.chat_templates import check_template
from ...serving.constraints import of_response_format, of_structured_outputs, the_one
from ...serving.durable_calls import CallHead, DurableRecord
from ...serving.fields import Body, engine_priority, ignore, note_field, read_part
from ...serving.images import ImageSource
from ...serving.model_names import adapter_of
from ...serving.request_ids import new_id
from ...serving.sampling_fields import TEXT_SAMPLING, read_sampling, read_sampling_params
from ...serving.token_images import images_of
from .bodies import ChatBody, CompletionBody, GenerateBody, StreamedBody, StreamOptions, TextBody

Prompt = str | tuple[int, ...]
Kind = Literal["completions", "chat", "generate"]

_ID_PREFIXES: dict[Kind, str] = {"completions": "cmpl-", "chat": "chatcmpl-", "generate": "gen-"}

_LONGEST_NAME = 256
_FORK = "invalid_fork"
_TARGETS = "prompt_logprob_token_ids"


class ChoicesCall(CallHead, frozen=True, kw_only=True):
    """A call, without its prompts.

    Attributes:
        sampling: For all choices.
        logprobs: Number of likeliest tokens to show at each position; None shows no logprobs.
        prompt_logprobs: Whether the logprobs of the prompt are shown, apart from the text's.
        token_ids: Whether they are shown.
        adapter: The adapter that its requests name; "" for none.
        fields: The fields of all calls, as they came.
        n: Choices of each prompt.
        scores_only: No tokens are wanted. The engine samples one all the same.
        echo: Whether the prompt stands before the text.
        as_token_ids: Whether logprobs name tokens by their ids.
        named: The client's own name for the call, which its answer repeats; "" for the answer's
            id. The bus has the call under that alone, so that no other client finds it by its name.
        prediction: The client's prediction of each choice; "" for none.
        reading: The reading of its messages; None where a sample is text alone.
        reasoning_field: The field of a message that has the reasoning.
        include_reasoning: Whether reasoning is shown.
        add_special_tokens: Whether the tokenizer adds special tokens to a prompt of text.
        before: The text before that of each of a chat's choices: with echo the last message.
        truncation: As of `serving.prepared.truncated`; None for prompts that are taken whole.
        truncation_side: Likewise.
        fork: The place in another request at which its one request begins; None for prompts.
        places: Offset and length of the tokens of each image, in an answer that shows a prompt of
            tokens; None in any other.
        template: The call's own chat template, by which its messages are read.
        custom_tools: Names of the custom tools that the model may call.
    """

    kind: Kind
    sampling: SamplingParams
    logprobs: int | None
    prompt_logprobs: bool
    token_ids: bool
    adapter: str
    fields: StreamedBody
    n: int = 1
    scores_only: bool = False
    echo: bool = False
    as_token_ids: bool = False
    named: str = ""
    prediction: str = ""
    reading: Reading | None = None
    reasoning_field: str = "reasoning_content"
    include_reasoning: bool = True
    add_special_tokens: bool = True
    before: str = ""
    truncation: int | None = None
    truncation_side: Literal["left", "right"] = "left"
    fork: Fork | None = None
    places: tuple[tuple[int, int], ...] | None = None
    template: str | None = None
    custom_tools: tuple[str, ...] = ()

    @property
    def chat(self) -> bool:
        return self.kind == "chat"

    @property
    def lists_tokens(self) -> bool:
        """Whether the answer lists its tokens, or their logprobs or versions."""
        shown = self.logprobs is not None or self.token_ids or self.sampling.return_sampling_mask
        return shown or self.fields.return_weight_versions

    @property
    def needs_prompt_ids(self) -> bool:
        """Whether the answer needs the prompt's tokens, which may have come as a text."""
        scored = self.prompt_logprobs or (self.echo and self.logprobs is not None)
        return scored or self.token_ids or bool(self.fields.stream_options.continuous_usage_stats)

    @property
    def needs_tokenizer(self) -> bool:
        """Whether the answer needs the tokenizer."""
        if self.kind == "generate":
            # Only these name the tokens' texts.
            return self.prompt_logprobs
        listed = self.needs_prompt_ids or self.lists_tokens
        # A stop string is found in the text, for the answer's stop_reason.
        return listed or self.echo or self.reading is not None or bool(self.sampling.stop)

    def request_id(self, place: int, prompts: int) -> str:
        """Return the id of the request for one of so many prompts."""
        return self.id if prompts == 1 else f"{self.id}_{place}"

    def request(
        self,
        place: int,
        prompts: int,
        prompt: Prompt,
        tenant: str,
        images: tuple[ImageInput, ...] = (),
    ) -> GenerateRequest:
        """Return the request for one of so many prompts; one with images is a conversation."""
        is_text, forks = isinstance(prompt, str), self.fork is not None
        return GenerateRequest(
            request_id=self.request_id(place, prompts),
            prompt=prompt if is_text and not forks else None,  # type: ignore[arg-type]
            prompt_token_ids=None if is_text or forks else prompt,  # type: ignore[arg-type]
            fork=self.fork,
            n=self.n,
            sampling=self.sampling,
            stream=self.fields.stream,
            priority=engine_priority(self.fields.priority),
            tenant=tenant,
            cache_salt=self.fields.cache_salt,
            # A fork that names none has its parent's.
            model=self.adapter or (self.model if forks else ""),
            prediction=self.prediction or None,
            kv_session=self.fields.kv_session,
            max_version_lag=self.fields.max_version_lag,
            on_version_lag=self.fields.on_version_lag,
            images=images,
            add_special_tokens=self.add_special_tokens and not images,
            is_chat=self.chat,
        )


class ChoicesRecord(DurableRecord, frozen=True, kw_only=True):
    """A call that is answered with choices, as the bus keeps it.

    Attributes:
        prompts: As they are submitted; empty ones in a record that is not complete.
        texts: The prompts that came as texts, None for the others, and for all unless they are
            echoed.
        has_prompts: Whether the answer, or another gateway, may need the prompts.
        images: Images of the one prompt of a chat.
    """

    call: ChoicesCall
    prompts: list[Prompt]
    texts: list[str | None]
    has_prompts: bool
    images: tuple[ImageInput, ...] = ()

    @property
    def request_ids(self) -> list[str]:
        prompts = len(self.prompts)
        return [self.call.request_id(place, prompts) for place in range(prompts)]

    @property
    def is_complete(self) -> bool:
        return self.has_prompts

    @property
    def is_durable(self) -> bool:
        # Otherwise no client has the answer's id before the answer is there.
        return self.call.fields.stream or self.keyed is not None

    @property
    def is_promised(self) -> bool:
        # A stream is stored so that it can be resumed, which its client didn't request.
        return self.keyed is not None

    def request(self, place: int) -> GenerateRequest:
        """Return the request of a prompt."""
        prompts = len(self.prompts)
        return self.call.request(place, prompts, self.prompts[place], self.tenant, self.images)

    def encode(self) -> bytes:
        prompts = self.prompts if self.has_prompts else [()] * len(self.prompts)
        texts = self.texts if self.call.echo else [None] * len(self.prompts)
        images = self.images if self.has_prompts else ()
        kept = msgspec.structs.replace(self, prompts=prompts, texts=texts, images=images)
        return msgspec.json.encode(kept)


def read_completion(body: Body, config: Config) -> tuple[ChoicesCall, list[Prompt]]:
    """Read a body of `/v1/completions`: the call, and its prompts.

    Raises:
        RequestError: A field can't be obeyed.
    """
    fields = read_part(body, CompletionBody)
    prompts: list[Prompt] = [()] if fields.fork is not None else prompts_of(fields.prompt)
    scores_only = fields.max_tokens == 0 and fields.echo
    # As a number in vLLM: true is 1, and false is none.
    top = None if fields.logprobs is False else fields.logprobs
    top, prompt_top = None if top is None else int(top), fields.prompt_logprobs
    if prompt_top is None:
        prompt_top = top if fields.echo else None
    elif fields.echo and top not in (None, prompt_top):
        raise field_error(
            "prompt_logprobs", "and logprobs must be alike with echo, or leave one out"
        )
    sampling = _text_sampling(
        body, fields, 1 if scores_only else fields.max_tokens, top, prompt_top
    )
    call = ChoicesCall(
        **_common(fields, config, "completions"),
        **_texts(fields),
        sampling=sampling,
        scores_only=scores_only,
        logprobs=top,
        echo=fields.echo,
        add_special_tokens=fields.add_special_tokens,
        truncation_side=fields.truncation_side,
        fork=fields.fork,
    )
    if call.fork is not None:
        _check_fork(call, "prompt", fields.prompt)
    _check_number(call.n, len(prompts), config.gateway.max_prompts)
    if len(prompts) > 1 and call.fields.kv_session is not None:
        raise field_error("kv_session", "takes one prompt", code="invalid_kv_session")
    return call, prompts


def read_chat(body: Body, config: Config, max_model_len: int) -> tuple[ChoicesCall, ChatBody]:
    """Read a body of `/v1/chat/completions`: the call, and the fields of which the prompt is made.

    Args:
        max_model_len: Tokens that prompt and completion may have together.

    Raises:
        RequestError: A field can't be obeyed.
    """
    fields = read_part(body, ChatBody)
    if fields.top_logprobs and not fields.logprobs:
        raise field_error("top_logprobs", "takes logprobs: true")
    # Both hold. Admission lowers it to what the model's length leaves.
    names = ("max_tokens", "max_completion_tokens")
    limits = [(each, name) for name in names if (each := getattr(fields, name)) is not None]
    max_tokens, name = min(limits, default=(None, names[0]))
    note_field(names[0], name)
    logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    sampling = _text_sampling(
        body,
        fields,
        max_model_len if max_tokens is None else max_tokens,
        logprobs,
        fields.prompt_logprobs,
    )
    call = ChoicesCall(
        **_common(fields, config, "chat"),
        **_texts(fields),
        sampling=sampling,
        logprobs=logprobs,
        reasoning_field=config.gateway.reasoning_field,
        include_reasoning=fields.shows_reasoning,
        before=_last_text(fields) if fields.echo else "",
        template=check_template(fields.chat_template, config),
    )
    _check_number(call.n, 1, config.gateway.max_prompts)
    return call, fields


def _last_text(fields: ChatBody) -> str:
    """Return the text of the last message, if it is the assistant's."""
    last = (fields.messages or [{}])[-1]
    content = last.get("content") if last.get("role") == "assistant" else None
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def read_generate(
    body: Body, config: Config, max_model_len: int
) -> tuple[ChoicesCall, tuple[int, ...], list[ImageSource]]:
    """Read a body of `/inference/v1/generate`: the call, its prompt, and the images of that.

    Args:
        max_model_len: As for `read_chat`.

    Raises:
        RequestError: A field can't be obeyed.
    """
    fields = read_part(body, GenerateBody)
    own, sampling = read_sampling_params(fields.sampling_params, "sampling_params", max_model_len)
    if config.gateway.return_sampling_mask and sampling.is_limited:
        sampling = msgspec.structs.replace(sampling, return_sampling_mask=True)
    if not fields.token_ids and fields.fork is None:
        raise RequestError("token_ids is empty; give the prompt's tokens", code="empty_prompt")
    prompt_logprobs = sampling.prompt_logprobs is not None
    _check_stream(fields, prompt_logprobs, "sampling_params.prompt_logprobs")
    _check_targets(fields, sampling, f"sampling_params.{_TARGETS}")
    call = ChoicesCall(
        **_common(fields, config, "generate"),
        n=own.n,
        sampling=sampling,
        logprobs=own.logprobs,
        prompt_logprobs=prompt_logprobs,
        token_ids=True,
        named=_named(fields.request_id),
        fork=fields.fork,
        places=() if fields.return_token_ids else None,
    )
    if call.fork is not None:
        _check_fork(call, "token_ids", fields.token_ids)
    _check_number(call.n, 1, config.gateway.max_prompts, "sampling_params.n")
    return call, tuple(fields.token_ids or ()), images_of(fields.content_parts, fields.features)


def _check_fork(call: ChoicesCall, field: str, prompt: object) -> None:
    """Refuse what needs the prompt of a fork before there is an answer.

    Args:
        field: The field for the prompt.
        prompt: Its value.

    Raises:
        FieldError: invalid_fork.
    """
    options = call.fields.stream_options
    needs_prompt = {
        "echo": call.echo,
        "return_token_ids": call.token_ids and call.kind == "completions",
        "stream_options.continuous_usage_stats": bool(options.continuous_usage_stats),
    }
    if prompt:
        raise field_error(field, "is the other request's in a fork; leave it out", code=_FORK)
    if call.truncation is not None:
        raise field_error(
            "truncate_prompt_tokens", "can't cut a fork's prompt", code=_FORK, remedy="leave it out"
        )
    for name, is_given in needs_prompt.items():
        if is_given and call.fields.stream:
            wrong = "needs the prompt, which a fork's stream doesn't have; ask without stream"
            raise field_error(name, wrong, code=_FORK)


def _common(fields: StreamedBody, config: Config, kind: Kind) -> dict[str, Any]:
    """Return what all calls have in common."""
    adapter = adapter_of(fields.model, config)
    return {
        "id": new_id(_ID_PREFIXES[kind]),
        "created": int(time.time()),
        "kind": kind,
        "model": adapter or config.engine.model_name,
        "of_model": config.engine.model_name,
        "adapter": adapter,
        "fields": msgspec.convert(fields, StreamedBody, from_attributes=True),
    }


def _texts(fields: TextBody) -> dict[str, Any]:
    """Return what completions and chats have in common."""
    prompt_logprobs = fields.prompt_logprobs is not None
    _check_stream(fields, prompt_logprobs, "prompt_logprobs")
    return {
        "n": fields.n,
        "prompt_logprobs": prompt_logprobs,
        "token_ids": fields.return_token_ids,
        "as_token_ids": fields.return_tokens_as_token_ids,
        "prediction": "" if fields.prediction is None else fields.prediction.text,
        "named": _named(fields.request_id),
        "truncation": fields.truncate_prompt_tokens,
    }


def _named(request_id: str) -> str:
    if len(request_id) > _LONGEST_NAME:
        raise field_error(
            "request_id",
            f"is longer than {_LONGEST_NAME} characters",
            remedy="choose a shorter one",
        )
    return request_id


def _check_stream(fields: StreamedBody, prompt_logprobs: bool, param: str) -> None:
    if fields.stream and prompt_logprobs:
        raise field_error(param, "are not there in a stream; send it without stream")
    options = fields.stream_options
    if options != StreamOptions() and not fields.stream:
        # An answer in one piece has its usage anyway.
        ignore("stream_options")
    if options.continuous_usage_stats and not options.include_usage:
        raise FieldError(
            "continuous_usage_stats takes include_usage: true",
            param="stream_options.continuous_usage_stats",
        )


def _text_sampling(
    body: Body, fields: TextBody, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """Read the sampling parameters of completions and chats.

    Raises:
        FieldError: One is of the wrong type, or several fields constrain the answer.
    """
    response_format = fields.response_format
    guided = {
        "json": fields.guided_json,
        "regex": fields.guided_regex,
        "choice": fields.guided_choice,
        "grammar": fields.guided_grammar,
    }
    constraint = the_one(
        {
            "structured_outputs": of_structured_outputs(
                fields.structured_outputs, "structured_outputs"
            ),
            "response_format": of_response_format(response_format, "response_format")
            if response_format
            else None,
            next(
                (f"guided_{name}" for name, each in guided.items() if each is not None), ""
            ): of_structured_outputs(guided, "guided"),
        }
    )
    sampling = read_sampling(
        body,
        TEXT_SAMPLING,
        max_tokens=max_tokens,
        logprobs=logprobs or 0,
        prompt_logprobs=prompt_logprobs,
        prompt_logprob_token_ids=fields.prompt_logprob_token_ids,
        prompt_logprob_start=fields.prompt_logprob_start,
        return_routed_experts=fields.return_routed_experts,
        routed_experts_prompt_start=fields.routed_experts_prompt_start,
        constraint=constraint,
    )
    _check_targets(fields, sampling, _TARGETS)
    return sampling


def _check_targets(fields: StreamedBody, sampling: SamplingParams, param: str) -> None:
    if fields.stream and sampling.prompt_logprob_token_ids is not None:
        raise field_error(param, "are not scored in a stream; send it without stream")
    if fields.stream and sampling.return_routed_experts:
        param = param.replace(_TARGETS, "return_routed_experts")
        raise field_error(param, "has an array in a whole answer; send it without stream")


def prompts_of(
    given: str | list[Any] | None, field: str = "prompt", *, may_be_empty: bool = False
) -> list[Prompt]:
    """The prompts in a field: a text or token ids, or a list of either.

    Args:
        may_be_empty: Whether a single text may be empty.

    Raises:
        RequestError: There is none, or it is none of these.
    """
    if not given and not (may_be_empty and given == ""):
        raise field_error(field, "is empty; give a text or token ids", code="empty_prompt")
    if given is None or isinstance(given, str):
        return [given or ""]
    kinds = set(map(type, given))
    if kinds == {int}:
        return [tuple(given)]
    if int in kinds:
        is_number = [isinstance(each, int) for each in given]
        param = f"{field}[{is_number.index(not is_number[0])}]"
        raise field_error(
            param,
            ": a number stands among prompts; a list has texts, or lists of token ids, or "
            "token ids alone; give one of them",
        )
    return [each if isinstance(each, str) else tuple(each) for each in given]


def _check_number(n: int, prompts: int, most: int, param: str = "n") -> None:
    if n < 1:
        raise field_error(param, f"is {shown(n)}; it must be at least 1", code="invalid_n")
    if n * prompts > most:
        raise FieldError(
            f"the call asks for more than {most} choices (gateway.max_prompts); send several calls",
            param=param if n > 1 else "prompt",
            code="too_many_prompts",
        )
