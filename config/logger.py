"""The logger of every module: silent in a program that has not asked for logs."""

from __future__ import annotations

import logging
from typing import Any, cast

import structlog

NAME = "nano_inference"
"""Of the logger of `logging` that has the lines of a program without structlog."""

# Without it, `logging` prints warnings of programs that have set up nothing.
logging.getLogger(NAME).addHandler(logging.NullHandler())


def get_logger() -> structlog.typing.FilteringBoundLogger:
    """Return a logger for what this process has set up by now.

    Commands, and programs that call `telemetry.setup_logging` or `structlog.configure`, get lines
    as set up there. Elsewhere the package is a library, and the lines go to the logger
    "nano_inference" of `logging`, which prints them once the program has set that up.
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
    """An event and its fields as one text, with a traceback below."""
    trace = event.pop("exception", "")
    event.pop("brief", None)  # which is for terminals
    line = " ".join([str(event.pop("event")), *(f"{name}={event[name]!r}" for name in event)])
    return f"{line}\n{trace}" if trace else line
