"""Fields of a call's body: honoured, neutral or refused.

A struct that reads a body, or a part of one, declares the kind of each field. Its own fields are
honoured. Class variables name the others:

- `SAMPLING`: sampling parameters, honoured (`read_sampling` reads them).
- `NEUTRAL`: by name the reason why the field changes nothing that the caller asked for.
- `REFUSED`: by name a `RefusedField`; the field would change the answer, and can't.
- `OPEN`: whether unknown fields are neutral. They are in messages, their parts, items, tools and
  tool calls, to which programs add what they like. Elsewhere they are refused, since a misspelt
  field would be lost, unless `gateway.unknown_fields` is "ignore".
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextvars import ContextVar
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import msgspec

from ...bus.public import ErrorInfo
from ...config import MAX_INT64, field_name, nearest
from ..call import MOST_IGNORED, Call
from ..server.http import FieldError, convert

T = TypeVar("T")

Body = dict[str, Any]

_FALSE = ("false", "False", "0")

# False is 0 to Python.
EMPTY: tuple[Any, ...] = (0, "", [], {})
"""Values that mean the default in any field, beside null."""


_INDEX = re.compile(r"\[\d+\]")


class _Ignored(NamedTuple):
    """The neutral fields of a call, and whether unknown fields are neutral."""

    fields: dict[str, None]
    unknown: bool


_IGNORED: ContextVar[_Ignored] = ContextVar("_IGNORED")
_NOTED: ContextVar[dict[str, str]] = ContextVar("_NOTED")


def collect_ignored(
    fields: dict[str, None] | None = None, unknown: Literal["refuse", "ignore"] = "refuse"
) -> dict[str, None]:
    """Return the neutral fields that are found from now on in this task: their paths, in order,
    without places in lists.

    Args:
        fields: Where they are added; None for a new collection.
        unknown: `gateway.unknown_fields`.
    """
    fields = {} if fields is None else fields
    _IGNORED.set(_Ignored(fields, unknown == "ignore"))
    _NOTED.set({})
    return fields


def ignore(param: str) -> None:
    """Report a field, item or tool of the call's body as neutral: taken, and without effect."""
    found = _IGNORED.get(None)
    # One more than are shown. A body may have any number.
    if found is not None and len(found.fields) <= MOST_IGNORED:
        found.fields[_INDEX.sub("[]", param)] = None


def note_field(own: str, path: str) -> None:
    """Note the path of a field in the call's body, for the engine's refusals, which have its `own`
    name."""
    _NOTED.set({**_NOTED.get({}), own: path})


def in_words_of_body(error: ErrorInfo) -> tuple[str, str | None]:
    """Return an error's message with the field's path in this task's body, and that path."""
    own, message = error.code.removeprefix("invalid_"), error.message
    path = _NOTED.get({}).get(own) if own != error.code else None
    if path is None:
        return message, None
    if message.startswith(f"{own} "):
        return f"{path}{message.removeprefix(own)}", path
    return f"{path}: {message}", path


class RefusedField(NamedTuple):
    """A known field that can't be obeyed.

    Attributes:
        why: For the error, and for the interface's document.
        nothing: Values, beside null, that are accepted: they mean the default.
        remedy: What to do about it.
    """

    why: str
    nothing: tuple[Any, ...] = EMPTY
    remedy: str = "leave it out, or give null"


class _Known(NamedTuple):
    """The fields of a struct, by name.

    Attributes:
        inner: Fields that count, each with the struct that it holds, alone or in a list.
        neutral: Fields that would not change an answer, each with its reason.
        refused: Fields that are known and not supported.
        open: Whether unknown fields are neutral.
    """

    inner: Mapping[str, type | None]
    neutral: Mapping[str, str]
    refused: Mapping[str, RefusedField]
    open: bool


def read_part(given: Any, kind: type[T], where: str = "") -> T:
    """Read a body, or a part of it, as a struct.

    A field that the struct doesn't declare is refused unless its value is empty, or the struct is
    `OPEN`; so it is in the structs of its fields.

    Args:
        where: The part's path in the body; "" for the body.

    Raises:
        FieldError: unsupported, or invalid_request for a value of the wrong type.
    """
    check_fields(given, kind, where)
    if isinstance(given, Mapping):
        # An explicit null is a default.
        given = {name: value for name, value in given.items() if value is not None}
    return convert_part(given, kind, where)


def convert_part(given: Any, kind: type[T], where: str) -> T:
    """Convert a value to a type; errors name its whole path in the body.

    Raises:
        FieldError: invalid_request.
    """
    try:
        return convert(given, kind, where)
    except FieldError as error:
        raise FieldError(error.message, param=_path(where, error.param or "") or None) from None


def check_fields(given: Any, kind: type, where: str) -> None:
    """Refuse unknown and unsupported fields of a part of a body; see `read_part`.

    Raises:
        FieldError: unsupported.
    """
    if not isinstance(given, Mapping):
        return
    known = _known_in(kind)
    refusal: FieldError | None = None
    for name, value in given.items():
        param = _path(where, field_name(name))
        if (inner := known.inner.get(name)) is not None:
            if isinstance(value, list):
                for place, each in enumerate(value):
                    check_fields(each, inner, f"{param}[{place}]")
            else:
                check_fields(value, inner, param)
        elif name in known.refused:
            refused = known.refused[name]
            if value is not None and value not in refused.nothing:
                why = f"is not supported here: {refused.why}"
                refusal = refusal or _unsupported(param, why, refused.remedy)
        # An empty object may be a request, as in web_search_options; other empty values are none.
        elif (value or (value == {} and name in known.neutral)) and name not in known.inner:
            if not (name in known.neutral or known.open or _takes_unknown()):
                near = nearest(name, fields_of(kind), listed=False)
                refusal = refusal or _unsupported(
                    param,
                    f"is not known here{near}",
                    "leave it out, or have unknown fields ignored (gateway.unknown_fields)",
                )
            else:
                ignore(param)
    # Once all neutral fields are noted: the fields of a map have no order.
    if refusal is not None:
        raise refusal


def _takes_unknown() -> bool:
    found = _IGNORED.get(None)
    return found is not None and found.unknown


def _unsupported(param: str, why: str, remedy: str) -> FieldError:
    end = " Otherwise " if why.endswith("?") else "; "
    message = f"{param} {why}{end}{remedy}"
    return FieldError(message, param=param, code="unsupported")


def fields_of(kind: type) -> Collection[str]:
    """Return all fields of a body's struct by name."""
    known = _known_in(kind)
    return {*known.inner, *known.neutral, *known.refused}


@cache
def _known_in(kind: type) -> _Known:
    fields = msgspec.structs.fields(kind)
    inner: dict[str, type | None] = {
        field.encode_name: next(structs_in(field.type), None) for field in fields
    }
    inner |= dict.fromkeys(getattr(kind, "SAMPLING", ()))
    return _Known(
        inner,
        getattr(kind, "NEUTRAL", {}),
        getattr(kind, "REFUSED", {}),
        getattr(kind, "OPEN", False),
    )


def structs_in(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """Return the structs in a field's type."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
    for each in get_args(kind):
        yield from structs_in(each)


def _path(where: str, name: str) -> str:
    between = "." if where and name and not name.startswith("[") else ""
    return f"{where}{between}{name}"


def engine_priority(lower_first: int) -> int:
    """Return the engine's priority, of which higher ones are earlier, for one of vLLM's, of which
    lower ones are."""
    return min(-lower_first, MAX_INT64)


def read_query(call: Call, kind: type[T]) -> T:
    """Read the query of a call's address; see `read_part`. An empty value is a default.

    Raises:
        FieldError: unsupported, or invalid_request for a value that is not accepted.
    """
    given = {name: value for name, value in call.query.items() if value}
    known = kind.__struct_fields__  # type: ignore[attr-defined]
    check_fields(
        {name: value for name, value in given.items() if name in known or value not in _FALSE},
        kind,
        "",
    )
    return convert(given, kind, strict=False)
