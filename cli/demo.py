"""`nano-inference demo`: a pipeline in this process, a dozen requests at once, and their times."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import typer
from msgspec.structs import replace
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..bus.public import Completion, CompletionChunk
from ..config import BUNDLED_MODEL, STAGES, Config
from ..pipeline.pipeline import Pipeline
from ..telemetry import setup_logging
from .options import Options, takes_options
from .terminal import complain, cut, cut_left, milliseconds, one_line, stdout
from .waterfall import waterfall

if TYPE_CHECKING:
    from ..pipeline.chat_renderer import ChatRenderer


class Show(msgspec.Struct, frozen=True):
    """One request of the demonstration.

    A prompt of the kind "chat" goes through the template in admission; of the kinds "tools" and
    "reasoning" here, since no message of the bus tells of these.
    """

    kind: str
    prompt: str
    n: int = 1
    temperature: float = 0.0

    def request(self, chat: ChatRenderer) -> dict[str, Any]:
        """As it goes onto the bus."""
        messages = [{"role": "user", "content": self.prompt}]
        sampling = {"temperature": self.temperature, "max_tokens": 96, "seed": 1}
        body: dict[str, Any] = {"prompt": self.prompt}
        match self.kind:
            case "chat":
                body = {"messages": messages}
            case "tools":
                body = {"prompt_token_ids": chat.render(messages, tools=[WEATHER]).token_ids}
            case "reasoning":
                rendered = chat.render(messages, enable_thinking=True)
                body = {"prompt_token_ids": rendered.token_ids}
        return body | {"n": self.n, "sampling": sampling}


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
"""The tool that the model is told of."""


# What the bundled model was trained to do; see models/tasks.py.
SHOWN = (
    Show("chat", "What is 12 + 30?"),
    Show("chat", "How much is 9 - 4?"),
    Show("chat", "Turn into JSON: Ben is a pilot, 44 years old."),
    Show("chat", "Tell a story about Iris, a parrot and a green hat."),
    Show("completion", "98 + 25 ="),
    Show("completion", "7 + 8 ="),
    Show("completion", "45 - 18 ="),
    Show("json", "Ana is 31 years old and lives in Oslo. JSON:"),
    Show("json", "Zoë works as a chef in Zürich. JSON:"),
    Show("json", "In 東京 lives さくら, aged 27. JSON:"),
    Show("story", "Story about Leo, a fox and a red kite:"),
    Show("story", "Story about Grace, an owl and a blue boat:"),
    Show("tools", "What is the weather in Oslo and Paris?"),
    Show("reasoning", "How much is 6 + 6?"),
    Show("4 samples", "46 + 97 =", n=4, temperature=1.0),
)


# Width of the table of times without its prompts.
_OTHER_COLUMNS = 59


class Progress:
    """What has come of one request so far: the text of each sample, then its end."""

    def __init__(self, number: int, show: Show) -> None:
        self.number = number
        self.show = show
        self.texts = [""] * show.n
        self.completion: Completion | None = None

    def add(self, output: CompletionChunk | Completion) -> None:
        """Takes the next output."""
        if isinstance(output, Completion):
            self.completion = output
            for sample in output.samples:
                self.texts[sample.sample_index] = sample.text
        else:
            self.texts[output.sample_index] += output.text


@takes_options("settings", "log_level")
def demo(options: Options) -> None:
    """See it work: a dozen requests at once on the bundled model, here and now.

    It needs no server, no download and no GPU. All five stages run in this process; requests go
    in on an in-memory bus, and tokens come out as they are made:

        nano-inference demo

        nano-inference demo --set engine.max_batch_size=2

    In the second one the requests have to take turns, which shows in their times.
    """
    here = replace(options, bus="memory", model=BUNDLED_MODEL)
    here = replace(here, log_level=options.log_level or "warning")
    config = here.config(**{"pipeline.stages": list(STAGES)})
    setup_logging(config.telemetry)
    rows = [Progress(number, show) for number, show in enumerate(SHOWN, 1)]
    anyio.run(_demo, config, rows)
    if not all(row.completion and row.completion.status == "done" for row in rows):
        raise typer.Exit(1)


async def _demo(config: Config, rows: list[Progress]) -> None:
    console = stdout()
    loading = f"starting five stages, loading the model {BUNDLED_MODEL!r} …"
    with console.status(loading) as spinner:
        async with Pipeline(config) as pipeline:
            spinner.stop()
            console.print(f"{len(rows)} requests, published at once on an in-memory bus:\n")
            began = time.monotonic()
            await _submit_all(pipeline, rows, console)
            seconds = time.monotonic() - began
    console.print()
    _report(console, rows, seconds)


async def _submit_all(pipeline: Pipeline, rows: list[Progress], console: Console) -> None:
    """Sends all requests; shows the answers growing, or where nobody can see that, whole."""

    # Other commands need not wait for it, and stages without torch have it hidden from Transformers
    # before that is imported.
    from ..pipeline.chat_renderer import ChatRenderer

    chat = ChatRenderer(BUNDLED_MODEL)

    async def follow(row: Progress) -> None:
        async with aclosing(pipeline.submit(row.show.request(chat))) as outputs:
            async for output in outputs:
                row.add(output)
        if not console.is_terminal:
            _print_answer(console, row)

    async def follow_all() -> None:
        async with anyio.create_task_group() as group:
            for row in rows:
                group.start_soon(follow, row)

    if not console.is_terminal:
        await follow_all()
        return
    with Live(console=console, refresh_per_second=15, get_renderable=lambda: _growing(rows)):
        await follow_all()


def _growing(rows: list[Progress]) -> RenderableType:
    """A line for each sample, with the end of its text, or once it is complete, the beginning."""
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), expand=True)
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=4)
    table.add_column(no_wrap=True, ratio=6)
    for row in rows:
        for index, text in enumerate(row.texts):
            number, prompt = (str(row.number), row.show.prompt) if index == 0 else ("", "")
            answer = _Answer(text, complete=row.completion is not None)
            table.add_row(number, Text(prompt, style="cyan"), answer)
    return table


class _Answer:
    """A text on one line, cut where the reader does not look: at its end once it is complete."""

    def __init__(self, text: str, *, complete: bool) -> None:
        self._text = one_line(text)
        self._complete = complete

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        if self._complete:
            yield Text(cut(self._text, width))
        else:
            yield Text(cut_left(self._text, width), style="dim")


def _print_answer(console: Console, row: Progress) -> None:
    for text in row.texts:
        console.print(f"{row.number:>2}  {row.show.prompt}  →  {one_line(text)}", soft_wrap=True)


def _report(console: Console, rows: list[Progress], seconds: float) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", justify="right", style="dim")
    table.add_column("kind", no_wrap=True)
    table.add_column("prompt", no_wrap=True)
    for heading in ("TTFT ms", "tok/s", "tokens"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("finish", no_wrap=True)
    table.add_column("status", no_wrap=True)
    prompt_width = max(10, min(console.width, 100) - _OTHER_COLUMNS)
    tokens = 0
    for row in rows:
        if row.completion is not None:
            tokens += row.completion.usage.completion_tokens
            table.add_row(*_cells(row, row.completion, prompt_width))
    console.print(table)
    console.print(
        f"{tokens} tokens for {len(rows)} requests in {seconds:.2f} s: "
        f"{tokens / max(seconds, 1e-9):,.0f} tokens/s, all together.\n"
    )
    ended = [row.completion for row in rows if row.completion is not None]
    if ended:
        console.print("Where the time of the slowest one went:\n")
        console.print(waterfall(max(ended, key=_duration_ns)))
    console.print(
        "\nNext: `nano-inference up` runs it as five processes. In another terminal:"
        '\n\n    nano-inference submit "98 + 25 =" --trace\n',
        soft_wrap=True,
    )
    for row in rows:
        if row.completion is not None and row.completion.error is not None:
            complain(f"request {row.number}: {row.completion.error.message}")


def _duration_ns(completion: Completion) -> int:
    return completion.timings.finished_ns - completion.timings.received_ns


def _cells(row: Progress, completion: Completion, prompt_width: int) -> list[str]:
    timings, tokens = completion.timings, completion.usage.completion_tokens
    ttft = (
        milliseconds(timings.first_token_ns - timings.received_ns)
        if timings.first_token_ns
        else "-"
    )
    seconds = _duration_ns(completion) / 1e9
    rate = f"{tokens / seconds:,.0f}" if tokens and seconds > 0 else "-"
    reasons = {sample.finish_reason for sample in completion.samples}
    finish = "mixed" if len(reasons) > 1 else next(iter(reasons), "-")
    facts = [ttft, rate, str(tokens), finish, completion.status]
    return [str(row.number), row.show.kind, cut(row.show.prompt, prompt_width), *facts]
