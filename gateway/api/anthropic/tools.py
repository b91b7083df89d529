"""Tools of a call: the caller's own, Anthropic's that clients execute, and those of its servers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from ....config import field_error, shown
from ....text.messages import Tool, ToolUse, tool_of, tools_of
from ...serving.fields import ignore, read_part
from ...serving.tools import tool_use_of, with_named
from .bodies import CountBody
from .client_tools import DIRECT, ClientTool, ToolBody, function_of, is_client_tool

_SERVER_TOOLS = (
    "advisor_",
    "code_execution_",
    "mcp_toolset",
    "tool_search_tool_",
    "web_fetch_",
    "web_search_",
)
"""Beginnings of the types of tools that Anthropic's servers execute."""

_SEARCH = "tool_search_tool_"


class CustomTool(ToolBody, frozen=True, kw_only=True):
    """A tool of the caller's."""

    type: Literal["custom"] = "custom"
    input_schema: dict[str, Any]
    description: str = ""


class ToolChange(NamedTuple):
    """A change of the offered tools within the conversation.

    Attributes:
        offered: Whether the tool is offered from here on.
        where: The path of the change in the body.
        definition: The tool, as in `tools`; None for one by name.
        must_exist: Whether an unknown name is an error, and not neutral.
    """

    name: str
    offered: bool
    where: str
    definition: dict[str, Any] | None = None
    must_exist: bool = True


class _Declared(NamedTuple):
    """A tool of the call, whether it is deferred, and its path in the body."""

    tool: Tool
    deferred: bool
    where: str


def use_of(body: CountBody, changes: Sequence[ToolChange]) -> ToolUse:
    """Read which tools the model may, or has to, call.

    Tools with `defer_loading` are offered once the conversation refers to them, after all others,
    so that the prompt's beginning stays the same.

    Raises:
        FieldError: A tool or the choice is invalid.
    """
    declared: list[_Declared] = []
    elsewhere: list[str] = []
    searched = False
    for place, given in enumerate(body.tools):
        where, kind = f"tools[{place}]", given.get("type")
        if isinstance(kind, str) and kind.startswith(_SERVER_TOOLS):
            ignore(where)
            elsewhere.append(str(given.get("name", "")))
            searched = searched or kind.startswith(_SEARCH)
        else:
            declared.append(_read(given, where))
    declared += [
        _read(change.definition, f"{change.where}.tool.definition")._replace(deferred=True)
        for change in changes
        if change.definition is not None
    ]
    checked = tools_of(((each.where, each.tool) for each in declared), schema="input_schema")
    declared = [each._replace(tool=tool) for each, tool in zip(declared, checked, strict=True)]
    choice = body.tool_choice
    named = choice.name if choice is not None and choice.type == "tool" else ""
    tools = _offered(declared, changes, named, all_at_once=searched)
    if choice is None:
        return ToolUse(tools=tools)
    if named and named in elsewhere:
        raise field_error(
            "tool_choice.name",
            f"is {shown(named)}, a tool that Anthropic's servers execute, and nothing is executed "
            "here; name a tool of your own, or leave the choice to the model",
            code="unsupported",
        )
    parallel = not choice.disable_parallel_tool_use
    if choice.type == "auto" or choice.type == "none":
        return tool_use_of(tools, choice.type, parallel=parallel)
    use = tool_use_of(tools, "required", parallel=parallel)
    return use if choice.type == "any" else with_named(use, choice.name, "tool_choice.name")


def _offered(
    declared: Sequence[_Declared],
    changes: Iterable[ToolChange],
    named: str,
    *,
    all_at_once: bool,
) -> tuple[Tool, ...]:
    """Return the tools at the conversation's end: the declared ones, then those added.

    Args:
        named: A tool that has to be called; "" for none.
        all_at_once: Whether deferred tools are offered from the beginning, since their search is
            left out.
    """
    known = {each.tool.name: each.tool for each in declared}
    offered = {each.tool.name: each.tool for each in declared if all_at_once or not each.deferred}
    for change in changes:
        name = change.name
        if name not in known:
            if change.must_exist:
                raise field_error(
                    f"{change.where}.tool.name", f"is {shown(name)}, and there is no such tool"
                )
            ignore(change.where)
        elif not change.offered:
            offered.pop(name, None)
        else:
            offered.setdefault(name, known[name])
    if named in known:
        offered.setdefault(named, known[named])
    return tuple(offered.values())


def _read(given: dict[str, Any], where: str) -> _Declared:
    kind = given.get("type")
    found: ToolBody
    if kind in (None, "custom"):
        found = custom = read_part(given, CustomTool, where)
        tool = tool_of(custom.name, custom.description, custom.input_schema, custom.strict)
    elif isinstance(kind, str) and is_client_tool(kind):
        found = client = read_part(given, ClientTool, where)
        tool = function_of(client)
    else:
        raise field_error(
            where,
            f": a tool of type {shown(kind)} is not supported here; give tools of your own, "
            "with a name and an input_schema",
            code="unsupported",
        )
    if found.allowed_callers and DIRECT not in found.allowed_callers:
        raise field_error(
            f"{where}.allowed_callers",
            f"lacks '{DIRECT}', and no code is executed here that could call the tool; add it",
            code="unsupported",
        )
    if found.input_examples:
        examples = "\n".join(json.dumps(each, ensure_ascii=False) for each in found.input_examples)
        described = f"{tool.description}\n\nExamples of its input:\n{examples}".strip()
        tool = msgspec.structs.replace(tool, description=described)
    return _Declared(tool, found.defer_loading, where)
