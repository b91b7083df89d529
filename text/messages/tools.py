"""Tools that a model may call, by whichever interface they were given."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


def _no_arguments() -> dict[str, Any]:
    return {"type": "object", "properties": {}}


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function of the caller's.

    Attributes:
        parameters: The schema of its arguments, an object.
        strict: Whether a call's arguments are always valid by that schema.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = msgspec.field(default_factory=_no_arguments)
    strict: bool = False

    def as_templates_read(self) -> dict[str, Any]:
        """The same in the form of OpenAI's, which chat templates are written for."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        return {"type": "function", "function": function}


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a model may, or has to, call in one message.

    Attributes:
        tools: What there is to be called.
        choice: Whether it calls none, as many as it likes, or at least one.
        named: The only tool that it may call, and then has to; "" for any.
        parallel: Whether it may call several.
    """

    tools: tuple[Tool, ...] = ()
    choice: Literal["none", "auto", "required"] = "auto"
    named: str = ""
    parallel: bool = True

    @property
    def usable(self) -> tuple[Tool, ...]:
        """Those that the model is told of; none where it may call none."""
        return () if self.choice == "none" else self.tools
