"""`nano-inference chat` and `complete`: converse, and continue a text."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from ..config import (
    BUNDLED_MODEL,
    ConfigError,
    EngineConfig,
    NanoInferenceError,
    RequestError,
    nearest,
    shown,
)
from ..telemetry.logs import has_colours, has_cursor
from .clients import Client, ListedModel, client_at
from .connection import ServerAddress, Target, run_with, target_of
from .images import for_server, from_server, question, read_image
from .line_editing import line_editing, without_echo
from .openai_calls import ReceivedCall
from .options import AskedModel, Options, argument, option, takes, takes_server_options
from .requests import Template, field, given, template
from .terminal import AnswerWriter, complain, cut, failures_exit, harmless, one_line

if TYPE_CHECKING:
    from .mcp_tools import McpTools

COMMANDS = {
    "/clear": "forgets the conversation",
    "/regenerate": "answers the last question again",
    "/model": "NAME goes on with another model; without NAME it lists them",
    "/system": "TEXT sets the system prompt; without TEXT it is removed",
    "/file": "FILE is a text for the next question",
    "/image": "FILE is an image for the next question",
    "/save": "FILE writes the conversation, as JSON in OpenAI's form",
    "/load": "FILE goes on with such a conversation",
    "/help": "prints this",
    "/quit": "ends the program, as Ctrl-D does",
}

_ALIASES = {"/reset": "/clear", "/exit": "/quit", "/bye": "/quit", "/?": "/help"}

_QUOTES = '"""'
"""Begins and ends a question of several lines."""

_PROMPT = "> "

_RESULT_CELLS = 400
"""Columns of a tool's result that are shown."""

_BACKTICKS = re.compile("`+")

_PLACE = re.compile(r"^messages\[\d+\][\w.\[\]]*: ")

DEMO_QUESTIONS = (
    "What is 3 + 4?",
    "Write as JSON: Ana is a baker, 30 years old.",
    "Tell a story about Ana, a cat and a red ball.",
)
"""Questions that the bundled model answers."""

Message = dict[str, Any]
"""A chat message in OpenAI's form."""


_COLOURED_PROMPT = f"\x01\x1b[1;36m\x02{_PROMPT}\x01\x1b[0m\x02"
"""The same for readline, to which \\x01 and \\x02 mark what takes no room."""


class _Conversation(msgspec.Struct):
    """A saved conversation; other fields are ignored, so that a request is one."""

    messages: list[dict[str, Any]]


@takes_server_options
@takes(template)
def chat(
    options: Options,
    template: Template,
    system: Annotated[str, field("--system TEXT", "The system prompt.")] = "",
    model: AskedModel = None,
    tools: Annotated[
        Path | None, field("--tools FILE", "Callable tools, as in OpenAI's interface, in JSON.")
    ] = None,
    mcp: Annotated[
        Path | None, field("--mcp FILE", "MCP servers with tools, as other programs' mcpServers.")
    ] = None,
    mcp_allow: Annotated[
        str,
        field("--mcp-allow NAMES", "Servers or tools called without asking, with commas, or all."),
    ] = "",
    plain: Annotated[
        bool, option("--plain", "Print answers as they are, not as Markdown.")
    ] = False,
    no_history: Annotated[bool, option("--no-history", "Keep no history of questions.")] = False,
) -> None:
    """Talk with a model.

    At a server, or with --bus at a pipeline:

        nano-inference serve                     (in another terminal)

        nano-inference chat

        nano-inference chat --url http://127.0.0.1:8000 --system "Answer in one word."

    Each line is a question, and the model reads the whole conversation. A question of several lines
    begins and ends with \"\"\". Ctrl-C stops an answer and keeps its text; Ctrl-D ends the program.
    A line that begins with / is a command: /help lists them; with // it is a question that begins
    with one /. With --tools, at a server, a tool call is printed, and the next line is its result.

    With --mcp, the tools of MCP servers are called for the model, each call after you allow it;
    on a pipe only those that --mcp-allow names. FILE has {"mcpServers": {"NAME": {"command": …} or
    {"url": …}}}.

    On a pipe, standard output has the answers alone, and the exit status is 1 when a question was
    refused or failed, or a tool call has no next line.
    """
    target = target_of(options, or_serve=True)
    known = _tools_of(tools, target) if tools is not None else []
    _Chat(
        target,
        template,
        model,
        system,
        known,
        plain,
        not no_history,
        _servers(mcp, mcp_allow, target),
    ).run()


@dataclass
class _Chat:
    """One run of the command. Each question has its own connection, so that none is open while the
    user thinks."""

    target: Target
    template: Template
    model: str | None
    system: str
    tools: list[Any]
    is_plain: bool
    keeps_history: bool
    mcp: McpTools | None = None

    def __post_init__(self) -> None:
        self._messages: list[Message] = []
        self._images: list[bytes] = []
        self._texts: list[str] = []
        self._ctrl_c = _CtrlC()
        self._on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._shows_markdown = self._on_terminal and not self.is_plain and has_cursor(sys.stdout)
        self._failed = False
        self._saved: Path | None = None
        # The system prompt and the model of the last answer.
        self._answered_by: tuple[str, str | None] | None = None
        self._models: list[str] = []
        self._prompt = _PROMPT

    def run(self) -> None:
        """Answer until the input ends.

        Raises:
            typer.Exit: On a pipe, a question failed.
            NanoInferenceError: Nothing answers.
        """
        if reconfigure := getattr(sys.stdin, "reconfigure", None):
            reconfigure(errors="replace")
        with asyncio.Runner() as runner:
            opening: tuple[str, ...] = ()
            with failures_exit():
                if self._on_terminal or self.model is None:
                    opening = runner.run(self._check())
                if self.mcp is not None:
                    runner.run(self.mcp.open())
                    self.tools += self.mcp.offered
            if self._on_terminal:
                _note(*opening[:1], f"model: {self.model or 'the default'}; /help for commands")
                for number, asked in enumerate(opening[1:]):
                    _dim(f"  {'Try:' if number == 0 else '    '} {asked}")
                editing = line_editing(
                    lambda: [*COMMANDS, *self._models], history=self.keeps_history
                )
                with editing as edits, self._ctrl_c:
                    if edits and has_colours(sys.stdout):
                        self._prompt = _COLOURED_PROMPT
                    self._converse(runner)
            else:
                self._converse(runner)
                if self._failed:
                    raise typer.Exit(1)

    def _converse(self, runner: asyncio.Runner) -> None:
        with suppress(EOFError):  # at the end of the input, or by /quit
            while True:
                text = self._read(self._prompt).strip()
                if text.startswith(_QUOTES):
                    if text := self._rest_of(text.removeprefix(_QUOTES)):
                        self._question(runner, text)
                elif text.startswith("/") and not text.startswith("//"):
                    self._command(runner, text)
                elif text:
                    self._question(runner, text.removeprefix("/"))

    def _rest_of(self, line: str) -> str:
        """Return a question of several lines, given its first; "" after Ctrl-C."""
        lines: list[str] = []
        with suppress(EOFError):
            while not line.rstrip().endswith(_QUOTES):
                lines.append(line.rstrip("\n"))
                try:
                    line = self._read("… ", again=False)
                except KeyboardInterrupt:
                    _note("dropped")
                    return ""
            lines.append(line.rstrip().removesuffix(_QUOTES))
        return "\n".join(lines).strip()

    def _read(self, prompt: str, *, again: bool = True) -> str:
        """Return the next line.

        Args:
            prompt: Shown before it.
            again: Whether Ctrl-C begins another line.

        Raises:
            EOFError: The input has ended.
            KeyboardInterrupt: Ctrl-C, unless `again`.
        """
        if not self._on_terminal:
            if line := sys.stdin.readline():
                return line
            raise EOFError
        while True:
            try:
                return self._ctrl_c.typed(prompt)
            except EOFError:
                sys.stdout.write("\n")
                raise
            except KeyboardInterrupt:
                sys.stdout.write("\n")
                if not again:
                    raise
                _note("/quit or Ctrl-D ends the program")

    def _command(self, runner: asyncio.Runner, text: str) -> None:
        """Run a command. Raises EOFError: It ends the conversation."""
        typed, _, rest = text.partition(" ")
        name, rest = _ALIASES.get(typed, typed), rest.strip()
        try:
            match name:
                case "/quit":
                    raise EOFError
                case "/file":
                    self._texts.append(_quoted(_file(name, rest)))
                    _note(f"{rest} goes with the next question")
                case "/image":
                    self._images.append(read_image(_file(name, rest)))
                    _note(f"{rest} goes with the next question")
                case "/clear":
                    self._messages.clear()
                    self._images.clear()
                    self._texts.clear()
                    _note("the conversation is forgotten")
                case "/system":
                    self.system = rest
                    _note("the system prompt is set" if self.system else "no system prompt")
                case "/model":
                    runner.run(self._choose_model(rest))
                case "/regenerate":
                    self._regenerate(runner)
                case "/save":
                    self._save(_file(name, rest))
                case "/load":
                    self._load(_file(name, rest))
                case "/help":
                    width = max(map(len, COMMANDS))
                    _note(*(f"{each:<{width}} {does}" for each, does in COMMANDS.items()))
                    _note(f"{_QUOTES:<{width}} begins and ends a question of several lines")
                case _:
                    raise ConfigError(
                        f"there is no command {typed!r:.40}{nearest(typed, [*COMMANDS, *_ALIASES])}"
                    )
        except NanoInferenceError as error:
            complain(error.message)
            self._failed = True

    async def _choose_model(self, name: str) -> None:
        """Go on with another model, or list those that there are."""
        async with client_at(self.target) as client:
            self._models = [model.id for model in await client.models()]
        if not name:
            _note(*(f"{id}{', in use' if id == self.model else ''}" for id in self._models))
            return
        if name not in self._models:
            raise ConfigError(f"there is no model {shown(name)}{nearest(name, self._models)}")
        self.model = name
        _note(f"model: {name}")

    def _regenerate(self, runner: asyncio.Runner) -> None:
        """Answer the last question again."""
        asked = [n for n, each in enumerate(self._messages) if each["role"] == "user"]
        if not asked:
            raise ConfigError("there is no question yet; write one first")
        is_greedy = not self.template.get("sampling", {}).get("temperature")
        if is_greedy and self._answered_by == (self.system, self.model):
            _note("at temperature 0 the answer is the same; chat --temperature 0.7 varies it")
        before = self._messages[asked[-1] :]
        del self._messages[asked[-1] :]
        if not self._ask(runner, before[0]):
            self._messages += before

    def _save(self, path: Path) -> None:
        """Write the conversation to a new file that only this user reads, or that of before. Its
        folder is created."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, *map(for_server, self._messages)]
        content = msgspec.json.encode({"model": self.model, "messages": messages})
        new = os.O_TRUNC if path == self._saved else os.O_EXCL
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | new, 0o600)
        except OSError as error:
            if isinstance(error, FileExistsError) and path.exists():
                raise ConfigError(f"{path} exists; give another name") from None
            raise ConfigError(f"can't write {path}: {error.strerror}; name another") from None
        with open(file, "wb") as opened:
            opened.write(msgspec.json.format(content) + b"\n")
        self._saved = path
        _note(f"{len(messages)} messages are in {path}")

    def _load(self, path: Path) -> None:
        """Replace the conversation by that of a file."""
        try:
            found = msgspec.json.decode(path.read_bytes(), type=_Conversation).messages
        except OSError as error:
            raise ConfigError(
                f"can't read {path}: {error.strerror}", remedy="give a readable file"
            ) from None
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"{path} has no conversation: {error}", remedy="give a file that /save has written"
            ) from None
        except (ValueError, RecursionError):
            raise ConfigError(
                f"{path} is no JSON conversation", remedy="give a file that /save has written"
            ) from None
        if not all("role" in each for each in found):
            raise ConfigError(
                f"{path} has no conversation: a message has no role",
                remedy="give a file that /save has written",
            )
        systems = [str(each.get("content")) for each in found if each["role"] == "system"]
        self.system = "\n".join(systems)
        self._messages = [from_server(each) for each in found if each["role"] != "system"]
        self._saved, self._answered_by = path, None
        _note(f"{len(found)} messages are loaded; the next question goes on from there")

    def _question(self, runner: asyncio.Runner, text: str) -> None:
        """Ask a question. Raises EOFError: The input ends at a tool call."""
        asked = question("\n\n".join([*self._texts, text]), self._images)
        self._images.clear()
        self._texts.clear()
        self._ask(runner, asked)

    def _ask(self, runner: asyncio.Runner, asked: Message) -> bool:
        """Ask, and handle tool calls; return whether there is an answer.

        Raises:
            EOFError: The input ends at a tool call.
        """
        before, rounds = len(self._messages), 0
        new = [asked]
        while new:
            calls = self._answered(runner, new)
            if calls is None:
                # A tool call must be followed by its result.
                del self._messages[before:]
                return False
            rounds += 1
            new = self._results(runner, calls, rounds)
        return True

    def _answered(self, runner: asyncio.Runner, new: list[Message]) -> list[ReceivedCall] | None:
        """Write the answer, and return its tool calls; None without an answer."""
        calls: list[ReceivedCall] = []
        writer = self._writer()
        try:
            with without_echo(), writer:
                runner.run(self._ctrl_c.watched(self._answer(new, writer, calls)))
        except asyncio.CancelledError:
            _note("stopped")
            if not writer.text:
                return None
            calls.clear()
        except NanoInferenceError as error:
            if not (self._on_terminal or isinstance(error, RequestError)):
                raise
            self._failed = True
            # A place in the call's body means nothing to someone who types.
            complain(f"{_PLACE.sub('', str(error))} ({error.code})")
            return None
        answer: Message = {"role": "assistant", "content": writer.text}
        if calls:
            answer["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for id, name, arguments in calls
            ]
        self._messages += [*new, answer]
        self._answered_by = (self.system, self.model)
        return calls

    def _writer(self) -> AnswerWriter:
        if not self._shows_markdown:
            return AnswerWriter()
        from .markdown import MarkdownWriter  # pipes need not wait for it

        return MarkdownWriter()

    def _results(
        self, runner: asyncio.Runner, calls: list[ReceivedCall], rounds: int
    ) -> list[Message]:
        """Return the results of tool calls: of an MCP server, or of one line each.

        Args:
            rounds: How many answers to this question have had calls.

        Raises:
            EOFError: The input ends.
        """
        results: list[Message] = []
        for call in calls:
            _note(f"calls {harmless(call.name)} {harmless(call.arguments)}")
            if self.mcp is not None and self.mcp.has(call.name):
                result = self._called(runner, self.mcp, call, rounds)
                _note(f"result: {cut(one_line(result), _RESULT_CELLS)}")
            else:
                try:
                    result = self._read(f"{harmless(call.name)} > ").rstrip("\n")
                except EOFError:
                    self._failed = True
                    raise
            results.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return results

    def _called(
        self, runner: asyncio.Runner, mcp: McpTools, call: ReceivedCall, rounds: int
    ) -> str:
        """Call a tool of an MCP server if the user allows it, and return its result.

        Raises:
            EOFError: The input ends.
        """
        if rounds > mcp.max_rounds:
            return f"Error: not called: this question had {mcp.max_rounds} rounds of calls; answer"
        if not mcp.allows(call.name):
            reply = ""
            if self._on_terminal:
                with suppress(KeyboardInterrupt):
                    reply = self._read("call it? y, n, or a for always > ", again=False)
            else:
                _note(f"not allowed; --mcp-allow {harmless(call.name)} allows it")
            reply = reply.strip().lower()[:1]
            if reply == "a":
                mcp.allow(call.name)
            elif reply != "y":
                return "Error: the user did not allow the call"
        results: list[str] = []

        async def run() -> None:
            results.append(await mcp.call(call.name, call.arguments))

        try:
            runner.run(self._ctrl_c.watched(run()))
        except asyncio.CancelledError:
            return "Error: the user stopped the call, which may have had its effect"
        return results[0]

    async def _check(self) -> tuple[str, ...]:
        """Set the model that requests name, and return the opening lines for a terminal."""
        async with client_at(self.target) as client:
            if self.model is None:
                self.model = await client.check() or None
            models = await client.models() if self._on_terminal else []
        self._models = [model.id for model in models]
        served = (model for model in models if self.model in (None, model.id))
        return opening_of(next(served, None))

    async def _answer(
        self, new: list[Message], writer: AnswerWriter, calls: list[ReceivedCall]
    ) -> None:
        system = [{"role": "system", "content": self.system}] if self.system else []
        request = self.template.of_messages([*system, *self._messages, *new])
        request |= given({"stream": True, "tools": self.tools or None, "model": self.model})
        async with client_at(self.target) as client, aclosing(client.ask(request)) as parts:
            async for part in parts:
                writer.reason(part.reasoning)
                writer.write(part.text)
                calls += part.calls


class _CtrlC:
    """Within this context, Ctrl-C ends the line being typed or the current answer, and never the
    program."""

    def __init__(self) -> None:
        self._typing = False
        self._answer: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGINT, self._pressed)

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def typed(self, prompt: str) -> str:
        """Return a line from the terminal. Raises EOFError, KeyboardInterrupt."""
        self._typing = True
        try:
            return input(prompt)
        finally:
            self._typing = False

    async def watched(self, answer: Coroutine[None, None, None]) -> None:
        """Await an answer. Raises asyncio.CancelledError: Ctrl-C."""
        self._answer = asyncio.current_task()
        try:
            await answer
        finally:
            self._answer = None

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        if self._typing:
            self._typing = False
            raise KeyboardInterrupt
        if self._answer is not None:
            self._answer.get_loop().call_soon_threadsafe(self._answer.cancel)


def opening_of(model: ListedModel | None) -> tuple[str, ...]:
    """Return the opening lines of a conversation: for the bundled model, what to try."""
    # A gateway reports the setting, an executor the folder.
    bundled = (BUNDLED_MODEL, str(EngineConfig(model_path=BUNDLED_MODEL).model_folder))
    if model is None or model.root not in bundled:
        return ()
    about = "this is a tiny demo model, trained on sums, JSON records and little stories"
    return (about, *DEMO_QUESTIONS)


def _tools_of(path: Path, target: Target) -> list[Any]:
    """Raises ConfigError: the file has no tools, or a bus takes none."""
    if not isinstance(target, ServerAddress):
        raise ConfigError("--tools takes a server (--url); requests on a bus have no tools")
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"--tools: {path} has no list of tools: {error}",
            remedy="write a JSON list of tools in OpenAI's form",
        ) from None


def _servers(path: Path | None, allowed: str, target: Target) -> McpTools | None:
    """Raises ConfigError: the file has no servers, or a bus takes no tools."""
    if path is None:
        if allowed:
            raise ConfigError("--mcp-allow takes --mcp FILE")
        return None
    if not isinstance(target, ServerAddress):
        raise ConfigError("--mcp takes a server (--url); requests on a bus have no tools")
    from .mcp_tools import McpTools  # only with servers

    return McpTools(path, allowed)


def _note(*lines: str) -> None:
    """Print lines of the program, on standard error."""
    _dim(*(f"({line})" for line in lines))


def _dim(*lines: str) -> None:
    begin, end = ("\x1b[2m", "\x1b[22m") if has_colours(sys.stderr) else ("", "")
    sys.stdout.flush()
    sys.stderr.writelines(f"{begin}{line}{end}\n" for line in lines)
    sys.stderr.flush()


def _quoted(path: Path) -> str:
    """Return a text file as a block of code under its name, as the console sends it.

    Raises:
        ConfigError: It can't be read, or is no text.
    """
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}; give a readable file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no text in UTF-8; /image takes images") from None
    fence = "`" * max([3, *(len(run) + 1 for run in _BACKTICKS.findall(text))])
    return f"{path.name}:\n{fence}\n{text}\n{fence}"


def _file(command: str, name: str) -> Path:
    if not name:
        raise ConfigError(f"{command} takes a file")
    return Path(name).expanduser()


# --- complete -------------------------------------------------------------------------------------


@takes_server_options
@takes(template)
def complete(
    options: Options,
    template: Template,
    text: Annotated[
        str | None, argument("TEXT", "The prompt; default, and -: standard input.")
    ] = None,
    model: AskedModel = None,
) -> None:
    """Continue a text, and print the continuation as it is generated.

    At a server, or with --bus at a pipeline:

        nano-inference complete "98 + 25 ="

        nano-inference complete "98 + 25 =" --url http://127.0.0.1:8000 --max-tokens 8

        nano-inference complete < prompt.txt

    Standard input is one prompt, without a final line break. Ctrl-C also cancels the request. The
    exit status is 1 when the request was refused or failed.
    """
    target = target_of(options, or_serve=True)
    prompt = _read_stdin() if text in (None, "-") else text
    request = template.of_text(prompt or "") | {"stream": True} | given({"model": model})

    async def answer(client: Client) -> None:
        if name := await client.check():
            request.setdefault("model", name)
        async with aclosing(client.ask(request)) as parts:
            async for part in parts:
                writer.write(part.text)

    with failures_exit(), AnswerWriter() as writer:
        run_with(client_at(target), answer)


def _read_stdin() -> str:
    """Raises ConfigError: standard input is empty, or no text."""
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError("give a prompt, as an argument or on standard input")
    try:
        text = sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError:
        raise ConfigError("standard input is not UTF-8 text; convert it") from None
    if not text:
        raise ConfigError("there is nothing on standard input; give a prompt")
    return text
