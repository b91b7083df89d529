"""The tools of a chat."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from ...chat import Tool, ToolUse
from ...config import shown
from ..http import FieldError, convert
from ..tools import tool_of, tool_use_of, tools_of, with_allowed, with_named
from .bodies import ChatBody

T = TypeVar("T")

_WHERE = "tool_choice"

Mode = Literal["none", "auto", "required"]
_MODES: dict[str, Mode] = {"none": "none", "auto": "auto", "required": "required"}


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """What can be called."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool. What else it may have tells of who calls it, and how."""

    function: Function


class Named(msgspec.Struct, frozen=True, kw_only=True):
    """A function by its name."""

    name: str


class NamedTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool, as choices have it."""

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
        named = _read(choice, NamedTool, _WHERE).function.name
        return with_named(use, named, f"{_WHERE}.function.name")
    if kind == "allowed_tools":
        allowed = _read(choice, AllowedTools, _WHERE).allowed_tools
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
    function = _read(given, FunctionTool, where).function
    return tool_of(function.name, function.description, function.parameters, function.strict)


def _read(given: Any, kind: type[T], where: str) -> T:
    """As `convert`, with the whole path of what is wrong."""
    try:
        return convert(given, kind, where)
    except FieldError as error:
        param = f"{where}.{error.param}" if error.param else where
        raise FieldError(error.message, param=param) from None
