"""Entries of the requests queue, and limits on their fields beside the request.

Both buses apply the limits, when publishing and when reading. `bus.max_request_bytes` limits the
request itself, in `codec.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from .entry_keys import MAX_REQUEST_ID_LENGTH as MAX_REQUEST_ID_LENGTH
from .entry_keys import entry_key as entry_key
from .entry_keys import is_usable_request_id as is_usable_request_id
from .public import Completion, ForkOrigin, GenerateRequest, Timings, Usage

MAX_FIELDS = 8
"""More than the known names; an entry with more fields is not read further."""

MAX_TRACEPARENT_BYTES = 256
"""The only version has 55 bytes; later ones may append."""

MAX_TRACESTATE_BYTES = 4096
"""Eight times the size that every participant must propagate."""


def id_in(key: str) -> str:
    """Return the entry id in a key."""
    return key.partition(" ")[0]


def usable_trace(traceparent: str | bytes, tracestate: str | bytes) -> tuple[str, str]:
    """Return a request's trace context; parts that are too long become "".

    By W3C Trace Context (3.3.1.5, 4.3), a tracestate is dropped if it is too long or has no
    traceparent; the request is processed regardless.
    """
    parent = _ascii(traceparent, MAX_TRACEPARENT_BYTES)
    return parent, _ascii(tracestate, MAX_TRACESTATE_BYTES) if parent else ""


def _ascii(text: str | bytes, most: int) -> str:
    if len(text) > most:
        return ""
    raw = text.encode("ascii", "ignore") if isinstance(text, str) else text
    return raw.decode("ascii", "ignore")


class Malformed(msgspec.Struct, frozen=True):
    """Placeholder for an unreadable request.

    Attributes:
        request_id: The client's id if readable, else "".
        code: "malformed", "invalid_request" or "request_too_large".
        message: The error and its position.
    """

    request_id: str
    code: str
    message: str


class RequestEntry(msgspec.Struct, frozen=True):
    """An entry of the requests queue, with the client's trace context.

    Attributes:
        waited_ns: Time in the queue by the queue's clock; set only for requests with a budget.
        model: The entry's own model field, which overrides the request's.
        queued_ns: As `waited_ns`, for all requests, as far as known: for the accounts of time.
        digest: Of its fields on the server, which distinguishes it from another entry with its
            id; "" in memory.
        origin: Where a fork begins, once admission has found it and its request has a prompt.
        origin_trace: Traceparent of the request that is forked, if it is known.
    """

    entry_id: str
    request: GenerateRequest | Malformed
    traceparent: str = ""
    tracestate: str = ""
    waited_ns: int = 0
    model: str = ""
    queued_ns: int = 0
    digest: str = ""
    origin: ForkOrigin | None = None
    origin_trace: str = ""

    @property
    def key(self) -> str:
        """Its identity in the lane; see `entry_key`."""
        return entry_key(self.entry_id, self.request.request_id)

    @property
    def budget_ns(self) -> int | None:
        """The request's budget in nanoseconds; None without one or if unreadable."""
        return budget_of(self.request)


Answer = Callable[[RequestEntry], Completion]
"""Returns the terminal message for an entry that no lane answers."""


def queued_only(entry: RequestEntry, now_ns: int) -> tuple[Usage, Timings]:
    """Return usage and timings of an entry that ends on the requests queue."""
    queued_ns = entry.queued_ns
    time = {"queue": queued_ns} if queued_ns else {}
    timings = Timings(finished_ns=now_ns, published_ns=now_ns - queued_ns)
    return Usage(time=time, billed_ns=0), timings


def budget_of(request: GenerateRequest | Malformed) -> int | None:
    """Return a request's budget in nanoseconds; None without one or if unreadable."""
    return None if isinstance(request, Malformed) else request.budget_ns
