"""The record of a deployment's shards on Redis, and the phases of a change of their number."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from redis import exceptions

from ...config import NOT_PERMITTED, BusError
from ...config.logger import get_logger
from ...store.records import readable
from ...store.redis.keys import Keys
from ...store.redis.records import RedisRecords
from ..shards import Layout

MOVING = "shards_moving"

_decode = msgspec.json.Decoder(Layout).decode


class LayoutRecord:
    """The layout of all processes under one prefix, as this one knows it.

    Attributes:
        layout: The last one read; without a record, one shard.
        read_at: When reading it began, on this process's clock.
        fresh_s: Longest use of a layout without reading it again.
        late_s: A publisher that took longer than this from reading the layout to the server's
            confirmation reads it again; so no process publishes by an older one unnoticed. Each
            measures by its own clock, so clocks may differ.
    """

    fresh_s = 0.25
    late_s = 0.5

    def __init__(self, keys: Keys, records: RedisRecords) -> None:
        self._keys = keys
        self._records = records
        self._is_readable = True
        # When this process first read the present version.
        self._changed_at = 0.0
        self.layout = Layout()
        self.read_at = -self.fresh_s

    async def fresh(self, *, waits: bool = False) -> Layout:
        """Return a layout read within `fresh_s`. Arguments and errors are those of `read`."""
        is_fresh = time.monotonic() - self.read_at < self.fresh_s
        return self.layout if is_fresh else await self.read(waits=waits)

    async def read(self, *, waits: bool = False) -> Layout:
        """Read the layout. A user without the right to read it has one shard.

        Args:
            waits: Whether it waits while the server can't be reached.

        Raises:
            BusError: The server can't be reached.
        """
        began, raw = time.monotonic(), None
        if self._is_readable:
            records, command = self._records, ("GET", self._keys.shards)
            try:
                raw = await (records.retry("layout", *command) if waits else records.run(*command))
            except BusError as error:
                if error.code != NOT_PERMITTED:
                    raise
                self._is_readable = False
        self._note(raw, began)
        return self.layout

    async def begin(self, shards: int) -> Layout:
        """Begin to change the number of shards, unless it is that already.

        Raises:
            BusError: `MOVING` during another change; or the server can't be reached.
        """
        while True:
            layout = await self.read()
            if layout.moving:
                raise BusError(
                    f"the number of shards is being changed from {layout.before} to "
                    f"{layout.shards}; try again when `nano-inference shards` no longer says so",
                    code=MOVING,
                )
            if layout.shards == shards:
                return layout
            added = range(layout.shards, shards)
            used, ends = 0, dict[int, str]()
            for shard in range(layout.streams):
                if await self._records.run("XLEN", self._keys.of_shard(shard).requests):
                    used = shard + 1
            for shard in added:
                key = self._keys.results_of(shard)
                last = await self._records.run("XREVRANGE", key, "+", "-", "COUNT", 1)
                ends[shard] = last[0][0].decode() if last else "0-0"
            if await self._replace(layout, layout.changed(shards, used, ends)):
                get_logger().info("shards_changing", before=layout.shards, shards=shards)
                return await self.read()

    async def make_known(self) -> Layout:
        """Take the first step of the change once no process publishes by the old layout.

        Raises:
            BusError: The server can't be reached, or this user may not change the layout.
        """
        layout = self.layout
        known_s = time.monotonic() - self._changed_at
        if layout.is_announced and known_s >= self.late_s:
            known = layout.known_to_all(await self._last_of(layout.left()))
            await self.replace(layout, known)
        return self.layout

    async def _last_of(self, shards: Sequence[int]) -> dict[int, str]:
        """Return the last entry that each of the shards ever had. Raises BusError."""
        keys = [self._keys.of_shard(shard).requests for shard in shards]
        infos = await self._records.run_all(
            [("XINFO", "STREAM", key) for key in keys], raise_on_error=False
        )
        ends = {}
        for shard, info in zip(shards, infos, strict=True):
            if isinstance(info, exceptions.ResponseError):
                ends[shard] = "0-0"  # no such stream
            elif isinstance(info, Exception):
                raise self._records.server.explain(info)
            else:
                ends[shard] = info[b"last-generated-id"].decode()
        return ends

    async def replace(self, old: Layout, new: Layout) -> bool:
        """Replace the layout unless another process has; return whether this one did."""
        replaced = await self._replace(old, new)
        await self.read()
        return replaced

    async def _replace(self, old: Layout, new: Layout) -> bool:
        key, raw = self._keys.shards, msgspec.json.encode(new)
        return await self._records.write_if(
            key, ("GET", key), lambda found: _layout_in(found) == old, ("SET", key, raw)
        )

    def _note(self, raw: bytes | None, began: float) -> None:
        if began < self.read_at:
            return  # another read, which began later, was answered earlier
        self.read_at = began
        layout = _layout_in(raw)
        if layout != self.layout:
            self.layout, self._changed_at = layout, time.monotonic()


def _layout_in(raw: Any) -> Layout:
    """Return the layout in the reply to GET; one shard if there is none, or an unreadable one."""
    return (readable(_decode, raw, "shards") if raw else None) or Layout()
