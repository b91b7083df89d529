"""submit and tail, on a running pipeline; requests from options and lines."""

from __future__ import annotations

import inspect
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest
from redis import Redis

from nano_inference.bus.codec import check_request, encode_output
from nano_inference.bus.public import Completion, GenerateRequest
from nano_inference.cli.requests import LineReader, Template, read_file, template
from nano_inference.config import Config, ConfigError, RequestError
from nano_inference.store.redis.keys import Keys

from ..commands import COMMAND, run_command
from ..programs import Program
from .conftest import Run, assert_refused

PATIENCE_S = 60.0


@contextmanager
def started(
    folder: Path, *arguments: str, file: Path = COMMAND, whole_end: bool = False
) -> Iterator[tuple[Program, IO[str]]]:
    """A program whose standard output is a pipe; its `output` is standard error alone.

    `whole_end`: as of `Program`."""
    pipe = folder / "stdout"
    os.mkfifo(pipe)
    program = Program(file, *arguments, stdout=pipe, whole_end=whole_end)
    with program, pipe.open() as stdout:
        yield program, stdout


def completions(text: str) -> list[Completion]:
    return [msgspec.json.decode(line, type=Completion) for line in text.splitlines()]


# --- submit -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["98 + 25 ="], " 123\n"),
        (["--chat", "What is 12 + 30?"], "42\n"),
        (["98 + 25 =", "-n", "3"], "[0] 123\n[1] 123\n[2] 123\n"),
    ],
)
def test_one_text(run: Run, on_served: Config, arguments: list[str], answer: str) -> None:
    assert run("submit", *arguments) == (0, answer, "")


def test_trace_goes_to_stderr(run: Run, on_served: Config) -> None:
    ran = run("submit", "98 + 25 =", "--trace")
    assert ran.stdout.strip() == "123"
    rows = [line.split()[0] for line in ran.stderr.splitlines()]
    stages = ["admission", "fairness", "batching", "executor", "streaming"]
    assert rows[:8] == ["request", "start", *stages, "first"]
    assert rows[8] == "time"
    assert {"own", "sum"} <= {*rows[9:]}


def test_json(run: Run, on_served: Config) -> None:
    ran = run("submit", "98 + 25 =", "-n", "2", "--json", "--max-tokens", "1")
    (completion,) = completions(ran.stdout)
    assert completion.status == "done"
    assert [len(sample.token_ids) for sample in completion.samples] == [1, 1]


def test_a_fork_goes_on_after_a_token(run: Run, on_served: Config) -> None:
    (parent,) = completions(run("submit", "98 + 25 =", "--json").stdout)
    whole = parent.samples[0]
    ran = run("submit", "--fork", parent.request_id, "--at", "1", "--json")
    (fork,) = completions(ran.stdout)
    assert fork.prompt_token_ids == (*parent.prompt_token_ids, whole.token_ids[0])
    assert (whole.token_ids[0], *fork.samples[0].token_ids) == whole.token_ids
    assert_refused(run("submit", "a", "--fork", parent.request_id, "--at", "1"), "takes no text")
    assert_refused(run("submit", "--fork", parent.request_id), "--at")


def test_refused_request(run: Run, on_served: Config) -> None:
    ran = run("submit", "x", "-n", "0")
    assert (ran.status, ran.stdout) == (1, "")
    assert ran.stderr.startswith("nano-inference: error: n is 0;")
    assert ran.stderr.endswith("(invalid_n)\n")


def test_file(run: Run, on_served: Config, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    mine = '{"prompt": "98 + 25 =", "request_id": "mine", "sampling": {"temperature": 0.0}}'
    file.write_text(f'"98 + 25 ="\n{mine}\n{{"prompt": "98 + 25 =", "n": 0}}')
    ran = run("submit", "--file", str(file))
    assert ran.status == 1
    assert sorted(ran.stdout.splitlines()) == ["[1] 123", "[mine] 123"]
    error, summary = ran.stderr.splitlines()
    assert error.startswith("nano-inference: [3] error: n is 0")
    assert summary.startswith("3 answered, 1 of them failed; ")


def test_several_texts(run: Run, on_served: Config) -> None:
    ran = run("submit", "98 + 25 =", "12 + 30 =", "--max-tokens", "3")
    assert ran.status == 0
    assert [line[:4] for line in sorted(ran.stdout.splitlines())] == ["[1] ", "[2] "]
    assert ran.stderr.startswith("2 answered; 6 tokens")


def test_standard_input(on_served: Config) -> None:
    lines = "\n".join(f"{i} + 5 =" for i in range(1, 100))
    ran = run_command("submit", "-", "--max-tokens", "3", text=lines)
    assert ran.status == 0, ran.stderr
    labels = [line.partition(" ")[0] for line in ran.stdout.splitlines()]
    assert sorted(labels) == sorted(f"[{i}]" for i in range(1, 100))


def test_lines_before_an_unreadable_one_are_answered(on_served: Config) -> None:
    ran = run_command("submit", "-", text='98 + 25 =\n{"prompt\n98 + 25 =\n')
    assert (ran.status, ran.stdout) == (2, "[1] 123\n")
    assert ran.stderr.startswith("nano-inference: standard input, line 2: not valid JSON")
    assert len(ran.stderr.splitlines()) == 1


def test_no_wait(run: Run, on_nobody: str, redis_url: str) -> None:
    ran = run("submit", "x", "--no-wait")
    assert ran.status == 0
    with Redis.from_url(redis_url) as redis:
        entries = redis.xrange(Keys(on_nobody).requests)
    assert [entry_id.decode() for entry_id, _ in entries] == ran.stdout.split()


def test_closed_pipe_is_quiet(on_served: Config, tmp_path: Path) -> None:
    with started(tmp_path, "submit", "-", whole_end=True) as (process, stdout):
        stdout.close()
        process.stdin.write("98 + 25 =\n")
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 141
        assert process.output.read() == ""


def test_waiting_is_said_once_and_ctrl_c_cancels(
    on_nobody: str, redis_url: str, tmp_path: Path
) -> None:
    code = tmp_path / "code.py"
    code.write_text(
        "import sys; from nano_inference.cli import app, submit\n"
        "submit.PATIENCE_S = 0.01\n"
        "sys.exit(app.main(['submit', 'x']))\n"
    )
    with started(tmp_path, file=code) as (process, stdout):
        assert process.output.readline().startswith("nano-inference: waiting: no answer for")
        process.send_signal(signal.SIGINT)
        assert (process.wait(PATIENCE_S), stdout.read(), process.output.read()) == (130, "", "")
    with Redis.from_url(redis_url) as redis:
        assert redis.xlen(Keys(on_nobody).link("control.admission")) == 1


def test_ctrl_c_while_reading_a_terminal_or_pipe(on_served: Config, tmp_path: Path) -> None:
    with started(tmp_path, "submit", "-", whole_end=True) as (process, stdout):
        process.stdin.write("98 + 25 =\n")
        process.stdin.flush()
        assert stdout.readline() == "[1] 123\n"
        process.send_signal(signal.SIGINT)
        assert (process.wait(PATIENCE_S), process.output.read()) == (130, "")


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ('{"prompt": ', "line 2: not valid JSON"),
        ('{"promt": "x"}', "line 2: promt is not known here"),
        ('{"prompt": "x", "n": "two"}', "line 2: n is 'two'; it must be a whole number"),
        ('{"prompt": "x", "sampling": 3}', "line 2: sampling is 3; it must be an object"),
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


def test_file_without_requests(run: Run) -> None:
    assert_refused(run("submit", "--file", "/dev/null"), "holds no requests")


# --- tail -------------------------------------------------------------------------------------


def test_tail(run: Run, on_served: Config, place: list[str], tmp_path: Path) -> None:
    with started(tmp_path, "tail", "--limit", "2", *place) as (process, stdout):
        # The heading comes when the stream is being followed.
        assert stdout.readline().split()[:2] == ["request", "status"]
        assert run("submit", "98 + 25 =").status == 0
        assert run("submit", "x", "-n", "0").status == 1
        text = stdout.read()
        assert (process.wait(PATIENCE_S), process.output.read()) == (0, "")
    first, second = (line.split() for line in text.splitlines())
    assert (first[1], first[-1]) == ("done", "123")
    assert second[1:6] == ["error", "0", "-", "-", "invalid_n:"]


def test_tail_json(on_nobody: str, redis_url: str, tmp_path: Path) -> None:
    sent = Completion(request_id="a", entry_id="1-0", status="expired")
    tail = ("tail", "--json", "--limit", "1")
    with started(tmp_path, *tail) as (process, stdout), Redis.from_url(redis_url) as redis:
        # Nothing shows that it has begun, so results are sent until it has received one.
        while process.poll() is None:
            redis.xadd(Keys(on_nobody).results, {"json": encode_output(sent)})
            time.sleep(0.01)
        assert completions(stdout.read()) == [sent]


# --- requests from options and lines --------------------------------------------------------------


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
def test_a_bad_sampling_parameter_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(sampling=[text])


def test_a_bias_in_a_line_has_text_for_token_ids() -> None:
    reader = LineReader("f", Template(), LIMIT, plain_prompts=True)
    assert reader.read(b'{"prompt": "x", "sampling": {"logit_bias": {"17": 2}}}') is not None


def test_lines_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text('{"prompt": "a"}\n\n"b \\"c\\""\r\n{"prompt": "d", "request_id": "mine"}')
    submissions = read_file(file, LineReader("f", Template(), LIMIT))
    found = {each.label: each.request["prompt"] for each in submissions}
    assert found == {"1": "a", "3": 'b "c"', "mine": "d"}


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
