"""Static analysis of JSON schemas."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_PARTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_TABLES = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_VALUES = ("const", "enum", "required", "dependentRequired", "dependencies", "x-guidance")
ANNOTATIONS = frozenset({"title", "description", "examples", "default", "deprecated", "$comment"})


def without_words(schema: Any) -> Any:
    """Return a schema without its annotations, which may be most of it."""
    if isinstance(schema, list):
        return [without_words(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _TABLES and isinstance(value, Mapping):
            kept[key] = {name: without_words(each) for name, each in value.items()}
        elif key not in ANNOTATIONS:
            kept[key] = value if key in _VALUES else without_words(value)
    return kept


def moved(schema: Any, root: str) -> Any:
    """Return a schema as a part of another one, with its references.

    Args:
        root: Its new path, such as `#/properties/x`.
    """
    if isinstance(schema, list):
        return [moved(each, root) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: f"{root}{value[1:]}"
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else moved(value, root)
        for key, value in schema.items()
    }


def may_have(schema: Any, name: str, others: Collection[str]) -> bool:
    """Return whether an object anywhere in JSON of a schema may have a property beside one of some
    others.

    True if unknown, as for an invalid schema.
    """
    try:
        return _may_have(schema, name, others)
    except (TypeError, AttributeError, RecursionError):
        return True


def _may_have(schema: Any, name: str, others: Collection[str]) -> bool:
    if not isinstance(schema, Mapping):
        return schema is not False
    inner = [each for key in _PARTS for each in schema.get(key, ())]
    inner += [each for key in _TABLES for each in schema.get(key, {}).values()]
    if any(_may_have(each, name, others) for each in inner):
        return True
    if "const" in schema or "enum" in schema:
        return _has([schema.get("const"), *schema.get("enum", ())], name, others)
    if "$ref" in schema:
        return not str(schema["$ref"]).startswith("#")
    if any(key in schema for key in _PARTS[:3]) and "type" not in schema:
        return False
    given = schema.get("type", ["object", "array"])
    types = {given} if isinstance(given, str) else set(given)
    if "array" in types and _may_have(
        schema.get("items", "prefixItems" not in schema), name, others
    ):
        return True
    return "object" in types and _is_such(schema, name, others)


def _is_such(schema: Mapping[str, Any], name: str, others: Collection[str]) -> bool:
    """Return whether the object itself may have the name (`_may_have`)."""
    if schema.get("additionalProperties") is not False or "patternProperties" in schema:
        return True
    properties = schema.get("properties", {})
    return name in properties and any(other in properties for other in others)


def _has(value: Any, name: str, others: Collection[str]) -> bool:
    """Return whether literal values have the name (`_may_have`)."""
    if isinstance(value, Mapping):
        if name in value and any(other in value for other in others):
            return True
        value = list(value.values())
    return isinstance(value, list) and any(_has(each, name, others) for each in value)
