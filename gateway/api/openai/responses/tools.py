"""The tools of a response, in its flat form."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from .....config import shown
from .....text.messages import Tool, ToolUse
from ....server.http import FieldError
from ....serving.fields import read_part
from ....serving.tools import tool_of, tool_use_of, tools_of, with_allowed, with_named
from ..bodies import CACHE_MARKS, ResponseBody

_CHOICE = "tool_choice"


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    """A function, as it is given."""

    HARMLESS: ClassVar = CACHE_MARKS

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: list[Literal["direct"]] = []


class NamedTool(msgspec.Struct, frozen=True, kw_only=True):
    """A function, as a choice has it. What it takes stands in the call's tools."""

    HARMLESS: ClassVar = FunctionTool.HARMLESS | {"description", "parameters", "strict"}

    type: Literal["function"]
    name: str


class AllowedTools(msgspec.Struct, frozen=True, kw_only=True):
    """The choice among some of them."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


def use_of(fields: ResponseBody) -> ToolUse:
    """What a response's model may, or has to, call.

    Raises:
        FieldError: A tool is none of the caller's, or the choice is none.
    """
    tools = tools_of(
        (f"tools[{place}]", _tool(given, f"tools[{place}]"))
        for place, given in enumerate(fields.tools)
    )
    choice = "auto" if fields.tool_choice is None else fields.tool_choice
    parallel = fields.parallel_tool_calls
    match choice:
        case "none" | "auto" | "required":
            return tool_use_of(tools, choice, parallel=parallel)
        case {"type": "function"}:
            use = tool_use_of(tools, "auto", parallel=parallel)
            return with_named(use, read_part(choice, NamedTool, _CHOICE).name, f"{_CHOICE}.name")
        case {"type": "allowed_tools"}:
            use = tool_use_of(tools, "auto", parallel=parallel)
            allowed = read_part(choice, AllowedTools, _CHOICE)
            names = [
                (f"{_CHOICE}.tools[{place}].name", tool.name)
                for place, tool in enumerate(allowed.tools)
            ]
            return with_allowed(use, allowed.mode, names, _CHOICE)
    raise FieldError(
        f"{_CHOICE} is {shown(choice)}; it may be none, auto, required, a function, or "
        "allowed_tools",
        param=_CHOICE,
        code="unsupported" if isinstance(choice, dict) else "invalid_request",
    )


def _tool(given: dict[str, Any], where: str) -> Tool:
    kind = given.get("type")
    if kind != "function":
        raise FieldError(
            f"{where}: a tool of type {shown(kind)} is not here; give functions, which you call",
            param=where,
            code="unsupported",
        )
    found = read_part(given, FunctionTool, where)
    return tool_of(found.name, found.description, found.parameters, found.strict)
