"""Tools of chats, which nest a function in a tool, and of responses, which don't."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from ....config import shown
from ....text.messages import Tool, ToolUse
from ...server.http import FieldError
from ...serving.fields import read_part
from ...serving.tools import tool_of, tool_use_of, tools_of, with_allowed, with_named
from .bodies import CACHE_MARKS, ChatBody, ResponseBody

_CHOICE = "tool_choice"


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    HARMLESS: ClassVar = CACHE_MARKS

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NestedTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of a chat."""

    HARMLESS: ClassVar = CACHE_MARKS

    type: Literal["function"]
    function: Function


class FlatTool(Function, frozen=True, kw_only=True):
    """A tool of a response."""

    type: Literal["function"]
    allowed_callers: list[Literal["direct"]] = []


class NamedFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function in a choice, by its name. Its parameters stand in the call's tools."""

    HARMLESS: ClassVar = CACHE_MARKS | {"description", "parameters", "strict"}

    name: str


class NestedNamed(msgspec.Struct, frozen=True, kw_only=True):
    """A tool in a chat's choice."""

    HARMLESS: ClassVar = CACHE_MARKS

    type: Literal["function"]
    function: NamedFunction


class FlatNamed(NamedFunction, frozen=True, kw_only=True):
    """A tool in a response's choice."""

    type: Literal["function"]


class NestedAllowed(msgspec.Struct, frozen=True, kw_only=True):
    """Some of a chat's tools."""

    mode: Literal["auto", "required"]
    tools: list[NestedNamed]


class NestedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A chat's choice among some tools."""

    type: Literal["allowed_tools"]
    allowed_tools: NestedAllowed


class FlatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A response's choice among some tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FlatNamed]


def chat_tools(given: list[dict[str, Any]]) -> tuple[Tool, ...]:
    """Read the tools of a chat.

    Raises:
        FieldError: A tool is not a function, or its name or schema is invalid.
    """
    return tools_of(
        (f"tools[{place}].function", _tool(tool, f"tools[{place}].type", nested=True))
        for place, tool in enumerate(given)
    )


def chat_tool_use(fields: ChatBody) -> ToolUse:
    """Read which tools a chat's model may, or has to, call.

    Raises:
        FieldError: As `chat_tools`, or the choice is invalid.
    """
    use = ToolUse(tools=chat_tools(fields.tools), parallel=fields.parallel_tool_calls)
    match choice := fields.tool_choice:
        case {"type": "function"}:
            named = read_part(choice, NestedNamed, _CHOICE).function.name
            return with_named(use, named, f"{_CHOICE}.function.name")
        case {"type": "allowed_tools"}:
            allowed = read_part(choice, NestedChoice, _CHOICE).allowed_tools
            where = f"{_CHOICE}.allowed_tools.tools"
            names = [
                (f"{where}[{place}].function.name", tool.function.name)
                for place, tool in enumerate(allowed.tools)
            ]
            return with_allowed(use, allowed.mode, names, _CHOICE)
    return _simple_choice(use, choice, "invalid_request")


def response_tool_use(fields: ResponseBody) -> ToolUse:
    """Read which tools a response's model may, or has to, call.

    Raises:
        FieldError: A tool or the choice is invalid.
    """
    tools = tools_of(
        (f"tools[{place}]", _tool(tool, f"tools[{place}]", nested=False))
        for place, tool in enumerate(fields.tools)
    )
    use = ToolUse(tools=tools, parallel=fields.parallel_tool_calls)
    match choice := fields.tool_choice:
        case {"type": "function"}:
            return with_named(use, read_part(choice, FlatNamed, _CHOICE).name, f"{_CHOICE}.name")
        case {"type": "allowed_tools"}:
            allowed = read_part(choice, FlatChoice, _CHOICE)
            names = [
                (f"{_CHOICE}.tools[{place}].name", tool.name)
                for place, tool in enumerate(allowed.tools)
            ]
            return with_allowed(use, allowed.mode, names, _CHOICE)
    return _simple_choice(
        use, choice, "unsupported" if isinstance(choice, dict) else "invalid_request"
    )


def _simple_choice(use: ToolUse, choice: str | dict[str, Any] | None, code: str) -> ToolUse:
    match choice:
        case None:
            return use
        case "none" | "auto" | "required":
            return tool_use_of(use.tools, choice, parallel=use.parallel)
    raise FieldError(
        f"{_CHOICE} is {shown(choice)}; it may be none, auto, required, a function or "
        "allowed_tools",
        param=_CHOICE,
        code=code,
    )


def _tool(given: dict[str, Any], param: str, *, nested: bool) -> Tool:
    """Args: `param` is named in the error for another type than functions."""
    if (kind := given.get("type")) != "function":
        raise FieldError(
            f"{param}: a tool of type {shown(kind)} is not supported here; give tools of the type "
            "'function', which you call yourself",
            param=param,
            code="unsupported",
        )
    where = param.removesuffix(".type")
    function = (
        read_part(given, NestedTool, where).function
        if nested
        else read_part(given, FlatTool, where)
    )
    return tool_of(function.name, function.description, function.parameters, function.strict)
