"""What becomes of each field of a call: an interface has one table, which its document repeats."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import msgspec

from ...config import Config, field_name, nearest
from ..server.http import FieldError, convert

T = TypeVar("T")

Body = dict[str, Any]
Becomes = Literal["honoured", "harmless", "refused"]

# False is 0 to Python.
EMPTY: tuple[Any, ...] = (0, "", [], {})
"""What asks for nothing in any field, beside null."""


class Field(NamedTuple):
    """A field of some calls.

    Attributes:
        calls: By the interface's own names.
        becomes: Of harmless ones nothing, since they say nothing that would change an answer.
        what: A line for the documents; of refused ones, why.
        nothing: Values of a refused field, beside null, that ask for nothing but what is done
            anyway.
    """

    name: str
    calls: tuple[str, ...]
    becomes: Becomes
    what: str
    nothing: tuple[Any, ...] = EMPTY


def read_known_fields(
    fields: Sequence[Field], body: Body, kind: type[T], call: str, where: str = ""
) -> T:
    """The fields of a call that count, as a struct.

    Args:
        fields: All that are known by name. Any other is refused when it asks for something.
        where: What stands before their names in errors, when they are within another field.

    Raises:
        FieldError: One is of the wrong type, or asks for what is not there.
    """
    known = {field.name: field for field in fields if call in field.calls}
    honoured = getattr(kind, "__struct_fields__", ())
    for name, value in body.items():
        field = known.get(name)
        why = ""
        if field is None:
            why = f"is not known here{nearest(name, known)}" if value else ""
        elif field.becomes == "refused" and value is not None and value not in field.nothing:
            why = f"is not supported here: {field.what}"
        if why:
            shown_name = where + field_name(name)
            raise FieldError(
                f"{shown_name} {why}; leave it out, or give null",
                param=shown_name,
                code="unsupported",
            )
    return read_part({name: body[name] for name in honoured if name in body}, kind, where[:-1])


def read_part(given: Any, kind: type[T], where: str = "") -> T:
    """A part of a body as a struct, or all of it.

    Fields in the struct's `HARMLESS` say nothing that would change an answer. Any other unknown
    field is refused when it asks for something, and so it is within the structs of its fields.

    Args:
        where: The part's path in the body; "" for the body.

    Raises:
        FieldError: The part has an unknown field, or one is of the wrong type.
    """
    check_known(given, kind, where)
    if isinstance(given, Mapping):
        # An explicit null is a default.
        given = {name: value for name, value in given.items() if value is not None}
    try:
        return convert(given, kind, where or "the body")
    except FieldError as error:
        raise FieldError(error.message, param=_path(where, error.param or "") or None) from None


def check_known(given: Any, kind: type, where: str) -> None:
    """Refuses fields that a part of a body can't have; see `read_part`.

    Raises:
        FieldError: unsupported.
    """
    if not isinstance(given, Mapping):
        return
    known = _structs_within(kind)
    harmless: Collection[str] = getattr(kind, "HARMLESS", ())
    for name, value in given.items():
        param = _path(where, field_name(name))
        inner = known.get(name)
        if inner is not None and isinstance(value, list):
            for place, each in enumerate(value):
                check_known(each, inner, f"{param}[{place}]")
        elif inner is not None:
            check_known(value, inner, param)
        elif name not in known and name not in harmless and value:
            raise FieldError(
                f"{param} is not known here{nearest(name, known)}; leave it out, or give null",
                param=param,
                code="unsupported",
            )


@cache
def _structs_within(kind: type) -> dict[str, type | None]:
    """A struct's fields, each with the struct that it holds, alone or in a list."""
    return {field.encode_name: _struct_in(field.type) for field in msgspec.structs.fields(kind)}


def _struct_in(kind: Any) -> type | None:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    return next(filter(None, map(_struct_in, get_args(kind))), None)


def _path(where: str, name: str) -> str:
    return f"{where}.{name}" if where and name else where or name


def adapter_of(model: str, config: Config) -> str:
    """What a request is submitted for: "" for the model itself, which a lane may call otherwise."""
    own = (config.engine.model_name, *config.engine.model_aliases)
    return "" if model in own else model
