"""Texts of tools in grammars of their own, in JSON, between tags and as in Python."""

from __future__ import annotations

import json

import pytest

from nano_inference.config import Constraint, RequestError
from nano_inference.text.messages import Tool, ToolUse, constraint_of, may_have_grammar
from nano_inference.text.messages.lark_in_json import in_json

from .families import named
from .message_writer import Writer, writer_of

PATCH = r"""
start: "*** Begin" LF hunk+ end? // a comment
hunk: "+" /(.*)/ LF -> line
    | "- \"" NAME "\\" ("a".."c" | "TAB\t"i | [/[^"'\n]/ /\d+\.(x|\/)/]) LF
end: "***"
NAME: /[a-z"]{2,3}|x?/
%import common.LF
"""
TEXTS = [
    "*** Begin\n+\n",
    '*** Begin\n+any "text" of \\ one\tline é\u2028\x01\n+\n***',
    '*** Begin\n- "a"b\\b\n- "x\\tab\t\n- "\\€17./\n',
]
OTHERS = [
    "",
    "*** Begin",
    "*** Begin\n+a\nb\n",
    '*** Begin\n- "abcd\\b\n',
    '*** Begin\n- "x\\"\n',
    "*** Begin\n- x\\b\n",
    "*** Begin\n+\n****",
]
IN_JSON = '<tool_call>\n{{"name": "edit", "arguments": {{"input": {}}}}}\n</tool_call>'
IN_TAGS = (
    "<tool_call>\n<function=edit>\n<parameter=input>\n{}\n</parameter>\n</function>\n</tool_call>"
)
EDIT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def rule(name: str, grammar: str) -> tuple[Writer, Constraint]:
    writer = writer_of(name, marked=True)
    assert may_have_grammar(named(name), grammar)
    tool = Tool(name="edit", parameters=EDIT, strict=True, grammar=grammar)
    found = constraint_of(
        named(name),
        "",
        ToolUse(tools=(tool,), choice="required"),
        None,
        None,
        writer.special_tokens,
    )
    assert found is not None
    return writer, found


@pytest.mark.parametrize("name", ["qwen", "qwen-xml"])
def test_a_tool_s_text_keeps_to_its_grammar(name: str) -> None:
    writer, constraint = rule(name, PATCH)

    def call(text: str) -> str:
        return (
            IN_JSON.format(json.dumps(text, ensure_ascii=False))
            if name == "qwen"
            else IN_TAGS.format(text)
        )

    assert [text for text in TEXTS if not writer.may_be(constraint, call(text))] == []
    assert [text for text in OTHERS if writer.may_be(constraint, call(text))] == []


@pytest.mark.parametrize(
    "grammar",
    [
        "start: X\nX: ~/a/",
        "start: <|end|>",
        'start: %json {"type": "object"}',
        "start: /a$/",
        "%import .other.X\nstart: X",
        "%import common.SQL_COMMENT\nstart: SQL_COMMENT",
        "start: WS\n%import common.WS\n%ignore WS",
        'start: "ab".."c"',
        "start: /(/",
    ],
)
def test_what_has_no_form_in_json_is_not_enforced_there(grammar: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        in_json(grammar)
    assert not may_have_grammar(named("qwen"), grammar)


def test_a_grammar_stands_beside_no_answer_in_plain_json() -> None:
    tool = Tool(name="edit", parameters=EDIT, strict=True, grammar='start: "a"')
    answer = Constraint(json_schema={"const": 1})
    with pytest.raises(RequestError) as raised:
        constraint_of(named("llama"), "", ToolUse(tools=(tool,)), answer)
    assert raised.value.code == "unsupported"
