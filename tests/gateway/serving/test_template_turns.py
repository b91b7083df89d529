"""Messages as each family's chat template wants them."""

from __future__ import annotations

from typing import Any

import pytest

from nano_inference.gateway.serving.chat_templates import as_read_by

TURNS: list[dict[str, Any]] = [
    {"role": "developer", "content": "S"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "R",
        "tool_calls": [{"id": "call_0123456789abcdef", "function": {"name": "f", "arguments": {}}}],
    },
    {"role": "tool", "content": "T", "tool_call_id": "call_0123456789abcdef"},
]
MISTRAL = "{% if tool_call.id|length != 9 %}{{ raise_exception('9') }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ message.reasoning_content }}", "reasoning_content"),
        ("{{ message['reasoning'] }}", "reasoning"),
        ("{% if 'thinking' in message %}{% endif %}", "thinking"),
        ("{{ message.reasoning or message.reasoning_content }}", "reasoning_content"),
        ("{{ thinking }}", "reasoning_content"),
        ("", "reasoning_content"),
    ],
)
def test_reasoning_has_the_template_s_name(template: str, name: str) -> None:
    turn = as_read_by(template, TURNS)[1]
    assert turn[name] == "R"
    assert {"reasoning_content", "reasoning", "thinking"} & turn.keys() == {name}


@pytest.mark.parametrize(
    ("template", "role"), [("", "system"), ("{{ role == 'developer' }}", "developer")]
)
def test_the_developer_role_becomes_system(template: str, role: str) -> None:
    assert as_read_by(template, TURNS)[0]["role"] == role


def test_ids_are_shortened_for_mistral() -> None:
    """The result still names its call, and the input is unchanged."""
    _, assistant, tool = as_read_by(MISTRAL, TURNS)
    assert assistant["tool_calls"][0]["id"] == tool["tool_call_id"] == "789abcdef"
    short = [{"role": "tool", "content": "T", "tool_call_id": "a-1"}]
    assert as_read_by(MISTRAL, short)[0]["tool_call_id"] == "0000000a1"
    assert as_read_by("", TURNS)[2]["tool_call_id"] == "call_0123456789abcdef"
    assert TURNS[2]["tool_call_id"] == "call_0123456789abcdef"
