"""From options and lines to requests."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from nano_inference.bus.codec import check_request
from nano_inference.bus.public import GenerateRequest
from nano_inference.cli.requests import LineReader, Template, read_file, template
from nano_inference.config import ConfigError, RequestError

LIMIT = 1 << 20


def options(**given: Any) -> Template:
    """The template of these options."""
    names = inspect.signature(template).parameters
    return template(**dict.fromkeys(names) | given)


def test_a_text_is_greedy_and_short_by_default() -> None:
    assert options().of_text("12 + 30 =") == {
        "prompt": "12 + 30 =",
        "sampling": {"temperature": 0.0, "max_tokens": 64},
    }


def test_a_text_with_every_option() -> None:
    made = options(
        max_tokens=5, temperature=0.5, seed=7, stop=["a", "b"], priority=3, tenant="me", budget=1.5
    )
    assert made.of_text("Hello", chat=True) == {
        "messages": [{"role": "user", "content": "Hello"}],
        "sampling": {"temperature": 0.5, "max_tokens": 5, "seed": 7, "stop": ["a", "b"]},
        "priority": 3,
        "tenant": "me",
        "budget_ns": 1_500_000_000,
    }


def test_a_prediction_is_a_text_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "answer.txt"
    file.write_text("é and so on\n")
    for given, wanted in (("42", "42"), ("a=@b", "a=@b"), (f"@{file}", "é and so on\n")):
        request = options(prediction=given).of_text("x")
        assert request["prediction"] == wanted
        assert isinstance(check_request(request, LIMIT), GenerateRequest)
    with pytest.raises(ConfigError, match="--prediction: can't read"):
        options(prediction=f"@{tmp_path}/other")


def test_options_fill_in_the_missing_fields_of_an_object() -> None:
    given = {"prompt": "x", "priority": 3, "sampling": {"temperature": 0.7}}
    made = options(priority=2, max_tokens=5, temperature=0.1)
    assert made.of_object(given) == given | {"sampling": {"temperature": 0.7, "max_tokens": 5}}
    assert options().of_object({"prompt": "x"}) == {"prompt": "x"}


def test_any_sampling_parameter_takes_precedence_over_its_own_option() -> None:
    texts = ["top_p=0.9", "logit_bias={17: -2.5}", "temperature = 0.3", "prompt_logprobs=0"]
    request = options(temperature=1.0, sampling=texts).of_text("x")
    assert request["sampling"] == {
        "temperature": 0.3,
        "max_tokens": 64,
        "top_p": 0.9,
        "logit_bias": {17: -2.5},
        "prompt_logprobs": 0,
    }
    assert isinstance(check_request(request, LIMIT), GenerateRequest)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("top_p", "takes name=value"),
        ("repetition_penality=2", "did you mean 'repetition_penalty'"),
        ("=3", "no parameter ''"),
    ],
)
def test_a_sampling_parameter_that_is_none(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(sampling=[text])


def test_a_bias_in_a_line_has_text_for_token_ids() -> None:
    reader = LineReader("f", Template(), LIMIT, plain_prompts=True)
    assert reader.read(b'{"prompt": "x", "sampling": {"logit_bias": {"17": 2}}}') is not None


def test_lines_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(
        '{"prompt": "a"}\n\n"b \\"c\\""\r\n{"prompt": "d", "request_id": "mine"}', "utf-8"
    )
    submissions = read_file(file, LineReader("f", Template(), LIMIT))
    assert [(s.label, s.request["prompt"]) for s in submissions] == [
        ("1", "a"),
        ("3", 'b "c"'),
        ("mine", "d"),
    ]


@pytest.mark.parametrize("line", ["12 + 30 =", '"quoted"', "[1]", "größer"])
def test_plain_lines_are_prompts_as_they_stand(line: str) -> None:
    reader = LineReader("standard input", Template(), LIMIT, plain_prompts=True)
    submission = reader.read(line.encode() + b"\n")
    assert submission is not None
    assert submission.request["prompt"] == line


@pytest.mark.parametrize("line", [b'{"prompt"', b'{"prompt": 3}', b"\xff\xfe", b'{"a": ' * 9999])
def test_unreadable_lines_are_named(line: bytes) -> None:
    reader = LineReader("standard input", Template(), LIMIT, plain_prompts=True)
    assert reader.read(b"\n") is None
    with pytest.raises(RequestError, match=r"^standard input, line 2: "):
        reader.read(line)


def test_a_line_above_the_limit_of_the_bus() -> None:
    reader = LineReader("f", Template(), 100, plain_prompts=True)
    with pytest.raises(RequestError, match="line 1: "):
        reader.read(b"x" * 200)
