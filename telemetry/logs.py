"""Logs: structlog, coloured on a terminal and JSON lines elsewhere, on standard error."""

from __future__ import annotations

import logging
import sys

import structlog

from ..config import TelemetryConfig
from .bounded import Bounded

_LEVELS = logging.getLevelNamesMapping()


def setup_logging(config: TelemetryConfig) -> None:
    """Sends our logs, and those of the libraries below us, through one renderer."""
    as_text = config.log_format == "text" or (config.log_format == "auto" and sys.stderr.isatty())
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
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
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[config.log_level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
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
