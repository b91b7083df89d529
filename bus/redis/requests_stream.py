"""One requests stream, of a shard: a consumer group with one consumer per lane."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from redis import exceptions
from redis.asyncio import Redis

from ...config import NOT_PERMITTED, BusConfig, BusError
from ...config.errors import bus_closed
from ...config.logger import get_logger
from ...store.redis.client import Backoff, Commands, end_tasks, execute, is_transient
from ...store.redis.keys import MODEL, TRACEPARENT, TRACESTATE, Keys, entry_name
from ..codec import encode_request
from ..ending import end_entries
from ..entries import Answer, RequestEntry, entry_key, id_in, usable_trace
from ..public import AnyRequest, Completion
from .entries import Entries, ServerClock, read_entries
from .leases import Identity, Leases, identity_of
from .links import BatchWriter
from .refusals import end_untaken
from .results import RedisResults
from .routing import PUBLISH, explain_closed
from .starts import ProcessStart

TAKE_BLOCK_S = 5.0
DRAIN_PAGE = 256
ACK_BATCH = 256
MOST_RETAKEN = 3
"""Limit on taking an entry again because the server lost its terminal message. Where outputs expire
too soon (`bus.results_ttl_s`) the loss would repeat for ever.
"""


class RequestsStream:
    """The entries of one shard, read through a consumer group.

    Methods that `RequestQueue` has, too, do the same for this shard alone.

    A task fetches entries; a cancelled `take` of the queue leaves it running, and the next one gets
    what Redis handed out. Redis may hand out an entry again (after a broken connection, or when the
    group was recreated), so entries in hand are known, by `RequestEntry.key`.

    Attributes:
        ready: Entries that were fetched, and not yet returned by `take`.
        key: The stream's key.
        leases: Of the stream's entries.
        fetched_at: When the last ones were fetched, on this process's clock.
    """

    def __init__(
        self,
        config: BusConfig,
        keys: Keys,
        commands: Commands,
        results: RedisResults,
        start: ProcessStart,
    ) -> None:
        self._config = config
        self._keys = keys
        self._results = results
        self.key = keys.requests
        self._server = commands.server
        self._commands = commands
        self._redis: Redis = commands.server.client(TAKE_BLOCK_S)
        self.leases = Leases(config, keys, commands, start)
        self.fetched_at = 0.0
        # Entries in hand: fetched, and neither acknowledged nor lost to another lane.
        self.ready: deque[RequestEntry] = deque()
        self._known: dict[str, Identity] = {}
        # Acknowledged since the running fetch began, which may have read them before.
        self._answered: set[str] = set()
        # Entries that the server possibly lost; it may have given their ids to others.
        self._possibly_lost: set[str] = set()
        self._fetching: asyncio.Task[None] | None = None
        # True while Redis may have assigned entries to this consumer that it has not received: at
        # first, and after each broken connection.
        self._drain_first = True
        self._clock = ServerClock()
        self._acks: BatchWriter[tuple[str, str | None]] | None = None
        # Times that an entry was taken again because the server lost its terminal message.
        self._retaken: dict[str, int] = {}
        self._closed = False
        self._may_run_scripts = True

    async def publish(
        self, request: AnyRequest, *, traceparent: str = "", tracestate: str = ""
    ) -> str:
        field, body = encode_request(request)
        fields: list[Any] = [field, body]
        trace = usable_trace(traceparent, tracestate)
        for name, value in zip((TRACEPARENT, TRACESTATE), trace, strict=True):
            if value:
                fields += [name, value]
        if self._server.is_cluster:
            # The cluster client doesn't notice that an idle connection was closed: the first
            # command after a failover is lost, so send one that may be.
            with contextlib.suppress(BusError):
                await self._commands.run("EXISTS", self._keys.entrance)
        if model := self._config.model:
            fields = [MODEL, model, *fields]
            if (direct := await self._publish_directly(fields)) is not None:
                return direct
        entry_id: bytes = await self._commands.run("XADD", self._keys.entrance, "*", *fields)
        return self._name(entry_id)

    async def _publish_directly(self, fields: Sequence[Any]) -> str | None:
        """Publish to the model's own stream; return None without the right to run scripts."""
        if not self._may_run_scripts:
            return None
        model, keys = self._config.model, (self._keys.entrance, self.key, self._keys.closed)
        try:
            entry_id: bytes = await self._commands.run(
                "EVAL", PUBLISH, len(keys), *keys, model, *fields
            )
        except BusError as error:
            self._may_run_scripts = error.code != NOT_PERMITTED
            if not self._may_run_scripts:
                return None
            raise explain_closed(error, model) from None
        return entry_id.decode()

    async def pending(self) -> list[RequestEntry]:
        if self._acks is not None:
            await self._acks.flush()
        await self.leases.enlist()
        self._drain_first = False  # before the drain: a fetch that breaks meanwhile sets it again
        try:
            raw = await self._commands.idempotent(
                "requests", lambda: self._drain(self._commands.redis)
            )
        except BaseException:
            self._drain_first = True
            raise
        entries = await self._read(raw)
        keys = {entry.key for entry in entries}
        # A fetch in flight may add entries meanwhile; it skips known ones.
        self.ready = deque(entry for entry in self.ready if entry.key not in keys)
        self._known = {entry.key: identity_of(entry) for entry in (*entries, *self.ready)}
        return entries

    def fetching(self, max_items: int, *, waits: bool = True) -> asyncio.Task[None]:
        """Return the running fetch, which adds entries to `ready`; begin one if there is none.

        Args:
            max_items: The number of entries to fetch; at most 64 more may come after a failure.
            waits: Whether the fetch waits until there is an entry.
        """
        if self._fetching is None or self._fetching.done():
            fetch = self._fetch(max_items, waits=waits)
            self._fetching = asyncio.create_task(fetch, name="requests")
        return self._fetching

    def end_fetch(self) -> None:
        """Raise the error of a fetch that has failed; a new one may begin.

        Raises:
            BusError: Redis refuses the command, for example for lack of permission.
        """
        if self._fetching is not None and self._fetching.done():
            fetching, self._fetching = self._fetching, None
            if not fetching.cancelled():
                fetching.result()

    async def acknowledge(self, entry_id: str, request_id: str | None = None) -> None:
        """Acknowledge within moments, in a batch."""
        if self._closed:
            raise bus_closed()
        if request_id is not None:
            keys = [entry_key(entry_id, request_id)]
        else:
            keys = [key for key in self._known if id_in(key) == entry_id]
        for key in keys:
            if key in self._known:
                if self._acks is None:
                    self._acks = BatchWriter("acknowledgements", self._write_acks)
                await self._acks.put((key, request_id))

    async def renew(self, lease_s: float) -> set[str]:
        held = dict.fromkeys(raw for raw, _ in self._known.values())
        owned, gone = await self.leases.renew(lease_s, tuple(held))
        self._possibly_lost &= self._known.keys()
        lost = {key for key, (raw, _) in self._known.items() if raw in owned}
        if uncertain := lost & self._possibly_lost:
            lost -= uncertain - {entry.key for entry in await self._on_server(owned)}
        # An entry answered by another lane is gone too; the fence of its output stream shows it
        # then.
        lost |= {
            key
            for key, (raw, _) in self._known.items()
            if raw in gone and key not in self._possibly_lost
        }
        for key in lost:
            self._known.pop(key, None)
        self.ready = deque(entry for entry in self.ready if entry.key not in lost)
        return lost

    async def _on_server(self, ids: Iterable[str]) -> list[RequestEntry]:
        """Return the entries that have these ids now."""
        commands = [("XRANGE", self.key, raw, raw) for raw in sorted(ids)]
        found = await self._commands.retry_all("requests", commands)
        return await self._read(list(chain.from_iterable(found)))

    def mark_possibly_lost(self) -> None:
        self._possibly_lost = set(self._known)

    async def take_over(self, lease_s: float, max_items: int) -> list[RequestEntry]:
        """Take over at most `TAKE_OVER_PAGE` entries."""
        raw = await self.leases.take_over(lease_s, max_items)
        return self._not_known(await self._read(raw))

    async def shed(
        self, max_queued: int, answer: Callable[[RequestEntry, int], Completion], epoch: int
    ) -> int:
        """Refuse at most `SHED_PAGE` entries beyond `max_queued` of this shard."""
        queued, raw = await self.leases.excess(max_queued)
        if not raw:
            return 0
        entries = await self._read(raw)
        refusals = [answer(entry, queued) for entry in entries]
        answered = await end_untaken(self._results, refusals, epoch)
        return await self.leases.remove(identities_of(entries, answered))

    async def end_all(self, answer: Answer, epoch: int) -> int:
        after, number = "-", 0
        while True:
            raw = await self._commands.run("XRANGE", self.key, after, "+", "COUNT", DRAIN_PAGE)
            if not raw:
                return number
            after = f"({raw[-1][0].decode()}"
            entries = await self._read(raw)
            ended = await end_entries(self._results, entries, answer, epoch)
            if ended:
                await self.leases.remove(identities_of(entries, ended), any_owner=True)
            number += len(ended)

    @property
    def holds(self) -> bool:
        """Whether entries are in hand."""
        return bool(self._known)

    async def has_received(self, last: str) -> bool:
        """Return whether the entries up to `last` that Redis handed to this lane have arrived.

        Raises:
            BusError: As `backlog`.
        """
        handed_out = await self.leases.assigned(last, len(self._known) + 1)
        return handed_out <= {id_in(key) for key in (*self._known, *self._answered)}

    async def counts(self) -> tuple[int, int]:
        """Return the numbers of untaken and of taken entries. Raises BusError."""
        key, group = self.key, self._config.group
        length, pending = await self._commands.run_all(
            [("XLEN", key), ("XPENDING", key, group)], raise_on_error=False
        )
        if isinstance(length, Exception):
            raise self._server.explain(length)
        # XPENDING fails while there is no group, so no entry is taken.
        taken = 0 if isinstance(pending, Exception) else int(pending["pending"])
        # Answered entries are deleted, so the rest is untaken.
        return max(0, int(length) - taken), taken

    async def aclose(self, patience_s: float) -> None:
        """Write pending acknowledgements. Entries in hand stay assigned to this lane."""
        self._closed = True
        if self._fetching is not None:
            await end_tasks({self._fetching})
        if self._acks is not None:
            await self._acks.aclose(patience_s)
        await self._redis.aclose()

    async def _write_acks(self, batch: list[tuple[str, str | None]]) -> int:
        """Remove entries whose terminal message exists.

        During a failover, commands may reach the old and the new server, and confirmed writes may
        be lost. An entry found unanswered is taken again and continues after its stored output.
        """
        batch = [(key, request_id) for key, request_id in batch if key in self._known]
        certain = {
            key
            for key, request_id in batch
            if request_id is None or self._retaken.get(key, 0) >= MOST_RETAKEN
        }
        answered = {key: request_id or "" for key, request_id in batch if key not in certain}
        unanswered = await self._acknowledge(certain, answered)
        for key in unanswered:
            self._retaken[key] = self._retaken.get(key, 0) + 1
        done = {key for key, _ in batch} - unanswered
        for key in done:
            self._retaken.pop(key, None)
        for key in done | unanswered:
            self._known.pop(key, None)
        self._answered |= done
        if unanswered:
            get_logger().warning("bus.answers_lost", entries=len(unanswered))
            self._drain_first = True
        return ACK_BATCH

    async def _acknowledge(self, certain: set[str], answered: dict[str, str]) -> set[str]:
        """Remove all entries but those of `answered` without a terminal message, and those whose id
        is another entry's; return these."""
        told = [(key, (id_in(key), request_id)) for key, request_id in answered.items()]
        unanswered: set[str] = set()
        if self._server.is_cluster:  # the marks are on other nodes
            missing = await self._results.unanswered([about for _, about in told])
            unanswered = {key for key, about in told if about in missing}
            certain = certain | (answered.keys() - unanswered)
        elif answered:
            marks = [mark for _, about in told for mark in self._results.marks_of(*about)]
            unanswered = await self._remove([*answered], marks)
        if certain:
            unanswered |= await self._remove([*certain])
        return unanswered

    async def _remove(self, keys: list[str], marks: Sequence[bytes] = ()) -> set[str]:
        """Remove entries as `Leases.acknowledge`; return those that stay."""
        left = await self.leases.acknowledge([self._known[key] for key in keys], marks)
        return {keys[index] for index in left}

    async def _fetch(self, max_items: int, *, waits: bool) -> None:
        """Add entries to `ready`; at least one if it `waits`."""
        backoff = Backoff()
        failed = False
        while not self.ready:
            self._answered.clear()
            try:
                if self._drain_first:
                    self._drain_first = False  # before the drain: it may be set again meanwhile
                    entries = await self._drain(self._redis)
                else:
                    block = ("BLOCK", int(TAKE_BLOCK_S * 1000)) if waits else ()
                    entries = await self._read_group(self._redis, ">", max_items, *block)
                read = await self._read_entries(self._redis, entries)
            except (exceptions.RedisError, OSError) as error:
                if is_no_group(error):
                    await self._make_group()
                elif is_transient(error):
                    self._drain_first = failed = True
                    self._server.lost(error, "requests")
                else:
                    raise self._server.explain(error) from None
                await backoff.wait()
                continue
            if failed:
                self._server.answered_again()
            failed = False
            backoff.reset()
            answered = self._answered
            self.ready.extend(self._not_known([e for e in read if e.key not in answered]))
            self.fetched_at = time.monotonic()
            if not waits:
                return

    def _not_known(self, entries: list[RequestEntry]) -> list[RequestEntry]:
        """Return the entries that were not in hand, and record them."""
        new = [entry for entry in entries if entry.key not in self._known]
        self._known.update((entry.key, identity_of(entry)) for entry in new)
        return new

    async def _drain(self, redis: Redis) -> Entries:
        """Return all entries assigned to this consumer, oldest first, without deleted ones."""
        assigned: Entries = []
        gone: list[bytes] = []
        cursor = "0"
        while True:
            try:
                page = await self._read_group(redis, cursor, DRAIN_PAGE)
            except exceptions.ResponseError as error:
                if is_no_group(error):
                    return []
                raise
            for entry_id, fields in page:
                if fields:
                    assigned.append((entry_id, fields))
                else:
                    gone.append(entry_id)
            if not page:
                break
            cursor = page[-1][0].decode()
        if gone:
            get_logger().warning("bus.requests_deleted_while_pending", entries=len(gone))
            await execute(redis, "XACK", self.key, self._config.group, *gone)
        return assigned

    async def _read_group(self, redis: Redis, start: str, count: int, *block: Any) -> Entries:
        reply = await execute(
            redis,
            "XREADGROUP",
            *("GROUP", self._config.group, self.leases.consumer, "COUNT", count),
            *block,
            *("STREAMS", self.key, start),
            key=self.key,
        )
        entries: Entries = (reply or {}).get(self.key, [])
        return entries

    async def _make_group(self) -> None:
        """Create the group from the stream's beginning: no entry in the stream is answered."""
        try:
            command = ("XGROUP", "CREATE", self.key, self._config.group, "0", "MKSTREAM")
            await execute(self._redis, *command, key=self.key)
        except exceptions.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                get_logger().warning("bus.group_not_made", error=str(error))
        except (exceptions.RedisError, OSError):
            self._drain_first = True

    async def _read(self, raw: Entries) -> list[RequestEntry]:
        """Read entries until it succeeds, in a task that survives a cancellation."""
        return await self._commands.idempotent(
            "requests", lambda: self._read_entries(self._commands.redis, raw)
        )

    async def _read_entries(self, redis: Redis, raw: Entries) -> list[RequestEntry]:
        limit = self._config.max_request_bytes
        return await read_entries(redis, self.key, raw, limit, self._clock, self._keys.shard)

    def _name(self, raw: bytes) -> str:
        """Return the id of an entry of this stream."""
        return entry_name(raw.decode(), self._keys.shard)


def identities_of(entries: Iterable[RequestEntry], ids: Iterable[str]) -> list[Identity]:
    """Return what names those of the entries that have these ids."""
    by_id = {entry.entry_id: identity_of(entry) for entry in entries}
    return [by_id[entry_id] for entry_id in ids]


def is_no_group(error: Exception) -> bool:
    return str(error).startswith("NOGROUP")
