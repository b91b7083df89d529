"""Whatever a user does wrong: one sentence, exit status 2, no traceback."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from .conftest import Ran, Run

WRONG = [
    pytest.param(["frobnicate"], "no such command 'frobnicate'", id="unknown command"),
    pytest.param(["submit", "--promt", "x"], "no such option: --promt", id="unknown option"),
    pytest.param(["complete", "a", "b"], "a text with spaces needs quotes", id="extra argument"),
    pytest.param(["serve", "tiny"], "a model is given with --model", id="model as an argument"),
    pytest.param(["serve", "--porrt", "1"], "--port", id="option nearly right"),
    pytest.param(
        ["complate"],
        "Did you mean 'complete'? See 'nano-inference --help'",
        id="command nearly right",
    ),
    pytest.param(
        ["dlq", "--bus", "x"], "as 'nano-inference dlq list --bus'", id="option too early"
    ),
    pytest.param(["submit"], "give prompts", id="no prompt"),
    pytest.param(["submit", "a", "--file", "b"], "only one", id="prompt and file"),
    pytest.param(["submit", "a", "-"], "only one", id="prompt and standard input"),
    pytest.param(
        ["submit", "a", "-n", "four"], "--n / -n must be a whole number; got 'four'", id="no number"
    ),
    pytest.param(
        ["submit", "a", "-t", "hot"], "-t must be a number; got 'hot'", id="no number at all"
    ),
    pytest.param(["up", "--replicas", "0"], "must be at least 1; got '0'", id="below the least"),
    pytest.param(["submit", "a", "--budget", "nan"], "--budget", id="budget"),
    pytest.param(["submit", "a", "--bus", "memory"], "--bus memory", id="memory bus"),
    pytest.param(["submit", "a", "--bus", "http://x"], "redis://", id="not a redis url"),
    pytest.param(["complete", "a", "--url", "ftp://x"], "--url is 'ftp://x'", id="not a url"),
    pytest.param(["models", "--url", "http://["], "--url is 'http://['", id="not a url at all"),
    pytest.param(["models", "--url", "http://x", "--bus", "redis://x"], "not both", id="both"),
    pytest.param(["chat", "--bus", "memory"], "--bus memory", id="chat on a memory bus"),
    pytest.param(["cancel"], "missing argument 'ID'", id="no id"),
    pytest.param(["complete", "a", "--sampling", "x=1"], "no parameter 'x'", id="no parameter"),
    pytest.param(["tail", "--limit", "0"], "--limit", id="limit"),
    pytest.param(["status", "--log-level", "loud"], "'warning'", id="log level"),
    pytest.param(
        ["submit", "a", "--set", "engine.max_batchsize=4"],
        "did you mean 'max_batch_size'?",
        id="unknown setting",
    ),
    pytest.param(["submit", "a", "--set", "engin.seed=4"], "'engine'?", id="unknown section"),
    pytest.param(["submit", "a", "--set", "engine.seed"], "section.setting=value", id="no value"),
    pytest.param(["submit", "a", "--set", "engine.seed=x"], "engine.seed", id="wrong type"),
    pytest.param(["submit", "a", "--config", "/no/file"], "can't read /no/file", id="no config"),
    pytest.param(["submit", "--file", "/no/file"], "can't read /no/file", id="no file"),
    pytest.param(["run", "--model", "/no/model"], "/no/model", id="no model"),
    pytest.param(["gateway", "--port", "70000"], "--port must be at most 65535", id="no such port"),
    pytest.param(["up", "--gateway", "-1"], "--gateway must be at least 0", id="negative port"),
    pytest.param(["up", "--port", "0"], "--port must be at least 1", id="port of the bus"),
    pytest.param(["gateway", "--bus", "memory"], "--bus memory", id="gateway on a memory bus"),
    pytest.param(["gateway", "--model", "/no/model"], "/no/model", id="no model for the gateway"),
    pytest.param(["up", "--model", "/no/model"], "/no/model", id="no model for up"),
    pytest.param(
        ["serve", "--model", "Qwen/Qwen2.5-0.5B-Instruct"],
        "fetch it with `nano-inference pull Qwen/Qwen2.5-0.5B-Instruct`",
        id="model of a hub",
    ),
    pytest.param(
        ["serve", "--set", "engine.model_path=/no/model"], "engine.model_path /no/model", id="set"
    ),
]


def assert_refused(ran: Ran, hint: str) -> None:
    assert ran.status == 2
    assert ran.stdout == ""
    lines = ran.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("nano-inference: ")
    assert hint in lines[0]


@pytest.mark.parametrize(("arguments", "hint"), WRONG)
def test_one_sentence(run: Run, arguments: list[str], hint: str) -> None:
    assert_refused(run(*arguments), hint)


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        ({}, "is a folder without config.json and without a GGUF file"),
        ({"config.json": b"{}"}, "is a folder without weights"),
        ({"model.gguf.txt": b"GGU"}, "is a folder without config.json"),
        (b"text", "is no GGUF file"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "up"])
def test_model_that_is_none_is_found_before_anything_starts(
    run: Run, tmp_path: Path, command: str, files: dict[str, bytes] | bytes, hint: str
) -> None:
    path = tmp_path / "it"
    if isinstance(files, bytes):
        path.write_bytes(files)
    else:
        path.mkdir()
        for name, content in files.items():
            (path / name).write_bytes(content)
    assert_refused(run(command, "--model", str(path)), f"--model {path} {hint}")


def test_model_that_was_pulled_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    pulled = tmp_path / ".cache/nano-inference/models/org--name"
    pulled.mkdir(parents=True)
    assert_refused(run("serve", "--model", "org/name"), f"it was pulled to {pulled}")


@pytest.mark.parametrize("arguments", [["submit", "x"], ["tail"], ["status"], ["gateway"]])
def test_redis_is_down(run: Run, closed_port: int, arguments: list[str]) -> None:
    url = f"redis://:secret@127.0.0.1:{closed_port}"
    ran = run(*arguments, "--bus", url)
    assert_refused(ran, f"127.0.0.1:{closed_port}")
    assert "secret" not in ran.stderr


def test_run_with_redis_down(run: Run, closed_port: int) -> None:
    ran = run("run", "--bus", f"redis://127.0.0.1:{closed_port}", "--stages", "fairness")
    assert_refused(ran, f"127.0.0.1:{closed_port}")


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ('{"prompt": ', "line 2: not valid JSON"),
        ('{"promt": "x"}', "line 2: Object contains unknown field `promt`"),
        ('{"prompt": "x", "n": "two"}', "line 2: Expected `int`"),
        ('{"prompt": "x", "sampling": 3}', "line 2: Expected `object`"),
        ("12 + 30 =", "line 2: not valid JSON"),
        ("[1, 2]", "line 2: a line is a request"),
    ],
)
def test_bad_line_of_a_file(run: Run, on_nobody: str, tmp_path: Path, line: str, hint: str) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    assert_refused(run("submit", "--file", str(file), "--no-wait"), f"{file}, {hint}")
    status = run("status", "--json").stdout
    assert '"waiting":0' in status, "the line before the bad one was sent"


def test_file_without_requests(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "empty.jsonl"
    file.write_text("\n\n")
    assert_refused(run("submit", "--file", str(file)), "holds no requests")


def test_as_a_program(program: list[str]) -> None:
    done = subprocess.run(
        [*program, "frobnicate"], capture_output=True, text=True, timeout=60, check=False
    )
    assert_refused(Ran(done.returncode, done.stdout, done.stderr), "no such command 'frobnicate'")
