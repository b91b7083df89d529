"""Help, version, and how little they load."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from .conftest import Run

COMMANDS = (
    *("adapters", "cancel", "chat", "complete", "demo", "dlq", "doctor", "embed", "fairness"),
    "flush-cache",
    *("gateway", "health", "models", "pause", "resume"),
    *("run", "score", "serve", "status", "submit", "tail", "up", "weights"),
)


def test_without_arguments_there_is_help(run: Run) -> None:
    ran = run()
    assert ran.status == 0
    assert "nano-inference demo" in ran.stdout
    for command in COMMANDS:
        assert f"│ {command} " in ran.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_an_example(run: Run, command: str) -> None:
    ran = run(command, "--help")
    assert ran.status == 0
    body = ran.stdout.partition("Usage:")[2].partition("\n")[2]
    assert f"nano-inference {command}" in body


@pytest.mark.parametrize(
    "group", [["adapters"], ["admin"], ["admin", "keys"], ["dlq"], ["fairness"], ["weights"]]
)
def test_group_without_a_command_shows_its_help_alone(run: Run, group: list[str]) -> None:
    ran = run(*group)
    assert f"Usage: nano-inference {' '.join(group)} [OPTIONS] COMMAND" in ran.stdout
    assert (ran.status, ran.stderr) == (0, "")


def test_version(run: Run) -> None:
    assert run("--version").stdout == f"nano-inference {metadata.version('nano-inference')}\n"


def test_closed_standard_streams_are_replaced() -> None:
    command = f"{sys.executable} -m nano_inference --version <&- >&- 2>&-"
    assert subprocess.run(command, shell=True, timeout=60, check=False).returncode == 0


def test_help_loads_no_model_code() -> None:
    program = (
        "import sys; from nano_inference.__main__ import main\n"
        "sys.argv = ['nano-inference', '--help']\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'redis', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
