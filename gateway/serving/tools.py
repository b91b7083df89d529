"""Tools of a call, in any interface."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from ...config import shown
from ...text.messages import Tool, ToolUse
from ..server.http import field_error

_DEEPEST = 100
"""Deepest nesting of a schema, since other code walks schemas by recursion."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class DirectCaller(msgspec.Struct, frozen=True, kw_only=True):
    """The caller of a tool: the model itself, and not a program of it."""

    type: Literal["direct"]


def tools_of(given: Iterable[tuple[str, Tool]], schema: str = "parameters") -> tuple[Tool, ...]:
    """Check and return the tools of a call.

    Args:
        given: Each with the path of its fields in the body, such as `tools[0].function`.
        schema: The interface's name for the schema of the arguments.

    Raises:
        FieldError: A name is invalid or not unique; a schema is not that of an object, or is nested
            too deeply.
    """
    found: dict[str, Tool] = {}
    for where, tool in given:
        param = f"{where}.name"
        if _NAME.fullmatch(tool.name) is None:
            raise field_error(
                param,
                f"is {shown(tool.name)}; it may have 1 to 64 of A to Z, a to z, 0 to 9, _, - and .",
            )
        if tool.name in found:
            raise field_error(param, f": there is a tool {shown(tool.name)} already")
        kind = tool.parameters.get("type", "object")
        if kind != "object":
            param = f"{where}.{schema}.type"
            raise field_error(
                param, f"is {shown(kind)}; arguments are an object, and so it has to be 'object'"
            )
        if _is_deep(tool.parameters):
            param = f"{where}.{schema}"
            raise field_error(param, f"is nested more than {_DEEPEST} deep")
        found[tool.name] = tool
    return tuple(found.values())


def _is_deep(schema: Any) -> bool:
    layer = [schema]
    for _ in range(_DEEPEST):
        inner = [each.values() if isinstance(each, dict) else each for each in layer]
        layer = [each for values in inner for each in values if isinstance(each, dict | list)]
    return bool(layer)


def tool_of(
    name: str, description: str | None, parameters: Mapping[str, Any] | None, strict: bool | None
) -> Tool:
    """Return a tool, with defaults for None."""
    schema = {} if not parameters else {"parameters": dict(parameters)}
    return Tool(name=name, description=description or "", strict=bool(strict), **schema)


def tool_use_of(
    tools: tuple[Tool, ...],
    choice: Literal["none", "auto", "required"],
    *,
    parallel: bool = True,
    param: str = "tool_choice",
) -> ToolUse:
    """Return the use of tools when the call names none.

    Raises:
        FieldError: A call is required, and there are no tools.
    """
    if choice == "required" and not tools:
        raise field_error(param, "asks for a call, and there are no tools")
    return ToolUse(tools=tools, choice=choice, parallel=parallel)


def with_named(use: ToolUse, name: str, param: str) -> ToolUse:
    """Return the use of tools when one must be called. `param`: the path of its name.

    Raises:
        FieldError: There is no such tool.
    """
    check_known(use.tools, name, param)
    return replace(use, choice="required", named=name)


def with_allowed(
    use: ToolUse, mode: Literal["auto", "required"], names: Sequence[tuple[str, str]], param: str
) -> ToolUse:
    """Return the use of tools when only some may be called; the model sees no others.

    Args:
        names: Each with its path.
        param: The path of the choice.

    Raises:
        FieldError: There is no such tool, or none may be called and one has to be.
    """
    for where, name in names:
        check_known(use.tools, name, where)
    allowed = {name for _, name in names}
    few = tuple(tool for tool in use.tools if tool.name in allowed)
    return tool_use_of(few, mode, parallel=use.parallel, param=param)


def check_known(tools: Iterable[Tool], name: str, param: str) -> None:
    """Raises FieldError when there is no tool of a name."""
    if all(tool.name != name for tool in tools):
        raise field_error(param, f": there is no tool {shown(name)}")


def tool_call(call_id: str | None, name: str, arguments: object) -> dict[str, Any]:
    """Return a tool call in OpenAI's form, which chat templates read as well."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}
