"""The board of stage reports on Redis: one short stream, whose entry ids are the server's clock."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...config.logger import get_logger
from ..board import STALE_AFTER_S, StageReport, latest
from .client import Commands
from .keys import JSON, Keys, parse_id

# Older entries are trimmed, so that the stream holds a few heartbeats of all processes. Without any
# report the stream expires.
_KEPT_S = 60


class RedisBoard:
    """`StageBoard` as a Redis stream, with one entry per process and heartbeat."""

    def __init__(self, keys: Keys, commands: Commands) -> None:
        self._key = keys.stages
        self._commands = commands
        self._last_ms = 0

    async def report(self, reports: Sequence[StageReport]) -> None:
        body = msgspec.json.encode(list(reports))
        trim = ("MINID", "~", max(0, self._last_ms - _KEPT_S * 1000))
        add = ("XADD", self._key, *trim, "*", JSON, body)
        replies = await self._commands.run_all([add, ("EXPIRE", self._key, _KEPT_S)])
        self._last_ms = parse_id(replies[0])[0]

    async def read(self) -> list[StageReport]:
        now_ms = await self._commands.time_ms(self._key)
        oldest = now_ms - int(STALE_AFTER_S * 1000)
        entries = await self._commands.run("XRANGE", self._key, max(0, oldest), "+")
        aged: list[tuple[float, StageReport]] = []
        for entry_id, fields in entries:
            age_s = (now_ms - parse_id(entry_id)[0]) / 1000
            try:
                reports = msgspec.json.decode(fields[JSON], type=list[StageReport])
            except (KeyError, ValueError, RecursionError) as error:
                # Written by another version during a rolling upgrade.
                get_logger().debug("bus.undecodable_entry", stream="stages", error=str(error))
                continue
            aged += [(age_s, report) for report in reports]
        return latest(aged)
