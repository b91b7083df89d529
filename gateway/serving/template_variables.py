"""What a chat template reads, and what it is given so that a model reasons as it was asked to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from ...text.messages import EFFORT, SWITCHES, asked_to_reason
from ..server.http import FieldError

_CODE = re.compile(r"\{%(.*?)%\}|\{\{(.*?)\}\}", re.DOTALL)
_TEXT = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_NAME = re.compile(r"(?<![\w.])[^\W\d]\w*")


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """How much a model is asked to reason, by whichever interface.

    Attributes:
        on: Whether it should; None where nobody said.
        effort: How much, as templates know it; None where nobody said.
        on_param: The field of the call that says whether.
        effort_param: The one that says how much; it may be the same.
    """

    on: bool | None = None
    effort: str | None = None
    on_param: str = "reasoning_effort"
    effort_param: str = "reasoning_effort"


def reasoning_of_effort(effort: str | None, param: str) -> Reasoning | None:
    """OpenAI's effort, of which "none" turns reasoning off; None where nobody said."""
    if effort is None:
        return None
    return Reasoning(on=effort != "none", effort=effort, on_param=param, effort_param=param)


def reasoning_asked(reasoning: Reasoning | None, given: Mapping[str, Any]) -> bool | None:
    """Return whether a call asks for reasoning, by its own fields or by the template's variables
    that the caller gave; None if it doesn't say."""
    if reasoning is None:
        return asked_to_reason(given)
    return asked_to_reason({EFFORT: reasoning.effort}) if reasoning.on is None else reasoning.on


@lru_cache(maxsize=64)
def names_read(template: str) -> frozenset[str]:
    """The names that stand in a template's code: variables, and what Jinja has itself. What
    follows a dot, and what stands in texts, are none."""
    code = " ; ".join(_TEXT.sub("''", a or b) for a, b in _CODE.findall(template))
    return frozenset(_NAME.findall(code))


def reasoning_variables(
    reasoning: Reasoning | None, given: Mapping[str, Any], template: str, always: bool
) -> dict[str, Any]:
    """The variables of a template, with those that make the model reason as asked.

    Args:
        given: Those that the caller gave by name.
        always: Whether the model reasons without being told.

    Raises:
        FieldError: unsupported: the template does not read them. invalid_request: those given by
            name say otherwise.
    """
    if reasoning is None:
        return dict(given)
    read = names_read(template)
    found: dict[str, Any] = {}
    if reasoning.on is not None:
        found = dict.fromkeys((name for name in SWITCHES if name in read), reasoning.on)
    if reasoning.effort is not None and EFFORT in read:
        found[EFFORT] = reasoning.effort
    _check_obeyed(reasoning, found, always=always or EFFORT in read)
    for name, value in found.items():
        if name in given and given[name] != value:
            param = f"chat_template_kwargs.{name}"
            fields = " and ".join(dict.fromkeys((reasoning.on_param, reasoning.effort_param)))
            raise FieldError(f"{param} says otherwise than {fields}; give one of them", param=param)
    return dict(given) | found


def _check_obeyed(reasoning: Reasoning, found: Mapping[str, Any], *, always: bool) -> None:
    """Who asks for no reasoning gets none of a model that has none."""
    why = "the model's chat template does not read it; leave it out"
    same = reasoning.on_param == reasoning.effort_param
    if reasoning.effort is not None:
        obeyed = EFFORT in found or (same and (bool(found) or reasoning.on is False))
        if not obeyed:
            param = reasoning.effort_param
            raise FieldError(f"{param}: {why}", param=param, code="unsupported")
    elif reasoning.on and not found and not always:
        param = reasoning.on_param
        raise FieldError(f"{param}: {why}", param=param, code="unsupported")
