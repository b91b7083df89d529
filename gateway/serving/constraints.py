"""Constraints on an answer's text, by each interface's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from ...config import Constraint, field_name, shown
from ..server.http import FieldError, field_error
from .fields import convert_part, note_field, read_part

# The place of the schema: OpenAI's chats nest it, its responses and Anthropic's outputs don't.
_NESTED = '{"type": "json_schema", "json_schema": {"name": "answer", "schema": {...}}}'
_FLAT = '{"type": "json_schema", "schema": {...}}'

# vLLM's `structured_outputs`: the type of each, and the field of `Constraint`; "" for a grammar.
_STRUCTURED: dict[str, tuple[Any, str]] = {
    "json": (dict[str, Any] | str, "json_schema"),
    "json_object": (bool, "json_object"),
    "regex": (str, "regex"),
    "choice": (tuple[str, ...], "choice"),
    "grammar": (str, ""),
}


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True):
    """A schema. All are strict.

    Attributes:
        name: A label, which OpenAI's interface requires.
    """

    NEUTRAL: ClassVar = {
        "description": "the model is shown no schema, and the schema is all that counts"
    }

    schema: dict[str, Any]
    name: str | None = None
    strict: bool | None = None


class TextFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A JSON object; with a schema, as in llama.cpp's server, an object of that schema."""

    type: Literal["json_object"]
    schema: dict[str, Any] | None = None


class NestedFormat(msgspec.Struct, frozen=True, kw_only=True):
    """JSON of a schema, in chats and completions."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class FlatFormat(JsonSchema, frozen=True, kw_only=True):
    """JSON of a schema, in responses and messages."""

    type: Literal["json_schema"]


class GrammarFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar in llama.cpp's form."""

    type: Literal["grammar"]
    grammar: str


def of_response_format(given: Mapping[str, Any], param: str) -> Constraint | None:
    """Return the constraint of OpenAI's `response_format`; None for any text.

    A grammar is llama.cpp's form, as `{"type": "grammar", "grammar": "root ::= …"}`.

    Raises:
        FieldError: The format is unknown, lacks something, or has an unknown field.
    """
    kind = given.get("type")
    if kind == "json_schema":
        _check_schema(given.get("json_schema"), f"{param}.json_schema", _NESTED)
        return Constraint(json_schema=read_part(given, NestedFormat, param).json_schema.schema)
    if kind == "grammar":
        return Constraint(gbnf=read_part(given, GrammarFormat, param).grammar)
    return _without_schema(given, param, ("json_schema", "grammar"))


def of_text_format(given: Mapping[str, Any], param: str) -> Constraint | None:
    """Return the constraint of `format` in OpenAI's responses and Anthropic's outputs."""
    if given.get("type") == "json_schema":
        _check_schema(given, param, _FLAT)
        return Constraint(json_schema=read_part(given, FlatFormat, param).schema)
    return _without_schema(given, param, ("json_schema",))


def of_structured_outputs(given: Mapping[str, Any], param: str) -> Constraint | None:
    """Return the constraint of vLLM's `structured_outputs`; None if it is empty.

    Its grammars are Lark or llama.cpp's form.

    Raises:
        FieldError: It has several constraints, or an unknown one.
    """
    asked = {name: value for name, value in given.items() if value not in (None, False)}
    if not asked:
        return None
    if len(asked) > 1:
        raise field_error(param, f"asks for {' and '.join(sorted(asked))!s:.80}; give one of them")
    ((name, value),) = asked.items()
    where = f"{param}.{field_name(name)}"
    if name not in _STRUCTURED:
        raise field_error(
            where,
            "is not supported here; json, regex, choice, grammar and json_object are",
            code="unsupported",
            remedy="give one of them",
        )
    kind, own = _STRUCTURED[name]
    found = convert_part(value, kind, where)
    try:
        return Constraint(**{own: found}) if own else of_grammar(found)
    except FieldError as error:
        raise FieldError(f"{where}: {error.message}", param=where, code=error.code) from None


def of_grammar(text: str) -> Constraint:
    """Return the constraint of a grammar in Lark's form or llama.cpp's."""
    return Constraint(gbnf=text) if "::=" in text else Constraint(lark=text)


def the_one(found: Mapping[str, Constraint | None]) -> Constraint | None:
    """Return the only constraint, by whichever field.

    Raises:
        FieldError: There are several.
    """
    given = {name: each for name, each in found.items() if each is not None}
    if len(given) > 1:
        raise FieldError(
            f"{' and '.join(given)} both say what the answer has to be; give one of them",
            param=next(iter(given)),
        )
    for name, constraint in given.items():
        note_field("constraint", name)
        return constraint
    return None


def _check_schema(found: object, param: str, form: str) -> None:
    """Raises FieldError when there is no schema at this interface's place."""
    if not (isinstance(found, dict) and "schema" in found):
        raise field_error(param, f"has no 'schema'; the form is {form}; write it so")


def _without_schema(
    given: Mapping[str, Any], param: str, others: tuple[str, ...]
) -> Constraint | None:
    match kind := given.get("type"):
        case "text":
            read_part(given, TextFormat, param)
            return None
        case "json_object":
            schema = read_part(given, JsonObjectFormat, param).schema
            if schema is None:
                return Constraint(json_object=True)
            return Constraint(json_schema=schema)
    wanted = ", ".join(map(repr, ("text", "json_object", *others)))
    raise field_error(f"{param}.type", f"is {shown(kind)}; it may be {wanted}")
