"""chat, against a gateway and against a bus, on a pipe and on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from nano_inference.cli import chat as chat_command
from nano_inference.cli import markdown
from nano_inference.cli.clients import ListedModel
from nano_inference.cli.line_editing import line_editing
from nano_inference.cli.markdown import MarkdownWriter, blocks_of
from nano_inference.cli.openai_calls import AnswerPart, ReceivedCall
from nano_inference.config import Config, RequestError

from ..soaking import in_soak
from .conftest import LIMIT_S, Run, assert_refused, paused, wait_until


def test_questions_on_a_pipe(run: Run, place: list[str]) -> None:
    """Standard output has the answers and nothing else."""
    ran = run("chat", *place, stdin="What is 12 + 30?\n\nHow much is 9 - 4?")
    first, second = ran.stdout.splitlines()
    assert first == "42"
    assert second
    assert (ran.status, ran.stderr) == (0, "")


class Recorded:
    """A client whose answers have the number of messages."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        # By the number of the request.
        self.failures: dict[int, RequestError] = {}
        # Of the answers in order, as far as they have any.
        self.calls: list[tuple[ReceivedCall, ...]] = []

    async def check(self) -> str:
        return "served"

    async def models(self) -> list[ListedModel]:
        return [ListedModel("served"), ListedModel("other")]

    async def ask(self, request: dict[str, Any]) -> AsyncGenerator[AnswerPart, None]:
        self.requests.append(request)
        yield AnswerPart(reasoning="Let me see.")
        yield AnswerPart("I have ")
        if failure := self.failures.get(len(self.requests)):
            raise failure
        yield AnswerPart(f"{len(request['messages'])}.")
        if self.calls:
            yield AnswerPart(calls=self.calls.pop(0))

    @property
    def said(self) -> list[list[str]]:
        return [[each["content"] for each in asked["messages"]] for asked in self.requests]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    answerer = Recorded()

    @asynccontextmanager
    async def client_at(place: object) -> AsyncIterator[Recorded]:
        yield answerer

    monkeypatch.setattr(chat_command, "client_at", client_at)
    return answerer


def test_each_question_has_the_whole_conversation(run: Run, recorded: Recorded) -> None:
    ran = run("chat", stdin="one\n two \n/reset\nthree\n/quit\nfour\n")
    assert (ran.status, ran.stdout) == (0, "I have 1.\nI have 3.\nI have 1.\n")
    assert recorded.said == [["one"], ["one", "I have 1.", "two"], ["three"]]
    assert [asked["model"] for asked in recorded.requests] == ["served"] * 3


TOOLS = [{"type": "function", "function": {"name": "add"}}]


@pytest.fixture
def with_tools(tmp_path: Path) -> list[str]:
    path = tmp_path / "tools.json"
    path.write_bytes(msgspec.json.encode(TOOLS))
    return ["chat", "--tools", str(path), "--url", "http://127.0.0.1:9/v1"]


def test_the_next_line_is_the_result_of_a_tool_call(
    run: Run, recorded: Recorded, with_tools: list[str]
) -> None:
    recorded.calls = [(ReceivedCall("c0", "add", '{"a":1}'), ReceivedCall("c1", "add", "{}"))]
    ran = run(*with_tools, stdin="question\n17\n18\nand then\n")
    assert (ran.status, ran.stdout) == (0, "I have 1.\nI have 4.\nI have 6.\n")
    assert 'calls add {"a":1}' in ran.stderr
    told = recorded.requests[1]["messages"]
    assert [each["role"] for each in told] == ["user", "assistant", "tool", "tool"]
    assert [each["tool_call_id"] for each in told[2:]] == ["c0", "c1"]
    assert [each["content"] for each in told[2:]] == ["17", "18"]
    assert told[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a":1}'}
    assert all(asked["tools"] == TOOLS for asked in recorded.requests)


def test_a_tool_call_without_a_next_line_ends_the_conversation(
    run: Run, recorded: Recorded, with_tools: list[str]
) -> None:
    """A model that only calls would otherwise be asked for ever."""
    recorded.calls = [(ReceivedCall("c0", "add", "{}"), ReceivedCall("c1", "add", "{}"))] * 3
    ran = run(*with_tools, stdin="question\n17\n")
    assert (ran.status, ran.stdout) == (1, "I have 1.\n")
    assert recorded.said == [["question"]]


def test_a_tool_call_with_a_refused_result_is_forgotten(
    run: Run, recorded: Recorded, with_tools: list[str]
) -> None:
    recorded.calls = [(ReceivedCall("c0", "add", "{}"),)]
    recorded.failures = {2: RequestError("no")}
    assert run(*with_tools, stdin="question\n17\nand then\n").status == 1
    assert recorded.said[1:] == [["question", "I have 1.", "17"], ["and then"]]


def test_bad_tools_are_refused(run: Run, on_served: Config, tmp_path: Path, url: str) -> None:
    path = tmp_path / "tools.json"
    at = ["chat", "--tools", str(path), "--url", url]
    assert_refused(run(*at), "has no list of tools")
    path.write_text("{}")
    assert_refused(run(*at), "has no list of tools")
    path.write_text("[]")
    assert_refused(run("chat", "--tools", str(path)), "takes a server")


SERVER = """
from mcp.server import MCPServer
server = MCPServer("sums")
@server.tool()
def add(a: int, b: int) -> str:
    return str(a + b)
@server.tool()
def stop() -> str:
    raise SystemExit
server.run()
"""


def test_tools_of_a_server_are_called_if_allowed(
    run: Run, recorded: Recorded, tmp_path: Path
) -> None:
    path, program = tmp_path / "servers.json", tmp_path / "sums.py"
    program.write_text(SERVER)
    server = {"command": sys.executable, "args": [str(program)]}
    path.write_bytes(msgspec.json.encode({"mcpServers": {"sums": server}}))
    recorded.calls = [
        (ReceivedCall("c0", "sums__add", '{"a":1,"b":2}'), ReceivedCall("c1", "sums__stop", "{}"))
    ]
    at = ["--mcp", str(path), "--mcp-allow", "sums__add", "--url", "http://127.0.0.1:9/v1"]
    ran = run("chat", *at, stdin="question")
    assert (ran.status, ran.stdout) == (0, "I have 1.\nI have 4.\n")
    assert 'calls sums__add {"a":1,"b":2})\n(result: 3)' in ran.stderr
    assert "--mcp-allow sums__stop allows it" in ran.stderr
    offered, _ = recorded.requests[0]["tools"]
    assert offered["function"]["parameters"]["required"] == ["a", "b"]
    results = [each["content"] for each in recorded.requests[1]["messages"][-2:]]
    assert results == ["3", "Error: the user did not allow the call"]


def test_a_server_that_can_not_be_run_is_refused(
    run: Run, recorded: Recorded, tmp_path: Path
) -> None:
    path = tmp_path / "servers.json"
    at = ["chat", "--mcp", str(path), "--url", "http://127.0.0.1:9/v1"]
    assert_refused(run(*at), "can't read")
    path.write_text('{"mcpServers": {"sums": {"command": "/no/such/program"}}}')
    ran = run(*at)
    assert ran.status
    assert "No such file" in ran.stderr
    path.write_text('{"mcpServers": {"sums": {}}}')
    assert_refused(run(*at), "takes either a url or a command")


def test_system_prompts(run: Run, recorded: Recorded) -> None:
    asked = "one\n/system B b\ntwo\n/reset\nthree\n/system\nfour\n"
    assert run("chat", "--system", "A", stdin=asked).status == 0
    assert recorded.said == [
        ["A", "one"],
        ["B b", "one", "I have 2.", "two"],
        ["B b", "three"],
        ["three", "I have 2.", "four"],
    ]
    assert recorded.requests[0]["messages"][0]["role"] == "system"


def test_only_the_bundled_model_is_introduced() -> None:
    assert chat_command.opening_of(None) == ()
    assert chat_command.opening_of(ListedModel("tiny", root="/data/tiny")) == ()
    first, *questions = chat_command.opening_of(ListedModel("mine", root="tiny"))
    assert "tiny demo model" in first
    assert questions == list(chat_command.DEMO_QUESTIONS)


def test_help_lists_the_commands(run: Run, recorded: Recorded) -> None:
    ran = run("chat", stdin="/help\n//etc is what?\n")
    assert ran.status == 0
    assert all(f"({name} " in ran.stderr for name in chat_command.COMMANDS)
    assert recorded.said == [["/etc is what?"]]


def test_a_question_of_several_lines(run: Run, recorded: Recorded) -> None:
    ran = run("chat", stdin='"""one\n  /two"""\n"""\nthree\n"""\n"""four"""\n"""five\n')
    assert ran.status == 0
    asked = [said[-1] for said in recorded.said]
    assert asked == ["one\n  /two", "three", "four", "five"]


def test_the_last_question_is_answered_again(run: Run, recorded: Recorded) -> None:
    recorded.failures = {3: RequestError("no")}
    ran = run("chat", "-t", "1", stdin="/regenerate\none\n/regenerate\n/regenerate\ntwo\n")
    assert recorded.said == [["one"], ["one"], ["one"], ["one", "I have 1.", "two"]]
    assert (ran.status, "there is no question yet" in ran.stderr) == (1, True)
    assert "at temperature 0 the answer is the same" not in ran.stderr
    assert "the answer is the same" in run("chat", stdin="one\n/regenerate\n").stderr
    changed = run("chat", stdin="one\n/system S\n/regenerate\n")
    assert "the answer is the same" not in changed.stderr


def test_another_model_goes_on(run: Run, recorded: Recorded) -> None:
    ran = run("chat", stdin="one\n/model\n/model othre\n/model other\ntwo\n")
    assert "(served, in use)\n(other)\n" in ran.stderr
    assert "there is no model 'othre', did you mean 'other'?" in ran.stderr.replace(";", ",")
    assert [asked["model"] for asked in recorded.requests] == ["served", "other"]
    assert len(recorded.said[1]) == 3


def test_a_saved_conversation_goes_on(run: Run, recorded: Recorded, tmp_path: Path) -> None:
    path, picture = tmp_path / "new" / "said.json", tmp_path / "picture.png"
    picture.write_bytes(b"\x89PNG of a cat")
    questions = f"/image {picture}\none\n/save {path}\n/save {path}\n"
    said = run("chat", "--system", "S", stdin=questions)
    assert path.stat().st_mode & 0o777 == 0o600
    saved = msgspec.json.decode(path.read_bytes())
    assert (saved["model"], len(saved["messages"])) == ("served", 3)
    assert f"3 messages are in {path}" in said.stderr
    assert saved["messages"][1]["content"][0]["image_url"]["url"].startswith("data:image/png;")
    ran = run("chat", stdin=f"/load {path}\ntwo\n/load {picture}\n/load\n/image\n")
    assert "3 messages are loaded" in ran.stderr
    assert f"{picture} is no JSON conversation" in ran.stderr
    assert "/load takes a file" in ran.stderr
    assert "/image takes a file" in ran.stderr
    _, asked = recorded.requests
    assert [each["role"] for each in asked["messages"]] == ["system", "user", "assistant", "user"]
    assert asked["messages"][1]["content"][0] == {"type": "image", "data": picture.read_bytes()}
    assert "exists; give another name" in run("chat", stdin=f"/save {path}\n").stderr


def test_a_text_goes_with_the_next_question(run: Run, recorded: Recorded, tmp_path: Path) -> None:
    text, binary = tmp_path / "a.md", tmp_path / "b"
    text.write_text("a ```` b\n")
    binary.write_bytes(b"\xff")
    ran = run("chat", stdin=f"/file {text}\none\ntwo\n/file {binary}\n/file\n")
    asked = [each["messages"][-1]["content"] for each in recorded.requests]
    assert asked == ["a.md:\n`````\na ```` b\n\n`````\n\none", "two"]
    assert f"{binary} is no text in UTF-8" in ran.stderr
    assert "/file takes a file" in ran.stderr


def test_questions_are_kept_for_the_next_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file that only this user reads."""
    readline = pytest.importorskip("readline")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    readline.clear_history()
    with line_editing(lambda: ["/model", "/save"], history=False) as edits:
        assert edits
        assert readline.get_completer()("/m", 0) == "/model "
        readline.add_history("unsaved")
    readline.clear_history()
    for number in range(2):
        with line_editing(list, history=True):
            assert readline.get_current_history_length() == number
            readline.add_history(f"question {number}")
        readline.clear_history()
    (path,) = tmp_path.glob("nano-inference/*")
    assert path.stat().st_mode & 0o777 == 0o600
    assert "question 0\nquestion 1\n" in path.read_text()


# --- Markdown -----------------------------------------------------------------------------------

MARKDOWN = """# Title

Some **bold** text,
on two <b>lines</b>, with [a link](https://x.org).

1. first

   more of it

2. second

```python
a = 1

b = 2
```

| a | b |
|---|---|
| 1 | 2 |

the very end\x1b[31m"""


def test_markdown_is_split_where_a_block_has_ended() -> None:
    blocks = blocks_of(MARKDOWN)
    assert "".join(blocks) == MARKDOWN
    firsts = [block.split()[0] for block in blocks]
    assert firsts == ["#", "Some", "1.", "```python", "|", "the"]
    assert blocks_of("a\n\n- ") == ["a\n\n- "], "it may go on"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_answer_is_shown_as_markdown(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """However its pieces come; nothing that the model wrote is hidden or obeyed."""
    out = StringIO()
    console = partial(Console, file=out, width=60, force_terminal=True, color_system=None)
    monkeypatch.setattr(markdown, "stdout", console)
    monkeypatch.setenv("TERM", "dumb")  # without what grows meanwhile
    with MarkdownWriter() as writer:
        writer.reason("Let me see.\n")
        for start in range(0, len(MARKDOWN), size):
            writer.write(MARKDOWN[start : start + size])
    assert writer.text == MARKDOWN
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    lines = [line.strip() for line in text.replace("\r", "\n").split("\n") if line.strip()]
    assert [line for line in lines if set(line) != {"─"}] == [
        "Let me see.",
        "Title",
        "Some bold text,",
        "on two <b>lines</b>, with a link (https://x.org).",
        *("1 first", "more of it", "2 second", "a = 1", "b = 2"),
        *("a  b", "1  2", "the very end\ufffd[31m"),
    ]


def test_an_unknown_command_is_refused(run: Run, recorded: Recorded) -> None:
    ran = run("chat", stdin="/rest\none\n")
    assert (ran.status, ran.stdout) == (1, "I have 1.\n")
    assert "did you mean '/reset'?" in ran.stderr


def test_a_failed_question_is_forgotten(run: Run, recorded: Recorded) -> None:
    recorded.failures = {1: RequestError("it is too long", code="prompt_too_long")}
    ran = run("chat", stdin="one\ntwo\n")
    assert (ran.status, ran.stdout) == (1, "I have \nI have 1.\n")
    assert ran.stderr == "nano-inference: it is too long (prompt_too_long)\n"
    assert recorded.said == [["one"], ["two"]]


def test_options_of_a_conversation(run: Run, recorded: Recorded) -> None:
    options = ("--model", "mine", "--sampling", "top_k=5", "--tenant", "lab", "--budget", "2")
    run("chat", *options, stdin="one\n")
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
    """A program with a terminal of its own, and its output."""

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


@pytest.mark.slow
@pytest.mark.parametrize("place", ["url", in_soak("bus")], indirect=True)
def test_ctrl_c_stops_the_answer_and_not_the_program(
    program: list[str], place: list[str], url: str
) -> None:
    terminal = Terminal([*program, "chat", *place])
    try:
        terminal.expect("(this is a tiny demo model, ")
        terminal.expect("  Try: What is 3 + 4?")
        terminal.expect("> ")
        terminal.type("hello\n")
        terminal.expect("\nHello! I am a tiny demo model.")
        terminal.expect("> ")
        terminal.type("What is 12 + 30?\n")
        terminal.expect("\n42\r\n")
        terminal.expect("> ")
        # Between its prompt and its wait for a key, Python misses a signal until a key comes.
        terminal.expect("(/quit or Ctrl-D ends the program)", typing="\x03")
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
