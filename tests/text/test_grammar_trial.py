"""Grammars that would take hours and all memory, whatever the library's own limits."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from nano_inference.config import Constraint, EngineConfig, RequestError
from nano_inference.text import grammar
from nano_inference.text.grammar import GrammarCompiler
from nano_inference.text.grammar_trial import GrammarTrial

from ..errors import raises

FOLDER = EngineConfig().model_folder
VOCAB = 779
LONG = "start: T\nT: /(.*a.{40}.*)/ & /(.*b.{40}.*)/ & ~/(.*c.{40}.*)/"
# No text is such that its 41st last character is both.
PATTERNS = {"allOf": [{"type": "string", "pattern": f"^.*{c}.{{40}}$"} for c in "ab"]}
HOSTILE = [
    (Constraint(lark=LONG), "make it simpler"),
    (Constraint(json_schema=PATTERNS), "determine if regex is empty"),
]


@pytest.fixture
def compiler() -> GrammarCompiler:
    return GrammarCompiler(FOLDER, VOCAB)


@pytest.mark.parametrize(("constraint", "words"), HOSTILE)
def test_a_grammar_without_end_is_refused_once_for_all(
    compiler: GrammarCompiler, constraint: Constraint, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        with raises("invalid_constraint", words):
            compiler.check(constraint)
        assert compiler.knows(constraint)
        # From here on it is remembered.
        monkeypatch.setattr(GrammarTrial, "run", lambda *_: pytest.fail("it was tried again"))


def test_the_librarys_message_about_a_trial_is_reported(compiler: GrammarCompiler) -> None:
    for text, words in (("start: <nope>", "special token"), ("start: <[779]>", "range")):
        with pytest.raises(RequestError, match=words):
            compiler.check(Constraint(lark=text))
    compiler.check(Constraint(lark="start: <|im_start|> <[778]>"))


def test_compiled_grammars_are_kept_up_to_a_size(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "_KEPT_BYTES", 1)
    first, last = Constraint(regex="ab*c"), Constraint(regex="ab*cd")
    for each in (first, last):
        compiler.check(each)
        assert compiler.knows(each)
    assert not compiler.knows(first)


def test_a_process_that_ended_is_started_again() -> None:
    trial = GrammarTrial(VOCAB, [2], dict(grammar._LIMITS))
    assert trial.run("start: <[700]>") == ""
    os.kill(trial._process.pid, signal.SIGKILL)
    trial._process.wait()
    assert trial.run("start: <[700]>") == ""


def test_the_process_ends_with_its_owner() -> None:
    trial = GrammarTrial(VOCAB, [2], dict(grammar._LIMITS))
    assert trial.run('start: "a"') == ""
    process = trial._process
    assert isinstance(process, subprocess.Popen)
    del trial
    assert process.wait(10) is not None


def test_a_process_that_can_not_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nonexistent")
    with raises("internal_error", "process"):
        GrammarTrial(VOCAB, [2], dict(grammar._LIMITS)).run('start: "a"')
