"""Programs of others are set to a server, and started."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, NoReturn

import pytest

from nano_inference.cli.agents import AGENTS
from nano_inference.cli.launch import launch_of

from .conftest import Run, assert_refused

API = "http://host:8000/models/it's/v1"
KEY = 'sesame "$x'


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, where each program's command prints its arguments and environment."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "bin").mkdir()
    for agent in AGENTS.values():
        stub = tmp_path / "bin" / agent.command[0]
        stub.write_text('#!/bin/sh\nprintf "%s\\0" "$@"; printf "\\0"; env -0\n')
        stub.chmod(0o755)
    return tmp_path


def at(*arguments: str) -> list[str]:
    return ["launch", *arguments, "--url", API, "--model", "m"]


@pytest.mark.parametrize("program", AGENTS)
def test_the_printed_script_starts_the_program_as_launch_does(
    run: Run, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setenv("NANO_INFERENCE_API_KEY", KEY)
    script = run(*at(program, "--print"), "--", "-p", "it's $HOME").stdout
    assert "sesame" not in script
    ran = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    arguments, _, variables = ran.stdout.partition("\0\0")
    ready = launch_of(program, API, "m", KEY, ["-p", "it's $HOME"])
    assert arguments.split("\0") == ready.command[1:]
    found = dict(each.partition("=")[::2] for each in variables.split("\0"))
    assert {name: found[name] for name in ready.variables} == ready.variables
    for path in ready.files:
        assert path.stat().st_mode & 0o077 == 0
    addresses = [*ready.command, *ready.variables.values(), *ready.files.values()]
    assert any(API.removesuffix("/v1") in each for each in addresses)


@pytest.mark.parametrize("program", [name for name in AGENTS if AGENTS[name].files])
def test_files_hold_the_server_and_the_model(program: str) -> None:
    ready = launch_of(program, API, 'a"b', KEY)
    (text,) = ready.files.values()
    strings = json.dumps(json.loads(text), ensure_ascii=False)
    assert json.dumps('a"b') in strings
    assert API in strings


def test_launch_becomes_the_program(
    run: Run, monkeypatch: pytest.MonkeyPatch, url: str, home: Path
) -> None:
    became: list[Any] = []

    def become(file: str, command: list[str], environment: dict[str, str]) -> NoReturn:
        became.extend((file, command, environment))
        raise SystemExit(0)

    monkeypatch.setattr("os.execvpe", become)
    ran = run("launch", "cline", "--url", url, "--", "hi")
    assert (ran.status, ran.stderr) == (0, "nano-inference: starting cline\n")
    file, command, environment = became
    assert (file, command) == ("cline", ["cline", "hi"])
    assert (environment["HOME"], environment["NANO_INFERENCE_API_KEY"]) == (str(home), "none")
    settings = Path(environment["CLINE_DATA_DIR"], "settings/providers.json")
    provider = json.loads(settings.read_text())["providers"]["openai-compatible"]["settings"]
    assert (provider["model"], provider["baseUrl"]) == ("tiny", f"{url}/v1")


def test_a_program_that_is_missing_is_refused_with_how_to_install_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert_refused(run("launch", "codex"), "codex is not on the PATH", "npm install -g @openai")
    assert_refused(run("launch", "codxe"), "did you mean 'codex'?")


def test_a_server_that_does_not_answer_is_named(run: Run) -> None:
    ran = run("launch", "codex", "--url", "http://127.0.0.1:9")
    assert "127.0.0.1:9" in ran.stderr
    assert ran.status != 0
