"""Arguments in elements that are named after them, and may be nested: `<city>Rome</city>`, each tag
behind a mark that stands in no text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from .typed import TEXT, referred, types_of, value_of

ELEMENTS = "elements"
"""Its name in `content_args`, beside `mark`."""

_ITEM = "item"
"""The name of a list's elements."""

_UNDECLARED = {"type": ["string", "object", "array"]}
"""The schema of an argument that its object does not declare: nothing says that its text is a
number or the like."""

_DEEPEST = 64


class Element(NamedTuple):
    """What stands between an element's tags.

    Attributes:
        parts: Its elements by their names; none in a text.
    """

    text: str
    parts: tuple[tuple[str, Element], ...]


def arguments_in(body: str, mark: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call, with values of the schema's types.

    Raises:
        ValueError: A part of the body is no element, or one stands there twice.
    """
    begins = re.escape(mark)
    tag = re.compile(rf"{begins}<(?P<end>/?)(?P<name>[A-Za-z_][\w.-]{{0,127}})>")
    element, at = _element(body, 0, tag, "", 0)
    if body[at:].strip():
        raise ValueError("an element is not closed")
    found = _value(element, {"type": "object", **schema}, schema)
    if not isinstance(found, dict):
        raise TypeError("the arguments are no object")
    return found


def _element(
    body: str, at: int, tag: re.Pattern[str], name: str, depth: int
) -> tuple[Element, int]:
    """Return the element whose text begins at a place, and the place behind its end."""
    if depth > _DEEPEST:
        raise ValueError("the elements are nested too deeply")
    begin, parts = at, list[tuple[str, Element]]()
    while True:
        found = tag.search(body, at)
        between = body[at : found.start() if found else len(body)]
        if found is None or found["end"]:
            if found is not None and found["name"] != name:
                raise ValueError("an element ends that is not open")
            if found is None and name:
                raise ValueError("an element is not closed")
            if (parts or not name) and between.strip():
                raise ValueError("a part of it is no element")
            end = found.start() if found else len(body)
            return Element(body[begin:end], tuple(parts)), found.end() if found else end
        if between.strip():
            raise ValueError("a part of it is no element")
        part, at = _element(body, found.end(), tag, found["name"], depth + 1)
        parts.append((found["name"], part))


def _value(element: Element, schema: Any, root: Mapping[str, Any]) -> Any:
    types = types_of(schema, root)
    if types == TEXT:
        return element.text
    names = [name for name, _ in element.parts]
    if not names:
        if not element.text.strip() and "string" not in types:
            empty: dict[str, Any] = {"object": {}, "array": []}
            return next((empty[kind] for kind in empty if kind in types), element.text)
        return value_of(element.text, types)
    listed = set(names) == {_ITEM}
    if "array" in types and (listed or "object" not in types):
        if not listed:
            raise ValueError("an element of a list has another name")
        items = _part(schema, root, "items", None)
        return [_value(part, items, root) for _, part in element.parts]
    if len(set(names)) < len(names):
        raise ValueError("an argument stands there twice")
    return {
        name: _value(part, _part(schema, root, "properties", name), root)
        for name, part in element.parts
    }


def _part(schema: Any, root: Mapping[str, Any], key: str, name: str | None, depth: int = 0) -> Any:
    """Return the schema of a part: of a property, or of a list's items; True if it has none."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return True
    found: Any = schema.get(key)
    none: Any = True
    if name is not None and isinstance(found, Mapping):
        found, none = found.get(name), _UNDECLARED
    if found is not None:
        return found
    others = [part for each in ("anyOf", "oneOf", "allOf") for part in schema.get(each) or ()]
    target = referred(schema, root)
    for part in [*others, *([] if target is None else [target])]:
        found = _part(part, root, key, name, depth + 1)
        if found is not True and found is not _UNDECLARED:
            return found
        none = found if none is True else none
    return none
