"""Of any interface: tools that a model may call, and whether a call asks for reasoning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec


def _no_arguments() -> dict[str, Any]:
    return {"type": "object", "properties": {}}


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function of the client.

    Attributes:
        parameters: The schema of its arguments, an object.
        strict: Whether a call's arguments are always valid by that schema.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = msgspec.field(default_factory=_no_arguments)
    strict: bool = False

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
    """Return whether these variables ask for reasoning; None if they don't say."""
    for name in SWITCHES:
        if variables.get(name) is not None:
            return bool(variables[name])
    effort = variables.get(EFFORT)
    return None if effort is None else effort != "none"
