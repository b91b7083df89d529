"""Texts are embedded by the command line."""

from __future__ import annotations

import io
import json

import pytest

from nano_inference.config import Config

from .conftest import Run


def test_each_text_has_a_line(run: Run, on_served: Config) -> None:
    ran = run("embed", "98 + 25 =", "12 + 30 =", "--pooling", "mean", "--dimensions", "5")
    assert ran.status == 0, ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [(each.get("index"), len(each["embedding"])) for each in lines] == [(0, 5), (1, 5)]
    assert [sum(x * x for x in each["embedding"]) for each in lines] == pytest.approx([1, 1])
    assert lines[0]["embedding"] != lines[1]["embedding"]


def test_lines_of_input_are_texts_and_one_that_is_refused_says_why(
    run: Run, on_served: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = io.BytesIO(b"98 + 25 =\n\n12 + 30 =\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(text))
    ran = run("embed", "-")
    assert ran.status == 1
    first, empty, last = (json.loads(line) for line in ran.stdout.splitlines())
    assert len(first["embedding"]) == len(last["embedding"]) == 128
    assert (empty["index"], empty["error"]["code"]) == (1, "empty_prompt")


@pytest.mark.parametrize("arguments", [(), ("a", "--pooling", "max"), ("a", "--dimensions", "0")])
def test_a_bad_call_is_refused(run: Run, on_served: Config, arguments: tuple[str, ...]) -> None:
    ran = run("embed", *arguments)
    assert (ran.status, ran.stdout) == (2, "")
