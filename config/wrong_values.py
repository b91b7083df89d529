"""Sentences about values of a wrong type, from msgspec's messages."""

from __future__ import annotations

import re
from typing import Any

import msgspec.inspect

from .quoting import cut, field_name, shown

# The path of a value, or of the object of a key. A field's name in the message may itself contain
# such text, so only the last one counts.
_PLACE = re.compile(r" - at `(key` in `)?\$\.?([\w.\[\]]{0,200})`\Z", re.ASCII)
_EXPECTED = re.compile(r"Expected `([\w |]+)`( of length .+?| [<>=]+ .+?)?(?:, got `?(\w+)`?)?\Z")
_FIELD = re.compile(r"Object (contains unknown|missing required) field `(.*)`\Z", re.DOTALL)
_INVALID = re.compile(r"Invalid .*? ('.*')\Z", re.DOTALL)
_STEP = re.compile(r"\.?(\w+)|\[(\d+|\.\.\.)\]")

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
_INNER = ("item", "value")
_UNKNOWN = object()


def place_of(error: Exception) -> str:
    """Return the path of the value that msgspec's message is about; "" for the whole value."""
    found = _PLACE.search(str(error))
    return found[2] if found else ""


def told_of(error: Exception, what: str = "", found: Any = _UNKNOWN, values: str = "") -> str:
    """Return a sentence about a wrong value.

    Args:
        error: Of msgspec.
        what: The path of the value that was converted, such as `messages[0]`; "" for a body.
        found: That value, of which the wrong part is quoted; nothing is, without it.
        values: The values that are possible, for an enumeration; "" if unknown.
    """
    text, place = str(error), _PLACE.search(str(error))
    text = text[: place.start()] if place else text
    path = f"{what}.{place[2]}" if place else what
    path = path.strip(".").replace(".[", "[")
    if field := _FIELD.match(text):
        name = f"{path}.{field_name(field[2])}".lstrip(".")
        missing = field[1][0] == "m"
        return f"{name} is {'missing; add it' if missing else 'not known here; leave it out'}"
    if invalid := _INVALID.match(text):
        may_be = f"it may be {values}" if values else "it must be another one"
        return f"{path or 'the value'} is {shown(invalid[1][1:-1])}; {may_be}"
    if (expected := _EXPECTED.match(text)) is None:
        return f"{path}: {cut(text, 400)}".removeprefix(": ")
    types = expected[1].removesuffix(" | null").split(" | ")
    kinds = [_KINDS.get(each, each) for each in types]
    wanted = f"it must be {' or '.join(kinds)}{expected[2] or ''}"
    step = place[2] if place else ""
    if place and place[1]:
        keys = [str(key) for key in _keys(_part(found, step))]
        wrong = [key for key in keys if not key.removeprefix("-").isdecimal()]
        which = f"the key {shown(wrong[0])}" if wrong else "a key out of range"
        return f"{path or 'the object'} has {which}; {wanted}"
    value = _part(found, step.removesuffix("[...]"))
    if step.endswith("[...]"):
        of_kind = [key for key in _keys(value) if type(value[key]).__name__ == expected[3]]
        if of_kind:
            path = f"{path.removesuffix('[...]')}[{shown(of_kind[0])}]"
            value = value[of_kind[0]]
        else:
            value = _UNKNOWN
    known = value is not _UNKNOWN and not isinstance(value, dict | list)
    given = shown(value) if known else _KINDS.get(expected[3] or "", "out of range")
    return f"{path or 'the value'} is {given}; {wanted}"


def values_at(kind: Any, place: str) -> list[str | int]:
    """Return the values that an enumeration at a path of a type may have; none for another type."""
    kinds: list[Any] = [msgspec.inspect.type_info(kind)]
    for name, _ in _STEP.findall(place):
        inner: list[Any] = []
        for each in _alternatives(kinds):
            fields = getattr(each, "fields", ()) if name else ()
            inner += [field.type for field in fields if field.encode_name == name]
            if not name:
                inner += filter(None, (getattr(each, f"{end}_type", None) for end in _INNER))
        kinds = inner
    return [value for each in _alternatives(kinds) for value in getattr(each, "values", ())]


def _alternatives(kinds: list[Any]) -> list[Any]:
    return [inner for each in kinds for inner in getattr(each, "types", (each,))]


def _part(found: Any, place: str) -> Any:
    """Return the part of a value at a path; `_UNKNOWN` if there is none."""
    for name, number in _STEP.findall(place):
        try:
            found = found[int(number)] if number else found[name]
        except (LookupError, TypeError, ValueError):
            return _UNKNOWN
    return found


def _keys(value: Any) -> list[Any]:
    return list(value) if isinstance(value, dict) else []
