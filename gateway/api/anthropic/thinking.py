"""Whether a model thinks before it answers, how much, and who is told."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ....config import Int64
from ...server.http import FieldError
from ...serving.chat_templates import Reasoning
from ...serving.fields import read_part
from .bodies import CountBody


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of it.

    Attributes:
        budget_tokens: It may have so many at most; None for no limit.
        display: Whether the answer says what was thought, or only that something was.
    """

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Int64 | None = None
    display: Literal["summarized", "omitted"] = "summarized"


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How an answer is to be; its format is looked at by itself."""

    format: dict[str, Any] = {}
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


def thinking_of(body: CountBody) -> Thinking | None:
    """None where nobody said whether it should think: it is left to the template.

    Raises:
        FieldError: It is asked for what is not there, or has no sense.
    """
    if not body.thinking:
        return None
    found = read_part(body.thinking, Thinking, "thinking")
    param = "thinking.budget_tokens"
    if found.type == "enabled" and found.budget_tokens is None:
        raise FieldError(f"{param} is missing; say how many tokens it may have", param=param)
    if found.type != "enabled" and found.budget_tokens is not None:
        raise FieldError(f"{param} takes thinking.type 'enabled'", param=param)
    if found.budget_tokens is not None and found.budget_tokens < 1:
        raise FieldError(f"{param} must be at least 1; or have thinking disabled", param=param)
    return found


def output_config_of(body: CountBody) -> OutputConfig:
    """How the answer is to be.

    Raises:
        FieldError: It asks for what is not there.
    """
    return read_part(body.output_config, OutputConfig, "output_config")


def reasoning_of(body: CountBody) -> Reasoning | None:
    """What becomes of it in the template; None where that is left alone.

    Raises:
        FieldError: As `thinking_of` and `output_config_of`.
    """
    thinking, effort = thinking_of(body), output_config_of(body).effort
    if thinking is None and effort is None:
        return None
    return Reasoning(
        on=None if thinking is None else thinking.type != "disabled",
        effort=effort,
        on_param="thinking",
        effort_param="output_config.effort",
    )
