"""The data of a simulated Redis server: streams with groups, and sorted sets."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

Id = tuple[int, int]
"""An entry's id: milliseconds, and a number."""

FIRST: Id = (0, 0)
LAST: Id = ((1 << 64) - 1, (1 << 64) - 1)


class RedisError(Exception):
    """An error reply; the text begins with its code."""


def read_id(raw: bytes, rest: int = 0) -> Id:
    """Return an id. `rest`: the number of an id without one."""
    milliseconds, hyphen, number = raw.partition(b"-")
    try:
        return int(milliseconds), int(number) if hyphen else rest
    except ValueError:
        raise RedisError("ERR Invalid stream ID specified as stream command argument") from None


def write_id(entry_id: Id) -> bytes:
    return b"%d-%d" % entry_id


class Group:
    """A consumer group.

    Attributes:
        last: Id of the last entry handed out.
        pending: Consumer, and time in milliseconds, of each entry not acknowledged.
    """

    def __init__(self, last: Id) -> None:
        self.last = last
        self.pending: dict[Id, tuple[bytes, int]] = {}

    def copy(self) -> Group:
        group = Group(self.last)
        group.pending = dict(self.pending)
        return group


class Stream:
    """A stream: entries in order of their ids.

    Attributes:
        ids: In order.
        fields: Names and values of each entry, one after the other.
        last: The last id ever given.
        added: Number of entries ever added.
    """

    def __init__(self) -> None:
        self.ids: list[Id] = []
        self.fields: dict[Id, list[bytes]] = {}
        self.last: Id = FIRST
        self.added = 0
        self.groups: dict[bytes, Group] = {}

    def copy(self) -> Stream:
        stream = Stream()
        stream.ids, stream.fields = list(self.ids), dict(self.fields)
        stream.last, stream.added = self.last, self.added
        stream.groups = {name: group.copy() for name, group in self.groups.items()}
        return stream

    def add(self, entry_id: Id, fields: list[bytes]) -> None:
        self.ids.append(entry_id)
        self.fields[entry_id] = fields
        self.last = entry_id
        self.added += 1

    def next_id(self, raw: bytes, now_ms: int) -> Id:
        """Return the id that XADD gives, or checks."""
        if raw == b"*":
            return max((now_ms, 0), (self.last[0], self.last[1] + 1))
        entry_id = read_id(raw)
        if entry_id <= self.last:
            raise RedisError(
                "ERR The ID specified in XADD is equal or smaller than the target stream top item"
            )
        return entry_id

    def between(self, start: Id, stop: Id) -> list[Id]:
        return self.ids[bisect_left(self.ids, start) : bisect_right(self.ids, stop)]

    def after(self, entry_id: Id) -> list[Id]:
        return self.ids[bisect_right(self.ids, entry_id) :]

    def delete(self, entry_id: Id) -> int:
        if entry_id not in self.fields:
            return 0
        del self.fields[entry_id]
        del self.ids[bisect_left(self.ids, entry_id)]
        return 1

    def trim(self, number: int) -> int:
        """Drop the oldest entries."""
        for entry_id in self.ids[:number]:
            del self.fields[entry_id]
        del self.ids[:number]
        return number


class SortedSet:
    """Members by score."""

    def __init__(self) -> None:
        self.scores: dict[bytes, float] = {}
        self.order: list[tuple[float, bytes]] = []

    def copy(self) -> SortedSet:
        copied = SortedSet()
        copied.scores, copied.order = dict(self.scores), list(self.order)
        return copied

    def put(self, member: bytes, score: float) -> None:
        self.remove(member)
        self.scores[member] = score
        insort(self.order, (score, member))

    def remove(self, member: bytes) -> int:
        if member not in self.scores:
            return 0
        del self.order[bisect_left(self.order, (self.scores.pop(member), member))]
        return 1


_NAME = re.compile(rb'"request_id":"([^"]*)"')


def names_of(data: Data) -> Iterator[str]:
    """Return the ids of requests that wait for their answers, or have ended streams."""
    for key, value in data.values.items():
        if not isinstance(value, Stream) or not value.ids:
            continue
        if key == b"nano:requests":
            raws = [b" ".join(fields) for fields in value.fields.values()]
        elif key.startswith(b"nano:out:"):
            raws = [raw for raw in value.fields[value.ids[-1]] if b'"type":"completion"' in raw]
        else:
            continue
        for raw in raws:
            if found := _NAME.search(raw):
                yield found[1].decode()


Value = bytes | dict[bytes, bytes] | list[bytes] | Stream | SortedSet


class Data:
    """All keys of a server.

    Attributes:
        values: By key.
        expiries: In milliseconds, of the keys that expire.
        versions: Number of changes of each key that was watched.
    """

    def __init__(self) -> None:
        self.values: dict[bytes, Value] = {}
        self.expiries: dict[bytes, int] = {}

    def copy(self) -> Data:
        """Return a copy, as on a disk or a replica."""
        data = Data()
        data.expiries = dict(self.expiries)
        data.values = {
            key: value if isinstance(value, bytes) else value.copy()
            for key, value in self.values.items()
        }
        return data

    def expire(self, key: bytes, now_ms: int) -> None:
        """Delete a key whose time has come."""
        at = self.expiries.get(key)
        if at is not None and at <= now_ms:
            self.delete(key)

    def delete(self, key: bytes) -> int:
        self.expiries.pop(key, None)
        return 0 if self.values.pop(key, None) is None else 1
