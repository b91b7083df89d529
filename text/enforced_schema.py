"""Rewriting of JSON schemas, so that llguidance (1.9) enforces them exactly, more strictly, or not
at all: what it would read as something else is refused by name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Set
from decimal import Decimal
from typing import Any, NoReturn, TypeGuard

from ..config import RequestError, cut
from .schemas import ANNOTATIONS

_FORMATS = frozenset(
    (
        *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
        *("uri", "unknown"),
    )
)
"""The formats that llguidance enforces. It refuses others; JSON Schema has them as annotations."""

_TABLES = frozenset(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"))
_LITERALS = frozenset(("const", "enum"))
_UPPER = frozenset(("maximum", "exclusiveMaximum"))
_BOUNDS = _UPPER | {"minimum", "exclusiveMinimum", "multipleOf"}
_NOTHING = {"uniqueItems": False, "unevaluatedProperties": True, "unevaluatedItems": True}
"""Values of keywords that demand nothing."""

_EXACT = 2**53
"""Whole numbers up to here are exact as floats."""

_INT64 = 2**63

_LEAST = 1e-30
"""The least number above an excluded 0."""

_ESCAPES = 'nrbtf\\"u'
"""llguidance's default of the letters after a backslash."""

IGNORING = "engine.ignored_schema_keywords may name keywords to ignore"

_LARK = re.compile(
    r'"(?:\\.|[^"\\])*"?|(?:\#|//)[^\n]*|/(?:\\.|[^/\\])+/?|%json\s*|<[^<>\s]+>', re.DOTALL
)
"""Texts, comments and patterns of a Lark grammar, besides its schemas and tokens. One that isn't
closed goes on to the end: a second attempt within it would make the search quadratic.
"""


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


# Decimals keep what a float would round.
_DECODER = json.JSONDecoder(parse_float=Decimal, parse_constant=_no_constant)


def enforced_schema(text: str, ignored: Set[str] = frozenset()) -> str:
    """Return a schema as llguidance enforces it.

    - Unknown formats are dropped, as annotations are.
    - Numbers that it would change are refused.
    - No property can be written by another spelling of its name: every name has a single one.

    Args:
        text: The schema, a JSON object.
        ignored: Keywords to drop, of `SchemaKeyword`. Without "oneOf" being enforced, it is
            `anyOf`.

    Raises:
        RequestError: invalid_constraint.
        RecursionError: It is nested too deeply.
    """
    try:
        schema = _DECODER.decode(text)
    except ValueError as error:
        raise _invalid(f"constraint.json_schema is no JSON: {cut(str(error), 200)}") from None
    if not isinstance(schema, dict):
        raise _invalid("constraint.json_schema must be a JSON object")
    return _enforced(schema, ignored)


def enforced_lark(text: str, special: Mapping[str, int], ignored: Set[str] = frozenset()) -> str:
    """Return a grammar whose schemas are enforced (`enforced_schema`). Tokens by name become tokens
    by id.

    Args:
        special: Ids by names, such as `<think>`.
    """
    parts: list[str] = []
    at = 0
    while found := _LARK.search(text, at):
        start, end = found.span()
        parts.append(text[at:start])
        part = found[0]
        if part.startswith("<") and part[1] != "[":
            part = f"<[{_id_of(part, special)}]>"
        elif part.startswith("%json"):
            try:
                schema, end = _DECODER.raw_decode(text, end)
                part = f"%json {_enforced(schema, ignored)}"
            # llguidance says where it is.
            except ValueError:
                pass
        parts.append(part)
        at = end
    return "".join((*parts, text[at:]))


def _id_of(name: str, special: Mapping[str, int]) -> int:
    """Return a token's id. Raises RequestError: invalid_constraint."""
    if name not in special:
        known = ", ".join(sorted(special, key=special.__getitem__)[:50])
        raise _invalid(f"the model has no special token {name}; it has {known or 'none'}")
    return special[name]


def _enforced(schema: Any, ignored: Set[str]) -> str:
    kept = _rewritten(schema, ignored)
    # llguidance refuses options of another type.
    if isinstance(kept, dict) and isinstance(options := kept.get("x-guidance", {}), dict):
        if _has_open_names(kept):
            allowed = str(options.get("json_allowed_escapes") or _ESCAPES)
            options["json_allowed_escapes"] = allowed.replace("u", "")
        if "oneOf" in ignored:
            options["coerce_one_of"] = True
        if options:
            kept["x-guidance"] = options
    return json.dumps(kept, ensure_ascii=False, separators=(",", ":"))


def _rewritten(schema: Any, ignored: Set[str]) -> Any:
    if isinstance(schema, list):
        return [_rewritten(each, ignored) for each in schema]
    if not isinstance(schema, dict):
        return _plain(schema)
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        # An object may be a schema, by a reference.
        is_annotation = key in ANNOTATIONS and not isinstance(value, dict)
        if is_annotation or value is _NOTHING.get(key, schema):
            continue
        if key in ignored and key != "oneOf":
            continue
        if key == "format" and isinstance(value, str) and value not in _FORMATS:
            continue
        if key in _TABLES and isinstance(value, dict):
            kept[key] = {name: _rewritten(each, ignored) for name, each in value.items()}
            continue
        if key == "minProperties":
            _check_min_properties(schema)
        if key in _LITERALS:
            _check_literal(key, value)
            value = _plain(value)
        elif key in _BOUNDS:
            _check_bound(key, value)
        else:
            value = _rewritten(value, ignored)
        kept[key] = value
    _exclude(kept)
    return kept | {key: _plain(kept[key]) for key in _BOUNDS & kept.keys()}


def _plain(value: Any) -> Any:
    """Return JSON with floats in place of decimals."""
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value


# --- numbers -------------------------------------------------------------------------------------


def _is_exact(number: int | Decimal) -> bool:
    """Return whether llguidance writes a number as it is: it reads floats, and writes a whole one
    below 2**63 by its digits, another one by the fewest that denote the float."""
    value = _as_float(number)
    if not math.isfinite(value):
        return False
    if number == int(number) and -_INT64 < number < _INT64:
        return int(value) == number
    return Decimal(repr(value)) == number


def _as_float(number: int | Decimal) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _check_literal(key: str, value: Any) -> None:
    if isinstance(value, list):
        for each in value:
            _check_literal(key, each)
    elif isinstance(value, dict):
        for each in value.values():
            _check_literal(key, each)
    elif _is_number(value) and not _is_exact(value):
        raise _inexact(key, value)


def _check_bound(key: str, value: Any) -> None:
    if not _is_number(value):
        return
    # llguidance takes the largest integer of 64 bits for a larger limit, which is stricter.
    is_large = key in _UPPER and value >= _INT64 - (key == "maximum")
    if is_large and math.isfinite(_as_float(value)):
        return
    # A bound that is excluded is a whole number more, or less.
    most = _EXACT if key.startswith("exclusive") else _INT64
    if not (_is_exact(value) and -most < value < most):
        raise _inexact(key, value)


def _is_number(value: Any) -> TypeGuard[int | Decimal]:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def _exclude(schema: dict[str, Any]) -> None:
    """Replace excluded whole bounds that llguidance would include, in place: where the other bound
    is less than 1 away, further from 0."""
    for bound, replaced, others, sign in (
        ("exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum"), 1),
        ("exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum"), -1),
    ):
        number = schema.get(bound)
        if not _is_number(number) or number * sign < 0 or number != int(number):
            continue
        ends = [schema[other] for other in others if _is_number(schema.get(other))]
        if replaced not in schema and any(0 < (end - number) * sign < 1 for end in ends):
            nearest = max(math.nextafter(float(number) * sign, math.inf), _LEAST)
            schema[replaced] = Decimal(nearest * sign)
            del schema[bound]


def _inexact(key: str, value: int | Decimal) -> RequestError:
    return _invalid(
        f"the schema's {key} has the number {value}, which would become another one: whole numbers "
        "are exact up to 2**53, others with up to 15 digits; use one of these, or a string"
    )


# --- names ---------------------------------------------------------------------------------------


def _has_open_names(schema: Any) -> bool:
    """Return whether some object has declared names, and room for others.

    Those are compared as they are written, so that an escape would evade a declared name's schema.
    Without escapes by code, a character has a single spelling. True for parts that only look like
    such a schema.
    """
    if isinstance(schema, list):
        return any(map(_has_open_names, schema))
    if not isinstance(schema, dict):
        return False
    named = "properties" in schema or "required" in schema
    return (
        (named and _is_open(schema))
        or "patternProperties" in schema
        or any(map(_has_open_names, schema.values()))
    )


def _is_open(schema: Mapping[str, Any]) -> bool:
    return schema.get("additionalProperties") is not False or "patternProperties" in schema


def _check_min_properties(schema: Mapping[str, Any]) -> None:
    least, required = schema["minProperties"], schema.get("required", [])
    if not (isinstance(least, int) and isinstance(required, list) and _is_open(schema)):
        return
    if least > len(set(map(str, required))) + 1:
        raise _invalid(
            f"minProperties is {least}, which can't be enforced for names that are not required, "
            "since the same one may be written twice; require them by name, or leave it out; "
            f"{IGNORING}"
        )


def _invalid(message: str) -> RequestError:
    return RequestError(message, code="invalid_constraint")
