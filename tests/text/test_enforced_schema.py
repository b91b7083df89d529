"""Schemas are enforced as they are written, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nano_inference.config import BUNDLED_MODEL, Constraint, EngineConfig
from nano_inference.text.enforced_schema import enforced_lark
from nano_inference.text.grammar import GrammarCompiler
from nano_inference.text.tokenizer import load_tokenizer

from ..errors import raises

FOLDER = EngineConfig(model_path=BUNDLED_MODEL).model_folder
VOCAB = 779
TOKENIZER = load_tokenizer(FOLDER)
AMOUNT = {"properties": {"amount": {"type": "integer", "maximum": 100}}, "required": ["amount"]}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(FOLDER, VOCAB)


def takes(compiler: GrammarCompiler, constraint: Constraint, text: str) -> bool:
    """Return whether a text satisfies a constraint."""
    matcher = compiler.matcher(constraint)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def both(schema: dict[str, Any]) -> list[Constraint]:
    """A schema by itself, and in a grammar, as a tool's."""
    text = json.dumps(schema, ensure_ascii=False)
    lark = f'// a "comment\nstart: "" a | /x\\/"/ a\na: %json\n  {text}'
    return [Constraint(json_schema=schema), Constraint(json_schema=text), Constraint(lark=lark)]


OPEN: list[tuple[dict[str, Any], str, list[str]]] = [
    (AMOUNT, r'"amount": 5', [r"\u0061mount", r"a\u006Dount", "amount"]),
    (AMOUNT | {"type": "object"}, r'"amount": 5', [r"\u0061mount"]),
    # The last two as surrogates, by upper case and lower case digits.
    ({"required": ["é🙂"]}, r'"é🙂": 5', [r"\u00e9🙂", r"é\ud83d\ude42", r"é\uD83D\uDE42", "é🙂"]),
    ({"required": ["a\nb\x7f\x01"]}, '"a\\nb\x7f\\u0001": 5', [r"a\u000ab\u007f\u0001"]),
    ({"required": ['/"\\']}, r'"/\"\\": 5', [r"\/\"\\", r"/\u0022\\", r"/\"\u005C", r"/\"\\"]),
    ({"required": ["a"], "additionalProperties": {"type": "integer"}}, '"a": 5', [r"\u0061"]),
    ({"allOf": [{"properties": {"b": {}}}, {"required": ["a"]}]}, '"a": 5', [r"\u0061"]),
    (
        {
            "properties": {"a\n": {"type": "integer"}},
            "patternProperties": {"^a": {"type": ["integer", "string"]}},
            "required": ["a\n"],
            "additionalProperties": False,
        },
        r'"a\n": 5',
        [r"a\u000a", r"a\u000A", r"\u0061\n"],
    ),
]


@pytest.mark.parametrize(("schema", "written", "others"), OPEN)
def test_a_declared_name_has_one_spelling(
    compiler: GrammarCompiler, schema: dict[str, Any], written: str, others: list[str]
) -> None:
    name = written.rpartition(": ")[0]
    for around in ("{}", '{{"in": {}}}'):
        outer = {"required": ["in"], "properties": {"in": schema}}
        for constraint in both(schema if around == "{}" else outer):
            assert takes(compiler, constraint, around.format("{" + written + "}"))
            for other in others:
                text = around.format("{" + written + f', "{other}": 1000' + "}")
                assert json.loads(f'"{other}"') == json.loads(name)
                assert not takes(compiler, constraint, text), text


def test_other_names_and_texts_stay_possible(compiler: GrammarCompiler) -> None:
    for constraint in both(AMOUNT):
        text = r'{"amount": 5, "é/x\n\"\\🙂": {"amount": "é\n"}}'
        assert takes(compiler, constraint, text)
    closed = {"properties": {"a": {"type": "string"}}, "additionalProperties": False}
    for free in (*both(closed), *both({"type": "object"}), Constraint(json_object=True)):
        assert takes(compiler, free, r'{"a": "\u001b[0m"}')


def test_an_option_of_the_schema_opens_no_other_spelling(compiler: GrammarCompiler) -> None:
    options = {"json_allow_general_unicode_escapes": True, "json_allowed_escapes": 'u"n\\'}
    for constraint in both(AMOUNT | {"x-guidance": options}):
        assert takes(compiler, constraint, r'{"amount": 5,"a\n": 1}')
        assert not takes(compiler, constraint, r'{"amount": 5,"\u0061mount": 1}')


def test_a_repeated_name_does_not_count_twice(compiler: GrammarCompiler) -> None:
    for constraint in both({"minProperties": 2, "additionalProperties": {"type": "integer"}}):
        with raises("invalid_constraint", "minProperties"):
            compiler.check(constraint)
    for constraint in both({"minProperties": 2, "required": ["a"]}):
        assert takes(compiler, constraint, '{"a": 1, "b": 2}')
        assert not takes(compiler, constraint, '{"a": 1, "a": 2}')


EXACT = [
    *("0", "-1", "9007199254740992", "9007199254740994", "-9007199254740994", "0.1", "1e22"),
    *("-2.5", "123456.789", "4611686018427387904", "1e-7", "0.30000000000000004"),
]
INEXACT = [
    *("9007199254740993", "-9007199254740993", "18446744073709551616", "9223372036854775807"),
    *("-9223372036854775808", "0.1000000000000000055511151231257827", "1e400", "-1e400"),
    *("9007199254740993.0", "1e-400", "1e999999999", "1" + "0" * 400),
]


@pytest.mark.parametrize("number", EXACT)
def test_a_number_is_written_as_it_is_given(compiler: GrammarCompiler, number: str) -> None:
    for schema in ('{"const": %s}', '{"enum": [[{"a": %s}]]}'):
        matcher = compiler.matcher(Constraint(json_schema=schema % number))
        text = ""
        while not matcher.is_accepting():
            mask = matcher.compute_logit_bias()
            token = next(id for id, allowed in enumerate(mask) if allowed and id > 3)
            matcher.consume_token(token)
            text += TOKENIZER.decode([token])
        found = json.loads(text)
        assert (found if isinstance(found, int | float) else found[0]["a"]) == json.loads(number)


@pytest.mark.parametrize("number", INEXACT)
def test_a_number_that_would_become_another_is_refused(
    compiler: GrammarCompiler, number: str
) -> None:
    for schema in ('{"const": %s}', '{"anyOf": [{"enum": [[{"a": %s}]]}]}', '{"minimum": %s}'):
        for text in (Constraint(json_schema=schema % number), lark_of(schema % number)):
            with raises("invalid_constraint", "would become another one"):
                compiler.check(text)
    # Where it demands nothing.
    compiler.check(Constraint(json_schema=f'{{"type": "null", "examples": [{number}]}}'))


def lark_of(schema: str) -> Constraint:
    return Constraint(lark=f"start: %json {schema}")


@pytest.mark.parametrize("key", ["exclusiveMinimum", "exclusiveMaximum"])
def test_an_excluded_bound_that_would_be_included_is_refused(
    compiler: GrammarCompiler, key: str
) -> None:
    with raises("invalid_constraint", key):
        compiler.check(Constraint(json_schema={"type": "integer", key: 2**53}))
    schema = {"type": "integer", key: 2**53 - 1}
    assert not takes(compiler, Constraint(json_schema=schema), str(2**53 - 1))


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.25", "0.5"], ["0", "0.0", "-0", "0.51"]),
        ({"exclusiveMinimum": 5, "exclusiveMaximum": 5.5}, ["5.1", "5.499"], ["5", "5.00", "5.5"]),
        ({"exclusiveMaximum": 0, "minimum": -0.5}, ["-0.25", "-0.5"], ["0", "-0", "-0.0", "-0.6"]),
        ({"exclusiveMaximum": -5, "minimum": -5.5}, ["-5.1", "-5.5"], ["-5", "-5.0", "-6"]),
        ({"exclusiveMinimum": 0, "maximum": 1}, ["0.25", "1"], ["0", "0.0", "1.1"]),
        ({"exclusiveMinimum": -1, "maximum": -0.5}, ["-0.75", "-0.5"], ["-1", "-0.4"]),
    ],
)
def test_an_excluded_bound_is_excluded(
    compiler: GrammarCompiler, bounds: dict[str, float], inside: list[str], outside: list[str]
) -> None:
    for constraint in both({"type": "number"} | bounds):
        assert all(takes(compiler, constraint, text) for text in inside)
        assert not any(takes(compiler, constraint, text) for text in outside)


def test_limits_of_machine_integers_are_kept(compiler: GrammarCompiler) -> None:
    for most in (2**63 - 1, 2**64 - 1):
        constraint = Constraint(json_schema={"type": "integer", "minimum": 0, "maximum": most})
        assert takes(compiler, constraint, str(2**63 - 1))
        assert not takes(compiler, constraint, str(most + 1))


def test_an_unknown_format_is_an_annotation(compiler: GrammarCompiler) -> None:
    formats = ("password", "path", "binary", "uri-reference", "regex", "json-pointer", "cuid")
    for name in (*formats, "jwt", "base64url", "", "größe"):
        for constraint in both({"type": "string", "format": name, "maxLength": 3}):
            compiler.check(constraint)
            assert takes(compiler, constraint, '"a b"')
            assert not takes(compiler, constraint, '"abcd"')
    for constraint in both({"type": "string", "format": "date"}):
        assert takes(compiler, constraint, '"2026-01-31"')
        assert not takes(compiler, constraint, '"a"')
    # A property of that name is none, nor is a text.
    text = '{"format": "path"}'
    for constraint in both({"properties": {"format": {"const": "path"}}, "required": ["format"]}):
        assert takes(compiler, constraint, text)
        assert not takes(compiler, constraint, '{"format": "jwt"}')
    for constraint in both({"enum": [{"format": "path"}]}):
        assert takes(compiler, constraint, text)
        assert not takes(compiler, constraint, "{}")


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "[1,1]"),
    "not": ({"type": "integer", "not": {"const": 3}}, "3"),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 2}]}, "3"),
    "minProperties": ({"minProperties": 4, "additionalProperties": {"type": "integer"}}, "{}"),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, '{"a": 1}'),
}


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_a_keyword_that_can_not_be_enforced_is_refused_unless_it_is_to_be_ignored(
    compiler: GrammarCompiler, key: str
) -> None:
    schema, text = UNSUPPORTED[key]
    ignoring = GrammarCompiler(FOLDER, VOCAB, ignored=frozenset((key,)))
    for constraint in both(schema):
        with raises("invalid_constraint", f"{key}.*engine.ignored_schema_keywords"):
            compiler.check(constraint)
        ignoring.check(constraint)
        assert takes(ignoring, constraint, text)
    # Of a property or a value it is a name.
    named = {"properties": {key: {"const": {key: 1}}}, "required": [key]}
    for constraint in both(named):
        assert takes(ignoring, constraint, json.dumps({key: {key: 1}}))
        assert not takes(ignoring, constraint, "{}")


def test_a_keyword_that_demands_nothing_is_taken(compiler: GrammarCompiler) -> None:
    for constraint in both({"type": "array", "uniqueItems": False, "maxItems": 1}):
        assert takes(compiler, constraint, "[1]")
        assert not takes(compiler, constraint, "[1,1]")


@pytest.mark.parametrize(
    "part", ['"' + r"\"" * 30_000, "/" + r"\/" * 30_000, '%json {"a": ' * 5000]
)
def test_a_grammar_that_is_not_closed_is_read_once(part: str) -> None:
    """The search for schemas in it would otherwise take time by the square of its length."""
    assert enforced_lark(f"start: {part}", {}) == f"start: {part}"


def test_schemas_and_tokens_are_found_after_everything_else() -> None:
    text = r"""start: "<a> %json {" /<a>\/%json {/ <a> // <a> " %json {
%json {"minProperties": 1, "title": "<a>"} "x"i # '"'
<[3]> <[^*]> %json"""
    found = enforced_lark(text, {"<a>": 7})
    expected = text.replace("<a> // <a>", "<[7]> // <a>")
    assert found == expected.replace('"minProperties": 1, "title": "<a>"', '"minProperties":1')
    with raises("invalid_constraint", "special token <b>; it has <a>"):
        enforced_lark("start: <b>", {"<a>": 7})
