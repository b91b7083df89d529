"""Logs: structlog, coloured on a terminal and JSON lines elsewhere, on standard error."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Collection, MutableMapping
from typing import Any, TextIO, cast

import structlog

from ..config import TelemetryConfig
from .bounded import Bounded
from .log_output import SUPPRESSED, LogOutput, dropped_lines
from .log_rate import LogRate

_LEVELS = logging.getLevelNamesMapping()

# Lines that a setting asks for, one for each call or request.
_ASKED_FOR = frozenset({"http_call", "request_admitted"})


def setup_logging(config: TelemetryConfig, *, said: Collection[str] = ()) -> None:
    """Sends our logs, and those of the libraries below us, through one renderer.

    Args:
        config: The least level, and the format.
        said: Events that the command itself says on a terminal, and the log therefore does not.
    """
    as_text = config.log_format == "text" or (config.log_format == "auto" and sys.stderr.isatty())
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False)
        if as_text
        else structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    for_people = as_text and config.log_level != "debug"
    # Plain tracebacks: the rich ones print local variables, and with them people's prompts.
    renderer: list[structlog.types.Processor] = [
        structlog.processors.format_exc_info,
        Bounded(
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
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

    output = LogOutput(sys.stderr, lambda lines: warning("log_written_again", dropped_lines=lines))
    limit = _Limit(output, warning)
    structlog.configure(
        processors=[limit, *shared, _Briefly(for_people, said), *renderer],
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


class _Briefly:
    """For people, the text that a line brings along in `brief`, without fields; else the fields."""

    def __init__(self, for_people: bool, said: Collection[str]) -> None:
        self._for_people = for_people
        self._said = frozenset(said)

    def __call__(
        self, logger: Any, method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        """As structlog's processor."""
        brief = event.pop("brief", None)
        if not self._for_people:
            return event
        if event.get("event") in self._said:
            raise structlog.DropEvent
        return event if brief is None else {"timestamp": event["timestamp"], "event": brief}


class _Limit:
    """Leaves out lines beyond those that `LogRate` admits, and says how many of which event."""

    def __init__(self, output: LogOutput, warning: Callable[..., str]) -> None:
        """Args: where lines go; what renders a line of an event and its fields."""
        self._rate = LogRate(time.monotonic)
        self._output = output
        self._warning = warning

    def __call__(
        self, logger: Any, method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        """Our lines, as structlog's processor."""
        name = str(event.get("event"))
        if method != "debug" and name not in _ASKED_FOR and not self._admits(name):
            raise structlog.DropEvent
        return event

    def admits_record(self, record: logging.LogRecord) -> bool:
        """Those of libraries, whose texts may be anything: by the line of their code."""
        return self._admits(f"{record.name}:{record.lineno}")

    def _admits(self, name: str) -> bool:
        for each in self._rate.ended():
            line = self._warning("log_lines_suppressed", of=each.event, lines=each.lines)
            self._output.write(line)
        if self._rate.admits(name):
            return True
        dropped_lines[SUPPRESSED] += 1
        return False
