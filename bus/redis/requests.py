"""The requests queue: a stream for each shard, and the order of a tenant that moves to another."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from ...config import BusConfig, BusError
from ...config.errors import bus_closed
from ...config.logger import get_logger
from ...store.records import readable
from ...store.redis.client import Backoff, Commands
from ...store.redis.keys import JSON, Keys, parse_id, split_entry
from ..backlog import Backlog
from ..codec import written_tenant
from ..dead_letters import DeadLetter, dead_letter
from ..entries import Answer, RequestEntry
from ..public import AnyRequest, Completion, ErrorInfo, GenerateRequest
from ..shards import Layout, homes_of, shard_of
from .layout import MOVING, LayoutRecord
from .requests_stream import RequestsStream
from .results import RedisResults
from .starts import ProcessStart

KEPT_DEAD = 10_000
"""Length limit of the dead-letter stream."""

POLL_S = 0.1
"""Interval at which a lane looks at one of the shards at which it doesn't wait, and, during a
change of their number, at its progress."""

LOOK_S = 1.0
"""Interval at which a lane looks at the number of shards."""

COUNT_LANES_S = 10.0

MOST_WAITING = 1024
"""Entries of moving tenants in hand from which no more are fetched from their new shards."""

PATIENCE_S = 10.0
"""Longest wait of a publisher for the sake of order."""

_decode_letter = msgspec.json.Decoder(DeadLetter).decode


class RedisRequests:
    """`RequestQueue` on Redis, as one stream for each shard.

    The order of a tenant that moves to another shard, for requests whose publishing was confirmed
    one after the other, by any processes:

    1. A publisher uses a layout for `fresh_s`. If the confirmation comes later than `late_s`, and
       the tenant has moved, the entry's publishing is confirmed once the entry is taken.
    2. When a change begins, tenants that move are not published. `late_s` later the last entry of
       each shard that they leave is written down, and they are published on their new shards.
    3. When all entries up to those are taken, a lane ends the change. Until then each lane keeps
       entries of moved tenants waiting; it reads the layout after it has got entries, so no layout
       is older than an entry. `take` returns them after all that the lane has got of the shards
       that tenants left.

    Attributes:
        streams: The streams of the shards that this process has used, the first one at least.
        record: The layout.
    """

    def __init__(
        self,
        config: BusConfig,
        keys: Keys,
        commands: Commands,
        results: RedisResults,
        record: LayoutRecord,
        start: ProcessStart,
    ) -> None:
        self._config = config
        self._keys = keys
        self._commands = commands
        self._results = results
        self.record = record
        self._start = start
        self.streams: list[RequestsStream] = []
        self._stream(0)
        # Entries of moved tenants, in order, and those that have waited.
        self._waiting: deque[RequestEntry] = deque()
        self._released: deque[RequestEntry] = deque()
        # The change that has not ended for this lane; and the number of those that have.
        self._change: Layout | None = None
        self._ended_changes = 0
        self._lanes = 1
        self._counted_at = self._polled_at = self._advanced_at = -COUNT_LANES_S
        self._next = 0
        self._closed = False

    # --- publishing -----------------------------------------------------------------------------

    async def publish(
        self, request: AnyRequest, *, traceparent: str = "", tracestate: str = ""
    ) -> str:
        try:
            layout = await self.record.fresh()
        except BusError:
            # The cluster client doesn't notice that an idle connection was closed: the first
            # command after a failover is lost.
            layout = await self.record.read()
        read_at = self.record.read_at
        if layout.is_announced:
            layout, read_at = await self._wait_for_move(written_tenant(request), layout)
        shard = 0
        if layout.shards > 1:
            shard = shard_of(written_tenant(request), layout.shards)
        entry_id = await self._stream(shard).publish(
            request, traceparent=traceparent, tracestate=tracestate
        )
        if time.monotonic() - read_at > self.record.late_s:
            await self._confirm_late(entry_id, written_tenant(request), layout)
        return entry_id

    async def _wait_for_move(self, tenant: str, layout: Layout) -> tuple[Layout, float]:
        """Wait until a tenant that moves can be published on its new shard.

        Returns:
            A layout, and when it was read.
        """
        record, backoff = self.record, Backoff(0.01, POLL_S)
        give_up_at = time.monotonic() + PATIENCE_S
        while layout.is_announced and layout.moved(tenant):
            if time.monotonic() > give_up_at:  # no process with the right to go on is alive
                get_logger().warning("bus.published_during_a_change_of_shards", tenant=tenant)
                break
            await backoff.wait()
            layout = await record.read()
            with contextlib.suppress(BusError):
                layout = await record.make_known()
        return layout, record.read_at

    async def _confirm_late(self, entry_id: str, tenant: str, layout: Layout) -> None:
        """Wait until an entry is taken whose tenant may have moved meanwhile."""
        now = await self.record.read()
        if shard_of(tenant, now.shards) == shard_of(tenant, layout.shards):
            return
        raw, shard = split_entry(entry_id)
        leases = self._stream(shard).leases
        give_up_at = time.monotonic() + PATIENCE_S
        try:
            backoff = Backoff(0.01, POLL_S)
            while time.monotonic() < give_up_at and not await leases.is_taken(raw):
                await backoff.wait()
        except BusError as error:  # the entry is published all the same
            get_logger().warning("bus.late_entry_not_followed", error=str(error))

    # --- taking ---------------------------------------------------------------------------------

    async def pending(self) -> list[RequestEntry]:
        await self.record.read(waits=True)
        try:
            await self._begin_configured()
        except BusError as error:  # `take` tries again
            get_logger().debug("bus.shards_not_begun", error=str(error))
        layout = self.record.layout
        self._ended_changes = layout.changes - layout.moving
        self._change = None
        self._waiting.clear()
        self._released.clear()
        found = await asyncio.gather(*(stream.pending() for stream in self._all()))
        entries = [entry for each in found for entry in each]
        return entries if len(found) == 1 else sorted(entries, key=_age)

    async def take(self, max_items: int = 64) -> list[RequestEntry]:
        """Wait for entries, including those that Redis handed out to a cancelled call.

        Raises:
            ChannelClosed: The bus was closed.
            BusError: Redis refuses the command, for example for lack of permission.
        """
        while True:
            if self._closed:
                raise bus_closed()
            if not await self._read_layout():
                await asyncio.sleep(POLL_S)
                continue
            if entries := self._collect(max_items):
                return entries
            fetching = self._fetch(max_items)
            await asyncio.wait(fetching, timeout=self._patience_s(), return_when="FIRST_COMPLETED")
            for stream in self.streams:
                stream.end_fetch()

    async def _begin_configured(self) -> None:
        """Give a deployment without a record, or whose server has lost it, its number of shards."""
        if self._config.shards > 1 and not self.record.layout.changes:
            try:
                await self.record.begin(self._config.shards)
            except BusError as error:
                if error.code != MOVING:  # another lane was first
                    raise

    async def _read_layout(self) -> bool:
        """Read the layout if it is older than an entry in hand, and take part in a change of it.

        Returns:
            False if it can't be read, and there is more than one shard.
        """
        record, streams = self.record, self.streams
        one = len(streams) == record.layout.streams == 1
        try:
            newest = max(stream.fetched_at for stream in streams)
            if self._is_due(record.read_at, LOOK_S) or (not one and newest >= record.read_at):
                await record.read()
                await self._begin_configured()
            if record.layout.moving:
                await self._advance(record.layout)
            if record.layout.changes != self._ended_changes:
                await self._take_part(record.layout)
            if record.layout.streams > 1 and self._is_due(self._counted_at, COUNT_LANES_S):
                self._counted_at = time.monotonic()
                self._lanes = await self._commands.run("HLEN", self._keys.lanes)
        except BusError as error:
            # While the server is away, the fetches wait for it.
            get_logger().debug("bus.layout_not_read", error=str(error))
            return one
        return True

    async def _advance(self, layout: Layout) -> None:
        """Take the next step of a change, if it is time; every lane tries."""
        record = self.record
        if layout.is_announced:
            await record.make_known()
        elif self._is_due(self._advanced_at, POLL_S):
            self._advanced_at = time.monotonic()
            drained = [
                self._stream(shard).leases.is_taken(end) for shard, end in layout.ends.items()
            ]
            if all(await asyncio.gather(*drained)) and await record.replace(
                layout, layout.settled()
            ):
                get_logger().info("shards_changed", shards=layout.shards)

    async def _take_part(self, layout: Layout) -> None:
        """Note that a change has begun; release entries once it has ended for this lane."""
        change = self._change
        if change is None or layout.changes == change.changes:
            change = self._change = layout
        if layout.moving and layout.changes == change.changes:
            return
        # After a change that this lane has missed, entries of any shard may be on their way.
        missed = change.changes > self._ended_changes + 1
        left = range(len(self._all())) if missed else change.left()
        for shard in left:
            # Handed out, but perhaps not yet arrived here.
            if not await self._stream(shard).has_received(change.ends.get(shard, "+")):
                return
        waiting, self._waiting = self._waiting, deque()
        self._ended_changes, self._change = change.changes, None
        if layout.changes != change.changes:
            self._change = layout
        for shard in left:
            self._pop_ready(shard, self._released, math.inf)
        for entry in waiting:
            self._sort(entry, split_entry(entry.entry_id)[1], self._released)

    def _collect(self, max_items: int) -> list[RequestEntry]:
        """Return fetched entries, of each shard in order; those of moving tenants wait."""
        entries: deque[RequestEntry] = deque()
        while self._released and len(entries) < max_items:
            entries.append(self._released.popleft())
        number = len(self.streams)
        self._next = (self._next + 1) % number
        for shard in ((self._next + i) % number for i in range(number)):
            self._pop_ready(shard, entries, max_items)
        return list(entries)

    def _pop_ready(self, shard: int, entries: deque[RequestEntry], most: float) -> None:
        """Move fetched entries of a shard to `entries`, and those of moving tenants apart."""
        ready = self.streams[shard].ready
        while ready and len(entries) < most:
            self._sort(ready.popleft(), shard, entries)

    def _sort(self, entry: RequestEntry, shard: int, entries: deque[RequestEntry]) -> None:
        """Append an entry to `entries`, or to those that wait."""
        waits = self._change is not None and self._change.moved_to(_tenant_of(entry), shard)
        (self._waiting if waits else entries).append(entry)

    def _fetch(self, max_items: int) -> set[asyncio.Task[None]]:
        """Return the running fetches: of this lane's shards, and now and then of another one."""
        layout, lane = self.record.layout, self._config.lane
        if len(self._all()) == 1:
            return {self.streams[0].fetching(max_items)}
        most = max(layout.shards, layout.before)
        homes = homes_of(lane, most, self._lanes)
        if len(self._waiting) > MOST_WAITING:
            homes = tuple(shard for shard in homes if shard in layout.left())
        # Each may bring as many.
        each = -(-max_items // max(1, len(homes)))
        fetching = {self.streams[shard].fetching(each) for shard in homes}
        if self._is_due(self._polled_at, POLL_S):
            self._polled_at = time.monotonic()
            others = [shard for shard in range(len(self.streams)) if shard not in homes]
            if len(self._waiting) > MOST_WAITING:
                others = [shard for shard in others if shard in layout.left()]
            if others:
                self._next += 1
                other = self.streams[others[self._next % len(others)]]
                fetching.add(other.fetching(max_items, waits=False))
        return fetching

    def _patience_s(self) -> float:
        """Return how long to wait before looking at the layout and at other shards."""
        layout = self.record.layout
        homes = homes_of(self._config.lane, layout.shards, self._lanes)
        waits = self._change is None and len(homes) == layout.streams
        return LOOK_S if waits else POLL_S

    # --- entries in hand ------------------------------------------------------------------------

    async def acknowledge(self, entry_id: str, request_id: str | None = None) -> None:
        """Acknowledge within moments, in a batch."""
        if self._closed:
            raise bus_closed()
        shard = split_entry(entry_id)[1]
        if shard < len(self.streams):
            await self.streams[shard].acknowledge(entry_id, request_id)

    async def renew(self, lease_s: float) -> set[str]:
        # The first stream's registry has all lanes.
        holding = [stream for stream in self.streams[1:] if stream.holds]
        renewals = (stream.renew(lease_s) for stream in (self.streams[0], *holding))
        lost = set[str]().union(*await asyncio.gather(*renewals))
        if lost:
            for entries in (self._waiting, self._released):
                kept = [entry for entry in entries if entry.key not in lost]
                entries.clear()
                entries.extend(kept)
        return lost

    def mark_possibly_lost(self) -> None:
        for stream in self.streams:
            stream.mark_possibly_lost()

    async def take_over(self, lease_s: float, max_items: int) -> list[RequestEntry]:
        """Take over at most `TAKE_OVER_PAGE` entries of each shard."""
        entries: list[RequestEntry] = []
        for stream in self._all():
            if len(entries) < max_items:
                entries += await stream.take_over(lease_s, max_items - len(entries))
        return entries

    async def shed(
        self, max_queued: int, answer: Callable[[RequestEntry, int], Completion], epoch: int
    ) -> int:
        """Refuse at most `SHED_PAGE` entries of each shard, whose bound is its share of all."""
        layout = self.record.layout
        if len(self._all()) == 1:
            return await self.streams[0].shed(max_queued, answer, epoch)
        shards = homes_of(self._config.lane, layout.streams, self._lanes)
        bound = -(-max_queued // layout.shards)
        sheds = (self.streams[shard].shed(bound, answer, epoch) for shard in shards)
        return sum(await asyncio.gather(*sheds))

    async def end_all(self, answer: Answer, epoch: int) -> int:
        await self.record.read()
        return sum([await stream.end_all(answer, epoch) for stream in self._all()])

    # --- numbers --------------------------------------------------------------------------------

    async def count_queue(self, begun: int | None) -> int:
        leases, others = self.streams[0].leases, self._all()[1:]
        length = await leases.count(begun, None if others else 0)
        if length is None:
            length = await leases.count(begun, sum(await self._lengths(others)))
        assert length is not None
        return length

    async def backlog(self) -> Backlog:
        await self.record.read()
        streams = self._all()
        counts = await asyncio.gather(*(stream.counts() for stream in streams))
        dead, queue_length = await self._commands.run_all(
            [("XLEN", self._keys.dead), ("GET", self._keys.queue_length)]
        )
        waiting, taken = (sum(numbers) for numbers in zip(*counts, strict=True))
        # Without a live lane nothing has begun.
        unanswered = waiting + taken if queue_length is None else queue_length
        return Backlog(waiting, taken, int(dead), int(unanswered))

    async def shard_lengths(self) -> list[int]:
        await self.record.read()
        return await self._lengths(self._all())

    async def _lengths(self, streams: Sequence[RequestsStream]) -> list[int]:
        return await self._commands.run_all([("XLEN", stream.key) for stream in streams])

    async def shards(self) -> Layout:
        return await self.record.read()

    async def set_shards(self, shards: int) -> Layout:
        if self._config.model or await self._commands.run("EXISTS", self._keys.models):
            raise BusError(
                "each of several models has a requests stream of its own, which has one shard",
                code="shards_of_models",
                remedy="leave the number as it is",
            )
        BusConfig(shards=shards)  # checks the number
        layout = await self.record.begin(shards)
        while layout.is_announced:
            await asyncio.sleep(self.record.late_s)
            layout = await self.record.make_known()
        return layout

    # --- dead letters ---------------------------------------------------------------------------

    async def add_dead_letter(self, entry: RequestEntry, error: ErrorInfo, deaths: int) -> None:
        """Keep a dead letter; beyond `KEPT_DEAD` the oldest are dropped."""
        letter = dead_letter(entry, error, deaths, time.time_ns(), self._config.model)
        command = ("XADD", self._keys.dead, "MAXLEN", "~", KEPT_DEAD, "*", JSON)
        await self._commands.retry("dead letters", *command, msgspec.json.encode(letter))

    async def dead_letters(self) -> list[DeadLetter]:
        entries = await self._commands.run("XRANGE", self._keys.dead, "-", "+")
        letters = []
        for letter_id, fields in entries:
            letter = readable(_decode_letter, fields.get(JSON, b""), "dead")
            if letter is not None:
                letters.append(msgspec.structs.replace(letter, letter_id=letter_id.decode()))
        return letters

    async def drop_dead_letter(self, letter_id: str) -> bool:
        return bool(await self._commands.run("XDEL", self._keys.dead, letter_id))

    async def aclose(self, patience_s: float) -> None:
        """Write pending acknowledgements. Entries in hand stay assigned to this lane."""
        self._closed = True
        await asyncio.gather(*(stream.aclose(patience_s) for stream in self.streams))

    def _all(self) -> list[RequestsStream]:
        """Return the streams of all shards that may have entries."""
        self._stream(self.record.layout.streams - 1)
        return self.streams

    def _stream(self, shard: int) -> RequestsStream:
        while len(self.streams) <= shard:
            keys = self._keys.of_shard(len(self.streams))
            self.streams.append(
                RequestsStream(self._config, keys, self._commands, self._results, self._start)
            )
        return self.streams[shard]

    @staticmethod
    def _is_due(since: float, interval_s: float) -> bool:
        return time.monotonic() - since >= interval_s


def _tenant_of(entry: RequestEntry) -> str:
    return entry.request.tenant if isinstance(entry.request, GenerateRequest) else ""


def _age(entry: RequestEntry) -> tuple[int, int]:
    return parse_id(split_entry(entry.entry_id)[0].encode())
