"""The logger of every module, silent in programs that don't configure logs."""

from __future__ import annotations

import logging
from typing import Any, cast

import structlog

NAME = "nano_inference"
"""Logger of `logging` that receives lines in programs without structlog."""

# Otherwise `logging` prints warnings of programs without a configuration.
logging.getLogger(NAME).addHandler(logging.NullHandler())


def get_logger() -> structlog.typing.FilteringBoundLogger:
    """Return a logger for the current configuration.

    Commands, and programs that call `telemetry.setup_logging` or `structlog.configure`, get lines
    in that format. Elsewhere the lines go to the logger "nano_inference" of `logging`, which prints
    them once the program configures it.
    """
    if structlog.is_configured():
        found = structlog.get_logger()
    else:
        found = structlog.wrap_logger(
            logging.getLogger(NAME),
            processors=[
                structlog.stdlib.filter_by_level,
                structlog.contextvars.merge_contextvars,
                structlog.processors.format_exc_info,
                _line,
            ],
            wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
        )
    return cast(structlog.typing.FilteringBoundLogger, found)


def _line(logger: Any, method: str, event: structlog.typing.EventDict) -> str:
    """Format an event and its fields as one line, with a traceback below."""
    trace = event.pop("exception", "")
    event.pop("brief", None)  # which is for terminals
    line = " ".join([str(event.pop("event")), *(f"{name}={event[name]!r}" for name in event)])
    return f"{line}\n{trace}" if trace else line
