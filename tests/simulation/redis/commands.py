"""The commands of Redis that the bus and the store send, on simulated data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from .data import (
    FIRST,
    LAST,
    Data,
    Group,
    Id,
    RedisError,
    SortedSet,
    Stream,
    read_id,
    write_id,
)

T = TypeVar("T")

Arguments = list[bytes]

OK = "OK"
"""A status reply."""

WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"


class Engine:
    """Runs commands, one at a time, on the data.

    Attributes:
        data: All keys.
        now_ms: The server's clock during a command.
        run_id: As in INFO; changes with each start.
        written: Keys of streams that got entries, for blocked readers.
        scripts: Runs EVAL.
        claims: Entries that went from one consumer to another: id, both, and the age of the lease
            in milliseconds.
        replaced: Fields of hashes that got another value: the key, and the field.
    """

    def __init__(self, scripts: Callable[[Engine, bytes, Arguments, Arguments], Any]) -> None:
        self.data = Data()
        self.now_ms = 0
        self.run_id = ""
        self.written: set[bytes] = set()
        self.claims: list[tuple[bytes, bytes, bytes, int]] = []
        self.replaced: set[tuple[bytes, bytes]] = set()
        self.scripts = scripts
        self._commands: dict[bytes, Callable[[Arguments], Any]] = {
            name[1:].encode(): getattr(self, name) for name in dir(self) if name[1:].isupper()
        }

    def run(self, command: Arguments) -> Any:
        """Return the reply: None, bytes, an int, OK, a list or a dict.

        Raises:
            RedisError: The reply is an error.
        """
        run = self._commands.get(command[0])
        if run is None:
            raise RedisError(f"ERR unknown command '{command[0].decode()}'")
        return run(command)

    # --- values -------------------------------------------------------------------------------

    def _get(self, key: bytes, kind: type[T]) -> T | None:
        if key in self.data.expiries:
            self.data.expire(key, self.now_ms)
        value = self.data.values.get(key)
        if value is not None and not isinstance(value, kind):
            raise RedisError(WRONG_TYPE)
        return value

    def _make(self, key: bytes, kind: type[T]) -> T:
        value = self._get(key, kind)
        if value is None:
            value = kind()
            self.data.values[key] = value  # type: ignore[assignment]
        return value

    def _drop_if_empty(self, key: bytes, value: Any) -> None:
        if not value:
            self.data.delete(key)

    def _exists(self, key: bytes) -> bool:
        if key in self.data.expiries:
            self.data.expire(key, self.now_ms)
        return key in self.data.values

    # --- server -------------------------------------------------------------------------------

    def _PING(self, command: Arguments) -> Any:
        return "PONG"

    def _TIME(self, command: Arguments) -> Any:
        return [b"%d" % (self.now_ms // 1000), b"%d" % (self.now_ms % 1000 * 1000)]

    def _INFO(self, command: Arguments) -> Any:
        return f"redis_version:7.4.0\r\nrun_id:{self.run_id}\r\n".encode()

    def _EVAL(self, command: Arguments) -> Any:
        keys = 3 + int(command[2])
        return self.scripts(self, command[1], command[3:keys], command[keys:])

    def _WATCHED(self, command: Arguments) -> Any:
        """WATCH, MULTI and EXEC at once: run commands if a key is still as it was.

        Args: the key, its value, and each command after its length.
        """
        value = self._get(command[1], (bytes, dict))  # type: ignore[arg-type]
        if repr(value or None).encode() != command[2]:
            return None
        at = 3
        while at < len(command):
            size = int(command[at])
            self.run(command[at + 1 : at + 1 + size])
            at += 1 + size
        return OK

    # --- keys and strings ---------------------------------------------------------------------

    def _GET(self, command: Arguments) -> Any:
        return self._get(command[1], bytes)

    def _SET(self, command: Arguments) -> Any:
        key, options = command[1], [each.upper() for each in command[3:]]
        exists = self._exists(key)
        old = self._get(key, bytes) if b"GET" in options else None
        if not (b"NX" in options and exists) and not (b"XX" in options and not exists):
            self.data.values[key] = command[2]
            self.data.expiries.pop(key, None)
            for name, unit in ((b"EX", 1000), (b"PX", 1)):
                if name in options:
                    lasts = int(options[options.index(name) + 1]) * unit
                    self.data.expiries[key] = self.now_ms + lasts
        elif b"GET" not in options:
            return None
        return old if b"GET" in options else OK

    def _GETRANGE(self, command: Arguments) -> Any:
        start, stop = int(command[2]), int(command[3])
        return (self._get(command[1], bytes) or b"")[start : stop + 1]

    def _SETRANGE(self, command: Arguments) -> Any:
        at, old = int(command[2]), self._get(command[1], bytes) or b""
        value = old[:at].ljust(at, b"\0") + command[3] + old[at + len(command[3]) :]
        self.data.values[command[1]] = value
        return len(value)

    def _DEL(self, command: Arguments) -> Any:
        return sum(self.data.delete(key) for key in command[1:] if self._exists(key))

    def _EXISTS(self, command: Arguments) -> Any:
        return sum(self._exists(key) for key in command[1:])

    def _EXPIRE(self, command: Arguments) -> Any:
        return self._expire(command[1], int(command[2]) * 1000)

    def _PEXPIRE(self, command: Arguments) -> Any:
        return self._expire(command[1], int(command[2]))

    def _expire(self, key: bytes, lasts_ms: int) -> int:
        if not self._exists(key):
            return 0
        self.data.expiries[key] = self.now_ms + lasts_ms
        return 1

    def _PTTL(self, command: Arguments) -> Any:
        if not self._exists(command[1]):
            return -2
        at = self.data.expiries.get(command[1])
        return -1 if at is None else at - self.now_ms

    def _PERSIST(self, command: Arguments) -> Any:
        return int(self.data.expiries.pop(command[1], None) is not None)

    def _RENAME(self, command: Arguments) -> Any:
        if not self._exists(command[1]):
            raise RedisError("ERR no such key")
        self.data.delete(command[2])
        self.data.values[command[2]] = self.data.values.pop(command[1])
        if (at := self.data.expiries.pop(command[1], None)) is not None:
            self.data.expiries[command[2]] = at
        return OK

    # --- hashes, lists, sorted sets -----------------------------------------------------------

    def _HSET(self, command: Arguments) -> Any:
        hash_: dict[bytes, bytes] = self._make(command[1], dict)
        before = len(hash_)
        for name, value in zip(command[2::2], command[3::2], strict=True):
            if hash_.get(name, value) != value:
                self.replaced.add((command[1], name))
            hash_[name] = value
        return len(hash_) - before

    def _HSETNX(self, command: Arguments) -> Any:
        hash_: dict[bytes, bytes] = self._make(command[1], dict)
        if command[2] in hash_:
            return 0
        hash_[command[2]] = command[3]
        return 1

    def _HGET(self, command: Arguments) -> Any:
        return (self._get(command[1], dict) or {}).get(command[2])

    def _HMGET(self, command: Arguments) -> Any:
        hash_: dict[bytes, bytes] = self._get(command[1], dict) or {}
        return [hash_.get(field) for field in command[2:]]

    def _HGETALL(self, command: Arguments) -> Any:
        return dict(self._get(command[1], dict) or {})

    def _HKEYS(self, command: Arguments) -> Any:
        return list(self._get(command[1], dict) or {})

    def _HLEN(self, command: Arguments) -> Any:
        return len(self._get(command[1], dict) or {})

    def _HEXISTS(self, command: Arguments) -> Any:
        return int(command[2] in (self._get(command[1], dict) or {}))

    def _HDEL(self, command: Arguments) -> Any:
        hash_: dict[bytes, bytes] = self._get(command[1], dict) or {}
        number = sum(hash_.pop(field, None) is not None for field in command[2:])
        self._drop_if_empty(command[1], hash_)
        return number

    def _HINCRBY(self, command: Arguments) -> Any:
        hash_: dict[bytes, bytes] = self._make(command[1], dict)
        value = int(hash_.get(command[2], b"0")) + int(command[3])
        hash_[command[2]] = b"%d" % value
        return value

    def _RPUSH(self, command: Arguments) -> Any:
        list_: list[bytes] = self._make(command[1], list)
        list_.extend(command[2:])
        return len(list_)

    def _LRANGE(self, command: Arguments) -> Any:
        list_: list[bytes] = self._get(command[1], list) or []
        stop = int(command[3])
        return list_[int(command[2]) : None if stop == -1 else stop + 1]

    def _ZADD(self, command: Arguments) -> Any:
        set_ = self._make(command[1], SortedSet)
        only_greater = command[2].upper() == b"GT"
        pairs, number = command[2 + only_greater :], 0
        for score, member in zip(pairs[::2], pairs[1::2], strict=True):
            old = set_.scores.get(member)
            number += old is None
            if old is None or not only_greater or float(score) > old:
                set_.put(member, float(score))
        return number

    def _ZREM(self, command: Arguments) -> Any:
        set_ = self._get(command[1], SortedSet)
        if set_ is None:
            return 0
        number = sum(set_.remove(member) for member in command[2:])
        self._drop_if_empty(command[1], set_.scores)
        return number

    def _ZRANGE(self, command: Arguments) -> Any:
        set_ = self._get(command[1], SortedSet) or SortedSet()
        if b"BYSCORE" not in command:
            stop = int(command[3])
            found = set_.order[int(command[2]) : None if stop == -1 else stop + 1]
            return [member for _, member in found]
        low, high = float(command[2]), float(command[3])
        members = [member for score, member in set_.order if low <= score <= high]
        if b"LIMIT" in command:
            at = command.index(b"LIMIT")
            start = int(command[at + 1])
            members = members[start : start + int(command[at + 2])]
        return members

    # --- streams ------------------------------------------------------------------------------

    def _XADD(self, command: Arguments) -> Any:
        key, at = command[1], 2
        limit: tuple[bytes, bytes] | None = None
        if command[at].upper() in (b"MAXLEN", b"MINID"):
            kind = command[at].upper()
            at += 1
            exact = command[at] != b"~"
            at += command[at] in (b"~", b"=")
            # An approximate limit keeps whole nodes of a hundred entries.
            limit = (kind, command[at]) if exact or kind == b"MAXLEN" else None
            if limit is not None and not exact:
                limit = (kind, b"%d" % (int(command[at]) + 100))
            at += 1
        stream = self._make(key, Stream)
        try:
            entry_id = stream.next_id(command[at], self.now_ms)
        except RedisError:
            if stream.last == FIRST:  # it has just been made
                self.data.delete(key)
            raise
        stream.add(entry_id, command[at + 1 :])
        if limit is not None:
            self._trim(stream, *limit)
        self.written.add(key)
        return write_id(entry_id)

    def _XTRIM(self, command: Arguments) -> Any:
        stream = self._get(command[1], Stream)
        return 0 if stream is None else self._trim(stream, command[2].upper(), command[-1])

    def _trim(self, stream: Stream, kind: bytes, limit: bytes) -> int:
        if kind == b"MAXLEN":
            return stream.trim(max(0, len(stream.ids) - int(limit)))
        return stream.trim(len(stream.ids) - len(stream.between(read_id(limit), LAST)))

    def _XLEN(self, command: Arguments) -> Any:
        stream = self._get(command[1], Stream)
        return 0 if stream is None else len(stream.ids)

    def _XDEL(self, command: Arguments) -> Any:
        stream = self._get(command[1], Stream)
        ids = [read_id(each) for each in command[2:]]
        return 0 if stream is None else sum(map(stream.delete, ids))

    def _XSETID(self, command: Arguments) -> Any:
        stream = self._get(command[1], Stream)
        if stream is None:
            raise RedisError("ERR The XSETID command requires the key to exist.")
        stream.last, stream.added = read_id(command[2]), int(command[4])
        return OK

    def _XRANGE(self, command: Arguments) -> Any:
        return self._range(command[1], command[2], command[3], command[4:], reverse=False)

    def _XREVRANGE(self, command: Arguments) -> Any:
        return self._range(command[1], command[3], command[2], command[4:], reverse=True)

    def _range(
        self, key: bytes, start: bytes, stop: bytes, options: Arguments, reverse: bool
    ) -> list[Any]:
        first, last = _start(start), _stop(stop)
        stream = self._get(key, Stream)
        ids = [] if stream is None else stream.between(first, last)
        if reverse:
            ids.reverse()
        return _entries(stream, ids[: int(options[1])] if options else ids)

    def _XREAD(self, command: Arguments) -> Any:
        """Return entries by stream; None if there are none. Blocking is up to the server."""
        count, _, positions = reading(command)
        found = {}
        values, expiries = self.data.values, self.data.expiries
        for key, raw in positions:
            stream = values.get(key)
            if key in expiries or type(stream) is not Stream:
                stream = self._get(key, Stream)
            if stream is None or not stream.ids:
                continue
            start = read_id(raw)
            if stream.ids[-1] > start:
                found[key] = _entries(stream, stream.after(start)[:count])
        return found or None

    def _XREADGROUP(self, command: Arguments) -> Any:
        count, _, ((key, start),) = reading(command)
        stream, group = self._group(key, command[2])
        if start == b">":
            ids = stream.after(group.last)[:count]
            if not ids:
                return None
            group.last = ids[-1]
            for entry_id in ids:
                group.pending[entry_id] = (command[3], self.now_ms)
            return {key: _entries(stream, ids)}
        after = read_id(start)
        own = (each for each, (owner, _) in group.pending.items() if owner == command[3])
        ids = sorted(each for each in own if each > after)[:count]
        return {key: _entries(stream, ids)}

    def _group(self, key: bytes, name: bytes) -> tuple[Stream, Group]:
        stream = self._get(key, Stream)
        group = None if stream is None else stream.groups.get(name)
        if stream is None or group is None:
            raise RedisError(
                f"NOGROUP No such key '{key.decode()}' or consumer group '{name.decode()}'"
            )
        return stream, group

    def _XGROUP(self, command: Arguments) -> Any:
        stream = self._make(command[2], Stream)
        if command[3] in stream.groups:
            raise RedisError("BUSYGROUP Consumer Group name already exists")
        stream.groups[command[3]] = Group(read_id(command[4]))
        return OK

    def _XACK(self, command: Arguments) -> Any:
        stream = self._get(command[1], Stream)
        group = None if stream is None else stream.groups.get(command[2])
        if group is None:
            return 0
        return sum(group.pending.pop(read_id(each), None) is not None for each in command[3:])

    def _XPENDING(self, command: Arguments) -> Any:
        _, group = self._group(command[1], command[2])
        if len(command) == 3:
            ids = sorted(group.pending)
            owners: dict[bytes, int] = {}
            for owner, _ in group.pending.values():
                owners[owner] = owners.get(owner, 0) + 1
            ends = [write_id(ids[0]), write_id(ids[-1])] if ids else [None, None]
            listed = [[owner, b"%d" % number] for owner, number in owners.items()]
            return [len(ids), *ends, listed or None]
        options, idle = command[3:], 0
        if options[0].upper() == b"IDLE":
            idle, options = int(options[1]), options[2:]
        first, last = _start(options[0]), _stop(options[1])
        rows = []
        found = sorted(group.pending) if first != last else [first] * (first in group.pending)
        for entry_id in found:
            owner, since = group.pending[entry_id]
            age, is_own = self.now_ms - since, len(options) < 4 or options[3] == owner
            if first <= entry_id <= last and age >= idle and is_own:
                rows.append([write_id(entry_id), owner, age, 1])
        return rows[: int(options[2])]

    def _XCLAIM(self, command: Arguments) -> Any:
        stream, group = self._group(command[1], command[2])
        just_ids = command[-1].upper() == b"JUSTID"
        claimed = []
        for raw in command[5 : len(command) - just_ids]:
            entry_id = read_id(raw)
            if entry_id not in group.pending:
                continue
            if entry_id not in stream.fields:
                del group.pending[entry_id]
                continue
            before, since = group.pending[entry_id]
            if self.now_ms - since >= int(command[4]):
                if before != command[3]:
                    self.claims.append((raw, before, command[3], self.now_ms - since))
                group.pending[entry_id] = (command[3], self.now_ms)
                claimed.append(entry_id)
        return [write_id(each) for each in claimed] if just_ids else _entries(stream, claimed)

    def _XINFO(self, command: Arguments) -> Any:
        stream = self._get(command[2], Stream)
        if stream is None:
            raise RedisError("ERR no such key")
        if command[1].upper() == b"GROUPS":
            return [
                {b"name": name, b"last-delivered-id": write_id(group.last)}
                for name, group in stream.groups.items()
            ]
        return {
            b"length": len(stream.ids),
            b"last-generated-id": write_id(stream.last),
            b"entries-added": stream.added,
        }


def among(command: Arguments, streams: set[bytes]) -> Arguments:
    """Return an XREAD of those of its streams that are among others."""
    at = command.index(b"STREAMS") + 1
    half = (len(command) - at) // 2
    places = [place for place in range(at, at + half) if command[place] in streams]
    starts = [command[place + half] for place in places]
    return [*command[:at], *(command[place] for place in places), *starts]


def reading(command: Arguments) -> tuple[int | None, int | None, Iterable[tuple[bytes, bytes]]]:
    """Return count, time to block in milliseconds, and positions of XREAD or XREADGROUP."""
    streams = command.index(b"STREAMS")
    options = command[:streams]
    count = int(options[options.index(b"COUNT") + 1]) if b"COUNT" in options else None
    block = int(options[options.index(b"BLOCK") + 1]) if b"BLOCK" in options else None
    names = command[streams + 1 :]
    half = len(names) // 2
    return count, block, list(zip(names[:half], names[half:], strict=True))


def _start(raw: bytes) -> Id:
    if raw == b"-":
        return FIRST
    if raw.startswith(b"("):
        milliseconds, number = read_id(raw[1:])
        return milliseconds, number + 1
    return read_id(raw)


def _stop(raw: bytes) -> Id:
    return LAST if raw == b"+" else read_id(raw, LAST[1])


def _entries(stream: Stream | None, ids: Iterable[Id]) -> list[Any]:
    """Return entries as in a reply; of deleted ones the fields are None."""
    fields = {} if stream is None else stream.fields
    return [[write_id(each), fields.get(each)] for each in ids]
