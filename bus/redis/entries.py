"""Decoding of requests stream entries."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from itertools import chain, islice

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

_CLOCK_ASKED_MS = 10_000
"""After this time the server's clock is read again; clocks drift by less than 1 ms in it."""

Entries = list[tuple[bytes, dict[bytes, bytes]]]

_DIGESTED_FIELDS = MAX_FIELDS
_DIGESTED_BYTES = 512

# As `digest_of`, of an entry on the server: a script that is to remove an entry compares it, since
# the server may have given its id to another one. The whole of a request may be megabytes.
IS_SAME = f"""
local function is_same(key, id, digest)
  local entry = redis.call('XRANGE', key, id, id)[1]
  if not entry or digest == '' then return entry end
  local parts = {{}}
  for i = 1, math.min(#entry[2], 2 * {_DIGESTED_FIELDS}) do
    local each = entry[2][i]
    parts[#parts + 1] = #each .. ' ' .. string.sub(each, 1, {_DIGESTED_BYTES})
      .. string.sub(each, -{_DIGESTED_BYTES})
  end
  return redis.sha1hex(table.concat(parts)) == digest
end
"""


def digest_of(fields: dict[bytes, bytes]) -> str:
    """Return a digest that distinguishes an entry from another one with its id: of each field the
    length, the beginning and the end, where a request's id stands."""
    digest = hashlib.sha1(usedforsecurity=False)
    for each in islice(chain.from_iterable(fields.items()), 2 * _DIGESTED_FIELDS):
        digest.update(b"%d " % len(each))
        digest.update(each[:_DIGESTED_BYTES] + each[-_DIGESTED_BYTES:])
    return digest.hexdigest()


def entries_of(rows: Iterable[tuple[bytes, list[bytes]]]) -> Entries:
    """Convert a script's reply, whose fields the client leaves flat. Deleted entries have none."""
    return [
        (entry_id, dict(zip(fields[::2], fields[1::2], strict=True)))
        for entry_id, fields in rows
        if fields
    ]


class ServerClock:
    """The clock that makes the entry ids of a stream, in milliseconds."""

    def __init__(self) -> None:
        self._ahead_ms = 0
        self._asked_ms = -_CLOCK_ASKED_MS

    async def now_ms(self, redis: Redis, key: bytes, *, exact: bool) -> int:
        """Return the time. If it need not be exact, the server's clock is read now and then only.

        Args:
            key: A key on the server.
            exact: Whether to read the server's clock.
        """
        own_ms = time.monotonic_ns() // 1_000_000
        if exact or own_ms - self._asked_ms >= _CLOCK_ASKED_MS:
            now_ms = await time_ms(redis, key)
            self._asked_ms, self._ahead_ms = own_ms, now_ms - own_ms
            return now_ms
        return own_ms + self._ahead_ms


async def read_entries(
    redis: Redis, key: bytes, raw: Entries, max_bytes: int, clock: ServerClock, shard: int = 0
) -> list[RequestEntry]:
    """Return the requests in entries.

    Args:
        key: A key on the node whose clock made the entry ids.
        max_bytes: Larger requests are refused undecoded.
        clock: The node's. Only budgets need it exact.
        shard: Of the stream.
    """
    if not raw:
        return []
    requests = [read_request(fields, max_bytes) for _, fields in raw]
    exact = any(budget_of(request) is not None for request in requests)
    now_ms = await clock.now_ms(redis, key, exact=exact)
    entries: list[RequestEntry] = []
    for (entry_id, fields), request in zip(raw, requests, strict=True):
        queued_ns = max(0, now_ms - parse_id(entry_id)[0]) * 1_000_000
        entries.append(
            RequestEntry(
                entry_name(entry_id.decode(), shard),
                request,
                *usable_trace(fields.get(TRACEPARENT, b""), fields.get(TRACESTATE, b"")),
                waited_ns=0 if budget_of(request) is None else queued_ns,
                model=model_of(fields),
                queued_ns=queued_ns,
                digest=digest_of(fields),
            )
        )
    return entries


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
