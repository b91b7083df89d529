"""Calls whose arguments stand between tags, as texts."""

# ruff: noqa: RUF001 (DeepSeek's marks are made of such characters.)

from __future__ import annotations

import json
from typing import Any

import pytest

from nano_inference.text.messages import (
    MessageFormat,
    MessageReader,
    Reading,
    Tool,
    ToolUse,
    constraint_of,
)
from nano_inference.text.messages.message_format import ArgumentSyntax
from nano_inference.text.messages.typed import types_of, value_of

from ...errors import raises
from .families import FAMILIES, Family, Read, deltas_of, format_of_family, named, read
from .message_writer import FORMS, Writer, writer_of

TAGGED = [name for name, family in FAMILIES.items() if family.argument]
PLACE = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "rate": {"type": ["number", "null"]},
        "on": {"type": "boolean"},
        "either": {"anyOf": [{"type": "string"}, {"type": "object"}]},
        "place": {"$ref": "#/$defs/place"},
        "any": {},
    },
    "$defs": {"place": {"type": "object", "properties": {"zip": {"type": "integer"}}}},
}
TOOL = Tool(name="set", parameters=PLACE)


def arguments(form: MessageFormat, text: str, opening: str = "") -> list[dict[str, Any]]:
    """The arguments of the calls in a message."""
    reader = MessageReader(form, Reading(tools=(TOOL,), opening=opening), "")
    return [json.loads(call.arguments) for call in deltas_of(reader, text).calls]


@pytest.fixture(params=TAGGED)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


# --- values ---------------------------------------------------------------------------------------


VALUES = [
    {"text": "12", "count": 12},
    {"text": "true", "on": True},
    {"text": ""},
    {"text": " \n two\n\nlines \n"},
    {"text": '"quoted" \\n', "either": "{not JSON"},
    {"text": "<b>1 < 2 && 3 > 2</b>", "either": {"a": [None, "東"]}},
    {"place": {"zip": 3}, "rate": 2.5},
    {"any": {"x": 1}, "text": "[1]"},
    {},
]


@pytest.mark.parametrize("values", VALUES)
def test_values_have_the_types_that_the_tool_declares(
    family: Family, values: dict[str, Any]
) -> None:
    assert arguments(format_of_family(family), family.written([("set", values)])) == [values]


def test_words_of_python_are_values() -> None:
    for text, types, value in (
        ("True", {"boolean"}, True),
        ("None", {"null", "string"}, None),
        ("{'a': [True, None]}", {"object"}, {"a": [True, None]}),
        (r"['\d']", {"array"}, [r"\d"]),
        ("3.0", {"integer"}, 3),
        ("1", {"boolean"}, True),
        ("1", {"number", "integer"}, 1),
    ):
        found = value_of(text, frozenset(types))
        assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("text", ["abc", "1.5", "NaN", "[1", "{1, 2}", "9" * 5000, "[" * 5000])
def test_what_is_no_value_of_the_type_stays_text(text: str) -> None:
    assert value_of(text, frozenset({"integer", "array"})) == text


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"enum": ["a", "b"]}, {"string"}),
        ({"const": 3}, {"integer"}),
        ({"type": "number"}, {"number", "integer"}),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"allOf": [{"type": ["string", "null"]}, {"enum": ["a"]}]}, {"string"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"$ref": "#/$defs/place"}, {"object"}),
    ],
)
def test_types_of_a_schema(schema: dict[str, Any], types: set[str]) -> None:
    assert types_of(schema, PLACE) == types


def test_a_schema_that_says_nothing_has_all_types() -> None:
    loop = {"$defs": {"x": {"$ref": "#/$defs/x"}}}
    for schema in ({}, True, {"$ref": "#/none"}, {"$ref": "http://x"}, {"$ref": "#/$defs/x"}):
        assert types_of(schema, loop) == types_of({}, {})


def test_the_models_word_decides_where_the_schema_does_not() -> None:
    call = (
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="set">\n'
        '<｜DSML｜parameter name="any" string="true">12</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="other" string="false">12</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="third" string="true">12</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="text" string="false">12</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    )
    expected = {"any": "12", "other": 12, "third": "12", "text": "12"}
    assert arguments(named("deepseek-v4"), call) == [expected]


# --- calls as models write them -------------------------------------------------------------------


def test_ids_that_the_model_wrote_are_kept() -> None:
    family = FAMILIES["Kimi K2"]
    text = family.written([("get_weather", {"city": "Bari"}), ("stop-now.v2", {})])
    second = text.replace("v2:0", "v2:1")
    tools = (Tool(name="get_weather"), Tool(name="stop-now.v2"))
    calls = deltas_of(MessageReader(named("kimi-k2"), Reading(tools=tools), "x"), second).calls
    assert [call.id for call in calls] == ["functions.get_weather:0", "functions.stop-now.v2:1"]
    twice = family.written([("get_weather", {})] * 2)
    calls = deltas_of(MessageReader(named("kimi-k2"), Reading(tools=tools), "x"), twice).calls
    assert calls[0].id == "functions.get_weather:0"
    assert calls[1].id.startswith("call_")


FUNCTION = "<function=get_weather>\n<parameter=city>\nBari\n</parameter>\n</function>"
BARI = ("get_weather", {"city": "Bari"})


@pytest.mark.parametrize(
    ("text", "content", "count"),
    [
        (f"{FUNCTION}\n</tool_call>", "", 1),
        (f"I look.\n{FUNCTION}\n</tool_call>\n<tool_call>\n{FUNCTION}\n</tool_call>", "I look.", 2),
        (f"{FUNCTION}\n{FUNCTION}", "", 2),
        (f"<tool_call>\n{FUNCTION}", "", 1),
        (f"<tool_call>\n{FUNCTION}\n</tool_call>\n\nDone.", "Done.", 1),
        (f"Write {FUNCTION} for it.", f"Write {FUNCTION} for it.", 0),
    ],
)
def test_marks_around_a_function_may_be_missing(text: str, content: str, count: int) -> None:
    found = read(named("qwen-xml"), text)
    assert found == read(named("qwen-xml"), [text])
    assert (found.content.removeprefix("\n"), found.calls) == (content, [BARI] * count)


def test_a_malformed_call_is_shown_with_all_of_its_marks() -> None:
    for name, text in (
        ("deepseek-v4", FAMILIES["DeepSeek-V4"].written([("unknown", {"city": "Bari"})])),
        ("kimi-k2", FAMILIES["Kimi K2"].written([("unknown", {"city": "Bari"})])),
        ("deepseek-v3.1", FAMILIES["DeepSeek-V3.1"].written([("unknown", {})])),
        ("step3", FAMILIES["Step 3"].written([("unknown", {})])),
    ):
        assert read(named(name), text) == read(named(name), [text]) == Read("", text, [], 1)


def test_a_budgets_remarks_are_part_of_the_reasoning() -> None:
    remark = "<seed:cot_budget_reflect>I have used 5 tokens.</seed:cot_budget_reflect>"
    text = f"<seed:think>Hm.\n{remark}\nSo.</seed:think>\nYes."
    assert read(named("seed-oss"), text) == Read(f"Hm.\n{remark}\nSo.", "Yes.", [], 0)


def test_an_answer_without_the_end_of_the_reasoning_before_it() -> None:
    opening = "<|open|>think<|sep|>"
    text = "<|open|>response<|sep|>Yes.<|close|>response<|sep|><|close|>message<|sep|>"
    assert read(named("kimi-k3"), f"Hm.{text}", opening=opening) == Read("Hm.", "Yes.", [], 0)


NESTED = {
    "type": "object",
    "properties": {
        "order": {"$ref": "#/$defs/order"},
        "tags": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "string"}}]},
        "either": {
            "oneOf": [
                {"type": "object", "properties": {"low": {"type": "string"}}},
                {"type": "object", "properties": {"high": {"type": "integer"}}},
            ]
        },
        "text": {"type": ["string", "object"]},
        "free": {},
    },
    "$defs": {
        "order": {
            "type": "object",
            "properties": {
                "lines": {"type": "array", "items": {"$ref": "#/$defs/order"}},
                "count": {"type": "integer"},
                "note": {"type": "string"},
            },
        }
    },
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "<order><lines><item><count>1</count><note>1</note></item><item></item></lines></order>",
            {"order": {"lines": [{"count": 1, "note": "1"}, {}]}},
        ),
        ("<tags><item>1</item><item>a b</item></tags>", {"tags": ["1", "a b"]}),
        ("<tags></tags><order></order>", {"tags": [], "order": {}}),
        ("<either><high>3</high></either>", {"either": {"high": 3}}),
        ("<either><low>3</low></either>", {"either": {"low": "3"}}),
        ("<text>1</text>", {"text": "1"}),
        ("<free><a>1</a><b><item>true</item></b></free>", {"free": {"a": 1, "b": [True]}}),
        ("<new><a>x</a></new><other>1</other>", {"new": {"a": "x"}, "other": "1"}),
        ('<order>{"count": 2}</order>', {"order": {"count": 2}}),
        ("<order><count>1</count><count>2</count></order>", None),
        ("<order><count>1</order>", None),
        ("<order><count>1</note></order>", None),
    ],
)
def test_values_in_elements_of_their_own(text: str, expected: dict[str, Any] | None) -> None:
    mark = "]<]minimax[>["
    body = text.replace("<", f"{mark}<")
    call = f'{mark}<tool_call>\n{mark}<invoke name="set">{body}{mark}</invoke>\n{mark}</tool_call>'
    reading = Reading(tools=(Tool(name="set", parameters=NESTED),))
    found = deltas_of(MessageReader(named("minimax-m3"), reading, ""), call)
    if expected is None:
        assert (found.calls, found.content) == ((), call) or mark in found.calls[0].arguments
        return
    (made,) = found.calls
    assert json.loads(made.arguments.replace(mark, "")) == expected


# --- grammars -------------------------------------------------------------------------------------

ENFORCED = Tool(
    name="find",
    parameters={
        "type": "object",
        "properties": {
            "zip": {"type": "integer", "minimum": 1},
            "city": {"type": "string", "minLength": 2},
            "kind": {"enum": ["a b", "c\nd", 3]},
            "code": {"type": "string", "pattern": "^[a-c]+"},
            "day": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
            "at": {"$ref": "#/$defs/at"},
        },
        "required": ["zip"],
        "$defs": {"at": {"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}}, "x": {}},
    },
)
RIGHT: list[dict[str, Any]] = [
    {"zip": 1},
    {"zip": 1, "city": "a </x>\n\nx < 3\n"},
    {"zip": 12, "kind": "c\nd", "code": "abX"},
    {"zip": 12, "kind": 3, "day": None},
    {"zip": 12, "day": "2020-02-03", "at": {"x": [1]}},
]
WRONG: list[dict[str, Any]] = [
    {},
    {"zip": 0},
    {"zip": "x"},
    {"zip": 1, "city": "a"},
    {"zip": 1, "kind": "a"},
    {"zip": 1, "code": "Xab"},
    {"zip": 1, "day": "20"},
    {"zip": 1, "at": [1]},
    {"zip": 1, "other": "x"},
    {"city": "ab", "zip": 1},
]


def written(form: MessageFormat, *calls: tuple[str, dict[str, Any]]) -> str:
    syntax = form.calls
    texts = (syntax.written(name, given, number) for number, (name, given) in enumerate(calls))
    return (syntax.open + syntax.between.join(texts) + syntax.close).lstrip("\n")


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize(
    "name",
    [name for name, form in FORMS.items() if isinstance(form.calls.arguments, ArgumentSyntax)],
)
def test_arguments_between_tags_are_enforced(name: str, marked: bool) -> None:
    form, writer = FORMS[name], writer_of(name, marked=marked)
    use = ToolUse(tools=(ENFORCED, Tool(name="now")), choice="required")
    constraint = constraint_of(form, "", use, None, None, writer.special_tokens)
    for given in RIGHT:
        text = written(form, ("find", given), ("now", {}))
        assert writer.may_be(constraint, text), given
        reader = MessageReader(form, Reading(tools=use.tools), "")
        assert json.loads(deltas_of(reader, [text]).calls[0].arguments) == given
    allowed = [
        given for given in WRONG if writer.may_be(constraint, written(form, ("find", given)))
    ]
    assert allowed == []
    free = ToolUse(tools=(Tool(name="find", strict=True), Tool(name="now")))
    constraint = constraint_of(form, "", free, None, None, writer.special_tokens)
    assert writer.may_be(constraint, written(form, ("now", {"any": "x <y>\n", "other": "3"})))
    assert writer.may_be(constraint, form.answer_open + "Text < 3.")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"x": {"type": "string", "not": {"const": "a"}}}}, "'not'"),
        ({"properties": {"x": {"type": "string", "pattern": "a(?=b)"}}}, "pattern"),
        ({"properties": {"<x>": {"type": "string"}}}, "'<x>'"),
        ({"anyOf": [{"required": ["x"]}]}, "'anyOf'"),
        ({"patternProperties": {"x": {}}}, "'patternProperties'"),
    ],
)
def test_schemas_that_can_not_be_enforced_between_tags(schema: dict[str, Any], words: str) -> None:
    use = ToolUse(tools=(Tool(name="find", parameters=schema),), choice="required")
    with raises("unsupported", words):
        constraint_of(named("qwen-xml"), "", use, None)
    assert constraint_of(named("qwen-xml"), "", ToolUse(tools=use.tools), None) is None


def test_calls_follow_the_answer_that_the_prompt_began() -> None:
    form, writer = named("kimi-k3"), Writer()
    use = ToolUse(tools=(Tool(name="now"),), choice="required")
    constraint = constraint_of(form, form.answer_open, use, None)
    text = written(form, ("now", {}))
    assert writer.may_be(constraint, text.removeprefix(form.answer_open))
    assert not writer.may_be(constraint, text)
