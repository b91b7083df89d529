"""`nano-inference trace`: one request's trace out of a file; waterfalls on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from ..bus.public import Completion
from ..config import ConfigError
from ..telemetry import names
from ..telemetry.clock import milliseconds
from ..telemetry.trace_page import page
from ..telemetry.trace_tree import Trace, TraceRow, find_trace, jaeger
from .options import Options, argument, option, takes
from .terminal import STAGE_STYLES, cut, stderr, stdout


@takes(Options, "config_file", "settings")
def trace(
    options: Options,
    request_id: Annotated[
        str, argument("REQUEST_ID", "The request's id, its entry's id, or the trace's id.")
    ],
    file: Annotated[
        Path | None, option("--file", "The trace file; default: `telemetry.trace_file`.")
    ] = None,
    html: Annotated[
        Path | None, option("--html", "Write a page for the browser there.", "FILE")
    ] = None,
    jaeger_file: Annotated[
        Path | None, option("--jaeger", "Write a file for Jaeger's UI there.", "FILE")
    ] = None,
) -> None:
    """Show the time of a request's spans, from a trace file.

    A pipeline writes the file if it is set; its processes may share it:

        nano-inference up --set telemetry.trace_file=traces.jsonl

        nano-inference trace my-request --file traces.jsonl

        nano-inference trace my-request --file traces.jsonl --html trace.html

    The page is self-contained. Jaeger's search page loads the file of --jaeger under "Upload".
    """
    config = options.config()
    if file is None and not config.telemetry.trace_file:
        raise ConfigError(
            "there is no trace file: give --file, or start the pipeline and this command with "
            "telemetry.trace_file set"
        )
    found = find_trace(file or Path(config.telemetry.trace_file).expanduser(), request_id)
    if html is None and jaeger_file is None:
        stdout().print(TraceView(found))
    if html is not None:
        _write(html, page(found).encode())
    if jaeger_file is not None:
        _write(jaeger_file, msgspec.json.encode(jaeger(found)))


def _write(target: Path, content: bytes) -> None:
    try:
        target.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{target} can't be written: {error.strerror or error}") from None
    stderr().print(f"wrote {target}")


# --- waterfalls -----------------------------------------------------------------------------------


# Blocks that fill a cell from its left side, by eighths. From the right side there are only a half
# and an eighth, so the beginning of a bar is less exact than its end.
_FROM_LEFT = " ▏▎▍▌▋▊▉█"
_RIGHT_HALF, _RIGHT_EIGHTH, _FULL = "▐", "▕", "█"

_MOST_COLUMNS = 120
_MOST_TRACE_COLUMNS = 140
_FEWEST_BAR_COLUMNS = 10


class Bar(NamedTuple):
    """A line of a waterfall: from `start_ns` to `end_ns`, or for a mark at `start_ns`."""

    label: str
    style: str
    start_ns: int
    end_ns: int | None = None


def bars(
    lines: Sequence[Bar | Text], begin_ns: int, end_ns: int, width: int, *, ascii_only: bool
) -> Iterator[Text]:
    """Yield a heading and the lines; a Text is a line of its own.

    A bar is drawn in eighths of a cell, or on an ASCII terminal in cells, and always visible.
    """
    drawn = [line for line in lines if isinstance(line, Bar)]
    labels = max(len(line.label) for line in drawn)
    starts = [milliseconds(line.start_ns - begin_ns) for line in drawn]
    took = [
        "" if line.end_ns is None else milliseconds(line.end_ns - line.start_ns) for line in drawn
    ]
    number = max(len("start ms"), *map(len, starts)), max(len("took ms"), *map(len, took))
    columns = max(_FEWEST_BAR_COLUMNS, width - labels - sum(number) - 6)
    scale = columns / max(1, end_ns - begin_ns)

    def row(label: str, mark: str, style: str, start: str, took: str) -> Text:
        return Text.assemble(
            (f"{label:<{labels}}  ", style),
            (f"{mark:<{columns}}", style),
            f"  {start:>{number[0]}}  {took:>{number[1]}}",
        )

    heading = row("", "", "", "start ms", "took ms")
    heading.stylize("dim")
    yield heading
    texts = zip(starts, took, strict=True)
    for line in lines:
        if isinstance(line, Text):
            yield line
            continue
        left = (line.start_ns - begin_ns) * scale
        if line.end_ns is None:
            mark = " " * min(columns - 1, max(0, int(left)))
            mark += "^" if ascii_only else "▲"
        else:
            draw = _ascii_bar if ascii_only else _bar
            mark = draw(left, (line.end_ns - begin_ns) * scale, columns)
        yield row(line.label, mark, line.style, *next(texts))


class Waterfall:
    """A Completion's times: a header, a line for each stage, and the first token."""

    def __init__(self, completion: Completion) -> None:
        self._completion = completion

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, _MOST_COLUMNS)
        yield from self._header(width)
        timings = self._completion.timings
        stages = timings.stages
        if not stages:
            yield Text("no stage has recorded a time", style="dim")
            return
        lines = [
            Bar(each.stage, STAGE_STYLES.get(each.stage, ""), each.start_ns, each.end_ns)
            for each in stages
        ]
        lines += [Bar("first token", "bold", timings.first_token_ns)] * bool(timings.first_token_ns)
        begin_ns = min(timings.received_ns or stages[0].start_ns, *(s.start_ns for s in stages))
        end_ns = max(timings.finished_ns, *(s.end_ns for s in stages))
        yield from bars(lines, begin_ns, end_ns, width, ascii_only=options.ascii_only)

    def _header(self, width: int) -> Iterator[Text]:
        completion, timings = self._completion, self._completion.timings
        request_id = completion.request_id or completion.entry_id
        line = Text.assemble(("request ", "dim"), (cut(request_id, width - 30), "bold"))
        line.append(f" {completion.status}")
        facts = []
        if timings.received_ns:
            facts.append(f"total {milliseconds(timings.finished_ns - timings.received_ns)} ms")
        if timings.first_token_ns:
            ttft = timings.first_token_ns - timings.received_ns
            facts.append(f"first token {milliseconds(ttft)} ms")
        times = "   ".join(facts)
        if not times or line.cell_len + 3 + len(times) <= width:
            yield line.append(f"   {times}" if times else "")
        else:
            yield line
            yield Text(times)
        if completion.trace_id:
            yield Text.assemble(("trace   ", "dim"), completion.trace_id)


class TraceView:
    """A trace: a header, a line for each span and event, and the recorded steps."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, _MOST_TRACE_COLUMNS)
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
        lines = [line for row in trace.rows for line in _span_lines(row)]
        yield from bars(lines, trace.start_ns, trace.end_ns, width, ascii_only=options.ascii_only)
        if trace.steps:
            sizes = [int(str(step.attributes.get(names.BATCH_SIZE, 0))) for step in trace.steps]
            yield Text(
                f"recorded steps: {len(sizes)}, of {min(sizes)} to {max(sizes)} sequences",
                style="dim",
            )


def _span_lines(row: TraceRow) -> Iterator[Bar | Text]:
    span, indent = row.span, "  " * row.depth
    style = STAGE_STYLES.get(str(span.attributes.get(names.STAGE, "")), "")
    yield Bar(indent + span.name, "red" if span.error else style, span.start_ns, span.end_ns)
    for event in span.events:
        name = event.name.removeprefix("nano.").replace("_", " ")
        yield Bar(f"{indent}  {name}", "bold", event.at_ns)
    if span.error:
        yield Text(f"{indent}  error: {span.error}", style="red")


def _bar(left: float, right: float, columns: int) -> str:
    """Return a bar from `left` to `right`, in cells from 0 to `columns`."""
    first = min(columns * 8 - 1, max(0, round(left * 8)))
    last = min(columns * 8, max(first + 1, round(right * 8)))
    cell, offset = divmod(first, 8)
    last_cell, end = divmod(last, 8)
    indent = " " * cell
    if last <= (cell + 1) * 8:  # within one cell
        if offset == 0:
            return indent + _FROM_LEFT[last - first]
        if offset + (last - first) < 8 and offset < 4:
            return indent + _FROM_LEFT[max(1, last - first)]
        return indent + (_RIGHT_HALF if last - first >= 3 else _RIGHT_EIGHTH)
    beginning = _FULL if offset < 2 else _RIGHT_HALF if offset < 6 else _RIGHT_EIGHTH
    return indent + beginning + _FULL * (last_cell - cell - 1) + _FROM_LEFT[end].strip()


def _ascii_bar(left: float, right: float, columns: int) -> str:
    cell = min(columns - 1, max(0, int(left)))
    length = min(columns, round(right)) - cell
    return " " * cell + ("#" * length if length > 0 else "|")
