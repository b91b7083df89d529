"""A message's deltas as chats have them: in chunks, and as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ....text.messages import Delta, ToolCall
from ...serving.message_parts import MessageParts


def fitting(deltas: Sequence[Delta]) -> int:
    """How many of the first can stand in one chunk, where clients read reasoning before text, and
    text before calls."""
    last = 0
    for number, delta in enumerate(deltas):
        parts = (delta.reasoning, delta.content, delta.calls)
        kinds = [kind for kind, part in enumerate(parts) if part]
        if kinds and kinds[0] < last:
            return number
        last = kinds[-1] if kinds else last
    return len(deltas)


def chunk_delta(deltas: Iterable[Delta], reasoning_field: str) -> dict[str, Any]:
    """Several that fit one chunk.

    Args:
        reasoning_field: What the reasoning is called; empty where it is not shown.
    """
    reasoning, content, calls = _together(deltas)
    delta: dict[str, Any] = {}
    if reasoning and reasoning_field:
        delta[reasoning_field] = reasoning
    if content:
        delta["content"] = content
    if calls:
        delta["tool_calls"] = [{"index": call.place} | _written(call) for call in calls]
    return delta


def whole_message(deltas: Iterable[Delta], reasoning_field: str) -> dict[str, Any]:
    """All of them as a message. Args: as for `chunk_delta`."""
    reasoning, content, calls = _together(deltas)
    shown = None if calls and not content else content
    message: dict[str, Any] = {"role": "assistant", "content": shown, "refusal": None}
    if reasoning and reasoning_field:
        message[reasoning_field] = reasoning
    if calls:
        message["tool_calls"] = list(map(_written, calls))
    return message


def finish_reason(reason: str, parts: MessageParts) -> str:
    """Why a choice ended, in OpenAI's words. A call that is complete counts only where the message
    is."""
    return "tool_calls" if reason == "stop" and parts.calls else reason


def _together(deltas: Iterable[Delta]) -> tuple[str, str, list[ToolCall]]:
    reasoning, content, calls = [], [], list[ToolCall]()
    for delta in deltas:
        reasoning.append(delta.reasoning)
        content.append(delta.content)
        calls += delta.calls
    return "".join(reasoning), "".join(content), calls


def _written(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
