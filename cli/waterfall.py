"""One request's way through the stages, drawn from the times in its Completion."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from ..bus.public import Completion, StageTime
from .terminal import cut, milliseconds

STAGE_STYLES = {
    "admission": "cyan",
    "fairness": "magenta",
    "batching": "yellow",
    "executor": "green",
    "streaming": "blue",
}
_FIRST_TOKEN = "first token"

# Blocks that fill a cell from its left side, by eighths. From the right side there are only a
# half and an eighth, so a bar's beginning is drawn a little less exactly than its end.
_FROM_LEFT = " ▏▎▍▌▋▊▉█"
_RIGHT_HALF, _RIGHT_EIGHTH, _FULL = "▐", "▕", "█"

_MOST_COLUMNS = 120
_FEWEST_BAR_COLUMNS = 10


class Waterfall:
    """What `waterfall` returns: lines as wide as the console, at most 120 columns."""

    def __init__(self, completion: Completion) -> None:
        self._completion = completion

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, _MOST_COLUMNS)
        yield from self._header(width)
        stages = self._completion.timings.stages
        if stages:
            yield from self._rows(stages, width, options.ascii_only)
        else:
            yield Text("no stage noted a time for it", style="dim")

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

    def _rows(self, stages: tuple[StageTime, ...], width: int, ascii_only: bool) -> Iterator[Text]:
        timings = self._completion.timings
        begin = min(timings.received_ns or stages[0].start_ns, *(s.start_ns for s in stages))
        end = max(timings.finished_ns, *(s.end_ns for s in stages))
        starts = [milliseconds(s.start_ns - begin) for s in stages]
        durations = [milliseconds(s.end_ns - s.start_ns) for s in stages]
        names = max(len(_FIRST_TOKEN), *(len(s.stage) for s in stages))
        numbers = max(len("start ms"), *map(len, starts)), max(len("took ms"), *map(len, durations))
        columns = max(_FEWEST_BAR_COLUMNS, width - names - sum(numbers) - 6)
        scale = columns / max(1, end - begin)

        def row(name: str, drawn: str, style: str, start: str, took: str) -> Text:
            return Text.assemble(
                (f"{name:<{names}}  ", style),
                (f"{drawn:<{columns}}", style),
                f"  {start:>{numbers[0]}}  {took:>{numbers[1]}}",
            )

        heading = row("", "", "", "start ms", "took ms")
        heading.stylize("dim")
        yield heading
        for stage, start, took in zip(stages, starts, durations, strict=True):
            style = STAGE_STYLES.get(stage.stage, "")
            left, right = (stage.start_ns - begin) * scale, (stage.end_ns - begin) * scale
            drawn = ascii_bar(left, right, columns) if ascii_only else bar(left, right, columns)
            yield row(stage.stage, drawn, style, start, took)
        if timings.first_token_ns:
            at = timings.first_token_ns - begin
            mark = " " * min(columns - 1, max(0, int(at * scale))) + ("^" if ascii_only else "▲")
            line = row(_FIRST_TOKEN, mark, "bold", milliseconds(at), "")
            line.rstrip()
            yield line


def waterfall(completion: Completion) -> Waterfall:
    """A rich renderable: a header, a line for each stage with a bar at its time, the first token.

    It reads well without colour. A stage too short for its bar still shows as a thin mark.
    """
    return Waterfall(completion)


def bar(left: float, right: float, columns: int) -> str:
    """A bar from `left` to `right`, in cells from 0 to `columns`, in eighths of a cell."""
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


def ascii_bar(left: float, right: float, columns: int) -> str:
    cell = min(columns - 1, max(0, int(left)))
    length = min(columns, round(right)) - cell
    return " " * cell + ("#" * length if length > 0 else "|")
