"""Tools that a model may call, and whether a call asks for reasoning, of any interface."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from ...config import field_error, shown

MOST_NAME_CHARS = 128
"""Characters of a tool's name, as Anthropic allows; OpenAI allows 64."""

_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{MOST_NAME_CHARS}}}")

_DEEPEST = 100
"""Deepest nesting of a schema, since other code walks schemas by recursion."""


def _no_arguments() -> dict[str, Any]:
    return {"type": "object", "properties": {}}


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function of the client.

    Attributes:
        parameters: The schema of its arguments, an object.
        strict: Whether a call's arguments are always valid by that schema.
        grammar: A grammar in Lark's form of the only argument, which is a text; "" for any text.
            Only a strict tool may have one, that `may_have_grammar`.
        where: The path of `parameters` in the call's body, for errors about them.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = msgspec.field(default_factory=_no_arguments)
    strict: bool = False
    grammar: str = ""
    where: str = ""

    def as_templates_read(self) -> dict[str, Any]:
        """Return the tool in OpenAI's form, for chat templates."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        return {"type": "function", "function": function}


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """The tools that a model may, or has to, call in one message.

    Attributes:
        tools: The available tools.
        choice: Whether it calls none, any number, or at least one.
        named: The only tool, which has to be called; "" for any.
        parallel: Whether it may call several.
    """

    tools: tuple[Tool, ...] = ()
    choice: Literal["none", "auto", "required"] = "auto"
    named: str = ""
    parallel: bool = True

    @property
    def usable(self) -> tuple[Tool, ...]:
        """The tools for the prompt; none if no call is allowed."""
        return () if self.choice == "none" else self.tools


SWITCHES = ("enable_thinking", "thinking")
"""Variables of chat templates that turn reasoning on or off."""

EFFORT = "reasoning_effort"
"""The variable that says how much a model reasons."""


def asked_to_reason(variables: Mapping[str, Any]) -> bool | None:
    """Return whether these variables request reasoning; None if they don't say."""
    for name in SWITCHES:
        if variables.get(name) is not None:
            return bool(variables[name])
    effort = variables.get(EFFORT)
    return None if effort is None else effort != "none"


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
                f"is {shown(tool.name)}; it may have 1 to {MOST_NAME_CHARS} of A to Z, a to z, "
                "0 to 9, _, - and .",
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
            raise field_error(param, f"is nested more than {_DEEPEST} deep; make it flatter")
        found[tool.name] = msgspec.structs.replace(tool, where=f"{where}.{schema}")
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
    return Tool(
        name=name,
        description=description or "",
        parameters=dict(parameters) if parameters else _no_arguments(),
        strict=bool(strict),
    )
