"""Supported constraints, and refusals before anything runs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nano_inference.config import BUNDLED_MODEL, Constraint, EngineConfig, RequestError
from nano_inference.text import grammar
from nano_inference.text.grammar import GrammarCompiler, check_size, plain
from nano_inference.text.tokenizer import load_tokenizer

from ..errors import raises

FOLDER = EngineConfig(model_path=BUNDLED_MODEL).model_folder
VOCAB = 779


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(FOLDER, VOCAB)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def decoded(**fields: Any) -> Constraint:
    """A constraint as from a client in another language, which nothing has checked."""
    return msgspec.convert(fields, Constraint)


REFUSED: dict[str, tuple[Constraint, str]] = {
    "nothing": (decoded(), "exactly one"),
    "two": (decoded(json_object=True, regex="a"), "exactly one"),
    "no JSON": (Constraint(json_schema="{"), "no JSON"),
    "no object": (Constraint(json_schema="3"), "JSON object"),
    "not": (Constraint(json_schema={"not": {}}), "not"),
    "a type that is none": (Constraint(json_schema={"type": "foo"}), "foo"),
    "contradictory": (
        Constraint(json_schema={"type": "string", "minLength": 5, "maxLength": 2}),
        "minLength",
    ),
    "elsewhere": (Constraint(json_schema={"$ref": "http://127.0.0.1:1/x"}), "not fetch"),
    "deep": (Constraint(json_schema=nested(200)), "recursion|nested"),
    "look-ahead": (Constraint(regex="(?=a)b"), "look-around"),
    "open bracket": (Constraint(regex="a("), r"expression 'a\(', at character 2: unclosed group$"),
    "surrogate": (Constraint(regex="\ud800"), "read"),
    "no choice": (decoded(choice=()), "choice"),
    "an empty choice": (decoded(choice=("a", "")), "choice"),
    "an unknown rule": (Constraint(lark="start: x"), "unknown name"),
    "no rule": (Constraint(lark=""), "Empty"),
    "a rule that never ends": (Constraint(lark="start: start"), "no text at all"),
    "no root": (Constraint(gbnf='a ::= "b"'), "root"),
    "broken": (Constraint(gbnf="root ::= ("), "GBNF"),
    "a product of alternatives": (
        Constraint(
            json_schema={
                "allOf": [
                    {"anyOf": [{"type": "string", "pattern": f"a{i}{j}"} for i in range(8)]}
                    for j in range(8)
                ]
            }
        ),
        # Which of the two comes first depends on the machine.
        "too large|takes more than",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_constraints_are_refused(compiler: GrammarCompiler, name: str) -> None:
    constraint, words = REFUSED[name]
    with raises("invalid_constraint", words):
        compiler.check(constraint)


WORDS = r"^(?:\S+\s+){0,99}\S+$"
COSTLY: dict[str, Constraint] = {
    "a schema": Constraint(json_schema={"type": "string", "maxLength": 5000, "pattern": WORDS}),
    "a later field": Constraint(
        json_schema={
            "type": "object",
            "properties": {
                "id": {"type": "integer"},
                "name": {"type": "string", "maxLength": 9},
                "text": {"type": "string", "maxLength": 5000, "pattern": WORDS},
            },
            "required": ["id", "name", "text"],
            "additionalProperties": False,
        }
    ),
    "a grammar": Constraint(lark=r"start: T " "\n" r"T: /(?:\S+\s+){0,99}\S+/ & /.{0,5000}/s"),
    "a pattern": Constraint(regex="(((a{1,100}){1,100}){1,100}){1,100}"),
}


@pytest.mark.parametrize("name", COSTLY)
def test_constraints_that_no_text_within_the_limits_meets_are_refused(
    compiler: GrammarCompiler, name: str
) -> None:
    with raises("invalid_constraint", "too much work"):
        compiler.check(COSTLY[name])


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint(json_schema={"type": "string", "pattern": WORDS}),
        Constraint(json_schema={"type": "string", "maxLength": 5000, "pattern": "^[a-z ]*$"}),
        Constraint(json_schema={"type": "string", "maxLength": 200, "format": "email"}),
        Constraint(regex=r"(?:\S+\s+){0,99}\S+"),
        Constraint(regex="([a-z]{2,12} ){1000}"),
    ],
)
def test_long_texts_within_the_limits_are_taken(
    compiler: GrammarCompiler, constraint: Constraint
) -> None:
    compiler.check(constraint)


def test_a_long_one_is_refused_by_its_size() -> None:
    check_size(Constraint(regex="a" * 100), 200)
    with pytest.raises(RequestError, match="200 are taken"):
        check_size(Constraint(regex="a" * 200), 200)


def test_a_schema_becomes_text_in_its_own_order() -> None:
    schema = {"type": "object", "properties": {"z": {}, "a": {}}}
    assert plain(Constraint(json_schema=schema)) == Constraint(
        json_schema='{"type":"object","properties":{"z":{},"a":{}}}'
    )
    assert plain(Constraint(regex="a")) == Constraint(regex="a")


def test_matchers_of_one_grammar_are_independent(compiler: GrammarCompiler) -> None:
    first, second = (compiler.matcher(Constraint(regex="ab")) for _ in range(2))
    (a,) = (token for token in range(VOCAB) if first.deep_copy().consume_token(token))
    assert first.consume_token(a)
    assert not first.deep_copy().consume_token(a)
    assert second.consume_token(a)


def test_threads_share_a_compiler(compiler: GrammarCompiler) -> None:
    made: list[object] = []

    def make() -> None:
        made.extend(compiler.matcher(Constraint(regex=f"[a-z]{{{n}}}")) for n in range(1, 40))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(made) == 4 * 39


def test_a_model_without_an_end_takes_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": []}')
    compiler = GrammarCompiler(tmp_path, VOCAB, lambda folder: load_tokenizer(FOLDER))
    with pytest.raises(RequestError, match="end-of-sequence"):
        compiler.check(Constraint(json_object=True))


def test_a_tokenizer_with_more_tokens_than_the_model_takes_none() -> None:
    with pytest.raises(RequestError, match="tokenizer"):
        GrammarCompiler(FOLDER, 100).check(Constraint(json_object=True))


def test_a_compiled_grammar_waits_for_no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """llguidance holds the interpreter while it reads one, so that nothing else goes on."""
    ready = GrammarCompiler(FOLDER, VOCAB)
    ready.make_ready()
    assert ready.stop_ids

    def too_late(*_: object) -> None:
        raise AssertionError("the tokenizer is read while requests run")

    monkeypatch.setattr(grammar, "LLTokenizer", too_late)
    monkeypatch.setattr(ready, "load", too_late)
    ready.check(Constraint(regex="[0-9]+"))


@pytest.mark.parametrize(
    "constraint",
    [Constraint(regex="[a-z]{3,5}x"), Constraint(json_schema={"type": "string", "maxLength": 3})],
)
def test_stages_of_one_process_share_compiled_grammars(
    constraint: Constraint, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = GrammarCompiler(FOLDER, VOCAB), GrammarCompiler(FOLDER, VOCAB)
    first.check(constraint)
    monkeypatch.delattr(grammar, "_compile")
    # As admission hands it on.
    assert not second.matcher(plain(constraint)).is_error()


def test_a_tokenizer_that_can_not_be_used_is_read_once() -> None:
    loaded: list[Path] = []

    def load(folder: Path) -> Any:
        loaded.append(folder)
        return load_tokenizer(folder)

    compiler = GrammarCompiler(FOLDER, 100, load)
    compiler.make_ready()
    for _ in range(2):
        with pytest.raises(RequestError, match="tokenizer"):
            compiler.check(Constraint(json_object=True))
    assert loaded == [FOLDER]


def test_grammars_that_grow_are_not_kept_beyond_the_limit() -> None:
    """All matchers of a grammar share its states, which masks add to."""
    compiler = GrammarCompiler(FOLDER, VOCAB + 1)  # shared with no other test
    kept = [Constraint(regex=f"a{{{number}}}") for number in range(1, 4)]
    for constraint in kept:
        compiler.check(constraint)
    compiler.charge(kept[1], 60.0)
    assert [compiler.knows(constraint) for constraint in kept] == [False, False, True]
    compiler.forget(kept[2])
    assert not compiler.knows(kept[2])
    compiler.check(kept[2])
