"""Durable calls: calls that outlive the connection that made them.

A call is one client request to a gateway: some engine requests, and an answer made of all their
outputs. The outputs are in the result streams; a durable call holds the rest of what any process
needs to make the same answer again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from ..config import BusConfig

MOST_CALLS = 4096
"""Calls kept in memory; the least recently attached go first."""

MOST_BYTES = 64 << 20
"""Bytes of all records kept in memory."""

Mark = Literal["resumed", "cancelled"]
"""An event of a call: a client has come back to it; or it is to run no further."""


class DurableCall(msgspec.Struct, frozen=True):
    """A stored call.

    Attributes:
        record: Whatever its creator needs to continue it; opaque to the store.
        entries: Stream entries of its published requests, by request id.
        marks: Its events.
    """

    record: bytes
    entries: dict[str, str] = {}
    marks: frozenset[Mark] = frozenset()


class CallStore(Protocol):
    """Durable calls by id. Each expires `bus.results_ttl_s` after it was last attached.

    Methods raise BusError when the transport can't be reached; a write may have happened
    nevertheless.
    """

    async def keep(self, call_id: str, record: bytes, for_s: float) -> None:
        """Store a call and attach to it (see `attach`). An existing call gets the new record
        only."""

    async def read(self, call_id: str) -> DurableCall | None:
        """Return the call; None if it is unknown or expired."""

    async def note(self, call_id: str, request_id: str, entry_id: str) -> bool:
        """Record the entry of a published request. Waits while the transport is away.

        Returns:
            Whether the call is marked "cancelled", so that the caller ends the request. A reader
            that sets the mark before it reads finds the entries of all other requests.

        Raises:
            ChannelClosed: The bus was closed.
        """

    async def mark(self, call_id: str, mark: Mark) -> None:
        """Add an event to a call."""

    async def claim(self, name: str, call_id: str) -> str:
        """Name a call, unless another call has the name. The name lives as long as the call.

        Returns:
            The id of the call that has the name now.
        """

    async def drop(self, call_id: str, name: str = "") -> None:
        """Delete a call of which nothing was published, and the name that it claimed."""

    async def attach(self, names: Mapping[str, str], for_s: float) -> None:
        """Attach to calls for `for_s` seconds; a shorter time than before is ignored.

        Args:
            names: By call id, the name that the call has claimed; "" for none.
            for_s: 0 extends the time to live only; the calls never become orphaned.
        """

    async def detach(self, call_ids: Collection[str]) -> None:
        """Stop watching calls that have ended."""

    async def orphaned(self, most: int) -> list[str]:
        """Return calls whose attachment has expired. Each is returned once, to one caller."""


@dataclass(slots=True)
class _Call:
    """A call in memory. `until_s` is on `time.monotonic`."""

    until_s: float
    record: bytes = b""
    entries: dict[str, str] = field(default_factory=dict)
    marks: set[Mark] = field(default_factory=set)


class MemoryCalls:
    """`CallStore` within one event loop."""

    def __init__(self, config: BusConfig) -> None:
        self._ttl_s = config.results_ttl_s
        # The least recently attached first.
        self._calls: OrderedDict[str, _Call] = OrderedDict()
        self._bytes = 0
        self._named: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._attached_until_s: dict[str, float] = {}

    async def keep(self, call_id: str, record: bytes, for_s: float) -> None:
        now = time.monotonic()
        if (call := self._find(call_id)) is None:
            self._forget(call_id)
            call = self._calls[call_id] = _Call(now + self._ttl_s)
        self._bytes += len(record) - len(call.record)
        call.record = record
        while self._calls and (
            len(self._calls) > MOST_CALLS
            or self._bytes > MOST_BYTES
            or next(iter(self._calls.values())).until_s < now
        ):
            self._forget(next(iter(self._calls)))
        await self.attach({call_id: ""}, for_s)

    async def read(self, call_id: str) -> DurableCall | None:
        if (call := self._find(call_id)) is None:
            return None
        return DurableCall(call.record, dict(call.entries), frozenset(call.marks))

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
        while len(self._named) > MOST_CALLS:
            self._named.popitem(last=False)
        return owner

    async def drop(self, call_id: str, name: str = "") -> None:
        self._named.pop(name, None)
        self._forget(call_id)
        self._attached_until_s.pop(call_id, None)

    async def attach(self, names: Mapping[str, str], for_s: float) -> None:
        now = time.monotonic()
        for call_id, name in names.items():
            if (call := self._find(call_id)) is not None:
                call.until_s = now + self._ttl_s
                self._calls.move_to_end(call_id)
            if name in self._named:
                self._named[name] = (self._named[name][0], now + self._ttl_s)
                self._named.move_to_end(name)
            if for_s:
                before = self._attached_until_s.get(call_id, 0.0)
                self._attached_until_s[call_id] = max(before, now + for_s)

    async def detach(self, call_ids: Collection[str]) -> None:
        for call_id in call_ids:
            self._attached_until_s.pop(call_id, None)

    async def orphaned(self, most: int) -> list[str]:
        now = time.monotonic()
        over = [each for each, until_s in self._attached_until_s.items() if until_s <= now][:most]
        await self.detach(over)
        return over

    def _forget(self, call_id: str) -> None:
        call = self._calls.pop(call_id, None)
        self._bytes -= len(call.record) if call is not None else 0

    def _find(self, call_id: str) -> _Call | None:
        call = self._calls.get(call_id)
        return call if call is not None and call.until_s >= time.monotonic() else None
