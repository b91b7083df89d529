"""Tools of chats, which nest a function in a tool, and of responses, which don't."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from ....config import shown
from ....text.messages import Tool, ToolUse
from ...server.http import field_error
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
    """A tool of a response: the function itself."""

    type: Literal["function"]
    allowed_callers: list[Literal["direct"]] = []

    @property
    def function(self) -> Function:
        return self


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

    @property
    def function(self) -> NamedFunction:
        return self


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

    @property
    def allowed_tools(self) -> FlatChoice:
        return self


class _Form(NamedTuple):
    """The form of an interface's tools, and the paths of fields in it."""

    tool: type[NestedTool | FlatTool]
    named: type[NestedNamed | FlatNamed]
    choice: type[NestedChoice | FlatChoice]
    kind: str
    function: str
    allowed: str


_NESTED = _Form(NestedTool, NestedNamed, NestedChoice, ".type", ".function", ".allowed_tools")
_FLAT = _Form(FlatTool, FlatNamed, FlatChoice, "", "", "")


def chat_tools(given: list[dict[str, Any]], form: _Form = _NESTED) -> tuple[Tool, ...]:
    """Read the tools of a chat.

    Raises:
        FieldError: A tool is not a function, or its name or schema is invalid.
    """
    return tools_of(
        (f"tools[{place}]{form.function}", _tool(tool, f"tools[{place}]", form))
        for place, tool in enumerate(given)
    )


def tool_use(fields: ChatBody | ResponseBody) -> ToolUse:
    """Read which tools a model may, or has to, call.

    Raises:
        FieldError: As `chat_tools`, or the choice is invalid.
    """
    form = _NESTED if isinstance(fields, ChatBody) else _FLAT
    use = ToolUse(tools=chat_tools(fields.tools, form), parallel=fields.parallel_tool_calls)
    match choice := fields.tool_choice:
        case None:
            return use
        case "none" | "auto" | "required":
            return tool_use_of(use.tools, choice, parallel=use.parallel)
        case {"type": "function"}:
            named = read_part(choice, form.named, _CHOICE).function.name
            return with_named(use, named, f"{_CHOICE}{form.function}.name")
        case {"type": "allowed_tools"}:
            allowed = read_part(choice, form.choice, _CHOICE).allowed_tools
            where = f"{_CHOICE}{form.allowed}.tools"
            tools: Sequence[NestedNamed | FlatNamed] = allowed.tools
            names = [
                (f"{where}[{place}]{form.function}.name", tool.function.name)
                for place, tool in enumerate(tools)
            ]
            return with_allowed(use, allowed.mode, names, _CHOICE)
    hosted = form is _FLAT and isinstance(choice, dict)
    raise field_error(
        _CHOICE,
        f"is {shown(choice)}; it may be none, auto, required, a function or allowed_tools",
        code="unsupported" if hosted else "invalid_request",
    )


def _tool(given: dict[str, Any], where: str, form: _Form) -> Tool:
    if (kind := given.get("type")) != "function":
        param = f"{where}{form.kind}"
        raise field_error(
            param,
            f": a tool of type {shown(kind)} is not supported here; give tools of the type "
            "'function', which you call yourself",
            code="unsupported",
        )
    function = read_part(given, form.tool, where).function
    return tool_of(function.name, function.description, function.parameters, function.strict)
