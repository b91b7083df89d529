"""JSON schemas by chance, of the keywords that llguidance takes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

_WORDS = ("name", "age", "tags", "id", "a b", "größe", 'quo"te', "x\\y")


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema that some JSON satisfies."""
    nodes = [_object, _object, _array, _any_of]
    kind = rng.choice(_LEAVES if depth >= 3 else _LEAVES + nodes * 2)
    return kind(rng, depth)


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 4)
    schema: dict[str, Any] = {"type": "string"}
    choice = rng.randrange(4)
    if choice == 0:
        schema |= {"minLength": least, "maxLength": least + rng.randint(0, 6)}
    elif choice == 1:
        schema["pattern"] = rng.choice([r"^[a-c]{1,4}$", r"^\d{3}-\d{2}$", r"^(yes|no)?$", "^x+y$"])
    elif choice == 2:
        schema["format"] = rng.choice(["date", "uuid", "ipv4"])
    return schema


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    if rng.random() < 0.5:
        least = rng.randint(-100, 100)
        schema |= {"minimum": least, "maximum": least + rng.randint(0, 500)}
    return schema


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "number"}
    if rng.random() < 0.3:
        schema |= {"minimum": -1.5, "exclusiveMaximum": 20}
    return schema


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randint(0, 3))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
    }
    if rng.random() < 0.7:
        schema["additionalProperties"] = False
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    schema: dict[str, Any] = {"type": "array", "items": random_schema(rng, depth + 1)}
    if rng.random() < 0.7:
        schema |= {"minItems": least, "maxItems": least + rng.randint(0, 2)}
    return schema


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}


_ENUM = ["red", "grün", 1, -2.5, None, True, ["a"], {"k": 1}]
_LEAVES: list[Callable[[random.Random, int], dict[str, Any]]] = [
    *(_string, _integer, _number),
    lambda rng, depth: {"type": "boolean"},
    lambda rng, depth: {"type": "null"},
    lambda rng, depth: {"enum": rng.sample(_ENUM, rng.randint(1, 4))},
    lambda rng, depth: {"const": rng.choice(["only", 7, False, [], {"a": [1]}])},
]
