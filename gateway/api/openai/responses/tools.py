"""Tools of a response: functions, custom tools, and namespaces of both.

A model is offered functions alone. A custom tool becomes a function with one text argument, the
functions of a namespace get its name before theirs, and tools that OpenAI's own servers or clients
have built in are left out. Calls go back in the form in which the tool came.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from .....config import shown
from .....text.messages import MessageFormat, Tool, ToolUse, tool_of, tools_of
from ....server.http import field_error
from ....serving.fields import convert_part, ignore, read_part
from ....serving.tools import tool_use_of, with_allowed, with_named
from ..bodies import CACHE_MARKS
from ..custom_tools import CustomFormat, custom_tool, input_of, joined
from ..messages import FlatTool
from ..response_bodies import ResponseBody

MCP = "mcp"
"""The type of an MCP server's tools."""

_CHOICE = "tool_choice"
_BUILT_IN = (
    "apply_patch",
    "code_interpreter",
    "computer",
    "file_search",
    "image_generation",
    "local_shell",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
)
"""Beginnings of the types of built-in tools; some go on with a version."""


_DEFAULTS: dict[str, Any] = {"description": None, "parameters": None, "strict": False}


def is_built_in(kind: object) -> bool:
    """Return whether a type is of a built-in tool, which a model here may do without."""
    return isinstance(kind, str) and kind.startswith(_BUILT_IN)


def has_servers(tools: list[dict[str, Any]]) -> bool:
    """Return whether any of the tools are an MCP server's."""
    return any(tool.get("type") == MCP for tool in tools)


class CustomTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that takes a text."""

    OPEN: ClassVar = True
    NEUTRAL: ClassVar = CACHE_MARKS

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: CustomFormat | None = None
    allowed_callers: list[Literal["direct"]] = []


class NamespaceTool(msgspec.Struct, frozen=True, kw_only=True):
    """Functions and custom tools under one name."""

    OPEN: ClassVar = True
    NEUTRAL: ClassVar = CACHE_MARKS

    type: Literal["namespace"]
    name: str
    tools: list[Any]
    description: str | None = None


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """A tool in a choice, by its name. Its other fields stand in the call's tools."""

    OPEN: ClassVar = True

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class AllowedTools(msgspec.Struct, frozen=True, kw_only=True):
    """A choice among some tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[Any]


class Origin(NamedTuple):
    """A tool as its client knows it."""

    kind: str
    name: str
    namespace: str | None = None


def shown_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tools as a response shows them: functions with all fields that Open Responses has."""
    return [_DEFAULTS | tool if tool.get("type") == "function" else tool for tool in tools]


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name that the model sees, which other servers make in the same way."""
    return f"{namespace}__{name}" if namespace else name


def origins_of(tools: list[dict[str, Any]]) -> dict[str, Origin]:
    """Return the tools of a response by the names that the model sees.

    Args:
        tools: As `response_tools` has read them.
    """
    return {
        flat_name(tool["name"], namespace): Origin(tool["type"], tool["name"], namespace)
        for _, tool, namespace, _ in _walk(tools)
    }


def response_tools(given: list[dict[str, Any]], form: MessageFormat | None) -> tuple[Tool, ...]:
    """Read the tools of a response.

    Args:
        form: The model's message format, which may enforce the inputs of custom tools.

    Raises:
        FieldError: A tool is of an unknown type, or its name, schema or format is invalid.
    """
    for place, each in enumerate(given):
        if is_built_in(each.get("type")):
            ignore(f"tools[{place}]")
    return tools_of(
        (where, _tool(tool, where, flat_name(tool.get("name") or "", namespace), before, form))
        for where, tool, namespace, before in _walk(given)
    )


def tool_use(fields: ResponseBody, form: MessageFormat | None) -> ToolUse:
    """Read which tools a model may, or has to, call.

    Raises:
        FieldError: As `response_tools`, or the choice is invalid.
    """
    tools = response_tools(fields.tools, form)
    use = ToolUse(tools=tools, parallel=fields.parallel_tool_calls)
    choice = fields.tool_choice
    if isinstance(choice, dict) and choice.get("type") in ("none", "auto", "required"):
        choice = choice["type"]
    match choice:
        case None:
            return use
        case "none" | "auto" | "required":
            if choice == "required" and fields.tools and not tools:
                raise _not_offered(_CHOICE, "all of the call's tools")
            return tool_use_of(tools, choice, parallel=use.parallel)
        case {"type": "function" | "custom"}:
            return with_named(use, _chosen(choice, _CHOICE), f"{_CHOICE}.name")
        case {"type": "allowed_tools"}:
            allowed = read_part(choice, AllowedTools, _CHOICE)
            names: list[tuple[str, str]] = []
            for place, each in enumerate(allowed.tools):
                where = f"{_CHOICE}.tools[{place}]"
                if isinstance(each, dict) and is_built_in(each.get("type")):
                    ignore(where)
                else:
                    names.append((f"{where}.name", _chosen(each, where)))
            return with_allowed(use, allowed.mode, names, _CHOICE)
        case {"type": kind} if is_built_in(kind):
            raise _not_offered(_CHOICE, f"a tool of type {shown(kind)}")
    raise field_error(
        _CHOICE,
        f"is {shown(choice)}; it may be none, auto, required, a function, a custom tool or "
        "allowed_tools",
        code="unsupported" if isinstance(choice, dict) else "invalid_request",
    )


def _not_offered(param: str, what: str) -> Exception:
    return field_error(
        param,
        f"requires a call of {what}, which is built into other servers and not offered to the "
        "model here; give functions or custom tools, or another tool_choice",
        code="unsupported",
    )


def _chosen(given: Any, where: str) -> str:
    chosen = read_part(given, Chosen, where)
    return flat_name(chosen.name, chosen.namespace)


def _walk(
    tools: list[dict[str, Any]],
) -> Iterator[tuple[str, dict[str, Any], str | None, str | None]]:
    """Yield each function and custom tool: its path, itself, its namespace and the description of
    that.

    Raises:
        FieldError: A namespace is invalid, or has one within.
    """
    for place, tool in enumerate(tools):
        where = f"tools[{place}]"
        if tool.get("type") == "namespace":
            space = read_part(tool, NamespaceTool, where)
            for number, each in enumerate(space.tools):
                inner = f"{where}.tools[{number}]"
                each = convert_part(each, dict[str, Any], inner)
                if each.get("type") == "namespace":
                    raise field_error(
                        inner,
                        ": a namespace has no namespaces within",
                        remedy="list its tools at the top",
                    )
                yield inner, each, space.name, space.description
        elif not is_built_in(tool.get("type")):
            yield where, tool, None, None


def _tool(
    given: dict[str, Any], where: str, name: str, before: str | None, form: MessageFormat | None
) -> Tool:
    """Read a function or a custom tool.

    Args:
        name: The name that the model sees.
        before: The description of its namespace.
    """
    kind = given.get("type")
    if kind == "custom":
        custom = read_part(given, CustomTool, where)
        about, grammar = joined(before, custom.description), custom.format
        return custom_tool(name, about, grammar, f"{where}.format", form)
    if kind == MCP:
        raise field_error(
            where,
            ": tools of MCP servers are called by POST /v1/responses alone, and only if the "
            "gateway has mcp.servers or mcp.server_hosts; call the tool yourself as a function",
            code="unsupported",
        )
    if kind != "function":
        raise field_error(
            where,
            f": a tool of type {shown(kind)} is not supported here; give functions and custom "
            "tools, which you call yourself, or namespaces of them",
            code="unsupported",
        )
    tool = read_part(given, FlatTool, where)
    about = joined(before, tool.description)
    return tool_of(name, about, tool.parameters, tool.strict)


def as_called(origins: Mapping[str, Origin], name: str, arguments: str) -> dict[str, Any]:
    """Return the fields of a call's item, in the form of its tool.

    Args:
        name: The name that the model sees.
    """
    origin = origins.get(name, Origin("function", name))
    space = {} if origin.namespace is None else {"namespace": origin.namespace}
    if origin.kind == "custom":
        return {
            "type": "custom_tool_call",
            "name": origin.name,
            **space,
            "input": input_of(arguments),
        }
    return {"type": "function_call", "name": origin.name, **space, "arguments": arguments}
