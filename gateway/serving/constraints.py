"""What an answer's text has to be, by the names that each interface has for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from ...config import Constraint, field_name, shown
from ..server.http import FieldError
from .fields import convert_part, read_part

# Where a schema stands: OpenAI's chats nest it, its responses and Anthropic's outputs do not.
_NESTED = '{"type": "json_schema", "json_schema": {"name": "answer", "schema": {...}}}'
_FLAT = '{"type": "json_schema", "schema": {...}}'


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's name and description of a schema say nothing that would change an answer, and all
    schemas are kept strictly."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Text as it comes."""

    type: Literal["text"]


class JsonObjectFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A JSON object; with a schema, as llama.cpp's server and others take one here, of that."""

    type: Literal["json_object"]
    schema: dict[str, Any] | None = None


class NestedFormat(msgspec.Struct, frozen=True, kw_only=True):
    """JSON of a schema, as chats and completions have it."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class FlatFormat(JsonSchema, frozen=True, kw_only=True):
    """The same as responses and messages have it."""

    type: Literal["json_schema"]


class GrammarFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar in llama.cpp's form."""

    type: Literal["grammar"]
    grammar: str


def of_response_format(given: Mapping[str, Any], param: str) -> Constraint | None:
    """OpenAI's `response_format` of chats and completions; None for text as it comes.

    A grammar is llama.cpp's form, as `{"type": "grammar", "grammar": "root ::= …"}`.

    Raises:
        FieldError: There is no such format, it lacks something, or has an unknown field.
    """
    kind = given.get("type")
    if kind == "json_schema":
        _check_schema(given.get("json_schema"), f"{param}.json_schema", _NESTED)
        return Constraint(json_schema=read_part(given, NestedFormat, param).json_schema.schema)
    if kind == "grammar":
        return Constraint(gbnf=read_part(given, GrammarFormat, param).grammar)
    return _without_schema(given, param, ("json_schema", "grammar"))


def of_text_format(given: Mapping[str, Any], param: str) -> Constraint | None:
    """The `format` of OpenAI's `text` in responses, and of Anthropic's outputs. As above."""
    if given.get("type") == "json_schema":
        _check_schema(given, param, _FLAT)
        return Constraint(json_schema=read_part(given, FlatFormat, param).schema)
    return _without_schema(given, param, ("json_schema",))


def of_structured_outputs(given: Mapping[str, Any], param: str) -> Constraint | None:
    """vLLM's: one of json, regex, choice, grammar and json_object; None when it has nothing.

    Its grammars are Lark or llama.cpp's form.

    Raises:
        FieldError: It has several, or one that is not there.
    """
    asked = {name: value for name, value in given.items() if value not in (None, False)}
    if not asked:
        return None
    if len(asked) > 1:
        raise FieldError(f"{param} asks for {shown(sorted(asked))}; give one of them", param=param)
    ((name, value),) = asked.items()
    if name == "json":
        schema = convert_part(value, dict[str, Any] | str, f"{param}.json")  # type: ignore[arg-type]
        return Constraint(json_schema=schema)
    if name == "json_object":
        convert_part(value, bool, f"{param}.json_object")
        return Constraint(json_object=True)
    if name == "regex":
        return Constraint(regex=_text(given, name, param))
    if name == "choice":
        return Constraint(choice=convert_part(value, tuple[str, ...], f"{param}.choice"))
    if name == "grammar":
        return of_grammar(_text(given, name, param))
    raise FieldError(
        f"{param}.{field_name(name)} is not supported here; json, regex, choice, grammar and "
        "json_object are",
        param=f"{param}.{field_name(name)}",
        code="unsupported",
    )


def of_grammar(text: str) -> Constraint:
    """A grammar of which nobody says whether it is Lark's form or llama.cpp's."""
    return Constraint(gbnf=text) if "::=" in text else Constraint(lark=text)


def the_one(found: Mapping[str, Constraint | None]) -> Constraint | None:
    """The constraint that was given, by whichever field.

    Raises:
        FieldError: There are several.
    """
    given = {name: each for name, each in found.items() if each is not None}
    if len(given) > 1:
        raise FieldError(
            f"{' and '.join(given)} both say what the answer has to be; give one of them",
            param=next(iter(given)),
        )
    return next(iter(given.values()), None)


def _check_schema(found: object, param: str, form: str) -> None:
    """Raises FieldError: the schema does not stand where this interface has it."""
    if not (isinstance(found, dict) and "schema" in found):
        raise FieldError(f"{param} has no 'schema'; the form is {form}", param=param)


def _without_schema(
    given: Mapping[str, Any], param: str, others: tuple[str, ...]
) -> Constraint | None:
    match kind := given.get("type"):
        case "text":
            read_part(given, TextFormat, param)
            return None
        case "json_object":
            schema = read_part(given, JsonObjectFormat, param).schema
            return (
                Constraint(json_object=True) if schema is None else Constraint(json_schema=schema)
            )
    wanted = ", ".join(map(repr, ("text", "json_object", *others)))
    raise FieldError(f"{param}.type is {shown(kind)}; it may be {wanted}", param=f"{param}.type")


def _text(given: Mapping[str, Any], name: str, param: str) -> str:
    return convert_part(given.get(name), str, f"{param}.{name}")
