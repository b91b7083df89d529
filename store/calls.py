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
from itertools import islice
from typing import Literal, Protocol

import msgspec

from ..config import BusConfig, RequestError

CALL_BYTES = 1024
"""What a call takes besides its record, for `bus.calls_max_bytes`."""

# Calls that are examined for the time until there is room.
_EXAMINED = 256

Mark = Literal["resumed", "cancelled"]
"""An event of a call: a client has come back to it; or it is to run no further."""


class CallsFull(RequestError):
    """A tenant's share of `bus.calls_max_bytes` is used up."""

    code = "stored_calls_full"

    def __init__(self, max_bytes: int, retry_after_s: float) -> None:
        super().__init__(
            "your stored calls (responses, calls with an Idempotency-Key) use all of your share of "
            f"{max_bytes} bytes (bus.calls_max_bytes); delete responses, send calls with store: "
            f"false and without a key, or wait {max(1, round(retry_after_s))} s until some expire"
        )
        self.retry_after_s = retry_after_s


def has_room(tenant_bytes: int, all_bytes: int, max_bytes: int) -> bool:
    """Return whether a tenant may use so many bytes of all that are in use: as many as are left
    free. So a new tenant always finds room, and none takes what another has stored."""
    return tenant_bytes <= max_bytes - all_bytes


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

    async def keep(self, call_id: str, record: bytes, for_s: float, tenant: str = "") -> None:
        """Store a tenant's call and attach to it (see `attach`). An existing call gets the new
        record only.

        Raises:
            CallsFull: There is no room for a new call. Calls are never dropped to make room.
        """

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

    async def named(self, name: str) -> str:
        """Return the id of the call that has a name; "" if none has."""

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
    tenant: str
    record: bytes = b""
    entries: dict[str, str] = field(default_factory=dict)
    marks: set[Mark] = field(default_factory=set)


class MemoryCalls:
    """`CallStore` within one event loop."""

    def __init__(self, config: BusConfig) -> None:
        self._ttl_s = config.results_ttl_s
        self._max_bytes = config.calls_max_bytes
        # The least recently attached first.
        self._calls: OrderedDict[str, _Call] = OrderedDict()
        self._bytes: dict[str, int] = {}
        self._all_bytes = 0
        # The call of a name, and until when, as in `_Call`; the least recently attached first.
        self._named: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._attached_until_s: dict[str, float] = {}

    async def keep(self, call_id: str, record: bytes, for_s: float, tenant: str = "") -> None:
        self._forget_expired()
        if (call := self._calls.get(call_id)) is None:
            size = len(record) + CALL_BYTES
            of_tenant = self._bytes.get(tenant, 0) + size
            if not has_room(of_tenant, self._all_bytes + size, self._max_bytes):
                raise CallsFull(self._max_bytes, self._first_expires_s(tenant))
            call = self._calls[call_id] = _Call(time.monotonic() + self._ttl_s, tenant)
            self._count(tenant, CALL_BYTES)
        self._count(call.tenant, len(record) - len(call.record))
        call.record = record
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
        self._forget_expired()
        if (owner := await self.named(name)) == "":
            owner = call_id
            self._named[name] = owner, time.monotonic() + self._ttl_s
            self._named.move_to_end(name)
        return owner

    async def named(self, name: str) -> str:
        owner, until_s = self._named.get(name, ("", 0.0))
        return owner if until_s >= time.monotonic() else ""

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
                self._named[name] = self._named[name][0], now + self._ttl_s
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

    def _forget_expired(self) -> None:
        now = time.monotonic()
        while self._calls and next(iter(self._calls.values())).until_s < now:
            self._forget(next(iter(self._calls)))
        while self._named and next(iter(self._named.values()))[1] < now:
            self._named.popitem(last=False)

    def _first_expires_s(self, tenant: str) -> float:
        """Return the seconds until the first of a tenant's calls expires, as far as known."""
        found = (each for each in islice(self._calls.values(), _EXAMINED) if each.tenant == tenant)
        first = next(found, None)
        return self._ttl_s if first is None else first.until_s - time.monotonic()

    def _forget(self, call_id: str) -> None:
        if (call := self._calls.pop(call_id, None)) is None:
            return
        self._count(call.tenant, -len(call.record) - CALL_BYTES)

    def _count(self, tenant: str, num_bytes: int) -> None:
        self._all_bytes += num_bytes
        self._bytes[tenant] = self._bytes.get(tenant, 0) + num_bytes
        if not self._bytes[tenant]:
            del self._bytes[tenant]

    def _find(self, call_id: str) -> _Call | None:
        call = self._calls.get(call_id)
        return call if call is not None and call.until_s >= time.monotonic() else None
