"""What the gateway tells of itself in metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from ...telemetry import Metrics, Tracing, instruments, names
from ...telemetry.instruments import Instrument

Reason = Literal[
    # Of connections.
    "replaced",
    "all_busy",
    "not_accepted",
    "slow_head",
    "slow_body",
    "slow_reader",
    "malformed",
    "handshake_failed",
    # Of limits.
    "too_many_requests",
    "too_many_bytes",
    # Of places.
    "too_many_waiting",
    "expired",
    # Of what callers may use.
    "requests_per_minute",
    "tokens_per_minute",
    "max_in_flight",
    "limits_unavailable",
    # Of callers.
    "forbidden_host",
    "forbidden_origin",
    "unsupported_media_type",
    # Of guardrails and the audit log.
    "content_filter",
    "policy_unavailable",
]
"""Why something was not served; docs/telemetry.md says which limit or check each belongs to."""


class Measures:
    """Where the parts of a gateway tell what they do.

    Attributes:
        tracing: Makes the spans of calls.
        metrics: Where the measurements go.
    """

    def __init__(self, tracing: Tracing | None = None, metrics: Metrics | None = None) -> None:
        """Without tracing or metrics there are none."""
        self.tracing = tracing or Tracing()
        self.metrics = metrics or Metrics()
        self._watched: dict[Instrument, Callable[[], float]] = {}
        for reason in get_args(Reason):
            # Prometheus sees a counter rise only if it has seen it before.
            self.refused(reason, 0)
        self.audit_lost(0)
        self.message_read(0, 0, 0)

    def refused(self, reason: Reason, number: int = 1) -> None:
        """So many were not served."""
        self.metrics.record(instruments.GATEWAY_REFUSED, number, {names.GATEWAY_REASON: reason})

    def audit_lost(self, number: int) -> None:
        """So many lines of the audit log were not written. Called from any thread."""
        self.metrics.record(instruments.AUDIT_LOST, number)

    def message_read(self, calls: int, malformed: int, reasoning_tokens: int) -> None:
        """So much was in a message. Called from any thread."""
        for outcome, number in (("made", calls), ("malformed", malformed)):
            self.metrics.record(instruments.TOOL_CALLS, number, {names.CALL_OUTCOME: outcome})
        self.metrics.record(instruments.REASONING_TOKENS, reasoning_tokens)

    def watch(self, gauge: Instrument, read: Callable[[], float]) -> None:
        """What `tell` shows from now on is what this function gives."""
        self._watched[gauge] = read

    def tell(self) -> None:
        """Brings the gauges up to date; called about once a second."""
        for gauge, read in self._watched.items():
            self.metrics.record(gauge, read())
