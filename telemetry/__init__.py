"""Traces and logs."""

from . import names
from .clock import now_ns
from .logs import setup_logging
from .tracing import Attributes, TraceContext, Tracing, endpoint_of, setup_tracing

__all__ = [
    "Attributes",
    "TraceContext",
    "Tracing",
    "endpoint_of",
    "names",
    "now_ns",
    "setup_logging",
    "setup_tracing",
]
