"""Help, version, errors and the demonstration."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from nano_inference.cli.app import PIPE_CLOSED, _group, main

from .conftest import Run, assert_refused

COMMANDS = (
    *("adapters", "cancel", "chat", "complete", "demo", "dlq", "doctor", "embed", "fairness"),
    *("flush-cache", "gateway", "health", "kv-events", "kv-session", "launch", "models", "pause"),
    *(
        "resume",
        "roles",
        "run",
        "samples",
        "score",
        "serve",
        "shards",
        "status",
        "submit",
        "tail",
        "up",
    ),
    "weights",
)


def test_without_arguments_there_is_help(run: Run) -> None:
    ran = run()
    assert ran.status == 0
    assert "nano-inference demo" in ran.stdout
    words = re.findall(r"[\w-]+", ran.stdout)
    assert set(COMMANDS) <= set(words)
    lines = ran.stdout.splitlines()
    assert len(lines) < 56, "it fits a screen"
    assert max(map(len, lines)) <= 80


def test_help_of_a_command_has_an_example(run: Run) -> None:
    commands = _group().commands
    for command in COMMANDS:
        assert f"nano-inference {command}" in (commands[command].help or ""), command
    ran = run("submit", "--help")
    assert ran.status == 0
    body = ran.stdout.partition("Usage:")[2].partition("\n")[2]
    assert "\n  nano-inference submit" in body


def test_help_names_values_and_defaults(run: Run) -> None:
    shown = run("top", "--help").stdout
    assert "  --every SECONDS  The interval; default: 1.\n" in shown
    assert "  --once           Print one status and exit.\n" in shown
    assert "--log-level debug|info|warning|error\n" in shown
    assert "<" not in shown


@pytest.mark.parametrize(
    "group",
    [["adapters"], ["admin"], ["admin", "keys"], ["dlq"], ["fairness"], ["roles"], ["weights"]],
)
def test_group_without_a_command_shows_its_help_alone(run: Run, group: list[str]) -> None:
    ran = run(*group)
    assert f"Usage: nano-inference {' '.join(group)} [OPTIONS] COMMAND" in ran.stdout
    assert (ran.status, ran.stderr) == (0, "")


def test_version(run: Run) -> None:
    assert run("--version").stdout == f"nano-inference {metadata.version('nano-inference')}\n"


def test_as_a_program_with_closed_standard_streams() -> None:
    """They are replaced, and the status of an error is that of the command."""
    command = f"{sys.executable} -m nano_inference frobnicate <&- >&- 2>&-"
    assert subprocess.run(command, shell=True, timeout=60, check=False).returncode == 2


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


def test_a_closed_pipe_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with capsys.disabled(), open(writer, "w") as pipe, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        assert main(["--help"]) == PIPE_CLOSED == 141


def test_ctrl_c_during_imports_is_quiet() -> None:
    program = (
        "import os, signal, sys\n"
        "class Pressed:\n"
        "    def find_spec(name, *more):\n"
        "        if name == 'nano_inference.cli.app': os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from nano_inference.__main__ import main\n"
        "sys.meta_path.insert(0, Pressed)\n"
        "main()\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (-signal.SIGINT, b"", b"")


@pytest.mark.parametrize("command", ["serve", "up", "demo"])
def test_too_little_address_space_is_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (10**9, -1))
    assert_refused(run(command), "`ulimit -v` allows 1.0 GB", "engine.kv_cache_bytes")


# --- errors -------------------------------------------------------------------------------------

WRONG = [
    ("frobnicate", "no such command 'frobnicate'"),
    ("submit --promt x", "no such option: --promt"),
    ("complete a b", "a text with spaces needs quotes"),
    ("serve tiny --model other", "not both"),
    ("run tiny", "a model is given with --model; 'nano-inference serve MODEL' serves it"),
    ("pause --for 3", "no such option: --for; see"),
    ("status --set foo", "'foo' has no '='"),
    ("serve --porrt 1", "no such option: --porrt; did you mean --port? See"),
    ("complte", "Did you mean 'complete'? See 'nano-inference --help'"),
    ("dlq --bus x", "as 'nano-inference dlq list --bus'"),
    ("submit", "give prompts"),
    ("submit a --file b", "only one"),
    ("submit a -", "only one"),
    ("submit a -n four", "--n / -n must be a whole number; got 'four'"),
    ("submit a -t hot", "-t must be a number; got 'hot'"),
    ("up --replicas 0", "must be at least 1; got '0'"),
    ("submit a --budget nan", "--budget"),
    ("submit a --bus memory", "--bus memory"),
    ("submit a --bus http://x", "redis://"),
    ("complete a --url ftp://x", "--url is 'ftp://x'"),
    ("models --url http://[", "--url is 'http://['"),
    ("models --url http://x --bus redis://x", "not both"),
    ("status --url http://x --bus redis://x", "not both"),
    ("top --url http://x --bus redis://x", "not both"),
    ("health --url http://x --bus redis://x", "not both"),
    ("health --stage exec", "did you mean 'executor'?"),
    ("chat --bus memory", "--bus memory"),
    ("cancel", "missing argument 'ID'"),
    ("complete a --sampling x=1", "no parameter 'x'"),
    ("tail --limit 0", "--limit"),
    ("kv-events --limit 0", "--limit"),
    ("release-memory --tag gpu", "'gpu' is not one of"),
    ("pause --in-flight forget", "'forget' is not one of"),
    ("status --log-level loud", "'warning'"),
    ("submit a --set engine.max_batchsize=4", "did you mean 'max_batch_size'?"),
    ("submit a --set engin.seed=4", "'engine'?"),
    ("submit a --set engine.seed", "section.setting=value"),
    ("submit a --set engine.seed=x", "engine.seed"),
    ("submit a --config /no/file", "can't read /no/file"),
    ("submit --file /no/file", "can't read /no/file"),
    ("run --model /no/model", "/no/model"),
    ("gateway --port 70000", "--port must be at most 65535"),
    ("up --gateway -1", "--gateway must be at least 0"),
    ("up --port 0", "--port must be at least 1"),
    ("gateway --bus memory", "--bus memory"),
    ("gateway --model /no/model", "/no/model"),
    ("up --model /no/model", "/no/model"),
    ("demo --set engine.model_path=/no/model", "/no/model"),
    ("serve --model org/name-0.5B", "run `nano-inference pull org/name-0.5B`"),
    ("serve --set engine.model_path=/no/model", "engine.model_path /no/model"),
]


@pytest.mark.parametrize(("command", "hint"), WRONG)
def test_each_error_is_one_sentence(run: Run, command: str, hint: str) -> None:
    assert_refused(run(*command.split()), hint)


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
def test_a_broken_model_is_found_before_anything_starts(
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


def test_a_pulled_model_is_found_by_its_name(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    pulled = tmp_path / ".cache/nano-inference/models/org--name"
    pulled.mkdir(parents=True)
    assert_refused(run("serve", "org/name"), f"{pulled} is a folder without config.json")
    assert "org/name" in run("list").stdout
    assert_refused(run("serve", "org/other"), "run `nano-inference pull org/other`")
    assert_refused(run("run", "--model", "org/name"), f"it was pulled to {pulled}")


@pytest.mark.parametrize(
    "command",
    ["submit x", "tail", "status", "top --once", "gateway", "up", "run --stages fairness"],
)
def test_redis_is_down(run: Run, closed_port: int, command: str) -> None:
    url = f"redis://:secret@127.0.0.1:{closed_port}"
    ran = run(*command.split(), "--bus", url)
    assert_refused(ran, f"127.0.0.1:{closed_port}")
    assert "secret" not in ran.stderr


@pytest.mark.parametrize("command", ["tail", "status"])
def test_commands_name_the_default_bus(
    run: Run, monkeypatch: pytest.MonkeyPatch, closed_port: int, command: str
) -> None:
    url = f"redis://127.0.0.1:{closed_port}"
    for module in ("options", "connection"):
        monkeypatch.setattr(f"nano_inference.cli.{module}.DEFAULT_URL", url)
    assert_refused(run(command), f"nano-inference: no pipeline at {url}; start one with")


# --- demo -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_demo(run: Run) -> None:
    ran = run("demo", "--set", "engine.dtype=float32")
    assert (ran.status, ran.stderr) == (0, "")
    assert " 5  98 + 25 =  →  123\n" in ran.stdout
    assert '"get_weather", "arguments": {"city": "Oslo"}}' in ran.stdout
    assert "6 + 6 = 12. ↵ </think> ↵  ↵ 12\n" in ran.stdout
    rows = [line for line in ran.stdout.splitlines() if line.rstrip().endswith(" done")]
    assert [row.split()[0] for row in rows] == [str(number) for number in range(1, 16)]
    for stage in ("admission", "fairness", "batching", "executor", "streaming"):
        assert f"\n{stage} " in ran.stdout
    assert "\n    rrrrr\n" in ran.stdout  # The circle's top.
    answer = "a red circle, a blue square and a green triangle"
    assert f"\nWhat do you see?  →  {answer}\n" in ran.stdout
    assert "nano-inference serve" in ran.stdout.splitlines()[-2]
    assert max(len(line) for line in ran.stdout.splitlines() if "→" not in line) <= 80
