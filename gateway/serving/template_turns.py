"""Messages by the names, and in the forms, that a model's chat template wants them in."""

from __future__ import annotations

import re
from typing import Any

Turn = dict[str, Any]
"""A message as most templates read it."""

_REASONING = ("reasoning_content", "reasoning", "thinking")
"""What templates call an assistant's reasoning, the most usual first."""

_SHORT_IDS = re.compile(r"length\s*!=\s*9\b")
_SHORT_ID = 9


def as_read_by(template: str, turns: list[Turn]) -> list[Turn]:
    """The same messages, as this template wants them."""
    if "developer" not in template:
        # To a template that knows no developer, his messages are the system's.
        turns = [
            turn | {"role": "system"} if turn["role"] == "developer" else turn for turn in turns
        ]
    turns = _with_reasoning(template, turns)
    # Mistral's take no others than its own.
    return [_with_short_ids(turn) for turn in turns] if _SHORT_IDS.search(template) else turns


def _with_reasoning(template: str, turns: list[Turn]) -> list[Turn]:
    read = (name for name in _REASONING if re.search(rf"\.{name}\b|['\"]{name}['\"]", template))
    name = next(read, _REASONING[0])
    if name == _REASONING[0]:
        return turns
    return [
        {name if key == _REASONING[0] else key: value for key, value in turn.items()}
        for turn in turns
    ]


def _with_short_ids(turn: Turn) -> Turn:
    """Ids of calls as the last letters and digits of theirs; ours differ in these."""
    found = dict(turn)
    if calls := turn.get("tool_calls"):
        found["tool_calls"] = [
            call | {"id": _short(call["id"])} if isinstance(call.get("id"), str) else call
            for call in calls
        ]
    if isinstance(turn.get("tool_call_id"), str):
        found["tool_call_id"] = _short(turn["tool_call_id"])
    return found


def _short(call_id: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "", call_id)[-_SHORT_ID:].rjust(_SHORT_ID, "0")
