"""Tools of a call, in any interface."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from ...config import field_error, shown
from ...text.messages import Tool, ToolUse


class DirectCaller(msgspec.Struct, frozen=True, kw_only=True):
    """The caller of a tool: the model itself, and not a program of it."""

    type: Literal["direct"]


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
        raise field_error(
            param, "asks for a call, and there are no tools", remedy="give one, or leave it out"
        )
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


def result_text(output: str | None, error: dict[str, Any] | str | None) -> str:
    """Return the result of an MCP server's tool, as the model reads it.

    Args:
        error: In OpenAI's form; None of a call that did not fail.
    """
    if not error:
        return output or ""
    if isinstance(error, str):
        return f"Error: {error}"
    if "message" in error:
        return f"Error: {error['message']}"
    content = error.get("content")
    parts = content if isinstance(content, list) else []
    texts = (str(part.get("text", "")) for part in parts if isinstance(part, dict))
    return "\n".join(["Error:", *texts])
