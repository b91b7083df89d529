"""`nano-inference trace`: a request's times, of its record or a trace file; waterfalls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from rich.bar import Bar
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from ..bus.public import Completion
from ..config import ConfigError
from ..config.clock import milliseconds
from ..telemetry import names
from ..telemetry.trace_page import page
from ..telemetry.trace_tree import Trace, find_trace, jaeger
from .clients import run_operation
from .operations import COMMANDS, Row
from .options import Options, argument, option, takes_status_options
from .terminal import STAGE_STYLES, begin_ns, cut, stderr, stdout, total, ttft


@takes_status_options
def trace(
    options: Options,
    request_id: Annotated[str, argument("REQUEST_ID", "The id of a request, entry or trace.")],
    file: Annotated[Path | None, option("--file", "Default: `telemetry.trace_file`.")] = None,
    html: Annotated[Path | None, option("--html FILE", "Write a page for browsers.")] = None,
    jaeger_file: Annotated[Path | None, option("--jaeger FILE", "Write a file for Jaeger.")] = None,
) -> None:
    """Show where the time of a request went.

    Without a file, from the request's record at a server or a pipeline:

        nano-inference submit "98 + 25 =" --json | tail -1

        nano-inference trace 1795185430038-0

    With a trace file, all of its spans. A pipeline writes the file if it is set; its processes may
    share it:

        nano-inference up --set telemetry.trace_file=traces.jsonl

        nano-inference trace my-request --file traces.jsonl

        nano-inference trace my-request --file traces.jsonl --html trace.html

    Below the stages are the causes of the time, which add up to the total; *overhead* is the
    engine's own work and the way between its stages.

    The page is self-contained. Jaeger's search page loads the file of --jaeger under "Upload".
    """
    traces = options.config().telemetry.trace_file
    if file is None and (not traces or options.url or options.bus):
        if html is not None or jaeger_file is not None:
            raise ConfigError(
                "--html and --jaeger write the spans of a trace file: give --file, or start the "
                "pipeline and this command with telemetry.trace_file set"
            )
        for each in run_operation(options, "recorded", {"id": request_id}):
            stdout().print(Waterfall(each))
        return
    found = find_trace(file or Path(traces).expanduser(), request_id)
    if html is None and jaeger_file is None:
        stdout().print(TraceView(found))
    if html is not None:
        _write(html, page(found).encode())
    if jaeger_file is not None:
        _write(jaeger_file, msgspec.json.encode(jaeger(found)))


COMMANDS.append(Row(trace, "recorded"))


def _write(target: Path, content: bytes) -> None:
    try:
        target.write_bytes(content)
    except OSError as error:
        raise ConfigError(
            f"{target} can't be written: {error.strerror or error}", remedy="name another"
        ) from None
    stderr().print(f"wrote {target}")


# --- waterfalls -----------------------------------------------------------------------------------

_MOST_COLUMNS = 120
_MOST_TRACE_COLUMNS = 140


class Strip(NamedTuple):
    """A bar between two shares of the width, or without `right` a mark; always visible."""

    style: str
    left: float
    right: float | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, ascii_only = options.max_width, options.ascii_only
        cell = min(width - 1, max(0, int(self.left * width)))
        if self.right is None:
            yield Text(" " * cell + ("^" if ascii_only else "▲"), self.style)
        elif ascii_only:
            length = min(width, round(self.right * width)) - cell
            yield Text(" " * cell + ("#" * length if length > 0 else "|"), self.style)
        else:  # in eighths of a cell
            first = min(width * 8 - 1, max(0, round(self.left * width * 8)))
            last = min(width * 8, max(first + 1, round(self.right * width * 8)))
            yield Bar(width * 8, first, last, color=self.style or "default")


@dataclass
class Chart:
    """Bars of a time span, one below the other."""

    begin_ns: int
    end_ns: int
    width: int

    def __post_init__(self) -> None:
        padding = (0, 2, 0, 0)
        self.table = Table(
            box=None, pad_edge=False, padding=padding, header_style="dim", width=self.width
        )
        self.table.add_column(no_wrap=True)
        self.table.add_column(no_wrap=True, ratio=1, min_width=10)
        for heading in ("start ms", "took ms"):
            self.table.add_column(heading, justify="right", no_wrap=True)

    def add(self, label: str, style: str, start_ns: int, end_ns: int | None = None) -> None:
        """Add a bar, or without an end a mark."""
        span_ns = max(1, self.end_ns - self.begin_ns)
        start = start_ns - self.begin_ns
        right = None if end_ns is None else (end_ns - self.begin_ns) / span_ns
        took = "" if end_ns is None else milliseconds(end_ns - start_ns)
        strip = Strip(style, start / span_ns, right)
        self.table.add_row(Text(label, style), strip, milliseconds(start), took)


CAUSE_STYLES: dict[str, str] = {
    **dict.fromkeys(("own_prefill", "own_decode"), STAGE_STYLES["executor"]),
    **dict.fromkeys(("queue", "credits"), STAGE_STYLES["fairness"]),
    **dict.fromkeys(("others_prefill", "others_decode", "kv"), STAGE_STYLES["batching"]),
    **dict.fromkeys(("preemption", "weights", "recovery"), "red"),
    **dict.fromkeys(("delivery", "slow_client"), STAGE_STYLES["streaming"]),
    "overhead": STAGE_STYLES["admission"],
}
"""Colours of causes of time; without one, the terminal's."""


def causes(time: Mapping[str, int], width: int) -> Table:
    """Return a table of a request's time by cause, whose bars follow one another."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", width=width)
    made.add_column("time by cause", no_wrap=True)
    made.add_column(no_wrap=True, ratio=1, min_width=10)
    for heading in ("share", "took ms"):
        made.add_column(heading, justify="right", no_wrap=True)
    whole_ns, before_ns = max(1, sum(time.values())), 0
    for cause, passed_ns in time.items():
        style = CAUSE_STYLES.get(cause, "")
        strip = Strip(style, before_ns / whole_ns, (before_ns + passed_ns) / whole_ns)
        label = Text(cause.replace("_", " "), style)
        made.add_row(label, strip, f"{passed_ns / whole_ns:.1%}", milliseconds(passed_ns))
        before_ns += passed_ns
    made.add_row("sum", "", "", milliseconds(before_ns), style="dim")
    return made


@dataclass
class Waterfall:
    """A Completion's times: a header, a line for each stage, the first token, and causes."""

    completion: Completion

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, _MOST_COLUMNS)
        yield from self._header(width)
        timings = self.completion.timings
        stages = timings.stages
        if not stages:
            yield Text("no stage has recorded a time", style="dim")
            return
        begin = min(begin_ns(self.completion) or stages[0].start_ns, *(s.start_ns for s in stages))
        chart = Chart(begin, max(timings.finished_ns, *(s.end_ns for s in stages)), width)
        for each in stages:
            chart.add(each.stage, STAGE_STYLES.get(each.stage, ""), each.start_ns, each.end_ns)
        if timings.first_token_ns:
            chart.add("first token", "bold", timings.first_token_ns)
        yield chart.table
        if time := self.completion.usage.time:
            yield causes(time, width)

    def _header(self, width: int) -> Iterator[Text]:
        completion = self.completion
        request_id = completion.request_id or completion.entry_id
        line = Text.assemble(("request ", "dim"), (cut(request_id, width - 30), "bold"))
        line.append(f" {completion.status}")
        named = (("total", total(completion)), ("first token", ttft(completion)))
        times = "   ".join(f"{name} {time} ms" for name, time in named if time != "-")
        if line.cell_len + 3 + len(times) <= width:
            yield line.append(f"   {times}")
        else:
            yield from (line, Text(times))
        if completion.trace_id:
            yield Text.assemble(("trace   ", "dim"), completion.trace_id)


@dataclass
class TraceView:
    """A trace: a header, a line for each span and event, causes, and the recorded steps."""

    trace: Trace

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, _MOST_TRACE_COLUMNS)
        trace = self.trace
        took = milliseconds(trace.end_ns - trace.start_ns)
        yield Text.assemble(
            ("request ", "dim"), (cut(trace.request_id, width - 40), "bold"), f"   {took} ms"
        )
        count = len(trace.processes)
        yield Text.assemble(
            ("trace   ", "dim"),
            f"{trace.trace_id}   {len(trace.rows)} spans, {count} process{'es' * (count != 1)}",
        )
        chart = Chart(trace.start_ns, trace.end_ns, width)
        for span, depth in trace.rows:
            indent = "  " * depth
            style = STAGE_STYLES.get(str(span.attributes.get(names.STAGE, "")), "")
            style = "red" if span.error else style
            chart.add(indent + span.name, style, span.start_ns, span.end_ns)
            for event, at_ns in span.events:
                name = event.removeprefix("nano.").replace("_", " ")
                chart.add(f"{indent}  {name}", "bold", at_ns)
            if span.error:
                chart.table.add_row(f"{indent}  error", Text(span.error), style="red")
        yield chart.table
        if trace.time:
            yield causes(trace.time, width)
        if trace.steps:
            sizes = [int(str(step.attributes.get(names.BATCH_SIZE, 0))) for step in trace.steps]
            yield Text(
                f"recorded steps: {len(sizes)}, of {min(sizes)} to {max(sizes)} sequences",
                style="dim",
            )
