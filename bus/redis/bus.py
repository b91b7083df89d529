"""The bus on Redis: durable ends, links between processes, and results for clients anywhere."""

from __future__ import annotations

import asyncio
import os
import socket
import time
import uuid
from functools import partial

import msgspec

from ...config import NOT_PERMITTED, STAGES, BusConfig, BusError, role_of_sender, split_role
from ...config.errors import bus_closed
from ...store.redis.client import Server, check_version, on_each, time_ms
from ...store.redis.images import RedisImages
from ...store.redis.keys import Keys
from ...store.redis.limits import RedisLimits
from ...store.redis.records import RedisRecords
from ...store.store import store_on
from ..channel import Inbox
from ..links import AnyLink, links_to
from ..memory.bus import Inboxes, MemoryInbox, MemorySender
from ..replies import Replies
from ..sender import Numbering, Sender
from .kv_events import RedisKVEvents
from .layout import LayoutRecord
from .leases import live_lanes
from .links import LinkReader, LinkWriter, RedisSender, Seen
from .requests import RedisRequests
from .results import RedisResults
from .routing import RedisRouting
from .starts import ProcessStart

CLOSE_PATIENCE_S = 5.0
"""Time limit of `aclose` for pending writes, when Redis is slow or unreachable."""

# At least the server's time in milliseconds. A server that lost its data would otherwise count from
# 1 again, and stages that remember a larger epoch would drop the new one as stale.
_EPOCH = """
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local epoch = math.max(tonumber(redis.call('GET', KEYS[1]) or 0) + 1, now_ms)
redis.call('SET', KEYS[1], string.format('%.0f', epoch))
return epoch
"""


class RedisBus:
    """`Bus` over one Redis server, Sentinel group or cluster.

    A link stays in memory when both ends are stages of this process (`local_stages`) and
    `config.links` is "auto". Other senders on such a link (clients, on a control link) send over
    Redis; the inbox merges both.
    """

    durable = True

    def __init__(
        self, config: BusConfig, local_stages: frozenset[str] = frozenset(), replicas: int = 1
    ) -> None:
        """Create the bus without connecting. Raises BusError if the URL is invalid."""
        self._config = config
        self._replicas = replicas
        self._local = local_stages if config.links == "auto" else frozenset()
        self._keys = Keys(config.prefix, config.lane, config.model)
        self._server = Server(config.url, _client_name(local_stages))
        self._commands = RedisRecords(self._server)
        self._writes = self._server.client()
        self._inboxes = Inboxes()
        self._numbering = Numbering()
        self._seen = Seen()
        self._nonce = uuid.uuid4().bytes[:8]
        self._writers: dict[tuple[str, str], LinkWriter] = {}
        self._readers: dict[str, LinkReader] = {}
        own = (self._keys, self._commands)
        record = LayoutRecord(*own)
        self.results = RedisResults(config, *own, record)
        self._start = ProcessStart(*own, config.lane)
        self.requests = RedisRequests(config, *own, self.results, record, self._start)
        self.replies = Replies(*own)
        self.kv_events = RedisKVEvents(config, *own)
        self._limits = RedisLimits(*own)
        self.store = store_on(self._commands, self._keys, config, self._limits, RedisImages(*own))
        self.routing = RedisRouting(config, *own, self.results)

    def __repr__(self) -> str:
        return f"RedisBus({self._config!r})"

    @property
    def model(self) -> str:
        return self._config.model

    def of_model(self, model: str) -> RedisBus:
        return RedisBus(msgspec.structs.replace(self._config, model=model))

    async def open_inbox(self, stage: str) -> Inbox:
        """Open a stage's inbox; wait while Redis is unreachable.

        Raises:
            LaneReplaced: A process that has started later has opened it.
        """
        self._check_open()
        older = self._readers.pop(stage, None)
        if older is not None:
            await older.aclose()
        await self._start.open(stage)
        inbox = MemoryInbox(stage, self._config.link_capacity)
        links = [link for link in links_to(stage, self._replicas) if not self._is_local(link)]
        if links:
            capacity = self._config.link_capacity
            reader = LinkReader(self._server, self._keys, links, inbox, self._seen, capacity)
            self._readers[stage] = reader
            await self._commands.idempotent(f"inbox of {stage}", reader.start)
        self._check_open()
        self._inboxes.add(stage, inbox)
        return inbox

    def sender(self, link: AnyLink, sender: str, lane: str | None = None) -> Sender:
        """Return a sender. `sender` begins with its stage's name and a hyphen."""
        lane = self._config.lane if lane is None else lane
        local = link.receiver in self._local and lane == self._config.lane
        if local and role_of_sender(sender) in self._local:
            return MemorySender(self._inboxes, self._numbering, link, sender)
        return RedisSender(partial(self._writer, link, lane), self._numbering, link, sender)

    async def lanes(self) -> list[str]:
        key = self._keys.lanes
        registry = await self._commands.retry("lanes", "HGETALL", key)
        return live_lanes(registry, await self._now_ms(key)) or [self._config.lane]

    async def next_epoch(self) -> int:
        """Return a new epoch; wait while Redis is unreachable."""
        return int(await self._commands.retry("epoch", "EVAL", _EPOCH, 1, self._keys.epoch))

    async def is_epoch(self, number: int) -> bool:
        """Return whether `next_epoch` can have given the number. A lost counter restarts at the
        server's time."""
        last = await self._commands.retry("epoch", "GET", self._keys.epoch)
        if last is not None:
            return number <= int(last)
        return number <= await self._now_ms(self._keys.epoch) + 1000

    async def is_newest(self, stage: str) -> bool:
        return await self._start.is_newest(stage)

    @property
    def reconnects(self) -> int:
        return self._server.reconnects

    async def ping(self) -> None:
        """Connect, and check the server's version where the user may read it."""
        redis = self._commands.redis
        await self._commands.run("PING")
        try:
            infos = await self._commands.once(lambda: on_each(redis, "INFO", "server"))
        except BusError as error:
            if error.code != NOT_PERMITTED:
                raise
            return  # a client needs no right to look at the server
        for info in infos:
            check_version(info, self._server.name)

    async def aclose(self) -> None:
        """Flush and close. Gives up after `CLOSE_PATIENCE_S` when Redis is unreachable."""
        if self._inboxes.closed:
            return
        give_up_at = time.monotonic() + CLOSE_PATIENCE_S
        self._inboxes.close()
        await asyncio.gather(
            *(writer.aclose(CLOSE_PATIENCE_S) for writer in self._writers.values()),
            *(reader.aclose() for reader in self._readers.values()),
            self.requests.aclose(CLOSE_PATIENCE_S),
            self._limits.aclose(CLOSE_PATIENCE_S),
            self.results.aclose(),
            self.kv_events.aclose(CLOSE_PATIENCE_S),
            self.routing.aclose(),
        )
        await self._commands.aclose(max(0.0, give_up_at - time.monotonic()))
        await self._writes.aclose()
        await self._server.aclose()

    async def _now_ms(self, key: bytes) -> int:
        return await self._commands.idempotent("clock", lambda: time_ms(self._commands.redis, key))

    def _is_local(self, link: AnyLink) -> bool:
        """Return whether all senders of the link are local. On a control link, clients send too."""
        if link.name.startswith("control."):
            return False
        return link.receiver in self._local and all(
            role in self._local for role in link.roles(self._replicas)
        )

    def _writer(self, link: AnyLink, lane: str) -> LinkWriter:
        self._check_open()
        writer = self._writers.get((lane, link.name))
        if writer is None:
            writer = self._writers[lane, link.name] = LinkWriter(
                self._server,
                self._writes,
                self._keys.link(link.name, lane),
                link,
                self._nonce,
                self._config.link_capacity,
            )
        return writer

    def _check_open(self) -> None:
        if self._inboxes.closed:
            raise bus_closed()


def _client_name(stages: frozenset[str]) -> str:
    """Return this process's name in CLIENT LIST, without spaces."""
    ordered = sorted(stages, key=lambda role: (STAGES.index(split_role(role)[0]), role))
    role = "+".join(ordered) or "client"
    return f"{role}.{socket.gethostname()}-{os.getpid()}"
