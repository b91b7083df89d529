"""The tools of a chat."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from ....config import shown
from ....text.messages import Tool, ToolUse
from ...server.http import FieldError
from ...serving.fields import read_part
from ...serving.tools import tool_of, tool_use_of, tools_of, with_allowed, with_named
from .bodies import CACHE_MARKS, ChatBody

_WHERE = "tool_choice"

Mode = Literal["none", "auto", "required"]
_MODES: dict[str, Mode] = {"none": "none", "auto": "auto", "required": "required"}


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """What can be called."""

    HARMLESS: ClassVar = CACHE_MARKS

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool."""

    HARMLESS: ClassVar = CACHE_MARKS

    type: Literal["function"]
    function: Function


class Named(msgspec.Struct, frozen=True, kw_only=True):
    """A function by its name. What it takes stands in the call's tools."""

    HARMLESS: ClassVar = Function.HARMLESS | {"description", "parameters", "strict"}

    name: str


class NamedTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool, as choices have it."""

    HARMLESS: ClassVar = FunctionTool.HARMLESS

    type: Literal["function"]
    function: Named


class Allowed(msgspec.Struct, frozen=True, kw_only=True):
    """Some of the tools."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedTools(msgspec.Struct, frozen=True, kw_only=True):
    """The choice among these."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


def chat_tools(given: list[dict[str, Any]]) -> tuple[Tool, ...]:
    """The tools of a call.

    Raises:
        FieldError: One is none, or of another type than functions; its name or its schema can't be
            one.
    """
    return tools_of(
        (f"tools[{place}].function", _tool(tool, f"tools[{place}]"))
        for place, tool in enumerate(given)
    )


def chat_tool_use(fields: ChatBody) -> ToolUse:
    """What the model may, or has to, call.

    Raises:
        FieldError: As `chat_tools`, or the choice is none.
    """
    tools = chat_tools(fields.tools)
    choice = "auto" if fields.tool_choice is None else fields.tool_choice
    parallel = fields.parallel_tool_calls
    if isinstance(choice, str) and choice in _MODES:
        return tool_use_of(tools, _MODES[choice], parallel=parallel)
    use = tool_use_of(tools, "auto", parallel=parallel)
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        named = read_part(choice, NamedTool, _WHERE).function.name
        return with_named(use, named, f"{_WHERE}.function.name")
    if kind == "allowed_tools":
        allowed = read_part(choice, AllowedTools, _WHERE).allowed_tools
        within = f"{_WHERE}.allowed_tools.tools"
        names = [
            (f"{within}[{place}].function.name", tool.function.name)
            for place, tool in enumerate(allowed.tools)
        ]
        return with_allowed(use, allowed.mode, names, _WHERE)
    raise FieldError(
        f"{_WHERE} is {shown(choice)}; it may be none, auto, required, a function or allowed_tools",
        param=_WHERE,
    )


def _tool(given: dict[str, Any], where: str) -> Tool:
    kind = given.get("type")
    if kind != "function":
        raise FieldError(
            f"{where}.type is {shown(kind)}; give tools of the type 'function', which you call "
            "yourself",
            param=f"{where}.type",
            code="unsupported",
        )
    function = read_part(given, FunctionTool, where).function
    return tool_of(function.name, function.description, function.parameters, function.strict)
