"""Decoding of requests stream entries."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from redis.asyncio import Redis

from ...store.redis.client import MOST_FIELDS, time_ms
from ...store.redis.keys import (
    JSON,
    MODEL,
    MSGPACK,
    REFUSED,
    TRACEPARENT,
    TRACESTATE,
    entry_name,
    parse_id,
)
from ..codec import decode_refused, decode_request
from ..entries import MAX_FIELDS, Malformed, RequestEntry, budget_of, usable_trace
from ..public import GenerateRequest

_FIELDS = frozenset({JSON, MSGPACK, REFUSED, TRACEPARENT, TRACESTATE, MODEL})
_BODIES = (JSON, MSGPACK, REFUSED)

Entries = list[tuple[bytes, dict[bytes, bytes]]]


def entries_of(rows: Iterable[tuple[bytes, list[bytes]]]) -> Entries:
    """Convert a script's reply, whose fields the client leaves flat. Deleted entries have none."""
    return [
        (entry_id, dict(zip(fields[::2], fields[1::2], strict=True)))
        for entry_id, fields in rows
        if fields
    ]


async def read_entries(
    redis: Redis, key: bytes, raw: Entries, max_bytes: int, shard: int = 0
) -> list[RequestEntry]:
    """Return the requests in entries. Asks for the server's time only if a request has a budget.

    Args:
        key: A key on the node whose clock made the entry ids.
        max_bytes: Larger requests are refused undecoded.
        shard: Of the stream.
    """
    requests = [read_request(fields, max_bytes) for _, fields in raw]
    now_ms: int | None = None
    if any(budget_of(request) is not None for request in requests):
        now_ms = await time_ms(redis, key)
    return [
        RequestEntry(
            entry_name(entry_id.decode(), shard),
            request,
            *usable_trace(fields.get(TRACEPARENT, b""), fields.get(TRACESTATE, b"")),
            0
            if now_ms is None or budget_of(request) is None
            else max(0, now_ms - parse_id(entry_id)[0]) * 1_000_000,
            model_of(fields),
        )
        for (entry_id, fields), request in zip(raw, requests, strict=True)
    ]


def read_request(fields: dict[bytes, bytes], max_bytes: int) -> GenerateRequest | Malformed:
    """Return the request in an entry's fields. Never raises: entries come from any client."""
    bodies = [name for name in _BODIES if name in fields]
    if len(fields) > MAX_FIELDS or not fields.keys() <= _FIELDS or len(bodies) != 1:
        return Malformed(
            "",
            "malformed",
            "an entry of the requests stream has one field 'json' or 'msgpack', and may have "
            f"'traceparent', 'tracestate' and 'model'; this one has {_names(fields)}",
        )
    body = fields[bodies[0]]
    if bodies[0] == REFUSED:
        if len(body) > max_bytes:
            return Malformed("", "malformed", "the field 'refused' is too long")
        return decode_refused(body)
    return decode_request(body, "json" if bodies[0] == JSON else "msgpack", max_bytes)


def model_of(fields: dict[bytes, bytes]) -> str:
    """Return the entry's own model field; "" if it has none."""
    return fields.get(MODEL, b"").decode("utf-8", "replace")


def _names(fields: dict[bytes, bytes]) -> str:
    first = sorted(islice(fields, MAX_FIELDS))
    names = [repr(name[:40].decode("utf-8", "replace")) for name in first]
    number = "many" if len(fields) > MOST_FIELDS else len(fields) - len(first)
    more = f" and {number} more" if len(fields) > len(first) else ""
    return (", ".join(names) or "none") + more
