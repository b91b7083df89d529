"""From Anthropic's bodies to our requests."""

from __future__ import annotations

import uuid

from starlette.requests import Request

from ....bus.public import GenerateRequest
from ....config import Config, Constraint, SamplingParams, shown
from ...server.http import MAX_INT64, FieldError
from ...serving.constraints import of_text_format, the_one
from ...serving.fields import Body, adapter_of
from ...serving.prepared import Prepared
from ...serving.sampling_fields import temperature_of, top_k_of
from .bodies import CountBody, MessagesBody
from .errors import VERSION_HEADER
from .fields import read_fields
from .thinking import output_config_of, thinking_of

_VERSIONS = ("2023-06-01", "2026-10-21")


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


def read_count(body: Body) -> CountBody:
    """A body of `/v1/messages/count_tokens`.

    Raises:
        RequestError: A field can't be obeyed.
    """
    fields = read_fields(body, CountBody, "count_tokens")
    return fields


def read_messages(body: Body) -> MessagesBody:
    """A body of `/v1/messages`.

    Raises:
        RequestError: A field can't be obeyed.
    """
    fields = read_fields(body, MessagesBody, "messages")
    if fields.max_tokens is None:
        raise FieldError(
            "max_tokens is missing; say how many tokens the answer may have", param="max_tokens"
        )
    thinking = thinking_of(fields)
    if thinking is not None and (thinking.budget_tokens or 0) >= fields.max_tokens:
        raise FieldError(
            "thinking.budget_tokens must be less than max_tokens, of which they are a part",
            param="thinking.budget_tokens",
        )
    return fields


def request_of(
    fields: MessagesBody, prepared: Prepared, tenant: str, config: Config
) -> GenerateRequest:
    """What is submitted for a prompt."""
    return GenerateRequest(
        request_id=f"msg_{uuid.uuid4().hex}",
        prompt_token_ids=prepared.token_ids,
        sampling=prepared.sampling,
        stream=fields.stream,
        # Lower ones are earlier, as in vLLM's interface.
        priority=min(-fields.priority, MAX_INT64),
        tenant=tenant,
        cache_salt=fields.cache_salt,
        model=adapter_of(fields.model, config),
    )


def sampling_of(fields: MessagesBody) -> SamplingParams:
    """How it is sampled, with the constraint of its text.

    Raises:
        FieldError: The text is to be of a form that is not there.
    """
    assert fields.max_tokens is not None, "it was looked at"
    return SamplingParams(
        temperature=temperature_of(fields.temperature),
        max_tokens=fields.max_tokens,
        stop_token_ids=frozenset(),
        top_k=top_k_of(fields.top_k),
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
        max_draft_tokens=None,
    )


def _constraint(fields: MessagesBody) -> Constraint | None:
    """By `output_config`, or `output_format` as it was called before."""
    form = output_config_of(fields).format
    found = {}
    for name, given in (("output_config.format", form), ("output_format", fields.output_format)):
        if given:
            found[name] = of_text_format(given, name)
    return the_one(found)
