"""What an entry of the requests stream may hold beside its request, whoever wrote it.

For both buses, where entries are published and where they are read. The request itself is limited
by `bus.max_request_bytes`, in `codec.py`.
"""

from __future__ import annotations

MAX_FIELDS = 8
"""More than the names that there are; an entry with more is not looked at any further."""

MAX_TRACEPARENT_BYTES = 256
"""The one version that there is has 55; a later one may append to that."""

MAX_TRACESTATE_BYTES = 4096
"""Eight times what everybody is to pass on."""


def usable_trace(traceparent: str | bytes, tracestate: str | bytes) -> tuple[str, str]:
    """The trace context that goes with a request; what is too long is "".

    As W3C Trace Context asks (3.3.1.5, 4.3): the state of others is dropped when it is too long, or
    when it belongs to no trace. Nobody is refused an answer for it.
    """
    parent = _ascii(traceparent, MAX_TRACEPARENT_BYTES)
    return parent, _ascii(tracestate, MAX_TRACESTATE_BYTES) if parent else ""


def _ascii(text: str | bytes, most: int) -> str:
    if len(text) > most:
        return ""
    raw = text.encode("ascii", "ignore") if isinstance(text, str) else text
    return raw.decode("ascii", "ignore")
