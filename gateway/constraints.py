"""What an answer's text has to be, by the names that each interface has for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from ..config import Constraint, shown
from .http import FieldError, convert

T = TypeVar("T")

_TEXT = "text"


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's name and description of a schema say nothing that would change an answer, and all
    schemas are kept strictly."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


def of_response_format(given: Mapping[str, Any], param: str) -> Constraint | None:
    """OpenAI's `response_format` of chats and completions; None for text as it comes.

    A grammar is llama.cpp's form, as `{"type": "grammar", "grammar": "root ::= …"}`.

    Raises:
        FieldError: There is no such format, or it lacks something.
    """
    kind = given.get("type")
    if kind == "json_schema":
        inner = _read(given.get("json_schema"), JsonSchemaFormat, f"{param}.json_schema")
        return Constraint(json_schema=inner.schema)
    if kind == "grammar":
        return Constraint(gbnf=_text(given, "grammar", param))
    return _without_schema(kind, param, ("json_schema", "grammar"))


def of_text_format(given: Mapping[str, Any], param: str) -> Constraint | None:
    """The `format` of OpenAI's `text` in responses, and of Anthropic's outputs. As above."""
    if given.get("type") == "json_schema":
        inner = _read(given, JsonSchemaFormat, param)
        return Constraint(json_schema=inner.schema)
    return _without_schema(given.get("type"), param, ("json_schema",))


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
        schema = _read(value, dict[str, Any] | str, f"{param}.json")  # type: ignore[arg-type]
        return Constraint(json_schema=schema)
    if name == "json_object":
        return Constraint(json_object=True)
    if name == "regex":
        return Constraint(regex=_text(given, name, param))
    if name == "choice":
        return Constraint(choice=_read(value, tuple[str, ...], f"{param}.choice"))
    if name == "grammar":
        return of_grammar(_text(given, name, param))
    raise FieldError(
        f"{param}.{shown(name)} is not supported here; json, regex, choice, grammar and "
        "json_object are",
        param=param,
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


def _without_schema(kind: object, param: str, others: tuple[str, ...]) -> Constraint | None:
    if kind == _TEXT:
        return None
    if kind == "json_object":
        return Constraint(json_object=True)
    wanted = ", ".join(map(repr, (_TEXT, "json_object", *others)))
    raise FieldError(f"{param}.type is {shown(kind)}; it may be {wanted}", param=f"{param}.type")


def _text(given: Mapping[str, Any], name: str, param: str) -> str:
    return _read(given.get(name), str, f"{param}.{name}")


def _read(found: Any, kind: type[T], param: str) -> T:
    """As `convert`, with the whole path of what is wrong."""
    try:
        return convert(found, kind, param)
    except FieldError as error:
        place = f"{param}.{error.param}" if error.param else param
        raise FieldError(error.message, param=place) from None
