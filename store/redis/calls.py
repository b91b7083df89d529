"""Durable calls on Redis: a hash per call, a key per name, and one sorted set of attached calls.

No scripts, so that a gateway needs no right to run any.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast, get_args

from ...config import BusConfig
from ..calls import DurableCall, Mark
from .client import Commands
from .keys import Keys

_RECORD = b"record"
_ENTRY = b"entry:"
_MARK = b"mark:"
_CANCELLED = b"mark:cancelled"


class RedisCalls:
    """`CallStore` over one Redis server, by whose clock attachments expire."""

    def __init__(self, config: BusConfig, keys: Keys, commands: Commands) -> None:
        self._ttl_s = config.results_ttl_s
        self._keys = keys
        self._commands = commands
        # Offset of the server's clock in milliseconds; updated by each `attach`.
        self._ahead_ms: float | None = None

    async def keep(self, call_id: str, record: bytes, for_s: float) -> None:
        commands = self._set(call_id, _RECORD, record)
        if for_s:
            if self._ahead_ms is None:
                await self._read_clock()
            commands.append(self._attach_command([call_id], for_s))
        await self._commands.run_all(commands)

    async def read(self, call_id: str) -> DurableCall | None:
        fields = await self._commands.run("HGETALL", self._keys.call(call_id))
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
        commands = self._set(call_id, _ENTRY + request_id.encode(), entry_id)
        commands.append(("HGET", self._keys.call(call_id), _CANCELLED))
        return (await self._commands.retry_all("calls", commands))[-1] is not None

    async def mark(self, call_id: str, mark: Mark) -> None:
        await self._commands.run_all(self._set(call_id, _MARK + mark.encode(), b""))

    async def claim(self, name: str, call_id: str) -> str:
        command = ("SET", self._keys.name(name), call_id, "NX", "GET", "EX", self._ttl_s)
        (owner,) = await self._commands.run_all([command])
        return owner.decode() if owner else call_id

    async def drop(self, call_id: str, name: str = "") -> None:
        commands: list[Sequence[Any]] = [("DEL", self._keys.name(name))] if name else []
        commands += [("DEL", self._keys.call(call_id)), ("ZREM", self._keys.attended, call_id)]
        await self._commands.run_all(commands)

    async def attach(self, names: Mapping[str, str], for_s: float) -> None:
        if not names:
            return
        commands: list[Sequence[Any]] = [
            ("EXPIRE", self._keys.call(call_id), self._ttl_s) for call_id in names
        ]
        commands += [
            ("EXPIRE", self._keys.name(name), self._ttl_s) for name in names.values() if name
        ]
        if for_s:
            await self._read_clock()
            commands.append(self._attach_command(names, for_s))
        await self._commands.run_all(commands)

    async def detach(self, call_ids: Collection[str]) -> None:
        if call_ids:
            await self._commands.run_all([("ZREM", self._keys.attended, *call_ids)])

    async def orphaned(self, most: int) -> list[str]:
        now_ms = await self._read_clock()
        key = self._keys.attended
        command = ("ZRANGE", key, "-inf", now_ms, "BYSCORE", "LIMIT", 0, most)
        (over,) = await self._commands.run_all([command])
        # The gateway whose ZREM removes the call takes it over.
        removed = await self._commands.run_all([("ZREM", key, call_id) for call_id in over])
        return [call_id.decode() for call_id, own in zip(over, removed, strict=True) if own]

    def _set(self, call_id: str, field: bytes, value: bytes | str) -> list[Sequence[Any]]:
        key = self._keys.call(call_id)
        return [("HSET", key, field, value), ("EXPIRE", key, self._ttl_s)]

    def _attach_command(self, call_ids: Collection[str], for_s: float) -> Sequence[Any]:
        assert self._ahead_ms is not None, "the clock was read"
        until_ms = int(time.monotonic() * 1000 + self._ahead_ms + for_s * 1000)
        pairs = [item for call_id in call_ids for item in (until_ms, call_id)]
        return ("ZADD", self._keys.attended, "GT", *pairs)

    async def _read_clock(self) -> int:
        now_ms = await self._commands.time_ms(self._keys.attended)
        self._ahead_ms = now_ms - time.monotonic() * 1000
        return now_ms
