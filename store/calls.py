"""Durable calls: calls that outlive the connection that made them.

A call is one client request to a gateway: some engine requests, and an answer made of all their
outputs. The outputs are in the result streams; a durable call holds the rest of what any process
needs to make the same answer again. There is a hash for each call, a string for each name, and one
sorted set of attached calls.

No scripts, so that a gateway needs no right to run any. The bytes in use are counted by tenant and
by the period in which they expire: sums that a killed gateway has left wrong expire with it. They
may count a call too often for a while, and never too seldom.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Literal, cast, get_args

import msgspec

from ..config import BusConfig, RequestError
from .records import Command, Records
from .redis.keys import Keys

CALL_BYTES = 1024
"""Bytes that a call counts besides its record, for `bus.calls_max_bytes`."""

_RECORD = b"record"
_ENTRY = b"entry:"
_MARK = b"mark:"
_CANCELLED = b"mark:cancelled"
_CHARGE = b"charge"

_PERIODS = 32
"""Periods of a call's time to live, by which its bytes are counted."""

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


class _Charge(msgspec.Struct, frozen=True, array_like=True):
    """The amounts that a call counts.

    Attributes:
        size: In bytes.
        period: The period in which it expires.
    """

    tenant: str
    size: int
    period: int


class CallStore:
    """Durable calls by id.

    Each expires `bus.results_ttl_s` after it was last attached, by the records' clock.

    Methods raise BusError when the transport can't be reached; a write may have happened
    nevertheless.
    """

    def __init__(self, config: BusConfig, keys: Keys, records: Records) -> None:
        self._ttl_s = config.results_ttl_s
        self._max_bytes = config.calls_max_bytes
        self._period_ms = max(1000, config.results_ttl_s * 1000 // _PERIODS)
        self._keys = keys
        self._records = records
        # Offset of the server's clock in milliseconds; updated by each `attach`.
        self._ahead_ms: float | None = None

    async def keep(self, call_id: str, record: bytes, for_s: float, tenant: str = "") -> None:
        """Store a tenant's call and attach to it (see `attach`). An existing call gets the new
        record only.

        Raises:
            CallsFull: There is no room for a new call. Calls are never dropped to make room.
        """
        if self._ahead_ms is None:
            await self._read_clock()
        charge = _Charge(tenant, len(record) + CALL_BYTES, self._last_period)
        commands = [
            *self._set(call_id, _RECORD, record),
            *self._set(call_id, _CHARGE, msgspec.json.encode(await self._charge(call_id, charge))),
        ]
        if for_s:
            commands.append(self._attach_command([call_id], for_s))
        await self._records.run_all(commands)

    async def read(self, call_id: str) -> DurableCall | None:
        """Return the call; None if it is unknown or expired."""
        fields = await self._records.run("HGETALL", self._keys.call(call_id))
        if _RECORD not in fields:
            return None
        entries = {
            name.removeprefix(_ENTRY).decode(): value.decode()
            for name, value in fields.items()
            if name.startswith(_ENTRY)
        }
        marks = (name.removeprefix(_MARK).decode() for name in fields if name.startswith(_MARK))
        known = frozenset(cast(Mark, mark) for mark in marks if mark in get_args(Mark))
        return DurableCall(fields[_RECORD], entries, known)

    async def note(self, call_id: str, request_id: str, entry_id: str) -> bool:
        """Record the entry of a published request. Waits while the transport is away.

        Returns:
            Whether the call is marked "cancelled", so that the caller ends the request. A reader
            that sets the mark before it reads finds the entries of all other requests.

        Raises:
            ChannelClosed: The bus was closed.
        """
        commands = self._add(call_id, _ENTRY + request_id.encode(), entry_id)
        commands.append(("HGET", self._keys.call(call_id), _CANCELLED))
        return (await self._records.retry_all("calls", commands))[-1] is not None

    async def mark(self, call_id: str, mark: Mark) -> None:
        """Add an event to a call."""
        await self._records.run_all(self._add(call_id, _MARK + mark.encode(), b""))

    async def claim(self, name: str, call_id: str) -> str:
        """Name a call, unless another call has the name. The name lives as long as the call.

        Returns:
            The id of the call that has the name now.
        """
        command = ("SET", self._keys.name(name), call_id, "NX", "GET", "EX", self._ttl_s)
        (owner,) = await self._records.run_all([command])
        return owner.decode() if owner else call_id

    async def named(self, name: str) -> str:
        """Return the id of the call that has a name; "" if none has."""
        (owner,) = await self._records.run_all([("GET", self._keys.name(name))])
        return owner.decode() if owner else ""

    async def drop(self, call_id: str, name: str = "") -> None:
        """Delete a call of which nothing was published, and the name that it claimed."""
        await self._drop({call_id: name})

    async def drop_named(self, names: Sequence[str]) -> None:
        """Delete calls that have ended, by the names that they have claimed."""
        found = await self._records.run_all([("GET", self._keys.name(name)) for name in names])
        await self._drop(
            {each.decode(): name for name, each in zip(names, found, strict=True) if each}
        )

    async def _drop(self, names: Mapping[str, str]) -> None:
        """Delete calls, and their names ("" for none)."""
        commands: list[Command] = []  # three of each call
        for call_id, name in names.items():
            key = self._keys.call(call_id)
            commands += [("HGET", key, _CHARGE), ("DEL", key)]
            commands += [("DEL", self._keys.name(name) if name else key)]
        if not names:
            return
        commands.append(("ZREM", self._keys.attended, *names))
        replies = await self._records.run_all(commands)
        sizes = Counter[tuple[str, int]]()
        for raw, deleted in zip(replies[:-1:3], replies[1:-1:3], strict=True):
            # Only one of several callers has deleted it.
            if raw is not None and deleted:
                charge = _decoded(raw)
                sizes[charge.tenant, charge.period] += charge.size
        counts = [
            self._count(_Charge(tenant, size, period), -size)
            for (tenant, period), size in sizes.items()
        ]
        if counts:
            await self._records.run_all([*chain.from_iterable(counts)])

    async def attach(self, names: Mapping[str, str], for_s: float) -> None:
        """Attach to calls for `for_s` seconds; a shorter time than before is ignored.

        Args:
            names: By call id, the name that the call has claimed; "" for none.
            for_s: 0 extends the time to live only; the calls never become orphaned.
        """
        if not names:
            return
        await self._read_clock()
        commands: list[Command] = [
            ("EXPIRE", self._keys.call(call_id), self._ttl_s) for call_id in names
        ]
        commands += [
            ("EXPIRE", self._keys.name(name), self._ttl_s) for name in names.values() if name
        ]
        if for_s:
            commands.append(self._attach_command(names, for_s))
        commands += [("HGET", self._keys.call(call_id), _CHARGE) for call_id in names]
        found = (await self._records.run_all(commands))[-len(names) :]
        moves: list[Command] = []
        for call_id, raw in zip(names, found, strict=True):
            if raw is None or (charge := _decoded(raw)).period >= self._last_period:
                continue
            later = msgspec.structs.replace(charge, period=self._last_period)
            moves += [*self._count(later, charge.size), *self._count(charge, -charge.size)]
            moves += self._set(call_id, _CHARGE, msgspec.json.encode(later))
        if moves:
            await self._records.run_all(moves)

    async def detach(self, call_ids: Collection[str]) -> None:
        """Stop watching calls that have ended."""
        if call_ids:
            await self._records.run_all([("ZREM", self._keys.attended, *call_ids)])

    async def orphaned(self, most: int) -> list[str]:
        """Return calls whose attachment has expired. Each is returned once, to one caller."""
        now_ms = await self._read_clock()
        key = self._keys.attended
        command = ("ZRANGE", key, "-inf", now_ms, "BYSCORE", "LIMIT", 0, most)
        (over,) = await self._records.run_all([command])
        # The gateway whose ZREM removes the call takes it over.
        removed = await self._records.run_all([("ZREM", key, call_id) for call_id in over])
        return [call_id.decode() for call_id, own in zip(over, removed, strict=True) if own]

    async def _charge(self, call_id: str, charge: _Charge) -> _Charge:
        """Count a call, and return what is counted. One that exists is not counted again.

        Raises:
            CallsFull: There is no room for it.
        """
        keys = self._keys.stored(charge.tenant), self._keys.stored_of_all
        # Counted before any sum is read, so that calls that come at once don't exceed the limit
        # together: on a cluster the sums are on servers of their own.
        exists: Command = ("HGET", self._keys.call(call_id), _CHARGE)
        raw, *_ = await self._records.run_all([exists, *self._count(charge, charge.size)])
        if raw is not None:
            before = _decoded(raw)
            now = msgspec.structs.replace(before, size=charge.size)
            undo = [*self._count(charge, -charge.size), *self._count(now, now.size - before.size)]
            await self._records.run_all(undo)
            return now
        of_tenant, of_all = await self._records.run_all([("HGETALL", key) for key in keys])
        for key, sizes in zip(keys, (of_tenant, of_all), strict=True):
            if over := [period for period in sizes if not self._is_live(period)]:
                await self._records.run_all([("HDEL", key, *over)])
        if has_room(self._sum(of_tenant), self._sum(of_all), self._max_bytes):
            return charge
        await self._records.run_all(self._count(charge, -charge.size))
        first = min(int(period) for period in of_tenant if self._is_live(period))
        wait_s = ((first + 1) * self._period_ms - self._now_ms) / 1000
        # The calls themselves expire up to a period earlier.
        raise CallsFull(self._max_bytes, min(self._ttl_s, wait_s))

    def _count(self, charge: _Charge, size: int) -> list[Command]:
        """Return the commands that add to what a tenant and all tenants have in a period."""
        ttl_s = self._ttl_s + 2 * self._period_ms // 1000
        keys = (self._keys.stored(charge.tenant), self._keys.stored_of_all)
        commands: list[Command] = [("HINCRBY", key, charge.period, size) for key in keys]
        return [*commands, *(("EXPIRE", key, ttl_s) for key in keys)]

    def _sum(self, sizes: Mapping[bytes, bytes]) -> int:
        return sum(int(size) for period, size in sizes.items() if self._is_live(period))

    def _is_live(self, period: bytes) -> bool:
        return (int(period) + 1) * self._period_ms > self._now_ms

    @property
    def _now_ms(self) -> int:
        """The server's time."""
        assert self._ahead_ms is not None, "the clock was read"
        return int(time.monotonic() * 1000 + self._ahead_ms)

    @property
    def _last_period(self) -> int:
        """The period in which a call expires that is attached now."""
        return (self._now_ms + self._ttl_s * 1000) // self._period_ms

    def _add(self, call_id: str, field: bytes, value: bytes | str) -> list[Command]:
        """Return the commands of `_set`, with no longer time to live: only `attach` counts it."""
        key = self._keys.call(call_id)
        return [("HSET", key, field, value), ("EXPIRE", key, self._ttl_s, "NX")]

    def _set(self, call_id: str, field: bytes, value: bytes | str) -> list[Command]:
        key = self._keys.call(call_id)
        return [("HSET", key, field, value), ("EXPIRE", key, self._ttl_s)]

    def _attach_command(self, call_ids: Collection[str], for_s: float) -> Command:
        until_ms = self._now_ms + int(for_s * 1000)
        pairs = [item for call_id in call_ids for item in (until_ms, call_id)]
        return ("ZADD", self._keys.attended, "GT", *pairs)

    async def _read_clock(self) -> int:
        now_ms = await self._records.time_ms(self._keys.attended)
        self._ahead_ms = now_ms - time.monotonic() * 1000
        return now_ms


def _decoded(raw: bytes) -> _Charge:
    return msgspec.json.decode(raw, type=_Charge)
