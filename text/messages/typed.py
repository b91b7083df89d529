"""Values of arguments that are written as text, by the tool's schema.

A syntax without quotation marks writes the text `12` and the number 12 alike.
"""

from __future__ import annotations

import ast
import json
import math
import warnings
from collections.abc import Mapping
from typing import Any

_NUMBERS = frozenset({"integer", "number"})

TYPES = _NUMBERS | {"string", "boolean", "null", "array", "object"}
"""JSON's types. A schema of numbers has integers too."""

TEXT = frozenset({"string"})

_DEEPEST = 32
"""References that are followed, one to the next."""

_WORDS = {"true": True, "false": False, "null": None, "none": None}


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the types that a schema allows; all of them if that is unknown.

    Args:
        root: The schema to which references refer.
    """
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return TYPES
    found = TYPES
    if (given := schema.get("type")) is not None:
        names = {given} if isinstance(given, str) else {*map(str, given)}
        found &= names | (_NUMBERS if "number" in names else frozenset())
    if "const" in schema:
        found &= _of_values([schema["const"]])
    if isinstance(values := schema.get("enum"), list):
        found &= _of_values(values)
    for key in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(key), list):
            found &= frozenset().union(*(types_of(part, root, depth + 1) for part in parts))
    for part in schema.get("allOf") or ():
        found &= types_of(part, root, depth + 1)
    if (target := referred(schema, root)) is not None:
        found &= types_of(target, root, depth + 1)
    return (found | {"null"} if schema.get("nullable") is True else found) or TYPES


def referred(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """Return the schema to which a schema refers, within the same document; None without one."""
    path = schema.get("$ref")
    if not isinstance(path, str) or not path.startswith("#"):
        return None
    target: Any = root
    for key in path.split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if not isinstance(target, Mapping) or key not in target:
            return None
        target = target[key]
    return target


def value_of(text: str, types: frozenset[str], *, is_text: bool | None = None) -> Any:
    """Return the value that a text stands for: the text itself, where it may be one, and is no
    value of another of the types. What is of none of the types stays text too.

    Args:
        is_text: Whether the model said that it is text; None if it did not say.
    """
    if types == TEXT or (is_text and types >= TEXT):
        return text
    others = types - TEXT
    for value in _read(text):
        kinds = _of_values([value])
        if kinds <= others:
            return value
        if kinds == {"number"} and "integer" in others and value.is_integer():
            return int(value)
        if others == {"boolean"} and kinds == {"integer"} and value in (0, 1):
            return bool(value)
    return text


def typed(
    arguments: Mapping[str, Any],
    schema: Mapping[str, Any],
    texts: Mapping[str, bool],
) -> dict[str, Any]:
    """Return arguments that are written as texts, with the values of the schema's types.

    Args:
        texts: Whether the model said that a value is text, by its name.
    """
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    found = {}
    for name, value in arguments.items():
        is_text = texts.get(name)
        # Of an unknown argument the model alone can say that it is no text.
        unknown = {} if is_text is False else {"type": "string"}
        values = value if isinstance(value, list) else [value]
        types = types_of(known.get(name, unknown), schema)
        read = [value_of(each, types, is_text=is_text) for each in values]
        found[name] = read if isinstance(value, list) else read[0]
    return found


def _read(text: str) -> list[Any]:
    """Return the value that a text has in JSON, or in Python, as templates write it; none without
    one."""
    try:
        value = json.loads(text, parse_constant=_refused)
        return [value] if not isinstance(value, float) or math.isfinite(value) else []
    except (ValueError, RecursionError):
        pass
    word = text.strip()
    if word.lower() in _WORDS:
        return [_WORDS[word.lower()]]
    if word[:1] not in ("[", "{"):
        return []
    try:
        with warnings.catch_warnings():
            # Unknown escapes, which stay as they are.
            warnings.simplefilter("ignore")
            return [json.loads(json.dumps(ast.literal_eval(word)))]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return []


def _refused(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def _of_values(values: list[Any]) -> frozenset[str]:
    return frozenset(map(type_of, values))


def type_of(value: Any) -> str:
    """Return the name of a value's type; a whole number is an integer."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", list: "array"}
    return next((name for kind, name in names.items() if isinstance(value, kind)), "object")
