"""Logs by structlog: coloured on a terminal and JSON lines elsewhere, on standard error.

Lines have a bounded size, and lines of one event a bounded rate: clients can cause many of them,
with any content.
"""

from __future__ import annotations

import logging
import os
import reprlib
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, MutableMapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, TextIO, cast

import msgspec
import structlog

from ..config import TelemetryConfig, cut_middle, shown
from .log_output import SUPPRESSED, LogOutput, dropped_lines

MOST_LOG_BYTES = 16 << 10
"""Size of a line, in UTF-8, with its traceback."""

MOST_LINES = 20
"""Lines of one event within `WINDOW_S`."""

WINDOW_S = 10.0

# Characters of each value, tried in turn until the line fits. Some characters become twelve bytes.
_MOST_OF_A_VALUE = (2000, 500, 100, 20)
# A traceback may be longer by this factor.
_TRACEBACK_SHARE = 4
# Characters that a level of nesting counts as, which bounds the depth.
_NESTING = 20
_ALWAYS = ("event", "level", "timestamp")
_LEVELS = logging.getLevelNamesMapping()
# Lines that a setting enables, one per call or request: not limited.
_REQUESTED = frozenset({"http_call", "request_admitted"})

_Event = MutableMapping[str, Any]


def has_cursor(stream: TextIO) -> bool:
    """Whether a stream is a terminal whose cursor can be moved; with TERM=dumb it can't."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def has_colours(stream: TextIO) -> bool:
    """Whether a stream is a terminal that shows colours; NO_COLOR and TERM=dumb turn them off."""
    return has_cursor(stream) and not os.environ.get("NO_COLOR")


def are_json(config: TelemetryConfig) -> bool:
    """Return whether the lines of a log are JSON."""
    return config.log_format == "json" or (config.log_format == "auto" and not sys.stderr.isatty())


def setup_logging(config: TelemetryConfig, *, said: Collection[str] = ()) -> None:
    """Send our log lines, and those of libraries, through one renderer.

    Args:
        config: The least level, and the format.
        said: Events that the command prints itself, so that text logs omit them.
    """
    as_text = not are_json(config)
    logging.captureWarnings(not as_text)
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False)
        if as_text
        else structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # Plain tracebacks: the rich ones print local variables, and with them prompts.
    renderer: list[structlog.types.Processor] = [
        structlog.processors.format_exc_info,
        _Bounded(
            structlog.dev.ConsoleRenderer(
                colors=has_colours(sys.stderr), exception_formatter=structlog.dev.plain_traceback
            )
            if as_text
            else structlog.processors.JSONRenderer()
        ),
    ]

    def warning(event: str, **fields: Any) -> str:
        line: Any = {"event": event, **fields}
        for process in (*shared, *renderer):
            line = process(None, "warning", line)
        return f"{line}\n"

    def briefly(logger: Any, method: str, event: _Event) -> _Event:
        """For people, replace the fields by the text in `brief`."""
        brief = event.pop("brief", None)
        if not as_text or config.log_level == "debug":
            return event
        if event.get("event") in said:
            raise structlog.DropEvent
        return event if brief is None else {"timestamp": event["timestamp"], "event": brief}

    output = LogOutput(sys.stderr, lambda lines: warning("log_written_again", dropped_lines=lines))
    limit = LogLimit(output, warning)
    structlog.configure(
        processors=[limit, *shared, briefly, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[config.log_level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, output)),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(output)
    handler.addFilter(limit.admits_record)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    logging.basicConfig(
        handlers=[handler],
        level=max(_LEVELS[config.log_level.upper()], logging.WARNING),
        force=True,
    )


# --- rate ---------------------------------------------------------------------------------------


class _Window(msgspec.Struct):
    """The lines of one event since a point in time."""

    start_s: float
    lines: int = 0


@dataclass(eq=False)
class LogLimit:
    """Admits `MOST_LINES` lines of an event in `WINDOW_S`; drops the others, and logs their number.

    Events are texts of the code, so their number is bounded.

    Attributes:
        output: Takes the lines about dropped ones.
        warning: Renders an event and its fields.
        clock: In seconds.
    """

    output: LogOutput
    warning: Callable[..., str]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._windows: dict[str, _Window] = {}
        # Events with suppressed lines that are not reported yet.
        self._unreported: set[str] = set()

    def __call__(self, logger: Any, method: str, event: _Event) -> _Event:
        """Process one of our lines, as structlog's processors do."""
        name = str(event.get("event"))
        if method != "debug" and name not in _REQUESTED and not self.admits(name):
            raise structlog.DropEvent
        return event

    def admits_record(self, record: logging.LogRecord) -> bool:
        """Filter a library's line. Its text is unbounded, so its line of code is the event."""
        return self.admits(f"{record.name}:{record.lineno}")

    def admits(self, event: str) -> bool:
        """Count a line of this event; return whether to write it. Reports ended windows."""
        with self._lock:
            now_s = self.clock()
            ended = [
                (each, self._windows.pop(each).lines - MOST_LINES)
                for each in sorted(self._unreported)
                if now_s - self._windows[each].start_s >= WINDOW_S
            ]
            self._unreported.difference_update(each for each, _ in ended)
            window = self._windows.get(event)
            if window is None or now_s - window.start_s >= WINDOW_S:
                window = self._windows[event] = _Window(now_s)
            window.lines += 1
            admitted = window.lines <= MOST_LINES
            if not admitted:
                self._unreported.add(event)
                dropped_lines[SUPPRESSED] += 1
        for each, lines in ended:
            self.output.write(self.warning("log_lines_suppressed", of=each, lines=lines))
        return admitted


# --- size ---------------------------------------------------------------------------------------


class _Bounded:
    """A renderer that shortens values until the line has at most `MOST_LOG_BYTES`."""

    def __init__(self, renderer: structlog.types.Processor) -> None:
        self._renderer = renderer

    def __call__(self, logger: Any, method: str, event: _Event) -> str:
        for most in _MOST_OF_A_VALUE:
            line = self._render(logger, method, event, most)
            if len(line) <= MOST_LOG_BYTES:
                return line.decode()
        few = {key: event[key] for key in _ALWAYS if key in event}
        return self._render(logger, method, few, most).decode()

    def _render(self, logger: Any, method: str, event: _Event, most: int) -> bytes:
        shares = {"exception": _TRACEBACK_SHARE}
        short = {key: _short(value, most * shares.get(key, 1)) for key, value in event.items()}
        line = self._renderer(logger, method, short)
        assert isinstance(line, str)
        # A stream may refuse lone surrogates, with an error out of the logging call.
        return line.encode(errors="backslashreplace")


def _short(value: Any, most: int) -> Any:
    """Return a plain, short value itself, else a text of at most `most` characters."""
    if isinstance(value, str):
        return cut_middle(value, most)
    if isinstance(value, int) and value.bit_length() > 64:
        return shown(value)
    if value is None or _room(value, most) >= 0:
        return value
    try:
        return cut_middle(reprlib.repr(value), most)
    except ValueError:  # an integer with more digits than Python writes out
        return f"<{type(value).__name__}>"


def _room(value: Any, room: int) -> int:
    """Return how much of `room` characters a value leaves.

    Negative if the value does not fit, or if its class has a repr of its own.
    """
    if isinstance(value, str):
        return room - len(value)
    if value is None or isinstance(value, bool | float):
        return room - _NESTING
    if isinstance(value, int):
        return room - _NESTING if value.bit_length() <= 64 else -1
    parts: Iterable[Any]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        parts = chain(value, value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        parts = value
    else:
        return -1
    room -= _NESTING
    for part in parts:
        if room < 0:
            break
        room = _room(part, room)
    return room
