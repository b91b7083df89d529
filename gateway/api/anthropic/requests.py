"""From Anthropic's bodies to our requests."""

from __future__ import annotations

from ....bus.public import GenerateRequest
from ....config import Config, SamplingParams, shown
from ...call import Call
from ...server.http import field_error
from ...serving.constraints import of_text_format, the_one
from ...serving.fields import Body, engine_priority, read_part
from ...serving.model_names import adapter_of
from ...serving.prepared import Prepared
from ...serving.request_ids import new_id
from ...serving.sampling_fields import ANTHROPIC, read_sampling
from .bodies import CountBody, MessagesBody
from .errors import VERSION_HEADER

_VERSIONS = ("2023-06-01", "2026-10-21")


def check_version(call: Call) -> None:
    """Check the interface's version. They differ only in what Anthropic refuses.

    Raises:
        FieldError: Unknown version.
    """
    version = call.header(VERSION_HEADER)
    if version not in (None, *_VERSIONS):
        raise field_error(
            VERSION_HEADER.lower(),
            f"is {shown(version)}; it may be {' or '.join(_VERSIONS)}",
            code="unsupported",
        )


def read_messages(body: Body) -> MessagesBody:
    """Read a body of `/v1/messages`.

    Raises:
        RequestError: A field can't be obeyed.
    """
    fields = read_part(body, MessagesBody)
    if fields.max_tokens is None:
        raise field_error("max_tokens", "is missing; say how many tokens the answer may have")
    if fields.max_tokens < 1:
        raise field_error("max_tokens", f"is {shown(fields.max_tokens)}; it must be at least 1")
    check_thinking(fields)
    if (budget := budget_of(fields) or 0) >= fields.max_tokens:
        limit = f"it must be less than max_tokens ({fields.max_tokens}), of which it is a part"
        raise field_error("thinking.budget_tokens", f"is {budget}", limit)
    return fields


def check_thinking(fields: CountBody) -> None:
    """Raises FieldError: the thinking budget is missing, too small, or has no effect."""
    if (thinking := fields.thinking) is None:
        return
    param, budget, enabled = "thinking.budget_tokens", budget_of(fields), thinking.type == "enabled"
    why = ""
    if enabled and budget is None:
        why = "is missing; say how many tokens it may have"
    elif not enabled and budget is not None:
        why = "takes thinking.type 'enabled'"
    elif budget is not None and budget < 1:
        why = "must be at least 1; or have thinking disabled"
    if why:
        raise field_error(param, why)


def budget_of(fields: CountBody) -> int | None:
    """Return the thinking budget in tokens; None for no limit."""
    return None if fields.thinking is None else fields.thinking.budget_tokens


def request_of(
    fields: MessagesBody, prepared: Prepared, tenant: str, config: Config
) -> GenerateRequest:
    """Return the request to submit."""
    return GenerateRequest(
        request_id=new_id("msg_"),
        prompt=prepared.prompt if isinstance(prepared.prompt, str) else None,
        prompt_token_ids=None if isinstance(prepared.prompt, str) else prepared.prompt,
        images=prepared.images,
        add_special_tokens=not prepared.images,
        sampling=prepared.sampling,
        stream=fields.stream,
        priority=engine_priority(fields.priority),
        tenant=tenant,
        cache_salt=fields.cache_salt,
        kv_session=fields.kv_session,
        model=adapter_of(fields.model, config),
        is_chat=True,
    )


def sampling_of(body: Body, fields: MessagesBody) -> SamplingParams:
    """Read the sampling parameters, with the constraint of the text.

    Raises:
        FieldError: One is of the wrong type, or the constraint is not supported.
    """
    formats = {
        "output_config.format": fields.output_config.format,
        "output_format": fields.output_format,  # its older name
    }
    found = {name: of_text_format(each, name) for name, each in formats.items() if each}
    return read_sampling(body, ANTHROPIC, constraint=the_one(found))
