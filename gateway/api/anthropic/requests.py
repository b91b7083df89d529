"""From Anthropic's bodies to our requests."""

from __future__ import annotations

import uuid
from typing import Any

from starlette.requests import Request

from ....bus.public import GenerateRequest
from ....config import Config, SamplingParams, shown
from ....text.messages import Tool, ToolUse
from ...server.http import field_error
from ...serving.chat_templates import Reasoning
from ...serving.constraints import of_text_format, the_one
from ...serving.fields import Body, adapter_of, engine_priority, read_part
from ...serving.prepared import Prepared
from ...serving.sampling_fields import ANTHROPIC, read_sampling
from ...serving.tools import tool_of, tool_use_of, tools_of, with_named
from .bodies import CountBody, CustomTool, MessagesBody
from .errors import VERSION_HEADER

_VERSIONS = ("2023-06-01", "2026-10-21")


def check_version(request: Request) -> None:
    """Check the interface's version. They differ only in what Anthropic refuses.

    Raises:
        FieldError: Unknown version.
    """
    version = request.headers.get(VERSION_HEADER)
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
    check_thinking(fields)
    if (budget_of(fields) or 0) >= fields.max_tokens:
        raise field_error(
            "thinking.budget_tokens", "must be less than max_tokens, of which they are a part"
        )
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


def reasoning_of(fields: CountBody) -> Reasoning | None:
    """Return the reasoning for the chat template; None leaves it to the template."""
    thinking, effort = fields.thinking, fields.output_config.effort
    if thinking is None and effort is None:
        return None
    return Reasoning(
        on=None if thinking is None else thinking.type != "disabled",
        effort=effort,
        on_param="thinking",
        effort_param="output_config.effort",
    )


def use_of(body: CountBody) -> ToolUse:
    """Read which tools the model may, or has to, call.

    Raises:
        FieldError: A tool or the choice is invalid.
    """
    tools = tools_of(
        [
            (f"tools[{place}]", _tool(tool, f"tools[{place}]"))
            for place, tool in enumerate(body.tools)
        ],
        schema="input_schema",
    )
    choice = body.tool_choice
    if choice is None:
        return ToolUse(tools=tools)
    parallel = not choice.disable_parallel_tool_use
    if choice.type == "auto" or choice.type == "none":
        return tool_use_of(tools, choice.type, parallel=parallel)
    use = tool_use_of(tools, "required", parallel=parallel)
    return use if choice.type == "any" else with_named(use, choice.name, "tool_choice.name")


def _tool(given: dict[str, Any], where: str) -> Tool:
    kind = given.get("type")
    if kind not in (None, "custom"):
        raise field_error(
            where,
            f": a tool of type {shown(kind)} is not supported here; give tools of your own, "
            "with a name and an input_schema",
            code="unsupported",
        )
    found = read_part(given, CustomTool, where)
    return tool_of(found.name, found.description, found.input_schema, found.strict)


def request_of(
    fields: MessagesBody, prepared: Prepared, tenant: str, config: Config
) -> GenerateRequest:
    """Return the request to submit."""
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
    formats = {
        "output_config.format": fields.output_config.format,
        "output_format": fields.output_format,  # its older name
    }
    found = {name: of_text_format(each, name) for name, each in formats.items() if each}
    return read_sampling(body, ANTHROPIC, constraint=the_one(found))
