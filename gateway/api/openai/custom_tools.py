"""Custom tools, which take a text, of chats and responses: as functions with one text argument."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from ....text.messages import MessageFormat, Tool, may_have_grammar, tool_of
from ....text.messages.lark import is_regex
from ...server.http import field_error
from ...serving.fields import ignore

INPUT = "input"
"""The argument."""

_MOST_CHARS = 1 << 16
"""Longest grammar that is read here."""


class CustomFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The form of a custom tool's input."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str = ""


def custom_tool(
    name: str, about: str, given: CustomFormat | None, where: str, form: MessageFormat | None
) -> Tool:
    """Return a custom tool as a function.

    Args:
        about: Its description.
        given: The format of its input; `where` is the path of its fields.
        form: The model's message format, which may enforce it.

    Raises:
        FieldError: It is no regular expression, or too long.
    """
    argument: dict[str, Any] = {"type": "string", "description": "The input, as plain text."}
    strict, grammar = False, ""
    if given is not None and given.type == "grammar":
        definition, syntax = given.definition, given.syntax or "lark"
        if len(definition) > _MOST_CHARS:
            raise field_error(
                f"{where}.definition",
                f"has {len(definition)} characters; it may have {_MOST_CHARS}",
                code="invalid_constraint",
            )
        if syntax == "regex" and not is_regex(definition):
            raise field_error(
                f"{where}.definition",
                "is no regular expression",
                code="invalid_constraint",
                remedy="write it as RE2 or llguidance reads it",
            )
        if syntax == "regex":
            strict = form is not None and form.calls is not None
            argument |= {"pattern": f"^(?:{definition})$"} if strict else {}
        elif may_have_grammar(form, definition):
            strict, grammar = True, definition
        if not strict:
            ignore(where)
        if not strict or grammar:
            about = joined(about, f"The input has to match this {syntax} grammar:\n{definition}")
    parameters = {
        "type": "object",
        "properties": {INPUT: argument},
        "required": [INPUT],
        "additionalProperties": False,
    }
    tool = tool_of(name, about, parameters, strict)
    return msgspec.structs.replace(tool, grammar=grammar)


def joined(*texts: str | None) -> str:
    """Return descriptions as one."""
    return "\n\n".join(text for text in texts if text)


def input_of(arguments: str) -> str:
    """Return the input of a custom tool's call.

    The model may have written other arguments, if no grammar kept it from that; a client then gets
    them as they are.
    """
    found = json.loads(arguments)
    text = found.get(INPUT) if len(found) == 1 else None
    return text if isinstance(text, str) else arguments


def custom_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call of a custom tool in a chat's form."""
    custom = {"name": name, "input": input_of(arguments)}
    return {"id": call_id, "type": "custom", "custom": custom}
