"""Messages that are what is asked of them, and what their reader finds in them."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import msgspec
import pytest

from nano_inference.config import AdmissionConfig, Constraint, RequestError
from nano_inference.text.grammar import check_size
from nano_inference.text.messages import Reading, Tool, ToolUse, constraint_of
from nano_inference.text.messages.lark import lark_of_gbnf

from ...errors import raises
from .families import named
from .message_writer import Writer, writer_of

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
QWEN = named("qwen")

OPEN, CLOSED = "<think>\n", "<think>\n\n</think>\n\n"

PLACE = {
    "type": "object",
    "properties": {"zip": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["zip"],
    "additionalProperties": False,
}
FIND, NOW = Tool(name="find", parameters=PLACE), Tool(name="now")
STRICT = Tool(name="find", parameters=PLACE, strict=True)
ANSWER = Constraint(json_schema={"type": "object", "properties": {"x": {"const": 1}}})


def call(name: str = "find", arguments: str = '{"zip": 1}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture(scope="module", params=["tokens", "spelled"])
def writer(request: pytest.FixtureRequest) -> Writer:
    """With tokens for the marks, and without."""
    return Writer(added=MARKS if request.param == "tokens" else ())


@cache
def with_tokens() -> Writer:
    return Writer(added=MARKS)


def asked(
    writer: Writer,
    use: ToolUse,
    opening: str = "",
    answer: Constraint | None = None,
    budget: int | None = None,
    *,
    reasons: bool | None = None,
) -> Constraint:
    given = (QWEN, opening, use, answer, budget, writer.special_tokens)
    return constraint_of(*given, reasoning_asked=reasons)


REQUIRED = ToolUse(tools=(FIND, NOW), choice="required")


@pytest.mark.parametrize(
    ("use", "texts", "others"),
    [
        (
            REQUIRED,
            [
                call(),
                call("now", "{}"),
                call() + "\n" + call("now"),
                call(arguments='{"zip":' + " " * 8 + "1}"),
                call(arguments='{\n "zip":  1,\t"city": "Köln \\" </b>"}'),
            ],
            [
                *("", "text", " " + call(), call() + call(), call("other"), call("fin")),
                *(call(arguments="{}"), call(arguments='{"zip": "1"}'), call()[:-1]),
                *(call(arguments='{"zip": 1, "x": 1}'), call() + "text"),
                call(arguments='{"zip":' + " " * 9 + "1}"),
            ],
        ),
        (
            ToolUse(tools=(FIND, NOW), choice="required", parallel=False),
            [call(), call("now")],
            [call() + "\n" + call()],
        ),
        (
            ToolUse(tools=(FIND, NOW), choice="required", named="now"),
            [call("now")],
            [call(), call("now") + "\n" + call("now")],
        ),
        (
            ToolUse(tools=(STRICT, NOW)),
            [
                *("", "text <tool", call()),
                "text " + call() + "\n" + call("now", '{"any": []}') + "text",
            ],
            ["<tool_call>", call(arguments="{}"), call("other"), "text " + call()[:-1]],
        ),
        (
            ToolUse(tools=(FIND, NOW), parallel=False),
            ["text", "text " + call(arguments="{}") + " text"],
            [call() + "\n" + call(), call() + "text" + call()],
        ),
    ],
)
def test_calls_that_may_be(
    writer: Writer, use: ToolUse, texts: list[str], others: list[str]
) -> None:
    constraint = asked(writer, use, CLOSED)
    assert [text for text in texts if not writer.may_be(constraint, text)] == []
    assert [text for text in others if writer.may_be(constraint, text)] == []


@pytest.mark.parametrize(
    ("opening", "texts", "others"),
    [
        ("", ["", "<think>\nHm\n</think>\n\n", "<think>a\nb</think>"], ["</think>", "Hm</think>"]),
        (OPEN, ["</think>", "Hm\n</think>\n\n"], ["", "Hm", "a</think>b"]),
        ("<think>\nWell, ", ["</think>", "so be it.</think>\n"], [""]),
        (CLOSED, [""], ["</think>", "<think>a</think>", "Hm"]),
        ("<think>a</think>", [""], ["</think>", "Hm"]),
        ("Hm, ", [""], ["<think>a</think>", "Hm"]),
    ],
)
def test_reasoning_that_may_stand_before(
    writer: Writer, opening: str, texts: list[str], others: list[str]
) -> None:
    constraint = asked(writer, REQUIRED, opening, reasons=True)
    assert [text for text in texts if not writer.may_be(constraint, text + call())] == []
    assert [text for text in others if writer.may_be(constraint, text + call())] == []


def test_a_mark_that_is_spelled_begins_nothing_else() -> None:
    writer = with_tokens()
    constraint = asked(writer, ToolUse(tools=(STRICT,)))
    assert writer.may_be(constraint, writer.spelled("<tool_call"))
    assert not writer.may_be(constraint, writer.spelled("<tool_call>"))
    assert not writer.may_be(constraint, writer.spelled("a<think>"))


def test_annotations_of_schemas_are_dropped() -> None:
    words = {"title": "T", "description": "D", "examples": [1], "default": 1}
    spoken = {
        **words,
        "type": "object",
        "properties": {name: {**words, "enum": [words]} for name in words},
        "required": ["title"],
    }
    constraint = asked(
        with_tokens(), ToolUse(tools=(Tool(name="t", parameters=spoken),), choice="required")
    )
    written = json.loads(constraint.lark.split("%json ")[1].split("\n")[0])
    del written["x-guidance"]
    assert written == {
        "type": "object",
        "properties": {name: {"enum": [words]} for name in words},
        "required": ["title"],
    }


@pytest.mark.parametrize("form", ["qwen", "llama"])
def test_schemas_that_are_none_are_refused(form: str) -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    tool = Tool(name="find", parameters=deep)
    with raises("invalid_constraint", r"deep|recursion"):
        constraint_of(named(form), "", ToolUse(tools=(tool,), choice="required"), None)
    for odd in ({"anyOf": 5}, {"enum": 3}, {"properties": [1]}, deep):
        with pytest.raises(RequestError, match="plain JSON"):
            constraint_of(named("llama"), "", ToolUse(tools=(FIND,)), Constraint(json_schema=odd))


MANY = tuple(Tool(name=f"tool_{n}", parameters=PLACE, strict=True) for n in range(64))


@pytest.mark.parametrize("name", ["llama", "hermes"])
def test_many_tools_whose_marks_are_spelled(name: str) -> None:
    """Each of them is told from any text, and from all others."""
    writer, form = Writer(), named(name)
    constraint = constraint_of(form, "", ToolUse(tools=MANY), None)
    for tool in MANY:
        head = f"{form.calls.before}{tool.name}{form.calls.middle}"
        assert writer.may_be(constraint, f'Text. {head}{{"zip": 1}}{form.calls.after}')
        assert not writer.may_be(constraint, f'Text. {head}{{"zip": ""}}{form.calls.after}')


AGENTS = {
    "type": "object",
    "properties": {
        f"field_number_{n}": {"enum": [f"value_number_{each}" for each in range(10)]}
        for n in range(12)
    },
    "required": [f"field_number_{n}" for n in range(12)],
    "additionalProperties": False,
}


def test_twenty_strict_tools_are_within_the_limits() -> None:
    tools = tuple(Tool(name=f"t{n}", parameters=AGENTS, strict=True) for n in range(20))
    constraint = constraint_of(QWEN, "", ToolUse(tools=tools), None, None, {})
    check_size(constraint, AdmissionConfig().max_constraint_bytes)
    with raises("invalid_constraint", "16384 are taken"):
        check_size(constraint, 16_384)
    with_tokens().compiler.check(constraint)


# --- budgets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 5, 64])
@pytest.mark.parametrize("opening", ["", OPEN])
def test_reasoning_ends_when_its_tokens_are_used_up(opening: str, budget: int) -> None:
    writer = with_tokens()
    begin = [] if opening else writer.tokens("<think>")
    constraint = asked(writer, ToolUse(), opening, budget=budget)
    (a,) = writer.tokens("a")
    assert len(writer.allowed(constraint, begin + [a] * (budget - 1))) > 500
    assert writer.allowed(constraint, begin + [a] * budget) == ["</think>"]
    assert writer.may_be(constraint, [*begin, *[a] * budget, *writer.tokens("</think>\n\nabc")])


def test_a_budget_of_nothing_ends_reasoning_at_once() -> None:
    writer = with_tokens()
    assert writer.allowed(asked(writer, ToolUse(), OPEN, budget=0), "") == ["</think>"]
    constraint = asked(writer, ToolUse(), "", budget=0)
    assert not writer.may_be(constraint, "<think>")
    assert writer.may_be(constraint, "text <tool_call> text")


def test_a_budget_may_end_within_a_character() -> None:
    writer = with_tokens()
    constraint = asked(writer, ToolUse(), OPEN, budget=2)
    first, second, _ = writer.tokens("漢")
    assert len(writer.allowed(constraint, [first])) == 64
    assert writer.allowed(constraint, [first, second]) == ["</think>"]
    tokens = [first, second, *writer.tokens("</think>text")]
    message = writer.read(QWEN, Reading(opening=OPEN), tokens)
    assert (message.reasoning, message.content) == ("\ufffd", "text")


def test_text_after_a_reasoning_budget_is_free() -> None:
    writer = with_tokens()
    constraint = asked(writer, ToolUse(tools=(FIND,)), OPEN, budget=5)
    assert writer.may_be(constraint, "</think> text <tool_call>{</tool_call> 漢")


def test_a_budget_goes_with_calls_and_answers() -> None:
    writer = with_tokens()
    for use, answer, text in (
        (REQUIRED, None, call()),
        (ToolUse(tools=(STRICT,)), None, "text" + call()),
        (ToolUse(), ANSWER, '{"x": 1}'),
    ):
        constraint = asked(writer, use, OPEN, answer, 2)
        assert writer.may_be(constraint, "ab</think>\n" + text)
        assert not writer.may_be(constraint, "a b c</think>\n" + text)


@pytest.mark.parametrize(
    ("use", "answer", "text"),
    [
        (REQUIRED, None, call()),
        (ToolUse(tools=(FIND, NOW), choice="required", named="now"), None, call("now")),
        (ToolUse(tools=(STRICT,)), None, "text"),
        (ToolUse(tools=(FIND,), parallel=False), None, "text"),
        (ToolUse(tools=(FIND,)), ANSWER, '{"x": 1}'),
        (ToolUse(), ANSWER, '{"x": 1}'),
    ],
)
def test_reasoning_begins_only_on_request(
    writer: Writer, use: ToolUse, answer: Constraint | None, text: str
) -> None:
    thought = "<think>\nHm\n</think>\n\n" + text
    for reasons in (None, False, True):
        constraint = asked(writer, use, "", answer, reasons=reasons)
        assert writer.may_be(constraint, text)
        assert writer.may_be(constraint, thought) == (reasons is True)
    assert writer.may_be(asked(writer, use, OPEN, answer), "Hm\n</think>\n\n" + text)


def test_a_budget_turns_reasoning_on_unless_it_is_off() -> None:
    writer, thought = with_tokens(), '<think>Hm</think>{"x": 1}'
    for reasons in (None, False, True):
        constraint = asked(writer, ToolUse(), "", ANSWER, 3, reasons=reasons)
        assert writer.may_be(constraint, thought) == (reasons is not False)
        anything = asked(writer, ToolUse(), "", budget=3, reasons=reasons)
        assert writer.may_be(anything, thought) == (reasons is not False)


def test_a_budget_takes_a_token_for_the_end() -> None:
    with raises("unsupported", "has no token"):
        asked(Writer(), ToolUse(), OPEN, budget=3)


# --- what nothing is asked of ---------------------------------------------------------------------


def test_a_message_that_may_be_anything() -> None:
    for use in (ToolUse(), ToolUse(tools=(FIND, NOW)), ToolUse(tools=(STRICT,), choice="none")):
        assert constraint_of(QWEN, "", use, None) is None
        assert constraint_of(None, "", use, None) is None


# --- answers --------------------------------------------------------------------------------------

ANSWERS: list[tuple[Constraint, list[str], list[str]]] = [
    (Constraint(json_object=True), ['{"a": [1]}', "{}"], ["[]", "text", "{" + " " * 9 + "}"]),
    (Constraint(json_schema={"type": "integer"}), ["12"], ["1.5"]),
    (Constraint(json_schema='{"enum": ["a\\"b", "ü"]}'), ['"a\\"b"', '"ü"'], ["a"]),
    (Constraint(regex=r"a/b\/c\\|[/\]]\n?"), ["a/b/c\\", "/", "]\n"], ["", "a"]),
    (Constraint(choice=('say "hi"', "a\\b", "é\x7f")), ['say "hi"', "a\\b", "é\x7f"], ["say"]),
    (Constraint(lark='start: "a" b*\nb: "b"\n%ignore " "  // twice'), ["a b  b"], ["b"]),
    (Constraint(gbnf='root ::= "x" y\ny ::= [0-9]+ "/"'), ["x12/"], ["x"]),
]


@pytest.mark.parametrize(("answer", "texts", "others"), ANSWERS)
@pytest.mark.parametrize("tools", [(), (STRICT,)])
def test_answers_after_reasoning_or_calls(
    answer: Constraint, texts: list[str], others: list[str], tools: tuple[Tool, ...]
) -> None:
    writer = with_tokens()
    constraint = asked(writer, ToolUse(tools=tools), OPEN, answer)
    for before in ("</think>", "Hm.\n</think>\n\n"):
        assert [text for text in texts if not writer.may_be(constraint, before + text)] == []
        assert [text for text in others if writer.may_be(constraint, before + text)] == []
        assert writer.may_be(constraint, before + call()) == bool(tools)


def test_an_answer_alone_stays_as_it_was() -> None:
    for answer, _, _ in ANSWERS:
        assert constraint_of(None, "", ToolUse(), answer) is answer
        assert constraint_of(QWEN, CLOSED, ToolUse(tools=(FIND,), choice="none"), answer) is answer


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (msgspec.convert({}, Constraint), "exactly one"),
        (Constraint(json_schema="{"), "no JSON"),
        (Constraint(json_schema="3"), "JSON object"),
        (msgspec.convert({"choice": []}, Constraint), "choice"),
        (Constraint(regex="a\\"), "backslash"),
        (Constraint(gbnf="root ::= ("), "GBNF"),
    ],
)
def test_answers_that_can_not_be_described(answer: Constraint, words: str) -> None:
    with raises("invalid_constraint", words):
        constraint_of(QWEN, OPEN, ToolUse(), answer)


# --- what formats have their own ways for ---------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "use", "budget"),
    [
        (None, REQUIRED, None),
        (None, ToolUse(), 5),
        ("gemma", REQUIRED, None),
        ("gemma", ToolUse(tools=(STRICT,)), None),
        ("llama", ToolUse(), 5),
    ],
)
def test_requests_beyond_a_format_are_refused(
    form: str | None, use: ToolUse, budget: int | None
) -> None:
    with raises("unsupported", r"gateway\.message_format"):
        constraint_of(form and named(form), "", use, None, budget)


@pytest.mark.parametrize(
    "use", [ToolUse(choice="required"), ToolUse(tools=(FIND,), choice="required", named="now")]
)
def test_calls_take_a_tool(use: ToolUse) -> None:
    with pytest.raises(RequestError, match="no tool"):
        constraint_of(QWEN, "", use, None)


def test_tools_that_are_not_strict_go_with_any_format() -> None:
    use = ToolUse(tools=(FIND,), parallel=False)
    assert constraint_of(named("gemma"), "", use, None) is None


def test_names_are_escaped_in_json() -> None:
    writer = with_tokens()
    tool = Tool(name='q"\\ü', parameters=PLACE)
    constraint = asked(writer, ToolUse(tools=(tool,), choice="required"), CLOSED)
    assert writer.may_be(constraint, call(r"q\"\\ü"))


def test_text_may_have_json_where_calls_are_json() -> None:
    writer = Writer()
    constraint = constraint_of(named("llama"), "", ToolUse(tools=(STRICT,)), None)
    for text in (
        'As {"name": "Bob"}, or {"name": "find", "age": 3}.',
        'Now {"name": "find", "parameters": {"zip": 1}}',
        '{"name": "find", "parameters": {"zip": 1}}; {"name": "find", "parameters": {"zip": 2}}',
    ):
        assert writer.may_be(constraint, text)
    for text in (
        '{"name": "find", "parameters": {"zip": "1"}}',
        '{ "name" : "find", "arguments": 1}',
        '{"name": "other", "parameters": {}}',
    ):
        assert not writer.may_be(constraint, text)


def test_arguments_that_refer_to_themselves_where_calls_are_json() -> None:
    tree = {
        "$defs": {"leaf": {"enum": ["#/x"]}},
        "properties": {"of": {"$ref": "#"}, "leaf": {"$ref": "#/$defs/leaf"}},
        "additionalProperties": False,
    }
    use = ToolUse(tools=(Tool(name="grow", parameters=tree, strict=True),))
    answer = Constraint(json_schema={**PLACE, "type": "object"})
    constraint = constraint_of(named("llama"), "", use, answer)
    writer = Writer()
    grown = '{"name": "grow", "parameters": {"of": {"leaf": "#/x"}}}'
    for text in (grown, f"{grown}; {grown}", '{"zip": 1}'):
        assert writer.may_be(constraint, text)
    assert not writer.may_be(constraint, grown.replace("of", "off"))


CALL_LIKE = {"properties": {"name": {}, "parameters": {}}, "additionalProperties": False}


@pytest.mark.parametrize(
    "answer",
    [
        Constraint(json_object=True),
        Constraint(regex="a"),
        Constraint(json_schema={"type": "object", "properties": {"x": PLACE}}),
        Constraint(json_schema={"anyOf": [{"type": "array"}]}),
        Constraint(json_schema={"enum": [[{"name": 1, "arguments": 2}]]}),
        Constraint(json_schema={"$defs": {"a": CALL_LIKE}, "$ref": "#/$defs/a"}),
    ],
)
def test_answers_that_could_be_taken_for_calls(answer: Constraint) -> None:
    with raises("unsupported", "additionalProperties"):
        constraint_of(named("llama"), "", ToolUse(tools=(FIND,)), answer)
    assert constraint_of(named("llama"), "", ToolUse(), answer) is answer


def test_an_answer_in_a_channel_of_its_own() -> None:
    writer = writer_of("gpt-oss", marked=True)
    form = named("gpt-oss")
    final, thought = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>Hm"
    end = "<|end|><|start|>assistant"
    answer = constraint_of(form, "", ToolUse(), ANSWER, 3, writer.special_tokens)
    unasked = constraint_of(form, "", ToolUse(), ANSWER, None, writer.special_tokens)
    assert writer.may_be(unasked, f'{final}{{"x": 1}}')
    assert not writer.may_be(unasked, f'{thought}{end}{final}{{"x": 1}}')
    assert writer.may_be(answer, f'{final}{{"x": 1}}')
    assert writer.may_be(answer, f'{thought}{end}{final}{{"x": 1}}')
    assert not writer.may_be(answer, '{"x": 1}')
    assert writer.allowed(answer, f"{thought}m") == ["<|end|>"]
    strict = (form, "", ToolUse(tools=(STRICT,)), None, None, writer.special_tokens)
    text = constraint_of(*strict, reasoning_asked=True)
    anything = constraint_of(form, "", ToolUse(tools=(FIND,)), None, 3, writer.special_tokens)
    called = f'{form.calls.before}find{form.calls.middle}{{"zip": 1}}{form.calls.after}'
    for constraint in (text, anything):
        assert writer.may_be(constraint, f"{thought}{end}{final}text")
        assert writer.may_be(constraint, f"{thought}{end}{called}")
        assert not writer.may_be(constraint, "text")


def test_blank_lines_of_llamas_form_cost_nothing() -> None:
    """Each takes time in proportion to their number, and 16,000 held the interpreter for 5 s."""
    gap = "\n \t\n" * 20_000
    assert lark_of_gbnf(f'root ::= {gap} "a\\n" x{gap}x ::= "b"{gap}') == lark_of_gbnf(
        'root ::= "a\\n" x\nx ::= "b"\n'
    )
