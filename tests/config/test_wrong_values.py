"""A value of a wrong type is named with its path, and with what it may be."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest

from nano_inference.config.wrong_values import place_of, told_of, values_at


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """Fields of each kind."""

    role: Literal["user", "system"] = "user"
    size: int | None = None
    bias: dict[int, float] = {}
    pair: tuple[int, int] = (1, 2)


class Whole(msgspec.Struct):
    """A body."""

    model: str
    parts: list[Part] = []


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ({"size": "x"}, "parts[0].size is 'x'; it must be a whole number"),
        ({"size": 1.5}, "parts[0].size is 1.5; it must be a whole number"),
        ({"role": "boss"}, "parts[0].role is 'boss'; it may be 'system', 'user'"),
        ({"bias": {"a": 1}}, "parts[0].bias has the key 'a'; it must be a whole number"),
        ({"bias": {"1": "x"}}, "parts[0].bias['1'] is 'x'; it must be a number"),
        ({"pair": [1]}, "parts[0].pair is out of range; it must be a list of length 2"),
        ({"foo": 1}, "parts[0].foo is not known here; leave it out"),
        ({"a b": 1}, "parts[0].'a b' is not known here; leave it out"),
        (
            {"x` - at `$" + "y" * 999: 1},
            f"parts[0].'{'x` - at `$' + 'y' * 66}... is not known here; leave it out",
        ),
        (3, "parts[0] is 3; it must be an object"),
    ],
)
def test_a_wrong_value_is_named(part: Any, sentence: str) -> None:
    body = {"model": "a", "parts": [part]}
    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.convert(body, Whole, str_keys=True)
    values = ", ".join(map(repr, values_at(Whole, place_of(error.value))))
    assert told_of(error.value, "", body, values) == sentence


def test_a_value_is_quoted_only_if_it_is_given() -> None:
    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.convert({"model": 3}, Whole)
    assert told_of(error.value, "engine") == "engine.model is a whole number; it must be a text"
    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.convert({}, Whole)
    assert told_of(error.value) == "model is missing; add it"
