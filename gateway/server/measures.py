"""The gateway's metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from ...telemetry import Metrics, Tracing, instruments, names
from ...telemetry.instruments import Instrument

Reason = Literal[
    # Connections.
    "replaced",
    "all_busy",
    "not_accepted",
    "slow_head",
    "slow_body",
    "slow_reader",
    "malformed",
    "handshake_failed",
    # Limits of the server.
    "too_many_requests",
    "too_many_bytes",
    # Places in the pipeline.
    "too_many_waiting",
    "expired",
    # Callers' limits.
    "requests_per_minute",
    "tokens_per_minute",
    "max_in_flight",
    "limits_unavailable",
    # Checks of callers.
    "forbidden_host",
    "forbidden_origin",
    "unsupported_media_type",
    # Guardrails and the audit log.
    "content_filter",
    "policy_unavailable",
]
"""Why a connection or a request was not served; see docs/telemetry.md."""


class Measures:
    """The gateway's spans and metrics."""

    def __init__(self, tracing: Tracing | None = None, metrics: Metrics | None = None) -> None:
        """None: without tracing, or without metrics."""
        self.tracing = tracing or Tracing()
        self.metrics = metrics or Metrics()
        self._watched: dict[Instrument, Callable[[], float]] = {}
        for reason in get_args(Reason):
            # Prometheus sees a counter's first increase only after a sample of 0.
            self.refused(reason, 0)
        self.audit_lost(0)
        self.message_read(0, 0, 0)

    def refused(self, reason: Reason, number: int = 1) -> None:
        """Count connections or requests that were not served."""
        self.metrics.record(instruments.GATEWAY_REFUSED, number, {names.GATEWAY_REASON: reason})

    def audit_lost(self, number: int) -> None:
        """Count lost lines of the audit log. Called from any thread."""
        self.metrics.record(instruments.AUDIT_LOST, number)

    def message_read(self, calls: int, malformed: int, reasoning_tokens: int) -> None:
        """Count the tool calls and reasoning tokens of a message. Called from any thread."""
        for outcome, number in (("made", calls), ("malformed", malformed)):
            self.metrics.record(instruments.TOOL_CALLS, number, {names.CALL_OUTCOME: outcome})
        self.metrics.record(instruments.REASONING_TOKENS, reasoning_tokens)

    def watch(self, gauge: Instrument, read: Callable[[], float]) -> None:
        """Record a gauge by this function at every update."""
        self._watched[gauge] = read

    def update_gauges(self) -> None:
        """Record the watched gauges; called about once a second."""
        for gauge, read in self._watched.items():
            self.metrics.record(gauge, read())
