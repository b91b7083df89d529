"""Traces, metrics and logs."""

from . import instruments, names
from .clock import now_ns
from .context import TraceContext, is_sampled
from .log_output import LogOutput
from .logs import setup_logging
from .metrics import Labels, Metrics, priority_label, setup_metrics
from .spans import Attributes
from .tracing import Tracing, endpoint_of, setup_tracing

__all__ = [
    "Attributes",
    "Labels",
    "LogOutput",
    "Metrics",
    "TraceContext",
    "Tracing",
    "endpoint_of",
    "instruments",
    "is_sampled",
    "names",
    "now_ns",
    "priority_label",
    "setup_logging",
    "setup_metrics",
    "setup_tracing",
]
