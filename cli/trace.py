"""`nano-inference trace`: one request's trace out of a file, without any server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from ..config import ConfigError
from ..telemetry import names
from ..telemetry.trace_page import page
from ..telemetry.trace_tree import Row, Trace, find_trace, jaeger
from .options import Options, takes_options
from .terminal import cut, milliseconds, stderr, stdout
from .waterfall import STAGE_STYLES, ascii_bar, bar

_MOST_COLUMNS = 140
_FEWEST_BAR_COLUMNS = 10


@takes_options("config_file", "settings")
def trace(
    options: Options,
    request_id: Annotated[
        str, typer.Argument(help="The request's id, its entry's id, or the trace's id.")
    ],
    file: Annotated[
        Path | None,
        typer.Option(help="The trace file; `telemetry.trace_file` when not given."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page for the browser there.")
    ] = None,
    jaeger_file: Annotated[
        Path | None,
        typer.Option("--jaeger", metavar="FILE", help="Write what Jaeger's UI loads from disk."),
    ] = None,
) -> None:
    """Show where a request's time went, from a trace file.

    A pipeline writes one when it is told so; its processes may share it:

        nano-inference up --set telemetry.trace_file=traces.jsonl

        nano-inference trace my-request --file traces.jsonl

        nano-inference trace my-request --file traces.jsonl --html trace.html

    The page needs nothing beside it. What --jaeger writes, Jaeger's search page loads under
    "Upload".
    """
    config = options.config()
    path = file or Path(config.telemetry.trace_file).expanduser()
    if file is None and not config.telemetry.trace_file:
        raise ConfigError(
            "there is no trace file: give --file, or start the pipeline and this command with "
            "telemetry.trace_file set"
        )
    found = find_trace(path, request_id)
    written = [
        (target, content)
        for target, content in (
            (html, page(found).encode() if html else b""),
            (jaeger_file, msgspec.json.encode(jaeger(found)) if jaeger_file else b""),
        )
        if target is not None
    ]
    for target, content in written:
        try:
            target.write_bytes(content)
        except OSError as error:
            raise ConfigError(f"{target} can't be written: {error.strerror or error}") from None
        stderr().print(f"wrote {target}")
    if not written:
        stdout().print(TraceView(found))


class TraceView:
    """A trace as lines as wide as the console, at most 140 columns."""

    def __init__(self, found: Trace) -> None:
        self._trace = found

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, _MOST_COLUMNS)
        trace = self._trace
        total = milliseconds(trace.end_ns - trace.start_ns)
        yield Text.assemble(
            ("request ", "dim"), (cut(trace.request_id, width - 40), "bold"), f"   {total} ms"
        )
        count = len(trace.processes)
        yield Text.assemble(
            ("trace   ", "dim"),
            f"{trace.trace_id}   {len(trace.rows)} spans, {count} process{'es' * (count != 1)}",
        )
        yield from self._lines(width, options.ascii_only)
        if trace.steps:
            sizes = [int(str(step.attributes.get(names.BATCH_SIZE, 0))) for step in trace.steps]
            yield Text(
                f"steps that were recorded beside it: {len(sizes)}, of {min(sizes)} to "
                f"{max(sizes)} sequences",
                style="dim",
            )

    def _lines(self, width: int, ascii_only: bool) -> Iterator[Text]:
        trace = self._trace
        labels = max(
            max(len(text) for text in (row.span.name, *(_short(e.name) for e in row.span.events)))
            + 2 * row.depth
            + 2
            for row in trace.rows
        )
        begin, end = trace.start_ns, trace.end_ns
        numbers = max(len("start ms"), len(milliseconds(end - begin)))
        columns = max(_FEWEST_BAR_COLUMNS, width - labels - 2 * numbers - 6)
        scale = columns / (end - begin)

        def line(label: str, mark: str, style: str, start: str, took: str) -> Text:
            return Text.assemble(
                (f"{label:<{labels}}  ", style),
                (f"{mark:<{columns}}", style),
                f"  {start:>{numbers}}  {took:>{numbers}}",
            )

        heading = line("", "", "", "start ms", "took ms")
        heading.stylize("dim")
        yield heading
        draw = ascii_bar if ascii_only else bar
        for row in trace.rows:
            span = row.span
            left, right = (span.start_ns - begin) * scale, (span.end_ns - begin) * scale
            yield line(
                "  " * row.depth + span.name,
                draw(left, right, columns),
                _style(row),
                milliseconds(span.start_ns - begin),
                milliseconds(span.end_ns - span.start_ns),
            )
            for event in span.events:
                at = min(columns - 1, max(0, int((event.at_ns - begin) * scale)))
                mark = " " * at + ("^" if ascii_only else "▲")
                label = "  " * row.depth + "  " + _short(event.name)
                yield line(cut(label, labels), mark, "bold", milliseconds(event.at_ns - begin), "")
            if span.error:
                yield Text(f"{'  ' * row.depth}  error: {span.error}", style="red")


def _style(row: Row) -> str:
    if row.span.error:
        return "red"
    return STAGE_STYLES.get(str(row.span.attributes.get(names.STAGE, "")), "")


def _short(event: str) -> str:
    return event.removeprefix("nano.").replace("_", " ")
