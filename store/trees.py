"""Token trees: the turns of each session, as records in one hash for each.

A turn's prompt mostly begins with the tokens of the turns before. So prompts are kept as blocks,
each named by a hash of all tokens up to its end, which the turns of a session share.

No scripts, and every command may be repeated: a turn is kept once, however often it is added. It is
added before its Completion is delivered, so that a client that has the one finds the other. A
process that was replaced meanwhile may add it, too; the turn of the latest epoch counts. Bytes are
counted by tenant and by the period in which they expire, so that sums which a killed process has
left wrong expire with them.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ..config import BusConfig
from .calls import has_room
from .records import Command, Records, readable
from .redis.keys import Keys

BLOCK_TOKENS = 256
"""Tokens of a full block of a prompt. The rest of a prompt is kept with its turn."""

FIELD_BYTES = 96
"""Bytes that a field counts besides its value."""

_TURN, _BLOCK, _LOST, _SIZE = b"turn:", b"block:", b"lost:", b"size:"
_HASH_BYTES = 16
_PERIODS = 32
"""Periods of a session's time to live, by which its bytes are counted."""


class KeptTurn(NamedTuple):
    """One request of a session.

    Attributes:
        key: The identity of its entry.
        prompt: `[prompt]`, its tokens.
        record: Further data of its creator, opaque to the store.
    """

    key: str
    prompt: tuple[int, ...]
    record: bytes


class KeptSession(NamedTuple):
    """The turns of a session.

    Attributes:
        turns: In the order of their keys.
        lost: Keys of the turns for which there was no room.
    """

    turns: list[KeptTurn]
    lost: list[str]


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    """A turn's field. `last`: hash of the prompt's last full block; `rest`: tokens after it."""

    last: bytes
    rest: bytes
    record: bytes


_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(_Stored).decode


class TreeStore:
    """Sessions by model, tenant and id.

    Each expires `bus.trees_ttl_s` after its first turn. Methods raise BusError when the transport
    can't be reached; a write may have happened nevertheless.
    """

    def __init__(self, config: BusConfig, keys: Keys, records: Records) -> None:
        self._ttl_s = config.trees_ttl_s
        self._max_bytes = config.trees_max_bytes
        self._period_s = max(1, config.trees_ttl_s // _PERIODS)
        self._keys = keys
        self._records = records

    @property
    def enabled(self) -> bool:
        """Whether turns are kept (`bus.trees_max_bytes`)."""
        return self._max_bytes > 0

    async def add(self, tenant: str, session: str, turn: KeptTurn, epoch: int = 0) -> bool:
        """Keep a turn, in place of the same turn of earlier epochs, unless it is kept already.

        Waits while the transport is away.

        Returns:
            Whether it is kept; False without room. Then the session's `lost` has its key.

        Raises:
            ChannelClosed: The bus was closed.
        """
        key, (of_tenant, of_all) = self._keys.tree(tenant, session), self._sums(tenant)
        own, fields = _field(turn.key, epoch), dict(_fields(turn, epoch))
        commands: list[Command] = [
            *(("HSETNX", key, name, value) for name, value in fields.items()),
            ("EXPIRE", key, self._ttl_s, "NX"),
            ("HGETALL", of_tenant),
            ("HGETALL", of_all),
        ]
        replies = await self._records.retry_all("trees", commands)
        new = [name for name, added in zip(fields, replies, strict=False) if added]
        if own not in new:
            return True
        size = sum(len(fields[name]) + FIELD_BYTES for name in new)
        now_s = int(time.time())
        tenant_bytes, all_bytes = (self._sum(sizes, now_s) + size for sizes in replies[-2:])
        if not has_room(tenant_bytes, all_bytes, self._max_bytes):
            mark: Command = ("HSET", key, _LOST + _encoded(turn.key), b"")
            await self._records.retry_all("trees", [("HDEL", key, *new), mark])
            return False
        period = (now_s + self._ttl_s) // self._period_s
        counts = self._count(tenant, period, size)
        await self._records.retry_all("trees", [("HINCRBY", key, _size(period), size), *counts])
        for place, sizes in zip((of_tenant, of_all), replies[-2:], strict=True):
            if over := [each for each in sizes if not self._is_live(each, now_s)]:
                await self._records.retry_all("trees", [("HDEL", place, *over)])
        return True

    async def forget(self, tenant: str, session: str, key: str, epoch: int) -> None:
        """Delete a turn of one epoch, which was not delivered. Waits as `add`; raises the same."""
        command: Command = ("HDEL", self._keys.tree(tenant, session), _field(key, epoch))
        await self._records.retry_all("trees", [command])

    async def read(self, tenant: str, session: str) -> KeptSession | None:
        """Return a session; None if it is unknown or expired."""
        key = self._keys.tree(tenant, session)
        fields: Mapping[bytes, bytes] = await self._records.run("HGETALL", key)
        if not fields:
            return None
        lost = {_decoded(each.removeprefix(_LOST)) for each in fields if each.startswith(_LOST)}
        latest: dict[str, tuple[int, bytes]] = {}
        for name, value in fields.items():
            if name.startswith(_TURN):
                epoch, _, raw = name.removeprefix(_TURN).partition(b":")
                found = int(epoch), value
                latest[_decoded(raw)] = max(latest.get(_decoded(raw), found), found)
        turns = []
        for turn, (_, value) in sorted(latest.items()):
            stored = readable(_decode, value, key.decode())
            prompt = None if stored is None else _prompt(stored, fields)
            if stored is None or prompt is None:
                lost.add(turn)
            else:
                turns.append(KeptTurn(turn, prompt, stored.record))
        return KeptSession(turns, sorted(lost))

    async def drop(self, tenant: str, session: str) -> bool:
        """Delete a session; return whether there was one."""
        key = self._keys.tree(tenant, session)
        fields, deleted = await self._records.run_all([("HGETALL", key), ("DEL", key)])
        # Only one of several callers has deleted it.
        if not deleted:
            return False
        sizes = {name: int(size) for name, size in fields.items() if name.startswith(_SIZE)}
        commands: list[Command] = []
        for name, size in sizes.items():
            commands += self._count(tenant, int(name.removeprefix(_SIZE)), -size)
        if commands:
            await self._records.run_all(commands)
        return True

    def _sums(self, tenant: str) -> tuple[bytes, bytes]:
        """Return the keys of the bytes of a tenant, and of all tenants, by period."""
        return self._keys.trees(tenant), self._keys.trees_of_all

    def _count(self, tenant: str, period: int, size: int) -> list[Command]:
        ttl_s = self._ttl_s + 2 * self._period_s
        keys = self._sums(tenant)
        commands: list[Command] = [("HINCRBY", key, period, size) for key in keys]
        return [*commands, *(("EXPIRE", key, ttl_s) for key in keys)]

    def _sum(self, sizes: Mapping[bytes, bytes], now_s: int) -> int:
        return sum(int(size) for period, size in sizes.items() if self._is_live(period, now_s))

    def _is_live(self, period: bytes, now_s: int) -> bool:
        return (int(period) + 1) * self._period_s > now_s


def _fields(turn: KeptTurn, epoch: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the fields of a turn: its blocks, and last itself, so that a turn has its blocks."""
    last, number = b"", len(turn.prompt) // BLOCK_TOKENS
    for block in range(number):
        tokens = _packed(turn.prompt[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS])
        value = last + tokens
        last = hashlib.blake2b(value, digest_size=_HASH_BYTES).digest()
        yield _BLOCK + last, value
    stored = _Stored(last, _packed(turn.prompt[number * BLOCK_TOKENS :]), turn.record)
    yield _field(turn.key, epoch), _encode(stored)


def _prompt(stored: _Stored, fields: Mapping[bytes, bytes]) -> tuple[int, ...] | None:
    """Return the prompt of a turn; None if a block of it is missing."""
    pieces, last = [stored.rest], stored.last
    while last:
        value = fields.get(_BLOCK + last)
        if value is None:
            return None
        tokens = len(value) - 4 * BLOCK_TOKENS
        last, piece = value[:tokens], value[tokens:]
        pieces.append(piece)
    return tuple(array("i", b"".join(reversed(pieces))))


def _packed(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()


def _field(key: str, epoch: int) -> bytes:
    return b"%s%d:%s" % (_TURN, epoch, _encoded(key))


def _encoded(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")


def _decoded(key: bytes) -> str:
    return key.decode("utf-8", "surrogatepass")


def _size(period: int) -> bytes:
    return b"%s%d" % (_SIZE, period)
