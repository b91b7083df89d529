"""Records under keys, on a server or in this process.

A record is a string, a hash, a list, a sorted set or a stream, with a time to live. A few of
Redis's commands read and write it, so that on Redis no layer is in between, and many take one round
trip.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from ..config.logger import get_logger

T = TypeVar("T")

_Entry = tuple[bytes, dict[bytes, bytes]]

Command = Sequence[Any]
"""The command's name, its key, and its arguments."""


class Records(Protocol):
    """Records of one server or process.

    Commands of one call run in order, and others may run between them. Methods raise BusError when
    the server can't be reached; a write may have happened nevertheless.
    """

    async def run(self, *command: Any) -> Any:
        """Run one command; return its reply."""

    async def run_all(self, commands: Sequence[Command]) -> list[Any]:
        """Run commands in one round trip; return their replies."""

    async def retry_all(self, what: str, commands: Sequence[Command]) -> list[Any]:
        """Run commands like `run_all`, until it succeeds; commands may take effect several times.

        Args:
            what: For the log.
        """

    async def transact(self, key: bytes, commands: Sequence[Command]) -> None:
        """Run commands atomically. All keys are in the slot of `key`."""

    async def replace(
        self, key: bytes, field: bytes, known: bytes, fields: Mapping[bytes, bytes]
    ) -> bool:
        """Set fields of a hash, if one of them has a known value; return whether it had.

        Args:
            field: The field to compare.
            known: Its value; b"" if it must not be there.
            fields: The new values.
        """

    async def stream_ends(self, streams: Sequence[bytes]) -> list[tuple[int, bytes]]:
        """Return the number of entries of each stream and the id of its last; (0, b"0-0") for none.
        The streams share a slot."""

    async def time_ms(self, key: bytes) -> int:
        """Return the clock of the server that holds a key."""


class MemoryRecords:
    """`Records` within one process and event loop."""

    def __init__(self) -> None:
        # A string is bytes; a hash is a dict; a list is one; a sorted set is a dict, too, from
        # member to score; a stream is a list of ids and dicts.
        self._values: dict[bytes, Any] = {}
        self._entries = 0
        self._until_s: dict[bytes, float] = {}
        # One deadline for each scheduled key. The key may have another one since, or none.
        self._deadlines: list[tuple[float, bytes]] = []
        self._scheduled: set[bytes] = set()

    async def run(self, *command: Any) -> Any:
        return self._apply(*command)

    async def run_all(self, commands: Sequence[Command]) -> list[Any]:
        return [self._apply(*command) for command in commands]

    async def retry_all(self, what: str, commands: Sequence[Command]) -> list[Any]:
        return await self.run_all(commands)

    async def transact(self, key: bytes, commands: Sequence[Command]) -> None:
        await self.run_all(commands)

    async def replace(
        self, key: bytes, field: bytes, known: bytes, fields: Mapping[bytes, bytes]
    ) -> bool:
        if (self._apply("HGET", key, field) or b"") != known:
            return False
        self._values.setdefault(key, {}).update(fields)
        return True

    async def stream_ends(self, streams: Sequence[bytes]) -> list[tuple[int, bytes]]:
        """Return zeros: requests streams are not among the records."""
        return [(0, b"0-0") for _ in streams]

    async def time_ms(self, key: bytes) -> int:
        return int(time.monotonic() * 1000)

    def _apply(self, name: str, key: bytes, *arguments: Any) -> Any:
        self._forget_expired(key)
        values = self._values
        words = [*map(_encoded, arguments)]
        match name, words:  # the most frequent ones first: each case takes time
            case "EXPIRE", [ttl_s]:
                self._expire(key, ttl_s)
            case "HINCRBY", [field, amount]:
                fields = values.setdefault(key, {})
                fields[field] = _encoded(int(fields.get(field, 0)) + int(amount))
            case "HSET", pairs:
                values.setdefault(key, {}).update(zip(pairs[::2], pairs[1::2], strict=True))
            case "HGETALL", []:
                return dict(values.get(key, {}))
            case "HGET", [field]:
                return values.get(key, {}).get(field)
            case "HMGET", fields:
                return [values.get(key, {}).get(field) for field in fields]
            case "EXPIRE", [ttl_s, b"NX"]:
                if key not in self._until_s:
                    self._expire(key, ttl_s)
            case "GET", []:
                return values.get(key)
            case "SET", [value]:
                values[key] = value
                self._until_s.pop(key, None)
            case "SET", [value, b"NX", b"GET", b"EX", ttl_s]:
                if (before := values.get(key)) is None:
                    values[key] = value
                    self._expire(key, ttl_s)
                return before
            case "DEL", []:
                return self._delete(key)
            case "HSETNX", [field, value]:
                fields = values.setdefault(key, {})
                known = field in fields
                fields.setdefault(field, value)
                return int(not known)
            case "ZADD", [b"GT", *pairs]:
                scores = values.setdefault(key, {})
                for score, member in zip(pairs[::2], pairs[1::2], strict=True):
                    scores[member] = max(int(score), scores.get(member, 0))
            case "ZRANGE", [b"-inf", most, b"BYSCORE", b"LIMIT", b"0", count]:
                listed = sorted((score, member) for member, score in values.get(key, {}).items())
                found = [member for score, member in listed if score <= int(most)]
                return found[: int(count)]
            case "XADD", [b"MINID", b"~", oldest, b"*", *pairs]:
                entries = values.setdefault(key, [])
                entries[:] = _since(entries, oldest)
                self._entries += 1
                entry_id = b"%d-%d" % (time.monotonic() * 1000, self._entries)
                entries.append((entry_id, dict(zip(pairs[::2], pairs[1::2], strict=True))))
                return entry_id
            case "XRANGE", [oldest, b"+"]:
                return _since(values.get(key, []), oldest)
            case "RPUSH", [value]:
                values.setdefault(key, []).append(value)
            case "LRANGE", [b"0", b"-1"]:
                return list(values.get(key, []))
            case "HDEL" | "ZREM", names:
                return self._remove(key, names)
            case _:
                raise NotImplementedError(name)
        return None

    def _remove(self, key: bytes, names: Sequence[bytes]) -> int:
        """Remove fields or members, and a record without any; return their number."""
        held = self._values.get(key, {})
        removed = [held.pop(name) for name in names if name in held]
        if not held:
            self._delete(key)
        return len(removed)

    def _delete(self, key: bytes) -> int:
        self._until_s.pop(key, None)
        return int(self._values.pop(key, None) is not None)

    def _expire(self, key: bytes, ttl_s: bytes) -> None:
        if key in self._values:
            self._until_s[key] = time.monotonic() + int(ttl_s)
            self._schedule(key)

    def _schedule(self, key: bytes) -> None:
        if key not in self._scheduled:
            self._scheduled.add(key)
            heapq.heappush(self._deadlines, (self._until_s[key], key))

    def _forget_expired(self, key: bytes) -> None:
        """Delete expired records: that of `key`, and those whose scheduled deadline has passed."""
        now_s, expired = time.monotonic(), [key]
        while self._deadlines and self._deadlines[0][0] <= now_s:
            expired.append(heapq.heappop(self._deadlines)[1])
            self._scheduled.remove(expired[-1])
        for each in expired:
            if each in self._until_s and self._until_s[each] <= now_s:
                self._delete(each)
            elif each in self._until_s:
                self._schedule(each)


def _since(entries: Sequence[_Entry], oldest_ms: bytes) -> list[_Entry]:
    """Return the entries whose ids, milliseconds and a number, are not before a time."""
    return [entry for entry in entries if int(entry[0].partition(b"-")[0]) >= int(oldest_ms)]


def _encoded(argument: Any) -> bytes:
    return argument if isinstance(argument, bytes) else str(argument).encode()


def readable(decode: Callable[[bytes], T], raw: bytes, place: str) -> T | None:
    """Decode a record or an entry; None, with a log line, if that is impossible.

    It may be foreign, or written by another version during a rolling upgrade.
    """
    try:
        return decode(raw)
    except (ValueError, RecursionError) as error:
        get_logger().warning("bus.undecodable_entry", stream=place, error=str(error))
        return None
