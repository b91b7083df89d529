"""`nano-inference demo`: a pipeline in this process, a dozen requests at once, and their times."""

from __future__ import annotations

import io
import os
import sys
import time
from contextlib import AsyncExitStack, aclosing, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import typer
from msgspec.structs import replace
from PIL import Image, ImageDraw
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from ..bus.public import Completion, CompletionChunk
from ..config import BUNDLED_MODEL, BUNDLED_VISION_MODEL, STAGES, Config, EngineConfig
from ..pipeline.pipeline import Pipeline
from ..telemetry import setup_logging
from . import images
from .model_files import check_address_space
from .options import Options, takes
from .picture import Picture
from .process import ending_at_once
from .terminal import complain, cut, one_line, stdout, table, ttft
from .trace import Waterfall

if TYPE_CHECKING:
    from ..pipeline.chat_renderer import ChatRenderer

_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_FUNCTION = {"name": "get_weather", "description": "Get the weather in a city", "parameters": _CITY}
WEATHER = {"type": "function", "function": _FUNCTION}
"""The tool in the prompt of the kind "tools"."""

# Width of the table of times without its prompts.
_OTHER_COLUMNS, _OTHER_COLUMNS_NARROW = 59, 31
_WIDE = 70


class Row(msgspec.Struct):
    """One request of the demonstration, and its answer so far.

    A prompt of the kind "chat" is rendered by admission; of the kinds "tools" and "reasoning"
    here, since no message of the bus has their options.
    """

    kind: str
    prompt: str
    n: int = 1
    temperature: float = 0.0
    texts: dict[int, str] = {}
    completion: Completion | None = None

    def request(self, chat: ChatRenderer) -> dict[str, Any]:
        """Return the request for the bus."""
        messages = [{"role": "user", "content": self.prompt}]
        sampling = {"temperature": self.temperature, "max_tokens": 96, "seed": 1}
        request: dict[str, Any] = {"n": self.n, "sampling": sampling}
        match self.kind:
            case "chat":
                return request | {"messages": messages}
            case "tools":
                rendered = chat.render(messages, tools=[WEATHER])
            case "reasoning":
                rendered = chat.render(messages, enable_thinking=True)
            case _:
                return request | {"prompt": self.prompt}
        return request | {"prompt_token_ids": rendered.token_ids}

    def add(self, output: CompletionChunk | Completion) -> None:
        """Process the next output."""
        if isinstance(output, Completion):
            self.completion = output
            self.texts = {sample.sample_index: sample.text for sample in output.samples}
        else:
            before = self.texts.get(output.sample_index, "")
            self.texts[output.sample_index] = before + output.text

    @property
    def answers(self) -> list[str]:
        """The text of each sample, on one line."""
        return [one_line(self.texts.get(index, "")) for index in range(self.n)]


# The bundled model was trained on these; see examples/bundled_models/tasks.py.
_SHOWN = (
    ("chat", "What is 12 + 30?"),
    ("chat", "How much is 9 - 4?"),
    ("chat", "Turn into JSON: Ben is a pilot, 44 years old."),
    ("chat", "Tell a story about Iris, a parrot and a green hat."),
    ("completion", "98 + 25 ="),
    ("completion", "7 + 8 ="),
    ("completion", "45 - 18 ="),
    ("json", "Ana is 31 years old and lives in Oslo. JSON:"),
    ("json", "Zoë works as a chef in Zürich. JSON:"),
    ("json", "In 東京 lives さくら, aged 27. JSON:"),
    ("story", "Story about Leo, a fox and a red kite:"),
    ("story", "Story about Grace, an owl and a blue boat:"),
    ("tools", "What is the weather in Oslo and Paris?"),
    ("reasoning", "How much is 6 + 6?"),
    ("4 samples", "46 + 97 =", 4, 1.0),
)

_COLOURS = {"red": (220, 30, 30), "blue": (40, 80, 230), "green": (30, 160, 50)}
_ABOUT_PICTURE = "What do you see?"


@takes(Options, "settings", "log_level")
def demo(options: Options) -> None:
    """Run a dozen requests at once on the bundled model, in this process.

    It needs no server, no download and no GPU. All five stages run in this process; requests go in
    on an in-memory bus, and tokens come out as they are generated:

        nano-inference demo

        nano-inference demo --set engine.max_batch_size=2

    In the second one the requests have to take turns, which shows in their times.
    """
    level = options.log_level or "warning"
    here = replace(options, bus="memory", model=BUNDLED_MODEL, log_level=level)
    config = here.config(**{"pipeline.stages": list(STAGES)})
    check_address_space(config.engine)
    setup_logging(config.telemetry)
    rows = [Row(*shown) for shown in _SHOWN]
    seen = anyio.run(_demo, config, rows)
    if not all(each and each.status == "done" for each in (seen, *(r.completion for r in rows))):
        raise typer.Exit(1)


async def _demo(config: Config, rows: list[Row]) -> Completion | None:
    console = stdout()
    loading = f"starting five stages, loading the model {BUNDLED_MODEL!r} …"
    async with AsyncExitStack() as stack:
        with console.status(loading), ending_at_once():
            pipeline = await stack.enter_async_context(Pipeline(config))
        console.print(f"{len(rows)} requests, published at once on an in-memory bus:\n")
        began = time.monotonic()
        await _submit_all(pipeline, rows, console)
        seconds = time.monotonic() - began
    console.print()
    _report(console, rows, seconds)
    seen = await _show_picture(console, config)
    _show_next(console)
    for number, completion in enumerate((*(row.completion for row in rows), seen), 1):
        if completion is not None and completion.error is not None:
            complain(f"request {number}: {completion.error.message}")
    return seen


def _show_next(console: Console) -> None:
    console.print("\nNext, a model over HTTP with a console in the browser:\n")
    if sys.prefix != sys.base_prefix and "VIRTUAL_ENV" not in os.environ:  # as by `make demo`
        console.print(f"    source {os.path.relpath(sys.prefix)}/bin/activate", soft_wrap=True)
    console.print("    nano-inference serve\n", soft_wrap=True)


async def _submit_all(pipeline: Pipeline, rows: list[Row], console: Console) -> None:
    """Send all requests; show the answers as they grow, or without a terminal when complete."""
    # Imported late: other commands need not wait for it, and stages without torch hide torch from
    # Transformers before that is imported.
    from ..pipeline.chat_renderer import ChatRenderer

    chat = ChatRenderer(BUNDLED_MODEL)

    async def follow(number: int, row: Row) -> None:
        async with aclosing(pipeline.submit(row.request(chat))) as outputs:
            async for output in outputs:
                row.add(output)
        if not console.is_terminal:
            for text in row.answers:
                console.print(f"{number:>2}  {row.prompt}  →  {text}", soft_wrap=True)

    growing = Live(console=console, refresh_per_second=15, get_renderable=lambda: _growing(rows))
    with growing if console.is_terminal else nullcontext():
        async with anyio.create_task_group() as group:
            for number, row in enumerate(rows, 1):
                group.start_soon(follow, number, row)


def _growing(rows: list[Row]) -> RenderableType:
    """Return a line for each sample: the end of its text, or its beginning once complete."""
    grid = Table.grid(
        Column(justify="right", style="dim", no_wrap=True),
        Column(no_wrap=True, overflow="ellipsis", ratio=4),
        Column(no_wrap=True, ratio=6),
        padding=(0, 1, 0, 0),
        expand=True,
    )
    for number, row in enumerate(rows, 1):
        for index, text in enumerate(row.answers):
            left, prompt = ("", "") if index else (str(number), row.prompt)
            answer = _Answer(text, complete=row.completion is not None)
            grid.add_row(left, Text(prompt, style="cyan"), answer)
    return grid


@dataclass
class _Answer:
    """A text on one line: its beginning once it is complete, its end before."""

    text: str
    complete: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        if self.complete:
            yield Text(cut(self.text, width))
        else:
            yield Text(cut(self.text[::-1], width)[::-1], style="dim")


def _report(console: Console, rows: list[Row], seconds: float) -> None:
    numbers = ("TTFT ms", "tok/s", "tokens")
    is_wide = console.width >= _WIDE
    names: tuple[str, ...] = ("", "kind", "prompt", *numbers, "finish", "status")
    if not is_wide:
        names = ("", "prompt", *numbers)
    made = table(*names, right=("", *numbers), box=box.SIMPLE_HEAD)
    made.padding, made.columns[0].style = (0, 1, 0, 0), "dim"
    others = _OTHER_COLUMNS if is_wide else _OTHER_COLUMNS_NARROW
    prompt_width = max(10, min(console.width, 100) - others)
    ended = [row.completion for row in rows if row.completion is not None]
    tokens = sum(completion.usage.completion_tokens for completion in ended)
    for number, row in enumerate(rows, 1):
        if row.completion is not None:
            prompt = cut(row.prompt, prompt_width)
            facts = _facts(row.completion)
            if is_wide:
                made.add_row(str(number), row.kind, prompt, *facts)
            else:
                made.add_row(str(number), prompt, *facts[: len(numbers)])
    console.print(made)
    console.print(
        f"{tokens} tokens for {len(rows)} requests in {seconds:.2f} s: "
        f"{tokens / max(seconds, 1e-9):,.0f} tokens/s, all together.\n"
    )
    if ended:
        console.print("The time of the slowest one:\n")
        console.print(Waterfall(max(ended, key=_duration_ns)))


async def _show_picture(console: Console, config: Config) -> Completion | None:
    """Print a picture, and what the bundled vision model says of it; return its completion."""
    image = _draw_picture()
    console.print(f"\nA picture for the model {BUNDLED_VISION_MODEL!r}:\n")
    console.print(Picture(image, _COLOURS))
    file = io.BytesIO()
    image.save(file, "PNG")
    request = images.for_bus([images.question(_ABOUT_PICTURE, [file.getvalue()])])
    request |= {"sampling": {"temperature": 0.0, "max_tokens": 64}}
    # Settings that the demonstration was given may not go with images.
    given = config.engine
    engine = EngineConfig(
        model_path=BUNDLED_VISION_MODEL, device=given.device, dtype=given.dtype, max_batch_size=1
    )
    row = Row("picture", _ABOUT_PICTURE)
    with ending_at_once():
        async with (
            Pipeline(replace(config, engine=engine)) as pipeline,
            aclosing(pipeline.submit(request)) as outputs,
        ):
            async for output in outputs:
                row.add(output)
    console.print(f"\n{row.prompt}  →  {row.answers[0]}", soft_wrap=True)
    return row.completion


def _draw_picture() -> Image.Image:
    """Return a picture of a red circle, a blue square and a green triangle.

    The bundled vision model was trained on such; see examples/bundled_models/vision/pictures.py.
    """
    image = Image.new("RGB", (48, 48), "white")
    pen = ImageDraw.Draw(image)
    pen.ellipse((0, 2, 12, 14), _COLOURS["red"])
    pen.rectangle((18, 18, 29, 29), _COLOURS["blue"])
    pen.polygon(((39, 33), (46, 45), (33, 45)), _COLOURS["green"])
    return image


def _duration_ns(completion: Completion) -> int:
    return completion.timings.finished_ns - completion.timings.received_ns


def _facts(completion: Completion) -> list[str]:
    tokens = completion.usage.completion_tokens
    seconds = _duration_ns(completion) / 1e9
    rate = f"{tokens / seconds:,.0f}" if tokens and seconds > 0 else "-"
    reasons = {sample.finish_reason for sample in completion.samples}
    finish = "mixed" if len(reasons) > 1 else next(iter(reasons), "-")
    return [ttft(completion), rate, str(tokens), finish, completion.status]
