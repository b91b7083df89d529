"""Messages in the form that a chat template reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nano_inference.config import FieldError, RequestError
from nano_inference.text import conversation
from nano_inference.text.conversation import (
    Turn,
    arguments_of,
    as_read_by,
    check_results,
    check_variables,
    joined_turns,
    names_read,
    with_call_ids,
)

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
    turn = as_read_by(template, TURNS, None)[1]
    assert turn[name] == "R"
    assert {"reasoning_content", "reasoning", "thinking"} & turn.keys() == {name}


@pytest.mark.parametrize(
    ("template", "role"), [("", "system"), ("{{ role == 'developer' }}", "developer")]
)
def test_the_developer_role_becomes_system(template: str, role: str) -> None:
    assert as_read_by(template, TURNS, None)[0]["role"] == role


def test_ids_are_shortened_for_mistral() -> None:
    """The result still names its call, and the input is unchanged."""
    _, assistant, tool = as_read_by(MISTRAL, TURNS, None)
    assert assistant["tool_calls"][0]["id"] == tool["tool_call_id"] == "789abcdef"
    short = [{"role": "tool", "content": "T", "tool_call_id": "a-1"}]
    assert as_read_by(MISTRAL, short, None)[0]["tool_call_id"] == "0000000a1"
    assert as_read_by("", TURNS, None)[2]["tool_call_id"] == "call_0123456789abcdef"
    assert TURNS[2]["tool_call_id"] == "call_0123456789abcdef"


def test_ids_are_those_of_kimis_models() -> None:
    """The model's own stay; those of other clients are made of name and number."""

    def called(*ids: str) -> Turn:
        calls = [{"id": each, "function": {"name": "find"}} for each in ids]
        return {"role": "assistant", "tool_calls": calls}

    turns = [
        called("toolu_1", "functions.find:7"),
        {"role": "tool", "tool_call_id": "functions.find:7"},
        {"role": "tool", "tool_call_id": "toolu_1"},
        called("functions.other:0"),
        {"role": "tool", "tool_call_id": "functions.other:0"},
        {"role": "tool"},
    ]
    found = with_call_ids(turns, "functions.{name}:{number}")
    assert [call["id"] for call in found[0]["tool_calls"]] == [
        "functions.find:0",
        turns[1]["tool_call_id"],
    ]
    assert [turn.get("tool_call_id") for turn in found] == [
        *(None, "functions.find:7", "functions.find:0", None, "functions.find:2", None)
    ]
    assert turns[2]["tool_call_id"] == "toolu_1"


def test_contents_are_texts_unless_the_template_loops_over_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    turns: list[Turn] = [{"role": "user", "content": parts}, {"role": "user", "content": "c"}]
    loop = "{% for part in message.content %}{% endfor %}"
    (first, second) = as_read_by(loop, turns, "<i>")
    assert (first["content"], second["content"]) == (parts, [{"type": "text", "text": "c"}])
    (first, second) = as_read_by("{{ message.content }}", turns, "<i>")
    assert (first["content"], second["content"]) == ("a\n<i>\nb", "c")
    assert as_read_by(loop, turns[1:], None) == turns[1:]
    with pytest.raises(FieldError) as refused:
        as_read_by(loop, turns, None)
    assert (refused.value.code, refused.value.param) == (
        "images_not_supported",
        "messages[0].content",
    )


@pytest.mark.parametrize(
    ("template", "name", "read"),
    [
        ("{% if enable_thinking is defined %}{% endif %}", "enable_thinking", True),
        ("{%- set reasoning_effort = 1 %}", "reasoning_effort", True),
        ("{%- for tool in tools -%}{%- endfor -%}", "tools", True),
        ("{{- tools|tojson }}", "tools", True),
        ("Use tools, if thinking helps.", "tools", False),
        ("{{ message.thinking }}{{ builtin_tools }}", "thinking", False),
        ("{{ builtin_tools }}{{ message.tools }}", "tools", False),
        ("{{ 'tools' }}{% if \"tools\" in message %}{% endif %}", "tools", False),
        ("{{ 'it\\'s' + tools }}", "tools", True),
        ("{# tools #}{{ messages }}", "tools", False),
        ("", "tools", False),
    ],
)
def test_which_names_a_template_reads(template: str, name: str, read: bool) -> None:
    assert (name in names_read(template)) is read


def test_an_unread_variable_compiles_no_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of megabytes would take seconds to compile."""

    def never(pattern: str, text: str) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(conversation, "re", SimpleNamespace(search=never))
    tokenizer: Any = SimpleNamespace(apply_chat_template=print, special_tokens_map={})
    with pytest.raises(FieldError, match="does not read it"):
        check_variables({"k" * 100: 1}, "{{ mood }}", tokenizer)


@pytest.mark.parametrize("given", [None, "", " \n", "null", "{}", {}])
def test_arguments_may_be_blank(given: Any) -> None:
    assert arguments_of(given) == {}
    assert arguments_of('{"a": null}') == {"a": None}


@pytest.mark.parametrize("given", ["[]", "1", "{", "no", "[" * 100_000])
def test_arguments_are_an_object(given: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        arguments_of(given)


# --- results of tools ---------------------------------------------------------------------------

USER: Turn = {"role": "user", "content": "?"}


def calling(*ids: str | None) -> Turn:
    return {"role": "assistant", "content": "", "tool_calls": [{"id": each} for each in ids]}


def result(call_id: str | None = None) -> Turn:
    return {"role": "tool", "content": "T"} | ({"tool_call_id": call_id} if call_id else {})


@pytest.mark.parametrize(
    "turns",
    [
        [USER, calling("a"), result("a")],
        [calling("a", "b", "c"), result("c"), result("a"), result("b"), USER],
        [calling("a"), result("a"), calling("a"), result("a")],
        [calling("a", "a"), result("a"), result("a")],
        # As Transformers' conversations, whose calls have no ids.
        [calling(None, None), result(), result()],
        [calling("a", "b"), result(), result("b")],
        # Calls without results are for the model, or the template.
        [calling("a", "b"), result("b"), USER, calling("a")],
    ],
)
def test_results_of_open_calls(turns: list[Turn]) -> None:
    check_results(turns)


@pytest.mark.parametrize(
    ("turns", "place"),
    [
        ([result("a")], 0),
        ([result()], 0),
        ([USER, {"role": "assistant", "content": "A"}, result("a")], 2),
        ([calling("a"), result("b")], 1),
        ([calling("a"), result("a"), result("a")], 2),
        ([calling("a"), result("a"), result()], 2),
        ([calling(None), result("a")], 1),
        # Of an earlier turn.
        ([calling("a"), USER, result("a")], 2),
        ([calling("a"), calling("b"), result("a")], 2),
        ([calling("a"), result("a"), calling("b"), result("a")], 3),
    ],
)
def test_a_result_of_no_call_is_refused(turns: list[Turn], place: int) -> None:
    with pytest.raises(FieldError) as refused:
        check_results(turns)
    named = ".tool_call_id" if "tool_call_id" in turns[place] else ""
    assert refused.value.param == f"messages[{place}]{named}"
    assert refused.value.code == "invalid_messages"
    assert "tool_calls" in refused.value.message


# --- instructions within a conversation -----------------------------------------------------------

SYSTEM, USER = {"role": "system", "content": "S"}, {"role": "user", "content": "U"}
LATER = {"role": "system", "content": "L"}
ANSWER = {"role": "assistant", "content": "A"}
NOTE = "<system-reminder>\nL\n</system-reminder>"
ANY_ROLE = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('first only') }}{% endif %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
)
LEAVES_OUT = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    "[{{ m.role }}:{{ m.content }}]{% endif %}{% endfor %}"
)


def rendered(template: str, turns: list[Turn]) -> str:
    tokenizer: Any = SimpleNamespace(
        chat_template=template,
        get_chat_template=lambda chat_template=None, tools=None: template,
        special_tokens_map={},
        apply_chat_template=lambda: None,
    )
    return conversation.render_conversation(tokenizer, turns, placeholder=None).text


@pytest.mark.parametrize("template", [FIRST_ONLY, LEAVES_OUT])
@pytest.mark.parametrize(
    ("turns", "wanted"),
    [
        ([SYSTEM, USER, LATER], f"[system:S][user:U\n\n{NOTE}]"),
        ([SYSTEM, LATER, USER], "[system:S\n\nL][user:U]"),
        ([USER, ANSWER, LATER, USER], f"[user:U][assistant:A][user:{NOTE}\n\nU]"),
        ([USER, ANSWER, LATER], f"[user:U][assistant:A][user:{NOTE}]"),
        ([USER, ANSWER, {"role": "tool", "content": "T"}, LATER, ANSWER], f"[tool:T\n\n{NOTE}]"),
        ([USER, LATER, LATER, ANSWER, USER], f"[user:U\n\n{NOTE}\n\n{NOTE}][assistant:A][user:U]"),
    ],
)
def test_a_template_s_later_system_messages_stand_in_the_one_before(
    template: str, turns: list[Turn], wanted: str
) -> None:
    assert wanted in rendered(template, turns)


def test_a_template_of_any_role_gets_system_messages_where_they_are() -> None:
    assert rendered(ANY_ROLE, [SYSTEM, USER, LATER]) == "[system:S][user:U][system:L]"


def test_a_later_system_message_beside_an_image_is_a_part() -> None:
    image: Turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "U"}]}
    (turn,) = conversation.with_instructions_inside([image, LATER])
    assert turn["content"] == [*image["content"], {"type": "text", "text": NOTE}]


# --- other conversations that templates refuse ----------------------------------------------------

ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}:{{ m.content }}]"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("turns", "wanted"),
    [
        ([USER, USER], "[user:U\n\nU]"),
        ([USER, ANSWER, ANSWER, USER], "[user:U][assistant:A\n\nA][user:U]"),
        ([SYSTEM, USER], "[user:S\n\nU]"),
        ([SYSTEM, {"role": "developer", "content": "D"}, USER], "[user:S\n\nD\n\nU]"),
        ([SYSTEM, USER, LATER, USER], f"[user:S\n\nU\n\n{NOTE}\n\nU]"),
    ],
)
def test_messages_in_a_row_are_joined_for_a_template_that_refuses_them(
    turns: list[Turn], wanted: str
) -> None:
    assert rendered(ALTERNATES, turns) == wanted


def test_messages_in_a_row_stay_for_a_template_that_takes_them() -> None:
    assert rendered(ANY_ROLE, [USER, USER]) == "[user:U][user:U]"


def test_what_no_form_helps_is_refused_as_it_came() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        rendered(ALTERNATES, [ANSWER, USER, USER])


def test_messages_of_one_role_that_follow_each_other_are_joined() -> None:
    """For templates that refuse them; calls and results stay as they are."""
    image = {"type": "image"}
    turns: list[Turn] = [
        *({"role": "system", "content": "S"}, {"role": "system", "content": "T"}),
        *({"role": "user", "content": "a"}, {"role": "user", "content": "b"}),
        *({"role": "user", "content": [image]}, {"role": "user", "content": [image]}),
        *(TURNS[1], TURNS[2], TURNS[2]),
    ]
    assert joined_turns(turns) == [
        {"role": "system", "content": "S\n\nT"},
        {"role": "user", "content": [{"type": "text", "text": "a\n\nb"}, image, image]},
        *(TURNS[1], TURNS[2], TURNS[2]),
    ]
