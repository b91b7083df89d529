"""`nano-inference chat`: a conversation, answered as it is generated."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Annotated, Any

import msgspec
import typer
from msgspec.structs import replace

from ..config import (
    BUNDLED_MODEL,
    ConfigError,
    EngineConfig,
    NanoInferenceError,
    RequestError,
    nearest,
)
from .answerer import AskedCall, Place, ServedModel, Server, answerer_at, place_of
from .asking import AnswerWriter, AskedModel, failures_told
from .options import Options, takes_asking_options
from .request_options import takes_wanted_options
from .requests import Wanted
from .terminal import complain, harmless

MOST_TOKENS = 1024
"""Of an answer, unless the options say otherwise."""

COMMANDS = {
    "/reset": "forgets what was said",
    "/system": "TEXT behind it says what the model shall be from now on; nothing behind it takes "
    "that back",
    "/help": "prints this",
    "/quit": "ends it, as Ctrl-D does",
}

DEMO_QUESTIONS = (
    "What is 3 + 4?",
    "Write as JSON: Ana is a baker, 30 years old.",
    "Tell a story about Ana, a cat and a red ball.",
)
"""Questions that the bundled model answers."""

Turn = dict[str, Any]
"""A message, as OpenAI's interface has it."""


class Conversation:
    """What was said, and what the model shall be.

    Attributes:
        system: What the model shall be; "" for nothing.
    """

    def __init__(self, system: str = "") -> None:
        self.system = system
        self._turns: list[Turn] = []

    def asking(self, asked: Sequence[Turn]) -> list[Turn]:
        """The messages that end with a question, or with results of tools."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self._turns, *asked]

    def add(self, asked: Sequence[Turn], answer: str, calls: Sequence[AskedCall] = ()) -> None:
        """A question was answered, perhaps by calls of tools."""
        told: Turn = {"role": "assistant", "content": answer}
        if calls:
            told["tool_calls"] = list(map(_as_turn, calls))
        self._turns += [*asked, told]

    @property
    def length(self) -> int:
        """How many messages there are."""
        return len(self._turns)

    def cut(self, length: int) -> None:
        """What came after so many messages was not said."""
        del self._turns[length:]

    def reset(self) -> None:
        """Nothing was said; what the model shall be stays."""
        self._turns.clear()


@takes_asking_options
@takes_wanted_options(max_tokens=MOST_TOKENS)
def chat(
    options: Options,
    wanted: Wanted,
    system: Annotated[
        str,
        typer.Option(
            "--system", metavar="TEXT", help="What the model shall be.", rich_help_panel="Requests"
        ),
    ] = "",
    model: AskedModel = None,
    tools: Annotated[
        Path | None,
        typer.Option(
            "--tools",
            metavar="FILE",
            help="Tools that the model may call, as OpenAI's interface takes them, in JSON.",
            rich_help_panel="Requests",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Talk with a model.

    Of a server, or with --bus of a pipeline:

        nano-inference serve                     (in another terminal)

        nano-inference chat

        nano-inference chat --url http://127.0.0.1:8000/v1 --system "Answer in one word."

    Each line is a question, and the model is given all that was said before. Ctrl-C stops an
    answer, of which what was said stays; Ctrl-D ends the program. A line that begins with / is a
    command, such as /reset, /system TEXT, /help and /quit; with // it is a question that begins
    with one. With --tools, of a server, a call of a tool is shown, and the next line is what comes
    of it.

    On a pipe nothing but the answers is printed on standard output, and the exit status is 1 when
    a question was refused or not answered well, or a call has no next line.
    """
    place = place_of(options)
    wanted = replace(wanted, chat=True, stream=True)
    known = _tools_of(tools, place) if tools is not None else []
    _Chat(place, wanted, model, Conversation(system), known).run()


class _Chat:
    """One run of the command. Each question has a connection of its own, so that nothing is kept
    open while somebody thinks."""

    def __init__(
        self,
        place: Place,
        wanted: Wanted,
        model: str | None,
        conversation: Conversation,
        tools: list[Any],
    ) -> None:
        self._tools = tools
        self._place = place
        self._wanted = wanted
        self._model = model
        self._conversation = conversation
        self._ctrl_c = _CtrlC()
        self._on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._failed = False

    def run(self) -> None:
        """Answers until the input ends.

        Raises:
            typer.Exit: A question was not answered well, and nobody was there to see it.
            NanoInferenceError: There is nobody to ask.
        """
        if reconfigure := getattr(sys.stdin, "reconfigure", None):
            reconfigure(errors="replace")
        if self._on_terminal:
            with suppress(ImportError):
                import readline  # noqa: F401  (gives `input` its line editing)
        with asyncio.Runner() as runner:
            opening: tuple[str, ...] = ()
            with failures_told():
                if self._on_terminal or self._model is None:
                    opening = runner.run(self._check())
            if not self._on_terminal:
                self._converse(runner)
            else:
                for line in opening:
                    _note(line)
                _note(f"asking {self._model or 'the model'}; /help says what else there is")
                with self._ctrl_c:
                    self._converse(runner)
        if self._failed and not self._on_terminal:
            raise typer.Exit(1)

    def _converse(self, runner: asyncio.Runner) -> None:
        while (line := self._read()) is not None:
            text = line.strip()
            if text.startswith("/") and not text.startswith("//"):
                if not self._obey(text):
                    break
            elif text:
                question = text.removeprefix("/") if text.startswith("//") else text
                if not self._ask(runner, question):
                    break

    def _read(self, prompt: str = "> ") -> str | None:
        """The next line; None when there is none."""
        if not self._on_terminal:
            return sys.stdin.readline() or None
        while True:
            try:
                return self._ctrl_c.typed(prompt)
            except EOFError:
                sys.stdout.write("\n")
                return None
            except KeyboardInterrupt:
                sys.stdout.write("\n")
                _note("/quit or Ctrl-D ends it")

    def _obey(self, text: str) -> bool:
        """Does what a command says. False when it ends the conversation."""
        name, _, rest = text.partition(" ")
        match name:
            case "/quit" | "/exit":
                return False
            case "/reset":
                self._conversation.reset()
                _note("nothing was said")
            case "/system":
                self._conversation.system = rest.strip()
                _note("the model knows" if rest.strip() else "the model need not be anything")
            case "/help":
                for command, what in COMMANDS.items():
                    _note(f"{command} {what}")
            case _:
                complain(f"there is no command {name!r:.40}{nearest(name, COMMANDS)}")
                self._failed = True
        return True

    def _ask(self, runner: asyncio.Runner, text: str) -> bool:
        """One question, with all that is called for it. False where the input ends within."""
        before = self._conversation.length
        asked: list[Turn] | None = [{"role": "user", "content": text}]
        while asked:
            calls = self._answered(runner, asked)
            if calls is None:
                # No call stays there without what came of it.
                self._conversation.cut(before)
                return True
            asked = self._results(calls)
        return asked is not None

    def _answered(self, runner: asyncio.Runner, asked: list[Turn]) -> list[AskedCall] | None:
        """Writes the answer, and gives the calls of tools that are a part of it; None where there
        is none."""
        calls: list[AskedCall] = []
        with AnswerWriter() as writer:
            try:
                self._ctrl_c.run(runner, self._answer(asked, writer, calls))
            except asyncio.CancelledError:
                _note("stopped")
                if not writer.text:
                    return None
                calls.clear()
            except NanoInferenceError as error:
                if not (self._on_terminal or isinstance(error, RequestError)):
                    raise
                self._failed = True
                complain(f"{error.message} ({error.code})")
                return None
        self._conversation.add(asked, writer.text, calls)
        return calls

    def _results(self, calls: list[AskedCall]) -> list[Turn] | None:
        """What comes of calls of tools, by whoever sits here; None where the input ends."""
        results: list[Turn] = []
        for call in calls:
            _note(f"calls {harmless(call.name)} {harmless(call.arguments)}")
            result = self._read(f"{harmless(call.name)} > ")
            if result is None:
                self._failed = True
                return None
            results.append(
                {"role": "tool", "tool_call_id": call.id, "content": result.rstrip("\n")}
            )
        return results

    async def _check(self) -> tuple[str, ...]:
        """Set the model that requests name, and return the lines with which a terminal opens."""
        async with answerer_at(self._place) as answerer:
            self._model = self._model or await answerer.check() or None
            models = await answerer.models() if self._on_terminal else []
        served = (model for model in models if self._model in (None, model.id))
        return opening_of(next(served, None))

    async def _answer(
        self, asked: list[Turn], writer: AnswerWriter, calls: list[AskedCall]
    ) -> None:
        request = self._wanted.of_messages(self._conversation.asking(asked), max_tokens=MOST_TOKENS)
        if self._tools:
            request["tools"] = self._tools
        if self._model is not None:
            request["model"] = self._model
        async with (
            answerer_at(self._place) as answerer,
            aclosing(answerer.ask(request)) as pieces,
        ):
            async for piece in pieces:
                writer.reason(piece.reasoning)
                writer.write(piece.text)
                calls += piece.calls


class _CtrlC:
    """What Ctrl-C stops while this is entered: the line that is being typed or the answer that
    comes, and never the program, however often and whenever it is pressed."""

    def __init__(self) -> None:
        self._typing = False
        self._answer: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGINT, self._pressed)

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def typed(self, prompt: str) -> str:
        """A line from the terminal.

        Raises:
            EOFError: Ctrl-D.
            KeyboardInterrupt: Ctrl-C.
        """
        self._typing = True
        try:
            return input(prompt)
        finally:
            self._typing = False

    def run(self, runner: asyncio.Runner, answer: Coroutine[None, None, None]) -> None:
        """Runs a coroutine to its end.

        Raises:
            asyncio.CancelledError: Ctrl-C.
        """

        async def watched() -> None:
            self._answer = asyncio.current_task()
            try:
                await answer
            finally:
                self._answer = None

        runner.run(watched())

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        if self._typing:
            self._typing = False
            raise KeyboardInterrupt
        if self._answer is not None:
            self._answer.get_loop().call_soon_threadsafe(self._answer.cancel)


def opening_of(model: ServedModel | None) -> tuple[str, ...]:
    """Return the lines with which a conversation opens: for the bundled model, what to try."""
    # A gateway tells the setting, an executor the folder.
    bundled = (BUNDLED_MODEL, str(EngineConfig(model_path=BUNDLED_MODEL).model_folder))
    if model is None or model.root not in bundled:
        return ()
    return (
        "this is a tiny demo model: it knows sums, JSON records and little stories; try",
        *DEMO_QUESTIONS,
    )


def _tools_of(path: Path, place: Place) -> list[Any]:
    """Raises ConfigError: the file has none, or nobody would take them."""
    if not isinstance(place, Server):
        raise ConfigError("--tools takes a server (--url); over the bus there are only texts")
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--tools: {path} has no list of tools: {error}") from None


def _as_turn(call: AskedCall) -> Turn:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _note(text: str) -> None:
    """A word of the program, which is no part of an answer."""
    sys.stdout.flush()
    sys.stderr.write(f"({text})\n")
    sys.stderr.flush()
