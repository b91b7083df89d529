"""submit, tail and status against a real pipeline behind a real server."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from redis import Redis

from nano_inference.bus.codec import encode_output
from nano_inference.bus.public import Completion
from nano_inference.config import STAGES, Config
from nano_inference.store.redis.keys import Keys

from .conftest import Run

PATIENCE_S = 60.0


@contextmanager
def started(command: list[str], stdin: int = subprocess.DEVNULL) -> Iterator[subprocess.Popen[str]]:
    """A program with pipes, ended at the latest with the test."""
    with subprocess.Popen(
        command,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Shells start background jobs with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def completions(text: str) -> list[Completion]:
    return [msgspec.json.decode(line, type=Completion) for line in text.splitlines()]


# --- submit -----------------------------------------------------------------------------------


def test_one_text(run: Run, on_served: Config) -> None:
    ran = run("submit", "98 + 25 =")
    assert (ran.status, ran.stdout.strip(), ran.stderr) == (0, "123", "")


def test_chat(run: Run, on_served: Config) -> None:
    assert run("submit", "--chat", "What is 12 + 30?").stdout == "42\n"


def test_trace_goes_to_stderr(run: Run, on_served: Config) -> None:
    ran = run("submit", "98 + 25 =", "--trace")
    assert ran.stdout.strip() == "123"
    rows = [line.split()[0] for line in ran.stderr.splitlines()]
    stages = ["admission", "fairness", "batching", "executor", "streaming"]
    assert rows == ["request", "start", *stages, "first"]


def test_samples_one_below_the_other(run: Run, on_served: Config) -> None:
    ran = run("submit", "98 + 25 =", "-n", "3")
    assert ran.stdout == "[0] 123\n[1] 123\n[2] 123\n"


def test_json(run: Run, on_served: Config) -> None:
    ran = run("submit", "98 + 25 =", "-n", "2", "--json", "--max-tokens", "1")
    (completion,) = completions(ran.stdout)
    assert completion.status == "done"
    assert [len(sample.token_ids) for sample in completion.samples] == [1, 1]


def test_refused_request(run: Run, on_served: Config) -> None:
    ran = run("submit", "x", "-n", "0")
    assert (ran.status, ran.stdout) == (1, "")
    assert ran.stderr.startswith("nano-inference: error: n is 0;")
    assert ran.stderr.endswith("(invalid_n)\n")


def test_file(run: Run, on_served: Config, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    lines = [
        '"98 + 25 ="',
        '{"prompt": "98 + 25 =", "request_id": "mine", "sampling": {"temperature": 0.0}}',
        '{"prompt": "98 + 25 =", "n": 0}',
    ]
    file.write_text("\n".join(lines))
    ran = run("submit", "--file", str(file))
    assert ran.status == 1
    assert sorted(ran.stdout.splitlines()) == ["[1] 123", "[mine] 123"]
    error, summary = ran.stderr.splitlines()
    assert error.startswith("nano-inference: [3] error: n is 0")
    assert summary.startswith("3 answered, 1 of them not well; ")


def test_several_texts(run: Run, on_served: Config) -> None:
    ran = run("submit", "98 + 25 =", "12 + 30 =", "--max-tokens", "3")
    assert ran.status == 0
    assert [line[:4] for line in sorted(ran.stdout.splitlines())] == ["[1] ", "[2] "]
    assert ran.stderr.startswith("2 answered; 6 tokens")


def test_standard_input(program: list[str], on_served: Config) -> None:
    lines = [f"{i} + 5 =" for i in range(1, 100)]
    done = subprocess.run(
        [*program, "submit", "-", "--max-tokens", "3"],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    labels = [line.partition(" ")[0] for line in done.stdout.splitlines()]
    assert sorted(labels) == sorted(f"[{i}]" for i in range(1, 100))


def test_lines_before_an_unreadable_one_are_answered(program: list[str], on_served: Config) -> None:
    done = subprocess.run(
        [*program, "submit", "-"],
        input='98 + 25 =\n{"prompt\n98 + 25 =\n',
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "[1] 123\n")
    assert done.stderr.startswith("nano-inference: standard input, line 2: not valid JSON")
    assert len(done.stderr.splitlines()) == 1


def test_no_wait(run: Run, on_nobody: str, redis_url: str) -> None:
    ran = run("submit", "x", "--no-wait")
    assert ran.status == 0
    with Redis.from_url(redis_url) as redis:
        entries = redis.xrange(Keys(on_nobody).requests)
    assert [entry_id.decode() for entry_id, _ in entries] == ran.stdout.split()


def test_closed_pipe_is_quiet(program: list[str], on_served: Config) -> None:
    with started([*program, "submit", "-"], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.write("98 + 25 =\n")
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 1
        assert process.stderr.read() == ""


def test_waiting_is_said_once_and_ctrl_c_cancels(
    program: list[str], on_nobody: str, redis_url: str
) -> None:
    code = (
        "import sys; from nano_inference.cli import app, submit\n"
        "submit.PATIENCE_S = 0.01\n"
        "sys.exit(app.main(['submit', 'x']))\n"
    )
    with started([program[0], "-c", code]) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("nano-inference: waiting: no answer for")
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, stdout, stderr) == (130, "", "")
    with Redis.from_url(redis_url) as redis:
        assert redis.xlen(Keys(on_nobody).link("control.admission")) == 1


def test_ctrl_c_while_reading_a_terminal_or_pipe(program: list[str], on_served: Config) -> None:
    with started([*program, "submit", "-"], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("98 + 25 =\n")
        process.stdin.flush()
        assert process.stdout.readline() == "[1] 123\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, stderr) == (130, "")


# --- tail -------------------------------------------------------------------------------------


def test_tail(program: list[str], run: Run, on_served: Config) -> None:
    with started([*program, "tail", "--limit", "2"]) as process:
        assert process.stdout is not None
        # The heading comes when the stream is being followed.
        assert process.stdout.readline().split()[:2] == ["request", "status"]
        assert run("submit", "98 + 25 =").status == 0
        assert run("submit", "x", "-n", "0").status == 1
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, stderr) == (0, "")
    first, second = (line.split() for line in stdout.splitlines())
    assert (first[1], first[-1]) == ("done", "123")
    assert second[1:6] == ["error", "0", "-", "-", "invalid_n:"]


def test_tail_json(program: list[str], on_nobody: str, redis_url: str) -> None:
    sent = Completion(request_id="a", entry_id="1-0", status="expired")
    with started([*program, "tail", "--json", "--limit", "1"]) as process:
        with Redis.from_url(redis_url) as redis:
            # It says nothing when it begins, so it is told until it has heard.
            while process.poll() is None:
                redis.xadd(Keys(on_nobody).results, {"json": encode_output(sent)})
                time.sleep(0.01)
        stdout, _ = process.communicate(timeout=PATIENCE_S)
    assert completions(stdout) == [sent]


# --- status -----------------------------------------------------------------------------------


def test_status_where_nothing_ever_ran(run: Run, on_nobody: str) -> None:
    ran = run("status")
    assert ran.status == 1
    assert "not ready: no stage is running; start a pipeline" in ran.stdout
    found = json.loads(run("status", "--json").stdout)
    assert (found["waiting"], found["in_flight"], found["last_taken_s"]) == (0, 0, None)
    assert (found["prefix"], found["lanes"], found["ready"]) == (on_nobody, [], False)


def test_status_counts_what_waits_and_what_is_in_flight(
    run: Run, on_nobody: str, redis_url: str
) -> None:
    for _ in range(3):
        run("submit", "x", "--no-wait")
    keys = Keys(on_nobody)
    with Redis.from_url(redis_url) as redis:
        redis.xgroup_create(keys.requests, "admission", "0")
        redis.xreadgroup("admission", "admission-0", {keys.requests: ">"}, count=1)
        redis.xadd(keys.link("plans"), {"w": b"", "m": b""})
        found = json.loads(run("status", "--json").stdout)
    assert (found["waiting"], found["in_flight"]) == (2, 1)
    assert found["links"]["plans"] == 1
    assert found["last_taken_s"] >= 0
    text = run("status").stdout
    assert "1 in flight, 0 tokens/s, 2 waiting" in text
    assert "plans ≤ 1" not in text
    assert "plans ≤ 1" in run("status", "--verbose").stdout


def until_ready(run: Run) -> None:
    """Stages tell about once a second how they are."""
    for _ in range(600):
        if run("status").status == 0:
            return
        time.sleep(0.1)
    raise AssertionError(run("status").stdout)


def test_status_of_a_running_pipeline(run: Run, on_served: Config) -> None:
    run("submit", "98 + 25 =")
    until_ready(run)
    text = run("status").stdout
    rows = [line.split()[:2] for line in text.splitlines()]
    for stage in STAGES:
        assert [stage, "ready"] in rows
    assert [line.split()[:2] for line in text.splitlines()[:2]] == [
        ["pipeline", "ready"],
        ["requests", "0"],
    ]
    assert "free, " in text
    assert "credits" not in text
    assert "credits" in run("status", "-v").stdout
    assert max(map(len, text.splitlines())) <= 80
    found = json.loads(run("status", "--json").stdout)
    assert (found["waiting"], found["in_flight"], found["dead_letters"]) == (0, 0, 0)
    assert found["results"] >= 1
    assert (found["ready"], found["reason"]) == (True, "")
    (lane,) = found["lanes"]
    assert lane["epoch"] >= 1
    assert set(lane["stages"]) == set(STAGES)
    assert found["server"].startswith("Valkey ")
    assert sum(found["connections"].values()) >= 1


def test_status_names_connections(run: Run, on_nobody: str, redis_url: str) -> None:
    with Redis.from_url(redis_url, client_name="some-process") as redis:
        redis.ping()
        assert json.loads(run("status", "--json").stdout)["connections"]["some-process"] == 1
        assert "other connection" in run("status", "--verbose").stdout


@pytest.mark.parametrize("command", ["tail", "status"])
def test_clients_find_the_default_server(
    run: Run, monkeypatch: pytest.MonkeyPatch, closed_port: int, command: str
) -> None:
    url = f"redis://127.0.0.1:{closed_port}"
    for module in ("options", "connection"):
        monkeypatch.setattr(f"nano_inference.cli.{module}.DEFAULT_URL", url)
    ran = run(command)
    assert ran.status == 2
    assert ran.stderr.startswith(f"nano-inference: no pipeline at {url}; start one with")
