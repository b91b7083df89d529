"""complete, cancel and models, against a gateway and against a bus."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from anyio.from_thread import start_blocking_portal

from .conftest import LIMIT_S, Paused, Ran, Run, assert_refused, post, type_in, wait_until

ASK = ["--max-tokens", "16"]


# --- complete -------------------------------------------------------------------------------------


def test_a_completion(run: Run, place: list[str]) -> None:
    assert run("complete", "98 + 25 =", *place) == Ran(0, " 123\n", "")


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_a_prompt_on_standard_input(
    run: Run, place: list[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    """All of it, without the line break that `echo` adds."""
    type_in(monkeypatch, "98 + 25 =\n")
    assert run("complete", *arguments, *place) == Ran(0, " 123\n", "")


def test_options_reach_the_engine(run: Run, place: list[str]) -> None:
    assert run("complete", "98 + 25 =", "--max-tokens", "3", *place).stdout == " 12\n"
    assert run("complete", "98 + 25 =", "--stop", "3", *place).stdout == " 12\n"
    drawn = {
        run("complete", "Story about", "-t", "1", "--seed", "7", *ASK, *place).stdout
        for _ in range(2)
    }
    assert len(drawn) == 1


def test_a_refused_request(run: Run, place: list[str]) -> None:
    ran = run("complete", "x", "--temperature", "-3", *place)
    assert (ran.status, ran.stdout) == (1, "")
    (line,) = ran.stderr.splitlines()
    assert line.startswith("nano-inference: temperature is -3.0;")
    assert line.endswith("(invalid_temperature)")


def test_another_model_is_refused(run: Run, place: list[str]) -> None:
    ran = run("complete", "x", "--model", "gpt-7", *place)
    assert ran.status == 1
    assert "gpt-7" in ran.stderr


def test_no_prompt(run: Run, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    type_in(monkeypatch, "\n")
    assert_refused(run("complete", "--url", url), "nothing on standard input")
    type_in(monkeypatch, b"\xff")
    assert_refused(run("complete", "--url", url), "UTF-8")


# --- models and cancel --------------------------------------------------------------------------


def test_models(run: Run, place: list[str]) -> None:
    assert run("models", *place).stdout.split()[0] == "tiny"
    (model,) = run("models", "--json", *place).stdout.splitlines()
    assert msgspec.json.decode(model)["id"] == "tiny"


def test_a_server_s_root_will_do(run: Run, url: str) -> None:
    assert run("models", "--url", f"{url}/").stdout.startswith("tiny ")


def test_a_request_is_cancelled(run: Run, place: list[str], url: str) -> None:
    """Its client gets an answer all the same."""
    with start_blocking_portal() as portal, Paused(url):
        body = {"text": "98 + 25 =", "rid": f"mine-{len(place)}"}
        answer = portal.start_task_soon(post, f"{url}/generate", body)
        wait_until(url, in_flight=True)
        assert run("cancel", body["rid"], *place) == Ran(0, "", "")
        result = answer.result(LIMIT_S).json()
    assert result["meta_info"]["finish_reason"]["type"] == "abort"


def test_an_unknown_request_is_ignored(run: Run, place: list[str]) -> None:
    assert run("cancel", "nobody", *place) == Ran(0, "", "")


# --- nobody there -------------------------------------------------------------------------------

EACH = [["chat"], ["complete", "x"], ["cancel", "x"], ["models"]]


@pytest.mark.parametrize("command", EACH)
def test_nobody_answers(run: Run, closed_port: int, command: list[str]) -> None:
    ran = run(*command, "--url", f"http://127.0.0.1:{closed_port}/v1")
    assert_refused(ran, f"can't reach http://127.0.0.1:{closed_port}/v1")
    ran = run(*command, "--bus", f"redis://127.0.0.1:{closed_port}")
    assert_refused(ran, f"127.0.0.1:{closed_port}")


@pytest.mark.parametrize("command", EACH)
def test_a_bus_without_a_pipeline(run: Run, on_nobody: str, command: list[str]) -> None:
    assert_refused(run(*command), "no stage is running")


@pytest.mark.parametrize("command", EACH)
def test_without_a_place_it_is_where_serve_listens(
    run: Run, monkeypatch: pytest.MonkeyPatch, closed_port: int, command: list[str]
) -> None:
    server = f"http://127.0.0.1:{closed_port}/v1"
    monkeypatch.setattr("nano_inference.cli.connection.DEFAULT_SERVER", server)
    assert_refused(run(*command), "start one with `nano-inference serve`")


# --- constraints ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("constraint", "answer"),
    [
        ("regex=[0-9]{4}", re.compile("[0-9]{4}")),
        ("choice=[perhaps, never]", re.compile("perhaps|never")),
        ('json_schema={"enum": [7]}', re.compile("7")),
        ("json_schema=@schema.json", re.compile("8")),
        ("choice=[yes, 12, null]", re.compile("yes|12|null")),
        ('gbnf=root ::= "yes" | "no"', re.compile("yes|no")),
        ('lark=start: "yes" | "no"', re.compile("yes|no")),
    ],
)
def test_an_answer_is_what_it_has_to_be(
    run: Run,
    place: list[str],
    constraint: str,
    answer: re.Pattern[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("schema.json").write_text('{"enum": [8]}')
    ran = run("complete", "98 + 25 =", "--constraint", constraint, *place)
    assert ran.status == 0, ran.stderr
    assert answer.fullmatch(ran.stdout.strip())


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ("regexp=a", "no kind 'regexp'"),
        ("regex", "regex=value"),
        ("json_schema=[]", "no JSON object"),
        ("json_object=false", "takes no value"),
        ("choice=yes", "no list"),
        ("choice=[[yes]]", "no list"),
        ("choice=[yes", "no list"),
        ("lark=@nowhere", "can't read nowhere"),
    ],
)
def test_a_constraint_that_is_none(run: Run, url: str, constraint: str, words: str) -> None:
    assert_refused(run("complete", "x", "--constraint", constraint, "--url", url), words)
