"""chat, complete, cancel and models, against a gateway and against a bus."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from anyio.from_thread import start_blocking_portal

from nano_inference.cli import chat as chat_command
from nano_inference.cli.answerer import AnswerPiece, AskedCall, ServedModel
from nano_inference.config import Config, GatewayConfig, RequestError

from .conftest import Ran, Run
from .opened import Opened
from .test_errors import assert_refused

LIMIT_S = 60.0

ASK = ["--max-tokens", "16"]


@pytest.fixture(scope="module")
def url(served: Config) -> Iterator[str]:
    """A gateway in front of the pipeline that all tests share."""
    config = msgspec.structs.replace(served, gateway=GatewayConfig())
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(Opened(config)) as gateway,
    ):
        yield gateway.url


@pytest.fixture(params=["url", "bus"])
def place(request: pytest.FixtureRequest, on_served: Config, url: str) -> list[str]:
    """The options that name it. Without --url, commands find the bus in the environment."""
    return ["--url", f"{url}/v1"] if request.param == "url" else []


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Standard input is a pipe with a text."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


# --- complete -----------------------------------------------------------------------------------


def test_a_completion(run: Run, place: list[str]) -> None:
    assert run("complete", "98 + 25 =", *place) == Ran(0, " 123\n", "")


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_a_prompt_on_standard_input(
    run: Run, place: list[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    """All of it, without the line break that `echo` adds."""
    typed(monkeypatch, "98 + 25 =\n")
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
    typed(monkeypatch, "\n")
    assert_refused(run("complete", "--url", url), "nothing on standard input")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
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
    with start_blocking_portal() as portal, paused(url):
        body = {"text": "98 + 25 =", "rid": f"mine-{len(place)}"}
        answer = portal.start_task_soon(_post, f"{url}/generate", body)
        wait_until(url, in_flight=True)
        assert run("cancel", body["rid"], *place) == Ran(0, "", "")
        told = answer.result(LIMIT_S).json()
    assert told["meta_info"]["finish_reason"]["type"] == "abort"


def test_what_nobody_knows_is_left_alone(run: Run, place: list[str]) -> None:
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
    monkeypatch.setattr(
        "nano_inference.cli.answerer.DEFAULT_SERVER", f"http://127.0.0.1:{closed_port}/v1"
    )
    monkeypatch.setattr(
        "nano_inference.cli.http_calls.DEFAULT_SERVER", f"http://127.0.0.1:{closed_port}/v1"
    )
    assert_refused(run(*command), "start one with `nano-inference serve`")


# --- chat ---------------------------------------------------------------------------------------


def test_questions_on_a_pipe(run: Run, place: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard output has the answers and nothing else."""
    typed(monkeypatch, "What is 12 + 30?\n\nHow much is 9 - 4?")
    ran = run("chat", *place)
    first, second = ran.stdout.splitlines()
    assert first == "42"
    assert second
    assert (ran.status, ran.stderr) == (0, "")


class Recorded:
    """An answerer that answers with how many messages it was given."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.failures: list[Exception] = []
        # A request that is refused, by its number.
        self.fails_at = 0
        # Of the answers in order, as far as they have any.
        self.calls: list[tuple[AskedCall, ...]] = []

    async def check(self) -> str:
        return "served"

    async def ask(self, request: dict[str, Any]) -> AsyncGenerator[AnswerPiece, None]:
        self.requests.append(request)
        yield AnswerPiece(reasoning="Let me see.")
        yield AnswerPiece("I have ")
        if self.failures:
            raise self.failures.pop()
        if len(self.requests) == self.fails_at:
            raise RequestError("no")
        yield AnswerPiece(f"{len(request['messages'])}.")
        if self.calls:
            yield AnswerPiece(calls=self.calls.pop(0))

    async def cancel(self, request_id: str) -> None:
        raise AssertionError

    async def models(self) -> list[ServedModel]:
        raise AssertionError

    @property
    def said(self) -> list[list[str]]:
        return [[each["content"] for each in asked["messages"]] for asked in self.requests]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    answerer = Recorded()

    @asynccontextmanager
    async def answerer_at(place: object) -> AsyncIterator[Recorded]:
        yield answerer

    monkeypatch.setattr(chat_command, "answerer_at", answerer_at)
    return answerer


def test_what_was_said_goes_with_each_question(
    run: Run, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "one\n two \n/reset\nthree\n/quit\nfour\n")
    ran = run("chat")
    assert (ran.status, ran.stdout) == (0, "I have 1.\nI have 3.\nI have 1.\n")
    assert recorded.said == [["one"], ["one", "I have 1.", "two"], ["three"]]
    assert [asked["model"] for asked in recorded.requests] == ["served"] * 3


def test_the_next_line_is_what_comes_of_a_call(
    run: Run, recorded: Recorded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    (tmp_path / "tools.json").write_bytes(msgspec.json.encode(tools))
    recorded.calls = [(AskedCall("c0", "add", '{"a":1}'), AskedCall("c1", "add", "{}"))]
    typed(monkeypatch, "question\n17\n18\nand then\n")
    ran = run("chat", "--tools", str(tmp_path / "tools.json"), "--url", "http://127.0.0.1:9/v1")
    assert (ran.status, ran.stdout) == (0, "I have 1.\nI have 4.\nI have 6.\n")
    assert 'calls add {"a":1}' in ran.stderr
    told = recorded.requests[1]["messages"]
    assert [each["role"] for each in told] == ["user", "assistant", "tool", "tool"]
    assert [each["tool_call_id"] for each in told[2:]] == ["c0", "c1"]
    assert [each["content"] for each in told[2:]] == ["17", "18"]
    assert told[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a":1}'}
    assert all(asked["tools"] == tools for asked in recorded.requests)


@pytest.fixture
def with_tools(tmp_path: Path) -> list[str]:
    path = tmp_path / "tools.json"
    path.write_text('[{"type": "function", "function": {"name": "add"}}]')
    return ["chat", "--tools", str(path), "--url", "http://127.0.0.1:9/v1"]


def test_a_call_without_a_next_line_ends_it(
    run: Run, recorded: Recorded, monkeypatch: pytest.MonkeyPatch, with_tools: list[str]
) -> None:
    """A model that only calls would otherwise be asked for ever."""
    recorded.calls = [(AskedCall("c0", "add", "{}"), AskedCall("c1", "add", "{}"))] * 3
    typed(monkeypatch, "question\n17\n")
    ran = run(*with_tools)
    assert (ran.status, ran.stdout) == (1, "I have 1.\n")
    assert recorded.said == [["question"]]


def test_a_call_whose_result_was_refused_was_not_made(
    run: Run, recorded: Recorded, monkeypatch: pytest.MonkeyPatch, with_tools: list[str]
) -> None:
    recorded.calls = [(AskedCall("c0", "add", "{}"),)]
    recorded.fails_at = 2
    typed(monkeypatch, "question\n17\nand then\n")
    assert run(*with_tools).status == 1
    assert recorded.said[1:] == [["question", "I have 1.", "17"], ["and then"]]


def test_tools_that_are_none_are_refused(
    run: Run, on_served: Config, tmp_path: Path, url: str
) -> None:
    path = tmp_path / "tools.json"
    at = ["chat", "--tools", str(path), "--url", url]
    assert_refused(run(*at), "has no list of tools")
    path.write_text("{}")
    assert_refused(run(*at), "has no list of tools")
    path.write_text("[]")
    assert_refused(run("chat", "--tools", str(path)), "takes a server")


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


def test_what_the_model_shall_be(
    run: Run, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "one\n/system B b\ntwo\n/reset\nthree\n/system\nfour\n")
    assert run("chat", "--system", "A").status == 0
    assert recorded.said == [
        ["A", "one"],
        ["B b", "one", "I have 2.", "two"],
        ["B b", "three"],
        ["three", "I have 2.", "four"],
    ]
    assert recorded.requests[0]["messages"][0]["role"] == "system"


def test_only_the_bundled_model_is_introduced() -> None:
    assert chat_command.opening_of(None) == ()
    assert chat_command.opening_of(ServedModel("tiny", root="/data/tiny")) == ()
    first, *questions = chat_command.opening_of(ServedModel("mine", root="tiny"))
    assert "tiny demo model" in first
    assert questions == list(chat_command.DEMO_QUESTIONS)


def test_commands_that_there_are(
    run: Run, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "/help\n//etc is what?\n")
    ran = run("chat")
    assert ran.status == 0
    assert all(f"({name} " in ran.stderr for name in chat_command.COMMANDS)
    assert recorded.said == [["/etc is what?"]]


def test_a_command_that_there_is_not(
    run: Run, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "/rest\none\n")
    ran = run("chat")
    assert (ran.status, ran.stdout) == (1, "I have 1.\n")
    assert "did you mean '/reset'?" in ran.stderr


def test_a_question_that_fails_was_not_asked(
    run: Run, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded.failures = [RequestError("it is too long", code="prompt_too_long")]
    typed(monkeypatch, "one\ntwo\n")
    ran = run("chat")
    assert (ran.status, ran.stdout) == (1, "I have \nI have 1.\n")
    assert ran.stderr == "nano-inference: it is too long (prompt_too_long)\n"
    assert recorded.said == [["one"], ["two"]]


def test_options_of_a_conversation(
    run: Run, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "one\n")
    run("chat", "--model", "mine", "--sampling", "top_k=5", "--tenant", "lab", "--budget", "2")
    assert recorded.requests == [
        {
            "messages": [{"role": "user", "content": "one"}],
            "model": "mine",
            "sampling": {"temperature": 0.0, "max_tokens": 1024, "top_k": 5},
            "stream": True,
            "tenant": "lab",
            "budget_ns": 2 * 10**9,
        }
    ]


# --- chat on a terminal -------------------------------------------------------------------------


class Terminal:
    """A program with a terminal of its own, and what it has written there."""

    def __init__(self, command: list[str]) -> None:
        self._main, side = pty.openpty()
        self.written = ""
        self.process = subprocess.Popen(
            command,
            stdin=side,
            stdout=side,
            stderr=side,
            env=os.environ | {"TERM": "dumb"},
            start_new_session=True,
            preexec_fn=_own_terminal,
        )
        os.close(side)

    def expect(self, text: str, *, typing: str = "") -> None:
        """Reads until it has written this behind what was expected before.

        Args:
            typing: Typed before, and once a second until then.
        """
        end_s = time.monotonic() + LIMIT_S
        next_s = time.monotonic() if typing else end_s
        while text not in self.written:
            if time.monotonic() >= next_s:
                assert time.monotonic() < end_s, f"no {text!r} in {self.written!r}"
                self.type(typing)
                next_s += 1
            ready, _, _ = select.select([self._main], [], [], max(0.0, next_s - time.monotonic()))
            if ready:
                self.written += os.read(self._main, 4096).decode()
        self.written = self.written.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self._main, text.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._main)


def _own_terminal() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Paused:
    """Nothing is generated while the context is open, or until `end`; nothing is in flight first.

    What is in flight while it is open is then the test's own request.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> Paused:
        wait_until(self._url, in_flight=False)
        _call(f"{self._url}/pause_generation", {"mode": "in_place"})
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        _call(f"{self._url}/continue_generation", {})


def paused(url: str) -> Paused:
    return Paused(url)


def _call(url: str, body: dict[str, Any]) -> None:
    httpx.post(url, json=body, timeout=LIMIT_S).raise_for_status()


async def _post(url: str, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(timeout=LIMIT_S) as client:
        return await client.post(url, json=body)


def wait_until(url: str, *, in_flight: bool) -> None:
    """Until a request is in flight, or none is."""
    end_s = time.monotonic() + LIMIT_S
    while bool(httpx.get(f"{url}/v1/loads").json()["loads"][0]["num_total_reqs"]) != in_flight:
        assert time.monotonic() < end_s


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_not_the_program(
    program: list[str], place: list[str], url: str
) -> None:
    terminal = Terminal([*program, "chat", *place])
    try:
        terminal.expect("(this is a tiny demo model: ")
        terminal.expect("(What is 3 + 4?)")
        terminal.expect("> ")
        terminal.type("hello\n")
        terminal.expect("\nHello! I am a tiny demo model.")
        terminal.expect("> ")
        terminal.type("What is 12 + 30?\n")
        terminal.expect("\n42\r\n")
        terminal.expect("> ")
        # Between its prompt and its wait for a key, Python misses a signal until a key comes.
        terminal.expect("(/quit or Ctrl-D ends it)", typing="\x03")
        terminal.expect("> ")
        with paused(url):
            terminal.type("How much is 9 - 4?\n")
            wait_until(url, in_flight=True)
            terminal.type("\x03")
            terminal.expect("(stopped)")
        terminal.expect("> ")
        terminal.type("/reset\nWhat is 12 + 30?\n")
        terminal.expect("\n42\r\n")
        terminal.expect("> ")
        terminal.type("\x04")
        assert terminal.process.wait(LIMIT_S) == 0
    finally:
        terminal.close()
