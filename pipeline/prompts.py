"""Checks of Python callers' arguments: prompts, numbers of samples, lists of equal length.

A decoder checks structs from the bus, but not a caller's arguments: a float would be cut to a token
id, and a text would count as a list of texts of one letter.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, TypeVar

from ..config import RequestError, SamplingParams, shown
from .rollouts import Prompt

_T = TypeVar("_T")

_BYTES = bytes | bytearray | memoryview


class ArgumentError(RequestError, ValueError):
    """An unusable argument of a call. Also a ValueError, Python's own class for one."""


def check_prompts(prompts: Any, name: str = "prompts", code: str = "invalid_prompt") -> list[Any]:
    """Return the prompts of a call as a list; the prompts themselves are not checked.

    Args:
        prompts: The argument: any iterable, array or tensor.
        name: The argument's name, for the message.
        code: The error's code.

    Raises:
        ArgumentError: The argument is a single text, or can't be iterated in order.
    """
    values = _without_arrays(prompts)
    if isinstance(values, str):
        raise ArgumentError(
            f"{name} is {shown(values)}, a text and no list; pass a list, such as "
            f"[{shown(values[:20])}]",
            code=code,
        )
    if isinstance(values, _BYTES | Mapping | Set) or not isinstance(values, Iterable):
        raise ArgumentError(
            f"{name} is {_a(prompts)}; pass a list of texts, or of lists of token ids", code=code
        )
    return list(values)


def prompt_of(prompt: Any) -> str | tuple[int, ...]:
    """Return a prompt in the form of requests.

    Raises:
        ArgumentError: invalid_prompt: neither text nor token ids. invalid_token_ids: an element is
            not an integer.
    """
    if isinstance(prompt, str):
        return prompt
    return token_ids_of(prompt, "a prompt is text or token ids", "invalid_prompt")


def token_ids_of(
    given: Any, rule: str, code: str, ids_code: str = "invalid_token_ids"
) -> tuple[int, ...]:
    """Return the token ids of a list, a numpy array or a tensor of one dimension.

    Args:
        given: The argument.
        rule: A clause for the message that describes a valid argument.
        code: The error's code if `given` is not a sequence.
        ids_code: The error's code if an element is not an integer.

    Raises:
        ArgumentError: `given` is not a sequence of integers.
    """
    if isinstance(given, _BYTES):
        raise ArgumentError(f"{rule}, not {_a(given)}; decode it to text", code=code)
    values = _without_arrays(given)
    if isinstance(values, str | Mapping | Set) or not isinstance(values, Iterable):
        raise ArgumentError(f"{rule}, not {_a(given)}", code=code)
    ids = tuple(values)
    if set(map(type, ids)) <= {int}:
        return ids
    return tuple(_token_id(value, place, rule, ids_code) for place, value in enumerate(ids))


def whole_number(value: Any, name: str, code: str) -> int:
    """Return a Python or numpy integer as a Python one.

    Raises:
        ArgumentError: The value is not an integer, or is a truth value.
    """
    number = _integer(value)
    if number is None:
        raise ArgumentError(f"{name} is {shown(value)}; it must be an integer", code=code)
    return number


def params_of_all(
    params: SamplingParams | Sequence[SamplingParams] | None, number: int
) -> list[SamplingParams]:
    """Return the parameters of each of `number` prompts.

    Raises:
        ArgumentError: `params` is neither one for all prompts nor a list with one for each.
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
    """Return the values. Raises ArgumentError unless there is one for each prompt."""
    if len(values) != number:
        raise ArgumentError(f"{number} prompts and {len(values)} {name}; give one for each prompt")
    return values


def predictions_of_all(predictions: Any, number: int) -> list[Prompt | None]:
    """Return the prediction of each of `number` prompts, None for a prompt without one.

    Raises:
        ArgumentError: `predictions` is not a list with one for each prompt.
    """
    if predictions is None:
        return [None] * number
    values = check_prompts(predictions, "predictions", "invalid_prediction")
    return same_number(values, number, "predictions")


def _token_id(value: Any, place: int, rule: str, code: str) -> int:
    number = _integer(value)
    if number is None:
        raise ArgumentError(
            f"{rule}, which are integers, not {shown(value)} (at place {place})", code=code
        )
    return number


def _integer(value: Any) -> int | None:
    """Return the value as an integer, or None. Unlike in Python, a bool is no integer."""
    value = _without_arrays(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return operator.index(value)


def _without_arrays(value: Any) -> Any:
    """Convert an array, tensor or scalar of numpy or torch to Python's lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def _a(value: object) -> str:
    """Return the type of a value, for a message."""
    return f"of type {type(value).__name__}"
