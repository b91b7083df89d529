"""embed and score, on a running pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nano_inference.config import Config

from .conftest import Run, assert_refused


def test_each_text_has_a_line(run: Run, on_served: Config) -> None:
    ran = run("embed", "98 + 25 =", "12 + 30 =", "--pooling", "mean", "--dimensions", "5")
    assert ran.status == 0, ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [(each.get("index"), len(each["embedding"])) for each in lines] == [(0, 5), (1, 5)]
    assert [sum(x * x for x in each["embedding"]) for each in lines] == pytest.approx([1, 1])
    assert lines[0]["embedding"] != lines[1]["embedding"]


def test_lines_of_input_are_texts_and_a_refused_one_has_its_error(
    run: Run, on_served: Config
) -> None:
    ran = run("embed", "-", stdin="98 + 25 =\n\n12 + 30 =\n")
    assert ran.status == 1
    first, empty, last = (json.loads(line) for line in ran.stdout.splitlines())
    assert len(first["embedding"]) == len(last["embedding"]) == 128
    assert (empty["index"], empty["error"]["code"]) == (1, "empty_prompt")


@pytest.mark.parametrize("arguments", [(), ("a", "--pooling", "max"), ("a", "--dimensions", "0")])
def test_a_bad_call_is_refused(run: Run, on_served: Config, arguments: tuple[str, ...]) -> None:
    ran = run("embed", *arguments)
    assert (ran.status, ran.stdout) == (2, "")


# --- score ----------------------------------------------------------------------------------------


def scores(run: Run, *arguments: str, stdin: str | None = None) -> list[dict[str, Any]]:
    ran = run("score", *arguments, stdin=stdin)
    assert ran.status == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_answers_are_scored_as_they_were_printed(run: Run, on_served: Config) -> None:
    made = run("submit", "98 + 25 =", "-n", "3", "-t", "0.5", "--json")
    samples = json.loads(made.stdout)["samples"]
    found = scores(run, "-", "-t", "0.5", stdin=made.stdout)
    assert [(each["line"], each["sample_index"]) for each in found] == [(1, 0), (1, 1), (1, 2)]
    for sample, each in zip(samples, found, strict=True):
        assert each["logprobs"] == pytest.approx(sample["logprobs"], abs=1e-4)
        assert each["ref_logprobs"] is None
        assert each["weight_version"] == sample["weight_version"]


def test_pairs_of_a_file_have_temperatures_of_their_own(
    run: Run, on_served: Config, tmp_path: Path
) -> None:
    pair = {"prompt_token_ids": [30, 31], "token_ids": [32, 33, 34]}
    lines = [pair, {**pair, "temperature": 2.0}]
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n\n".join(map(json.dumps, lines)))
    plain, warm = scores(run, str(file))
    assert (plain["line"], warm["line"]) == (1, 3)
    assert [len(each["logprobs"]) for each in (plain, warm)] == [3, 3]
    assert plain["logprobs"] != warm["logprobs"]
    assert scores(run, str(file), "-t", "2")[0]["logprobs"] == pytest.approx(warm["logprobs"])


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 1: "),
        ('{"prompt_token_ids": [1]}', "line 1: Object missing required field `token_ids`"),
        ('{"prompt_token_ids": [], "token_ids": [1]}', "give at least one token of each"),
        ('{"prompt_token_ids": [1], "token_ids": [1], "top_k": 3}', "unknown field `top_k`"),
        ('{"prompt_token_ids": [1], "token_ids": [99999]}', "token"),
        ("", "holds nothing to score"),
    ],
)
def test_a_bad_line_is_refused(run: Run, on_served: Config, line: str, problem: str) -> None:
    assert_refused(run("score", "-", stdin=line), problem)


def test_a_missing_file_is_refused(run: Run, on_served: Config, tmp_path: Path) -> None:
    assert_refused(run("score", str(tmp_path / "nowhere")), "can't read")
