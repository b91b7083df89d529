"""Checks of what Python callers pass: prompts, numbers of samples, lists that belong together.

A struct that arrives over the bus has been decoded by its types. What a caller passes has not: a
float would be cut to a token id, and text taken for a list of texts of one letter.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Set, Sized
from typing import Any, TypeVar

from ..config import RequestError, SamplingParams, shown
from .rollouts import Prompt

_T = TypeVar("_T")

_BYTES = bytes | bytearray | memoryview


class ArgumentError(RequestError, ValueError):
    """An argument of a call can't be used. Also a ValueError, as Python has it."""


def check_prompts(prompts: Any) -> list[Any]:
    """The prompts of a call, each still to be checked.

    Raises:
        ArgumentError: invalid_prompt: they are no list.
    """
    if isinstance(prompts, str | _BYTES):
        raise ArgumentError(
            f"prompts is {shown(prompts)}, one prompt and no list of prompts; pass a list, such as "
            f"[{shown(prompts[:20])}]",
            code="invalid_prompt",
        )
    if isinstance(prompts, Mapping | Set) or not isinstance(prompts, Iterable):
        raise ArgumentError(
            f"prompts is {_a(prompts)}; pass a list of texts, or of lists of token ids",
            code="invalid_prompt",
        )
    return list(prompts)


def prompt_of(prompt: Any) -> str | tuple[int, ...]:
    """A prompt as requests have it.

    Raises:
        ArgumentError: invalid_prompt: it is neither text nor token ids; or invalid_token_ids.
    """
    if isinstance(prompt, str):
        return prompt
    return token_ids_of(prompt, "a prompt is text or token ids", "invalid_prompt")


def token_ids_of(
    given: Any, rule: str, code: str, ids_code: str = "invalid_token_ids"
) -> tuple[int, ...]:
    """Token ids of a list, a numpy array or a tensor of one dimension.

    Args:
        given: What the caller passed.
        rule: What it should have been, as a clause.
        code: Of the error where it holds no sequence of any kind.
        ids_code: Of the error where something in it is no integer.

    Raises:
        ArgumentError: It is something else, or holds something else than integers.
    """
    if isinstance(given, _BYTES):
        raise ArgumentError(f"{rule}, not {_a(given)}; decode it to text", code=code)
    values = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(values, str | Mapping | Set) or not isinstance(values, Iterable):
        raise ArgumentError(f"{rule}, not {_a(given)}", code=code)
    ids = tuple(values)
    if set(map(type, ids)) <= {int}:
        return ids
    return tuple(_token_id(value, place, rule, ids_code) for place, value in enumerate(ids))


def whole_number(value: Any, name: str, code: str) -> int:
    """An integer, also one of numpy's.

    Raises:
        ArgumentError: It is none, or a truth value.
    """
    number = _integer(value)
    if number is None:
        raise ArgumentError(f"{name} is {shown(value)}; it must be an integer", code=code)
    return number


def params_of_all(
    params: SamplingParams | Sequence[SamplingParams] | None, number: int
) -> list[SamplingParams]:
    """The parameters of each of so many prompts.

    Raises:
        ArgumentError: They are neither one for all nor one for each.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * number
    if isinstance(params, str | _BYTES | Mapping | Set) or not isinstance(params, Iterable):
        raise ArgumentError(
            f"sampling_params is {_a(params)}; pass one SamplingParams for all prompts, or a list "
            "with one for each"
        )
    return same_number(list(params), number, "sampling_params")


def same_number(values: list[_T], number: int, name: str) -> list[_T]:
    """Values of which each prompt has one. Raises ArgumentError where it has not."""
    if len(values) != number:
        raise ArgumentError(f"{number} prompts and {len(values)} {name}; give one for each prompt")
    return values


def predictions_of_all(predictions: Any, number: int) -> list[Prompt | None]:
    """The prediction of each of so many prompts; None for none.

    Raises:
        ArgumentError: They are no list, or not one for each prompt.
    """
    if predictions is None:
        return [None] * number
    if isinstance(predictions, str | _BYTES) or not isinstance(predictions, Sized):
        raise ArgumentError(
            f"predictions is {_a(predictions)}; pass a list with one for each prompt",
            code="invalid_prediction",
        )
    values: list[Prompt | None] = same_number(check_prompts(predictions), number, "predictions")
    return values


def _token_id(value: Any, place: int, rule: str, code: str) -> int:
    number = _integer(value)
    if number is None:
        raise ArgumentError(
            f"{rule}, which are integers, not {shown(value)} (at place {place})", code=code
        )
    return number


def _integer(value: Any) -> int | None:
    """None for what is no integer; a truth value is none, though Python takes True for 1."""
    if hasattr(value, "tolist"):
        value = value.tolist()  # of numpy and torch
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return operator.index(value)


def _a(value: object) -> str:
    """What kind of thing a value is, in a message."""
    return f"of type {type(value).__name__}"
