"""From Anthropic's bodies to our requests."""

from __future__ import annotations

import uuid

from starlette.requests import Request

from ....bus.public import GenerateRequest
from ....config import Config, Constraint, SamplingParams, shown
from ...server.http import FieldError
from ...serving.constraints import of_text_format, the_one
from ...serving.fields import Body, adapter_of, engine_priority, read_part
from ...serving.prepared import Prepared
from ...serving.sampling_fields import ANTHROPIC, read_sampling
from .bodies import MessagesBody
from .errors import VERSION_HEADER
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


def read_messages(body: Body) -> MessagesBody:
    """A body of `/v1/messages`.

    Raises:
        RequestError: A field can't be obeyed.
    """
    fields = read_part(body, MessagesBody)
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
        priority=engine_priority(fields.priority),
        tenant=tenant,
        cache_salt=fields.cache_salt,
        model=adapter_of(fields.model, config),
    )


def sampling_of(body: Body, fields: MessagesBody) -> SamplingParams:
    """Read the sampling parameters, with the constraint of the text.

    Raises:
        FieldError: One is of the wrong type, or the constraint is not supported.
    """
    return read_sampling(body, ANTHROPIC, constraint=_constraint(fields))


def _constraint(fields: MessagesBody) -> Constraint | None:
    """By `output_config`, or `output_format` as it was called before."""
    form = output_config_of(fields).format
    found = {}
    for name, given in (("output_config.format", form), ("output_format", fields.output_format)):
        if given:
            found[name] = of_text_format(given, name)
    return the_one(found)
