"""From OpenAI's bodies to our requests."""

from __future__ import annotations

import time
import uuid
from typing import Any, Literal

import msgspec

from ...bus.public import GenerateRequest
from ...config import Config, Constraint, RequestError, SamplingParams, field_name, shown
from ..constraints import of_response_format, of_structured_outputs, of_text_format, the_one
from ..fields import Body, check_model
from ..http import MAX_INT64, FieldError, convert
from .bodies import (
    ChatBody,
    Common,
    CompletionBody,
    GenerateBody,
    ResponseBody,
    SamplerFields,
    SamplingBody,
    SamplingFields,
    StreamOptions,
)
from .fields import read_fields

Prompt = str | tuple[int, ...]
Kind = Literal["completions", "chat", "generate"]

_ID_PREFIXES: dict[Kind, str] = {"completions": "cmpl-", "chat": "chatcmpl-", "generate": "gen-"}

_LONGEST_NAME = 256
_GREEDY_BELOW = 1e-6
_ALL_TOKENS = 1 << 30

_AS_IT_COMES = {"verbosity": ("medium",)}
"""What asks of the text of a response for nothing but what is done anyway."""


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
        return self.needs_prompt_ids or self.echo or self.logprobs is not None

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
        )


def read_completion(body: Body, config: Config) -> tuple[Call, list[Prompt]]:
    """A body of `/v1/completions`, and its prompts.

    Raises:
        RequestError: A field can't be obeyed.
    """
    fields = read_fields(body, CompletionBody, "completions")
    prompts = _prompts(fields.prompt)
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
    return call, fields


def read_generate(body: Body, config: Config, max_model_len: int) -> tuple[Call, Prompt]:
    """A body of `/inference/v1/generate`, and its prompt.

    Args:
        max_model_len: As for `read_chat`.

    Raises:
        RequestError: A field can't be obeyed.
    """
    fields = read_fields(body, GenerateBody, "generate")
    within = "sampling_params."
    sampling = read_fields(fields.sampling_params, SamplingBody, "sampling_params", within)
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
    check_model(fields.model, config)
    if fields.stream_options is not None and not fields.stream:
        raise FieldError("stream_options takes stream: true", param="stream_options")
    if fields.stream and sampling.prompt_logprobs is not None:
        param = f"{where}prompt_logprobs"
        raise FieldError(f"{param} are not told in a stream", param=param)
    options = fields.stream_options or StreamOptions()
    if options.continuous_usage_stats and not options.include_usage:
        raise FieldError(
            "continuous_usage_stats takes include_usage: true",
            param="stream_options.continuous_usage_stats",
        )
    return Call(
        id=f"{_ID_PREFIXES[kind]}{uuid.uuid4().hex}",
        created=int(time.time()),
        model=config.engine.model_name,
        kind=kind,
        n=sampling.n,
        sampling=sampling_of(
            sampling, 1 if scores_only else max_tokens, logprobs, prompt_logprobs, where
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
    )


def sampling_of(
    fields: SamplerFields,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    where: str = "",
) -> SamplingParams:
    """How to sample. Args: `max_tokens` and the logprobs, which have other names in each call;
    `where` stands before the fields' names."""
    stop = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop)
    return SamplingParams(
        temperature=0.0 if 0 <= fields.temperature < _GREEDY_BELOW else fields.temperature,
        max_tokens=max_tokens,
        stop_token_ids=frozenset(fields.stop_token_ids),
        top_k=0 if fields.top_k == -1 or fields.top_k >= _ALL_TOKENS else fields.top_k,
        top_p=fields.top_p,
        min_p=fields.min_p,
        seed=fields.seed,
        stop=tuple(text for text in stop if text),
        ignore_eos=fields.ignore_eos,
        repetition_penalty=fields.repetition_penalty,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        logit_bias=fields.logit_bias,
        min_tokens=fields.min_tokens,
        logprobs=logprobs or 0,
        prompt_logprobs=prompt_logprobs,
        constraint=_constraint(fields, where),
    )


def _constraint(fields: SamplerFields, where: str) -> Constraint | None:
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
    elif isinstance(fields, ResponseBody):
        found["text.format"] = _text_format(fields.text)
    return the_one(found)


def _text_format(text: Body) -> Constraint | None:
    """Raises FieldError: it says more of the text than its format."""
    for name, value in text.items():
        if name != "format" and value not in (None, *_AS_IT_COMES.get(name, ())):
            where = f"text.{field_name(name)}"
            raise FieldError(
                f"{where} is not supported here; leave it out, or give null",
                param=where,
                code="unsupported",
            )
    given = text.get("format")
    if given is None:
        return None
    return of_text_format(convert(given, dict[str, Any], "text.format"), "text.format")


def _prompts(given: str | list[Any] | None) -> list[Prompt]:
    if not given:
        raise RequestError("prompt is empty; give a text or token ids", code="empty_prompt")
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], int):
        return [_token_ids(given, "prompt")]
    prompts: list[Prompt] = []
    for place, each in enumerate(given):
        if isinstance(each, str):
            prompts.append(each)
        elif isinstance(each, list):
            prompts.append(_token_ids(each, f"prompt[{place}]"))
        else:
            raise FieldError(
                f"prompt[{place}] is a number among prompts; a list has texts, or lists of token "
                "ids, or token ids alone",
                param=f"prompt[{place}]",
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
