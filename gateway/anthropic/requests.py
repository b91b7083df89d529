"""From Anthropic's bodies to our requests."""

from __future__ import annotations

import uuid
from typing import Any

from starlette.requests import Request

from ...bus.public import GenerateRequest
from ...config import Config, Constraint, SamplingParams, shown
from ..constraints import of_text_format, the_one
from ..fields import Body, check_model
from ..http import MAX_INT64, FieldError, convert
from .bodies import CountBody, MessagesBody
from .fields import read_fields

VERSION_HEADER = "Anthropic-Version"
_VERSIONS = ("2023-06-01", "2026-10-21")

_GREEDY_BELOW = 1e-6
_ALL_TOKENS = 1 << 30


def check_version(request: Request) -> None:
    """The interface's version. The newer ones differ in what they refuse, which is taken here.

    Raises:
        FieldError: It is another.
    """
    version = request.headers.get(VERSION_HEADER)
    if version not in (None, *_VERSIONS):
        raise FieldError(
            f"{VERSION_HEADER.lower()} is {shown(version)}; it may be {' or '.join(_VERSIONS)}",
            param=VERSION_HEADER.lower(),
            code="unsupported",
        )


def read_count(body: Body, config: Config) -> CountBody:
    """A body of `/v1/messages/count_tokens`.

    Raises:
        RequestError: A field can't be obeyed.
    """
    fields = read_fields(body, CountBody, "count_tokens")
    check_model(fields.model, config)
    return fields


def read_messages(body: Body, config: Config) -> MessagesBody:
    """A body of `/v1/messages`.

    Raises:
        RequestError: A field can't be obeyed.
    """
    fields = read_fields(body, MessagesBody, "messages")
    check_model(fields.model, config)
    if fields.max_tokens is None:
        raise FieldError(
            "max_tokens is missing; say how many tokens the answer may have", param="max_tokens"
        )
    return fields


def request_of(
    fields: MessagesBody, token_ids: tuple[int, ...], tenant: str, config: Config
) -> GenerateRequest:
    """What is submitted for a prompt."""
    return GenerateRequest(
        request_id=f"msg_{uuid.uuid4().hex}",
        prompt_token_ids=token_ids,
        sampling=_sampling(fields),
        stream=fields.stream,
        # Lower ones are earlier, as in vLLM's interface.
        priority=min(-fields.priority, MAX_INT64),
        tenant=tenant,
        cache_salt=fields.cache_salt,
    )


def _sampling(fields: MessagesBody) -> SamplingParams:
    assert fields.max_tokens is not None, "it was looked at"
    return SamplingParams(
        temperature=0.0 if 0 <= fields.temperature < _GREEDY_BELOW else fields.temperature,
        max_tokens=fields.max_tokens,
        stop_token_ids=frozenset(),
        top_k=0 if fields.top_k == -1 or fields.top_k >= _ALL_TOKENS else fields.top_k,
        top_p=fields.top_p,
        min_p=0.0,
        seed=fields.seed,
        stop=tuple(text for text in fields.stop_sequences if text),
        ignore_eos=False,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        logit_bias={},
        min_tokens=0,
        logprobs=0,
        prompt_logprobs=None,
        constraint=_constraint(fields),
    )


def _constraint(fields: MessagesBody) -> Constraint | None:
    """By `output_config`, or `output_format` as it was called before.

    Raises:
        FieldError: Another format than a schema is asked for, or an effort.
    """
    config = dict(fields.output_config)
    form = config.pop("format", None) or {}
    if any(value is not None for value in config.values()):
        raise FieldError(
            "output_config may have a format, and nothing else here",
            param="output_config",
            code="unsupported",
        )
    found = {}
    for name, given in (("output_config.format", form), ("output_format", fields.output_format)):
        if given:
            found[name] = of_text_format(convert(given, dict[str, Any], name), name)
    return the_one(found)
