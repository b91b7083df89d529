"""Whether a call asks for reasoning, by the variables of the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SWITCHES = ("enable_thinking", "thinking")
"""Variables of chat templates that turn reasoning on or off."""

EFFORT = "reasoning_effort"
"""The variable that says how much a model reasons."""


def asked_to_reason(variables: Mapping[str, Any]) -> bool | None:
    """Return whether these variables ask for reasoning; None if they don't say."""
    for name in SWITCHES:
        if variables.get(name) is not None:
            return bool(variables[name])
    effort = variables.get(EFFORT)
    return None if effort is None else effort != "none"
