"""Edits of a conversation: what is removed, what stays, and what the answer says of it."""

from __future__ import annotations

from typing import Any

import pytest

from nano_inference.config import FieldError
from nano_inference.gateway.api.anthropic.bodies import ContextManagement, CountBody
from nano_inference.gateway.api.anthropic.conversation import read_conversation
from nano_inference.gateway.api.anthropic.edits import CLEARED, Edited, edit
from nano_inference.gateway.serving.chat_templates import Conversation
from nano_inference.gateway.serving.fields import collect_ignored


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def round_of(number: int, name: str) -> list[dict[str, Any]]:
    """A call with thinking, and its result."""
    use = {"type": "tool_use", "id": f"c{number}", "name": name, "input": {"n": number}}
    thinking = {"type": "thinking", "thinking": f"thought {number}"}
    result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": f"result {number}"}
    return [{"role": "assistant", "content": [thinking, use]}, user(result)]


TEXT = {"type": "text", "text": "Go on."}
ANSWER = {"role": "assistant", "content": [{"type": "thinking", "thinking": "end"}, TEXT]}
MESSAGES = [
    user(TEXT),
    *round_of(0, "read"),
    *round_of(1, "write"),
    ANSWER,
    user(TEXT),
    *round_of(2, "read"),
    *round_of(3, "read"),
]


async def words(conversation: Conversation) -> int:
    """A hundred for each result and each input that is there, and one for each turn."""
    return sum(
        1
        + 100 * (turn["role"] == "tool" and turn["content"] != CLEARED)
        + 100 * sum(bool(call["function"]["arguments"]) for call in turn.get("tool_calls", ()))
        for turn in conversation.turns
    )


async def edited(**fields: Any) -> Edited:
    conversation, _ = read_conversation(CountBody(messages=MESSAGES), "a")
    return await edit(conversation, ContextManagement(edits=[fields]), words)


def results(found: Edited) -> list[str]:
    turns = found.conversation.turns
    return [turn["content"][-1:] for turn in turns if turn["role"] == "tool"]


def thoughts(found: Edited) -> list[str]:
    turns = found.conversation.turns
    return [turn["reasoning_content"] for turn in turns if "reasoning_content" in turn]


USES, THINKING = "clear_tool_uses_20250919", "clear_thinking_20251015"
AT_ONCE = {"trigger": {"type": "tool_uses", "value": 2}}


def uses(number: int) -> dict[str, Any]:
    return {"type": "tool_uses", "value": number}


@pytest.mark.parametrize(
    ("fields", "left", "applied"),
    [
        (AT_ONCE, ["]", "1", "2", "3"], (1, 100)),
        (AT_ONCE | {"keep": uses(1)}, ["]", "]", "]", "3"], (3, 300)),
        (AT_ONCE | {"keep": uses(0)}, ["]", "]", "]", "]"], (4, 400)),
        (AT_ONCE | {"keep": uses(1), "exclude_tools": ["read"]}, ["0", "]", "2", "3"], (1, 100)),
        (AT_ONCE | {"clear_tool_inputs": True}, ["]", "1", "2", "3"], (1, 200)),
        (
            AT_ONCE | {"keep": uses(1), "clear_tool_inputs": ["write"]},
            ["]", "]", "]", "3"],
            (3, 400),
        ),
        (
            {"trigger": {"type": "input_tokens", "value": 800}, "keep": uses(2)},
            ["]", "]", "2", "3"],
            (2, 200),
        ),
    ],
)
async def test_the_oldest_results_are_cleared(
    fields: dict[str, Any], left: list[str], applied: tuple[int, int]
) -> None:
    found = await edited(type=USES, **fields)
    assert results(found) == left
    number, tokens = applied
    assert found.applied == [
        {"type": USES, "cleared_tool_uses": number, "cleared_input_tokens": tokens}
    ]
    assert results(found._replace(conversation=found.before)) == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("keep", "left", "number"),
    [
        ({}, ["thought 2", "thought 3"], 1),
        ({"keep": {"type": "thinking_turns", "value": 1}}, ["thought 2", "thought 3"], 1),
        ({"keep": {"type": "thinking_turns", "value": 0}}, [], 2),
    ],
)
async def test_the_thinking_of_earlier_turns_is_cleared(
    keep: dict[str, Any], left: list[str], number: int
) -> None:
    """Results of tools are within a turn."""
    found = await edited(type=THINKING, **keep)
    assert thoughts(found) == left
    (applied,) = found.applied or ()
    assert applied["cleared_thinking_turns"] == number


@pytest.mark.parametrize(
    "fields",
    [
        {"type": THINKING, "keep": "all"},
        {"type": THINKING, "keep": {"type": "all"}},
        {"type": THINKING, "keep": {"type": "thinking_turns", "value": 2}},
        {"type": USES},
        {"type": USES, "trigger": {"type": "tool_uses", "value": 4}},
        {"type": USES, "keep": uses(4), "trigger": {"type": "input_tokens", "value": 1}},
        {"type": USES, **AT_ONCE, "clear_at_least": {"type": "input_tokens", "value": 101}},
        {"type": "compact_20260112", "instructions": "Briefly."},
    ],
)
async def test_an_edit_that_removes_nothing_is_neutral(fields: dict[str, Any]) -> None:
    ignored = collect_ignored()
    found = await edited(**fields)
    assert (found.applied, found.conversation) == ([], found.before)
    assert any(each.startswith("context_management.edits") for each in ignored)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"type": "clear_all"}, "type"),
        ({"type": USES, "keep": {"type": "tool_uses"}}, "keep"),
        ({"type": USES, "kept": 1}, "kept"),
        ({"type": THINKING, "keep": "none"}, "keep"),
        (
            {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 300}},
            "trigger.value",
        ),
    ],
)
async def test_an_edit_that_can_not_be_applied_is_refused(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(FieldError) as raised:
        await edited(**fields)
    assert raised.value.param == f"context_management.edits[0].{param}"
