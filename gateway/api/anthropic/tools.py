"""The tools of a call."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ....config import shown
from ....text.messages import Tool, ToolUse
from ...server.http import FieldError
from ...serving.fields import read_part
from ...serving.tools import tool_of, tool_use_of, tools_of, with_named
from .bodies import CountBody


class CustomTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of the caller's.

    Neither how its prefix is cached nor how its input is streamed changes what a model says.
    """

    name: str
    input_schema: dict[str, Any]
    type: Literal["custom"] = "custom"
    description: str = ""
    strict: bool = False
    allowed_callers: list[Literal["direct"]] = []
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool = False


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Which of them are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


def use_of(body: CountBody) -> ToolUse:
    """What the model may, or has to, call.

    Raises:
        FieldError: A tool is none of the caller's, or the choice is none.
    """
    places = (f"tools[{place}]" for place in range(len(body.tools)))
    given = [(where, _tool(tool, where)) for where, tool in zip(places, body.tools, strict=True)]
    tools = tools_of(given, schema="input_schema")
    if not body.tool_choice:
        return ToolUse(tools=tools)
    choice = read_part(body.tool_choice, ToolChoice, "tool_choice")
    parallel = not choice.disable_parallel_tool_use
    if choice.type == "auto" or choice.type == "none":
        return tool_use_of(tools, choice.type, parallel=parallel)
    use = tool_use_of(tools, "required", parallel=parallel)
    return use if choice.type == "any" else with_named(use, choice.name, "tool_choice.name")


def _tool(given: dict[str, Any], where: str) -> Tool:
    kind = given.get("type")
    if kind not in (None, "custom"):
        raise FieldError(
            f"{where}: a tool of type {shown(kind)} is not here; give tools of your own, with a "
            "name and an input_schema",
            param=where,
            code="unsupported",
        )
    found = read_part(given, CustomTool, where)
    return tool_of(found.name, found.description, found.input_schema, found.strict)
