"""Limits on the fields of a requests stream entry beside the request.

Applied by both buses, when publishing and when reading. The request itself is limited by
`bus.max_request_bytes`, in `codec.py`.
"""

from __future__ import annotations

MAX_FIELDS = 8
"""More than the known names; an entry with more fields is not read further."""

MAX_TRACEPARENT_BYTES = 256
"""The only version has 55 bytes; later ones may append."""

MAX_TRACESTATE_BYTES = 4096
"""Eight times the size that every participant must propagate."""


def usable_trace(traceparent: str | bytes, tracestate: str | bytes) -> tuple[str, str]:
    """Return a request's trace context; parts that are too long become "".

    By W3C Trace Context (3.3.1.5, 4.3), a tracestate is dropped if it is too long or has no
    traceparent; the
    request is processed regardless.
    """
    parent = _ascii(traceparent, MAX_TRACEPARENT_BYTES)
    return parent, _ascii(tracestate, MAX_TRACESTATE_BYTES) if parent else ""


def _ascii(text: str | bytes, most: int) -> str:
    if len(text) > most:
        return ""
    raw = text.encode("ascii", "ignore") if isinstance(text, str) else text
    return raw.decode("ascii", "ignore")
