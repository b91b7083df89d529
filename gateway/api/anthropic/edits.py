"""Edits of a conversation before the model reads it: Anthropic's `context_management`.

An edit that would remove nothing is neutral. Tokens are counted only where an edit depends on their
number and has something to remove.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from ....config import Int64
from ...server.http import field_error
from ...serving.chat_templates import Conversation, Turn
from ...serving.fields import ignore, read_part
from .bodies import ContextManagement
from .content import of_type

CLEARED = "[This result was removed to save context.]"
"""In place of a cleared result."""

Count = Callable[[Conversation], Awaitable[int]]
"""Returns the number of a conversation's tokens as a prompt."""


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """A number of tokens, tool uses or turns."""

    type: Literal["input_tokens", "tool_uses", "thinking_turns"]
    value: Int64


class ClearToolUses(msgspec.Struct, frozen=True, kw_only=True):
    """Remove the results of the oldest tool calls.

    Attributes:
        trigger: Nothing is removed until the prompt has more.
        keep: The number of last calls that stay.
        clear_at_least: Nothing is removed if it would be less.
        exclude_tools: Tools whose calls stay.
        clear_tool_inputs: Whether the calls' inputs are removed too, or the tools whose are.
    """

    type: Literal["clear_tool_uses_20250919"]
    trigger: Amount = Amount(type="input_tokens", value=100_000)
    keep: Amount = Amount(type="tool_uses", value=3)
    clear_at_least: Amount | None = None
    exclude_tools: list[str] = []
    clear_tool_inputs: bool | list[str] = False


class KeptTurns(msgspec.Struct, frozen=True, kw_only=True):
    """All turns, or a number of last ones with thinking."""

    type: Literal["all", "thinking_turns"]
    value: Int64 = 1


class ClearThinking(msgspec.Struct, frozen=True, kw_only=True):
    """Remove the thinking of all turns of the assistant but the last ones.

    A turn goes from one message of the user to the next; results of tools are within it.
    """

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | KeptTurns = KeptTurns(type="thinking_turns")


class Compact(msgspec.Struct, frozen=True, kw_only=True):
    """Summarise the conversation once it is long, which nothing does here."""

    NEUTRAL: ClassVar = {
        "instructions": "nothing is summarised",
        "pause_after_compaction": "nothing is summarised",
    }

    type: Literal["compact_20260112"]
    trigger: Amount = Amount(type="input_tokens", value=150_000)


Edit = ClearToolUses | ClearThinking | Compact

_EDITS: dict[str, type[Edit]] = {
    "clear_tool_uses_20250919": ClearToolUses,
    "clear_thinking_20251015": ClearThinking,
    "compact_20260112": Compact,
}


class Edited(NamedTuple):
    """An edited conversation.

    Attributes:
        conversation: As the model reads it.
        applied: What was removed, in Anthropic's form; None without `context_management`.
        before: The conversation before the edits.
    """

    conversation: Conversation
    applied: list[dict[str, Any]] | None
    before: Conversation


async def edit(
    conversation: Conversation, management: ContextManagement | None, count: Count
) -> Edited:
    """Apply the edits of a call in their order.

    Raises:
        FieldError: An edit is unknown or invalid, or would have to summarise the conversation.
        RequestError: As `count`.
    """
    before = conversation
    if management is None:
        return Edited(conversation, None, before)
    applied: list[dict[str, Any]] = []
    for place, given in enumerate(management.edits):
        where = f"context_management.edits[{place}]"
        done = None
        wanted = _read(given, where)
        if isinstance(wanted, Compact):
            await _check_short(conversation, wanted, where, count)
        elif isinstance(wanted, ClearThinking):
            done = _without_thinking(conversation.turns, wanted)
        else:
            done = await _without_tool_uses(conversation, wanted, count)
        if done is None:
            ignore(where)
            continue
        after = replace(conversation, turns=done.turns)
        tokens = await count(conversation) - await count(after)
        least = wanted.clear_at_least if isinstance(wanted, ClearToolUses) else None
        if least is not None and tokens < least.value:
            ignore(where)
            continue
        conversation = after
        removed = {done.unit: done.number, "cleared_input_tokens": tokens}
        applied.append({"type": wanted.type, **removed})
    return Edited(conversation, applied, before)


def _read(given: dict[str, Any], where: str) -> Edit:
    found = of_type(_EDITS, given, where, f"it may be {', '.join(_EDITS)}")
    return read_part(given, found, where)


async def _check_short(
    conversation: Conversation, wanted: Compact, where: str, count: Count
) -> None:
    tokens = await count(conversation)
    if tokens > wanted.trigger.value:
        raise field_error(
            f"{where}.trigger.value",
            f"is {wanted.trigger.value}, the prompt has {tokens} tokens, and nothing is summarised "
            "here; summarise the conversation in your program, or raise the trigger",
            code="unsupported",
        )


class _Removed(NamedTuple):
    """Turns without what an edit removes: so many of a unit."""

    turns: list[Turn]
    unit: str
    number: int


def _without_thinking(turns: Sequence[Turn], wanted: ClearThinking) -> _Removed | None:
    """Return the turns without older thinking; None if there is none."""
    if wanted.keep == "all" or wanted.keep.type == "all":
        return None
    # Counted from the end, since the last ones are kept.
    kept: list[Turn] = []
    number = cleared = 0
    within, clears = False, False
    for turn in reversed(turns):
        if turn["role"] == "user":
            within = False
        if "reasoning_content" in turn:
            if not within:
                within, number = True, number + 1
                clears = number > wanted.keep.value
                cleared += clears
            if clears:
                turn = {name: each for name, each in turn.items() if name != "reasoning_content"}
        kept.append(turn)
    return _Removed(kept[::-1], "cleared_thinking_turns", cleared) if cleared else None


async def _without_tool_uses(
    conversation: Conversation, wanted: ClearToolUses, count: Count
) -> _Removed | None:
    """Return the turns without older results; None if none is to be removed."""
    turns = conversation.turns
    results = [place for place, turn in enumerate(turns) if turn["role"] == "tool"]
    older = results[: max(0, len(results) - wanted.keep.value)]
    cleared = {place for place in older if turns[place]["name"] not in wanted.exclude_tools}
    if not cleared:
        return None
    in_tokens = wanted.trigger.type == "input_tokens"
    number = await count(conversation) if in_tokens else len(results)
    if number <= wanted.trigger.value:
        return None
    inputs = wanted.clear_tool_inputs
    without_inputs = {
        turns[place]["tool_call_id"]
        for place in cleared
        if inputs is True or (isinstance(inputs, list) and turns[place]["name"] in inputs)
    }
    edited = [
        turn | {"content": CLEARED} if place in cleared else _without_inputs(turn, without_inputs)
        for place, turn in enumerate(turns)
    ]
    return _Removed(edited, "cleared_tool_uses", len(cleared))


def _without_inputs(turn: Turn, ids: set[str]) -> Turn:
    if not ids or "tool_calls" not in turn:
        return turn
    calls = [
        call | {"function": call["function"] | {"arguments": {}}} if call["id"] in ids else call
        for call in turn["tool_calls"]
    ]
    return turn | {"tool_calls": calls}
