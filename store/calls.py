"""Calls that outlive the connection that made them: what each was, and who attends it.

A call is what a client of a gateway asks for at once: some requests, and an answer made of all
their outputs. The outputs are in the result streams; here is what it takes to make the same answer
of them again, in another process too.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Literal, Protocol

import msgspec

from ..config import BusConfig

KEPT_CALLS = 4096
"""Calls that are kept in memory; the ones least recently attended go first."""

KEPT_BYTES = 64 << 20
"""What their records may take there together."""

Mark = Literal["resumed", "cancelled"]
"""What happened to a call: a client has come back to it; or it is to run no further."""


class KeptCall(msgspec.Struct, frozen=True):
    """What is kept of a call.

    Attributes:
        record: What whoever began it wants to find again.
        entries: The entries of its requests that were published, by request id.
        marks: What happened to it.
    """

    record: bytes
    entries: dict[str, str] = {}
    marks: frozenset[Mark] = frozenset()


class Calls(Protocol):
    """Calls by id. Each is kept for `bus.results_ttl_s` after it was last attended."""

    async def keep(self, call_id: str, record: bytes, for_s: float) -> None:
        """Begins to keep a call, and attends it as `attend` does.

        Of one that is kept already the record is replaced, and nothing else.

        Raises:
            BusError: The transport can't be reached; it may be kept nevertheless.
        """

    async def read(self, call_id: str) -> KeptCall | None:
        """None when it is not kept, or not any more.

        Raises:
            BusError: The transport can't be reached.
        """

    async def note(self, call_id: str, request_id: str, entry_id: str) -> bool:
        """One of its requests was published. While the transport is away it waits.

        Returns:
            Whether the call is to run no further (`mark`), so that the request is to end. Whoever
            marks it so and then reads it finds the entries of all others.

        Raises:
            ChannelClosed: The bus was closed.
        """

    async def mark(self, call_id: str, mark: Mark) -> None:
        """Raises BusError when the transport can't be reached."""

    async def claim(self, name: str, call_id: str) -> str:
        """Gives a call a name, unless another one has it; kept as long as the call.

        Returns:
            The id of the call that has the name now.

        Raises:
            BusError: The transport can't be reached; it may have the name nevertheless.
        """

    async def drop(self, call_id: str, name: str = "") -> None:
        """Forgets a call of which nothing was published, and a name that it has claimed.

        Raises BusError as `mark`.
        """

    async def attend(self, names: Mapping[str, str], for_s: float) -> None:
        """Somebody attends these calls, or will again within `for_s`; where that is 0, nobody
        looks whether they do (`abandoned`).

        Args:
            names: By call id, the name that it has claimed, "" for none.
            for_s: A time shorter than what was said before does not count.

        Raises:
            BusError: The transport can't be reached.
        """

    async def leave(self, call_ids: Collection[str]) -> None:
        """These calls have ended and need nobody's attention. Raises BusError as `attend`."""

    async def abandoned(self, most: int) -> list[str]:
        """Calls that nobody has attended for as long as was said. Each is told once, to one caller.

        Raises:
            BusError: The transport can't be reached.
        """


class _Call:
    """A call in memory. Times are those of `time.monotonic`."""

    def __init__(self, record: bytes, until_s: float) -> None:
        self.record = record
        self.entries: dict[str, str] = {}
        self.marks: set[Mark] = set()
        self.until_s = until_s


class MemoryCalls:
    """`Calls` within one event loop."""

    def __init__(self, config: BusConfig) -> None:
        self._ttl_s = config.results_ttl_s
        # Oldest first, by when they were last attended.
        self._calls: OrderedDict[str, _Call] = OrderedDict()
        self._bytes = 0
        self._named: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._attended_until_s: dict[str, float] = {}

    async def keep(self, call_id: str, record: bytes, for_s: float) -> None:
        now = time.monotonic()
        if (call := self._find(call_id)) is None:
            self._forget(call_id)
            call = self._calls[call_id] = _Call(b"", now + self._ttl_s)
        self._bytes += len(record) - len(call.record)
        call.record = record
        while self._calls and (
            len(self._calls) > KEPT_CALLS
            or self._bytes > KEPT_BYTES
            or _first(self._calls).until_s < now
        ):
            self._forget(next(iter(self._calls)))
        await self.attend({call_id: ""}, for_s)

    async def read(self, call_id: str) -> KeptCall | None:
        call = self._find(call_id)
        return (
            None
            if call is None
            else KeptCall(call.record, dict(call.entries), frozenset(call.marks))
        )

    async def note(self, call_id: str, request_id: str, entry_id: str) -> bool:
        if (call := self._find(call_id)) is None:
            return False
        call.entries[request_id] = entry_id
        return "cancelled" in call.marks

    async def mark(self, call_id: str, mark: Mark) -> None:
        if (call := self._find(call_id)) is not None:
            call.marks.add(mark)

    async def claim(self, name: str, call_id: str) -> str:
        now = time.monotonic()
        owner, until_s = self._named.get(name, ("", 0.0))
        if until_s < now:
            owner = call_id
            self._named[name] = (owner, now + self._ttl_s)
            self._named.move_to_end(name)
        while len(self._named) > KEPT_CALLS:
            self._named.popitem(last=False)
        return owner

    async def drop(self, call_id: str, name: str = "") -> None:
        self._named.pop(name, None)
        self._forget(call_id)
        self._attended_until_s.pop(call_id, None)

    async def attend(self, names: Mapping[str, str], for_s: float) -> None:
        now = time.monotonic()
        for call_id, name in names.items():
            if (call := self._find(call_id)) is not None:
                call.until_s = now + self._ttl_s
                self._calls.move_to_end(call_id)
            if name in self._named:
                self._named[name] = (self._named[name][0], now + self._ttl_s)
                self._named.move_to_end(name)
            if for_s:
                before = self._attended_until_s.get(call_id, 0.0)
                self._attended_until_s[call_id] = max(before, now + for_s)

    async def leave(self, call_ids: Collection[str]) -> None:
        for call_id in call_ids:
            self._attended_until_s.pop(call_id, None)

    async def abandoned(self, most: int) -> list[str]:
        now = time.monotonic()
        over = [each for each, until_s in self._attended_until_s.items() if until_s <= now][:most]
        await self.leave(over)
        return over

    def _forget(self, call_id: str) -> None:
        call = self._calls.pop(call_id, None)
        self._bytes -= len(call.record) if call is not None else 0

    def _find(self, call_id: str) -> _Call | None:
        call = self._calls.get(call_id)
        return call if call is not None and call.until_s >= time.monotonic() else None


def _first(calls: OrderedDict[str, _Call]) -> _Call:
    return next(iter(calls.values()))
