"""From OpenAI's bodies to our requests."""

from __future__ import annotations

import time
import uuid
from typing import Any, Literal

import msgspec

from ....bus.public import GenerateRequest
from ....config import Config, Constraint, RequestError, SamplingParams, shown
from ....text.messages import Reading
from ...server.http import MAX_INT64, FieldError, convert
from ...serving.constraints import of_response_format, of_structured_outputs, the_one
from ...serving.fields import Body, adapter_of
from ...serving.sampling_fields import SamplingFields, read_sampling_params, sampling_of
from .bodies import (
    ChatBody,
    Common,
    CompletionBody,
    GenerateBody,
    StreamOptions,
)
from .fields import read_fields

Prompt = str | tuple[int, ...]
Kind = Literal["completions", "chat", "generate"]

_ID_PREFIXES: dict[Kind, str] = {"completions": "cmpl-", "chat": "chatcmpl-", "generate": "gen-"}

_LONGEST_NAME = 256


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A call, but for its prompts.

    Attributes:
        id: The answer's own.
        created: When it came, seconds since the Unix epoch.
        kind: Which of the calls it is.
        n: Choices of each prompt.
        sampling: For all of them.
        scores_only: No tokens are wanted. The engine samples one all the same.
        logprobs: How many of the likeliest tokens to show at each place; None shows no logprobs.
        prompt_logprobs: The same of the prompt, by themselves.
        echo: Whether the prompt stands before the text.
        token_ids, weight_versions: Whether they are shown.
        as_token_ids: Whether logprobs name tokens by their ids.
        usage: A stream has a chunk with the usage.
        continuous_usage: It has the usage in every chunk.
        named: What the client calls it, which its answer repeats; empty for the answer's id. On
            the bus it is known by that alone, so that nobody can ask for another's by its name.
        reading: How its messages are read; None where a sample is text alone.
        reasoning_field: What a message's reasoning is called.
        include_reasoning: Whether it is shown.
        adapter: The adapter that its requests ask for; "" for none.
        of_model: The id of the model that it is for; `model` may be the adapter's.
        prediction: What the client expects each choice to be; "" for nothing.
        requested_model: The body's `model` as it stands there.
    """

    id: str
    created: int
    model: str
    kind: Kind
    n: int
    sampling: SamplingParams
    scores_only: bool
    logprobs: int | None
    prompt_logprobs: bool
    echo: bool
    token_ids: bool
    weight_versions: bool
    as_token_ids: bool
    stream: bool
    usage: bool
    continuous_usage: bool
    priority: int
    budget_ms: float | None
    cache_salt: str
    named: str = ""
    reading: Reading | None = None
    reasoning_field: str = "reasoning_content"
    include_reasoning: bool = True
    adapter: str = ""
    of_model: str = ""
    prediction: str = ""
    requested_model: str = ""

    @property
    def chat(self) -> bool:
        """Whether the prompt is a conversation."""
        return self.kind == "chat"

    @property
    def needs_prompt_ids(self) -> bool:
        """Whether the answer takes the prompt's tokens, which may have come as a text."""
        scored = self.prompt_logprobs or (self.echo and self.logprobs is not None)
        return scored or self.token_ids or self.continuous_usage

    @property
    def needs_words(self) -> bool:
        """Whether it takes the tokenizer."""
        if self.kind == "generate":
            # Which alone name the tokens' texts.
            return self.prompt_logprobs
        of_tokens = self.needs_prompt_ids or self.logprobs is not None or self.weight_versions
        return of_tokens or self.echo or self.reading is not None

    def request_id(self, place: int, prompts: int) -> str:
        """That of one of so many prompts."""
        return self.id if prompts == 1 else f"{self.id}_{place}"

    def request(self, place: int, prompts: int, prompt: Prompt, tenant: str) -> GenerateRequest:
        """What is submitted for one of so many prompts."""
        return GenerateRequest(
            request_id=self.request_id(place, prompts),
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=None if isinstance(prompt, str) else prompt,
            n=self.n,
            sampling=self.sampling,
            stream=self.stream,
            priority=self.priority,
            tenant=tenant,
            cache_salt=self.cache_salt,
            model=self.adapter,
            prediction=self.prediction or None,
        )


def read_completion(body: Body, config: Config) -> tuple[Call, list[Prompt]]:
    """A body of `/v1/completions`, and its prompts.

    Raises:
        RequestError: A field can't be obeyed.
    """
    fields = read_fields(body, CompletionBody, "completions")
    prompts = prompts_of(fields.prompt)
    scores_only = fields.max_tokens == 0 and fields.echo
    top = fields.logprobs
    if fields.prompt_logprobs is None:
        prompt_top = top if fields.echo else None
    else:
        prompt_top = fields.prompt_logprobs
        if fields.echo and top not in (None, prompt_top):
            raise FieldError(
                "prompt_logprobs and logprobs must be alike with echo, or leave one out",
                param="prompt_logprobs",
            )
    call = _call(
        fields,
        fields,
        config,
        kind="completions",
        scores_only=scores_only,
        max_tokens=fields.max_tokens,
        logprobs=top,
        prompt_logprobs=prompt_top,
        echo=fields.echo,
        token_ids=fields.return_token_ids,
        as_token_ids=fields.return_tokens_as_token_ids,
    )
    _check_number(call.n, len(prompts), config.gateway.max_prompts)
    return call, prompts


def read_chat(body: Body, config: Config, max_model_len: int) -> tuple[Call, ChatBody]:
    """A body of `/v1/chat/completions`, and its fields, of which the prompt is made.

    Args:
        max_model_len: Tokens that prompt and completion may have together.

    Raises:
        RequestError: A field can't be obeyed.
    """
    fields = read_fields(body, ChatBody, "chat")
    if fields.top_logprobs and not fields.logprobs:
        raise FieldError("top_logprobs takes logprobs: true", param="top_logprobs")
    given = (fields.max_tokens, fields.max_completion_tokens)
    told = {tokens for tokens in given if tokens is not None}
    if len(told) > 1:
        raise FieldError(
            "max_tokens and max_completion_tokens are different; give one of them",
            param="max_tokens",
        )
    call = _call(
        fields,
        fields,
        config,
        kind="chat",
        # Admission cuts it to what the model's length leaves.
        max_tokens=told.pop() if told else max_model_len,
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        prompt_logprobs=fields.prompt_logprobs,
        token_ids=fields.return_token_ids,
        as_token_ids=fields.return_tokens_as_token_ids,
    )
    _check_number(call.n, 1, config.gateway.max_prompts)
    if (budget := fields.thinking_token_budget) is not None and budget < 0:
        raise FieldError(
            f"thinking_token_budget is {shown(budget)}; it must be at least 0, or left out",
            param="thinking_token_budget",
        )
    shows = {
        "reasoning_field": config.gateway.reasoning_field,
        "include_reasoning": fields.include_reasoning,
    }
    return msgspec.structs.replace(call, **shows), fields


def read_generate(body: Body, config: Config, max_model_len: int) -> tuple[Call, Prompt]:
    """A body of `/inference/v1/generate`, and its prompt.

    Args:
        max_model_len: As for `read_chat`.

    Raises:
        RequestError: A field can't be obeyed.
    """
    fields = read_fields(body, GenerateBody, "generate")
    within = "sampling_params."
    sampling = read_sampling_params(fields.sampling_params, within)
    if not fields.token_ids:
        raise RequestError("token_ids is empty; give the prompt's tokens", code="empty_prompt")
    if len(fields.request_id) > _LONGEST_NAME:
        raise FieldError(
            f"request_id is longer than {_LONGEST_NAME} characters", param="request_id"
        )
    call = _call(
        fields,
        sampling,
        config,
        kind="generate",
        max_tokens=_or(sampling.max_tokens, max_model_len),
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        token_ids=True,
        named=fields.request_id,
        where=within,
    )
    _check_number(call.n, 1, config.gateway.max_prompts, within)
    return call, tuple(fields.token_ids)


def _call(
    fields: Common | GenerateBody,
    sampling: SamplingFields,
    config: Config,
    *,
    kind: Kind,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    token_ids: bool,
    as_token_ids: bool = False,
    scores_only: bool = False,
    echo: bool = False,
    named: str = "",
    where: str = "",
) -> Call:
    """Args: `where` stands before the names of sampling parameters."""
    if fields.stream and sampling.prompt_logprobs is not None:
        param = f"{where}prompt_logprobs"
        raise FieldError(f"{param} are not told in a stream", param=param)
    options = _stream_options(fields)
    return Call(
        id=f"{_ID_PREFIXES[kind]}{uuid.uuid4().hex}",
        created=int(time.time()),
        model=adapter_of(fields.model, config) or config.engine.model_name,
        of_model=config.engine.model_name,
        kind=kind,
        n=sampling.n,
        sampling=sampling_of(
            sampling,
            1 if scores_only else max_tokens,
            _constraint(sampling, where),
            logprobs,
            prompt_logprobs,
        ),
        scores_only=scores_only,
        logprobs=logprobs,
        prompt_logprobs=sampling.prompt_logprobs is not None,
        echo=echo,
        token_ids=token_ids,
        weight_versions=fields.return_weight_versions,
        as_token_ids=as_token_ids,
        stream=fields.stream,
        usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        # vLLM's lower ones are earlier.
        priority=min(-fields.priority, MAX_INT64),
        budget_ms=fields.budget_ms,
        cache_salt=fields.cache_salt,
        named=named,
        adapter=adapter_of(fields.model, config),
        requested_model=fields.model,
        prediction=_prediction(fields),
    )


def _stream_options(fields: Common | GenerateBody) -> StreamOptions:
    if fields.stream_options is not None and not fields.stream:
        raise FieldError("stream_options takes stream: true", param="stream_options")
    options = fields.stream_options or StreamOptions()
    if options.continuous_usage_stats and not options.include_usage:
        raise FieldError(
            "continuous_usage_stats takes include_usage: true",
            param="stream_options.continuous_usage_stats",
        )
    return options


def _prediction(fields: Common | GenerateBody) -> str:
    if isinstance(fields, Common) and fields.prediction is not None:
        return fields.prediction.text
    return ""


def _constraint(fields: SamplingFields, where: str) -> Constraint | None:
    """What the text has to be.

    Raises:
        FieldError: Several fields say so, or one says what is not there.
    """
    name = f"{where}structured_outputs"
    found = {name: of_structured_outputs(fields.structured_outputs, name)}
    if isinstance(fields, Common):
        if fields.response_format:
            found["response_format"] = of_response_format(fields.response_format, "response_format")
        guided = {
            name: getattr(fields, f"guided_{name}")
            for name in ("json", "regex", "choice", "grammar")
        }
        found["guided_*"] = of_structured_outputs(guided, "guided")
    return the_one(found)


def prompts_of(given: str | list[Any] | None, field: str = "prompt") -> list[Prompt]:
    """The prompts in a field: a text or token ids, or a list of either.

    Raises:
        RequestError: There is none, or it is none of these.
    """
    if not given:
        raise FieldError(
            f"{field} is empty; give a text or token ids", param=field, code="empty_prompt"
        )
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], int):
        return [_token_ids(given, field)]
    prompts: list[Prompt] = []
    for place, each in enumerate(given):
        if isinstance(each, str):
            prompts.append(each)
        elif isinstance(each, list):
            prompts.append(_token_ids(each, f"{field}[{place}]"))
        else:
            raise FieldError(
                f"{field}[{place}] is a number among prompts; a list has texts, or lists of token "
                "ids, or token ids alone",
                param=f"{field}[{place}]",
            )
    return prompts


def _token_ids(given: list[Any], where: str) -> tuple[int, ...]:
    try:
        return convert(given, tuple[int, ...], where)
    except FieldError as error:
        raise FieldError(error.message, param=where) from None


def _or(given: int | None, default: int) -> int:
    return default if given is None else given


def _check_number(n: int, prompts: int, most: int, where: str = "") -> None:
    param = f"{where}n"
    if n < 1:
        raise FieldError(
            f"{param} is {shown(n)}; it must be at least 1", param=param, code="invalid_n"
        )
    if n * prompts > most:
        raise FieldError(
            f"the call asks for more than {most} choices (gateway.max_prompts); send several calls",
            param=param if n > 1 else "prompt",
            code="too_many_prompts",
        )
