"""From the items of a conversation to its turns, as templates read them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ....serving.chat_templates import Turn
from ..messages import text_of, turn_of
from .items import Item, message_of


def turns_of(items: Iterable[Item]) -> list[Turn]:
    """What a template is given of items that were looked at.

    Reasoning, text and calls of the model that follow each other are one turn of the assistant,
    as far as they could have been written so.
    """
    turns: list[Turn] = []
    spoken = _Spoken()
    names: dict[str, str] = {}
    for item in items:
        kind = item["type"]
        if kind == "reasoning":
            turns += spoken.turn() if spoken.begun else []
            spoken.reasoning = "\n".join(filter(None, (spoken.reasoning, _reasoning_of(item))))
            continue
        if kind == "function_call":
            names[item["call_id"]] = item["name"]
            spoken.calls.append(_call_of(item))
            continue
        if kind == "message" and item["role"] == "assistant":
            turns += spoken.turn() if spoken.begun else []
            spoken.message = message_of(item)
            continue
        turns += spoken.turn()
        if kind == "function_call_output":
            turns.append(_output_of(item, names))
        else:
            turns.append(turn_of(message_of(item), "input"))
    return turns + spoken.turn()


class _Spoken:
    """What the assistant has said since somebody else did."""

    def __init__(self) -> None:
        self.reasoning = ""
        self.message: dict[str, Any] | None = None
        self.calls: list[dict[str, Any]] = []

    @property
    def begun(self) -> bool:
        """Whether there is more of it than reasoning."""
        return self.message is not None or bool(self.calls)

    def turn(self) -> list[Turn]:
        """It as a turn, if there is any of it. What comes now is another one."""
        message = self.message or {"role": "assistant", "content": ""}
        if self.reasoning:
            message = {"reasoning_content": self.reasoning} | message
        if self.calls:
            message = message | {"tool_calls": self.calls}
        there = self.begun or bool(self.reasoning)
        self.reasoning, self.message, self.calls = "", None, []
        return [turn_of(message, "input")] if there else []


def _reasoning_of(item: Item) -> str:
    """What was thought, or where only that is known, what was told of it."""
    parts = item["content"] or item["summary"]
    return "\n".join(part["text"] for part in parts)


def _call_of(item: Item) -> dict[str, Any]:
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _output_of(item: Item, names: dict[str, str]) -> Turn:
    name = item.get("name") or names.get(item["call_id"])
    turn: Turn = {"role": "tool", "content": text_of(item["output"], "input")}
    turn["tool_call_id"] = item["call_id"]
    return turn if name is None else turn | {"name": name}
