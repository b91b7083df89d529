"""What becomes of each field of a call: an interface has one table, which its document repeats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from ..config import Config, field_name, nearest
from .http import FieldError, convert

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
    # An explicit null is a default.
    found = {name: body[name] for name in honoured if body.get(name) is not None}
    try:
        return convert(found, kind, where.rstrip(".") or "the body")
    except FieldError as error:
        param = f"{where}{error.param or ''}".rstrip(".") or None
        raise FieldError(error.message, param=param) from None


def adapter_of(model: str, config: Config) -> str:
    """What a request is submitted for: "" for the model itself, which a lane may call otherwise."""
    own = (config.engine.model_name, *config.engine.model_aliases)
    return "" if model in own else model
