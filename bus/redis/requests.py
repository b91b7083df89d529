"""The requests stream: a consumer group, one consumer for each lane, which keeps what it took."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import msgspec
from redis import exceptions
from redis.asyncio import Redis

from ...config import BusConfig, BusError
from ..channel import Backlog, DeadLetter, Malformed, RequestEntry, budget_of, dead_letter
from ..codec import decode_refused, decode_request, encode_request
from ..entries import MAX_FIELDS, usable_trace
from ..keys import JSON, MSGPACK, REFUSED, TRACEPARENT, TRACESTATE, Keys, parse_id
from ..public import Completion, ErrorInfo, GenerateRequest
from ..queue import bus_closed
from .client import (
    Backoff,
    Commands,
    Server,
    end_tasks,
    execute,
    execute_all,
    is_transient,
    log,
    persist,
    time_ms,
)
from .leases import Leases, Refusal, refusals_of
from .links import BatchWriter
from .queue_length import QueueLength
from .results import RedisResults

TAKE_BLOCK_S = 5.0
DRAIN_PAGE = 256
ACK_BATCH = 256
KEPT_DEAD = 10_000
"""Dead letters that are kept."""

_FIELDS = frozenset({JSON, MSGPACK, REFUSED, TRACEPARENT, TRACESTATE})
_BODIES = (JSON, MSGPACK, REFUSED)

Entries = list[tuple[bytes, dict[bytes, bytes]]]


class RedisRequests:
    """The `RequestQueue` as one Redis stream, of which each lane takes through a consumer group.

    Entries come from Redis in a task of their own, which a cancelled `take` leaves running: what
    Redis has handed out is kept here for the next one. Redis may hand out an entry again (after a
    broken connection, or when the group had to be made again), so those in hand are known by id.
    """

    def __init__(
        self,
        config: BusConfig,
        keys: Keys,
        server: Server,
        commands: Commands,
        results: RedisResults,
    ) -> None:
        self._config = config
        self._keys = keys
        self._results = results
        self._key = keys.requests
        self._server = server
        self._commands = commands
        self._redis: Redis = server.client(1, TAKE_BLOCK_S)
        self._leases = Leases(config, keys, commands, uuid.uuid4().hex)
        self._queue_length = QueueLength(config.lane, keys, commands)
        # Entries in hand: fetched, and neither acknowledged nor lost to another lane.
        self._ready: deque[RequestEntry] = deque()
        self._known: set[str] = set()
        # Acknowledged since the running fetch began, which may have read them before that.
        self._answered: set[str] = set()
        # Of these the server may have lost the entries.
        self._distrusted: set[str] = set()
        self._fetching: asyncio.Task[None] | None = None
        # True while entries may be assigned to us that we have not got: at first, and after each
        # broken connection, whose last reply may have been lost.
        self._drain_first = True
        self._acks: BatchWriter[str] | None = None
        self._closed = False

    async def publish(
        self,
        request: GenerateRequest | dict[str, Any] | bytes,
        *,
        traceparent: str = "",
        tracestate: str = "",
    ) -> str:
        field, body = encode_request(request)
        command: list[Any] = ["XADD", self._key, "*", field, body]
        trace = usable_trace(traceparent, tracestate)
        for name, value in zip((TRACEPARENT, TRACESTATE), trace, strict=True):
            if value:
                command += [name, value]
        redis = self._commands.redis
        if self._server.is_cluster:
            # Its client does not look whether an idle connection was closed, so that what is sent
            # first after a failover is lost. That must not be this.
            with contextlib.suppress(BusError):
                await self._commands.once(lambda: execute(redis, "EXISTS", self._key))
        entry_id: bytes = await self._commands.once(lambda: execute(redis, *command))
        return entry_id.decode()

    async def pending(self) -> list[RequestEntry]:
        if self._acks is not None:
            await self._acks.flush()
        await self._leases.enlist()
        self._drain_first = False  # before the drain: a fetch that breaks meanwhile sets it again
        try:
            raw = await self._commands.shielded(
                persist(self._server, "requests", lambda: self._drain(self._commands.redis))
            )
        except BaseException:
            self._drain_first = True
            raise
        redis = self._commands.redis
        entries = await self._commands.shielded(
            persist(self._server, "requests", lambda: self._read_entries(redis, raw))
        )
        ids = {entry.entry_id for entry in entries}
        # A fetch under way may add what it gets meanwhile; it knows these by id and skips them.
        self._ready = deque(entry for entry in self._ready if entry.entry_id not in ids)
        self._known = ids | {entry.entry_id for entry in self._ready}
        return entries

    async def take(self, max_items: int = 64) -> list[RequestEntry]:
        """Waits for entries, also for those that Redis has handed out to a call that was cancelled.

        Raises:
            ChannelClosed: The bus was closed.
            BusError: Redis refuses the command itself, for example for want of permission.
        """
        while not self._ready:
            if self._closed:
                raise bus_closed()
            if self._fetching is None:
                self._fetching = asyncio.create_task(self._fetch(max_items), name="requests")
            fetching = self._fetching
            await asyncio.wait({fetching})
            if self._fetching is fetching:
                self._fetching = None
            if not fetching.cancelled():
                fetching.result()
        return [self._ready.popleft() for _ in range(min(max_items, len(self._ready)))]

    async def acknowledge(self, entry_id: str) -> None:
        """Written within moments, together with others."""
        if self._closed:
            raise bus_closed()
        if entry_id not in self._known:
            return
        if self._acks is None:
            self._acks = BatchWriter("acknowledgements", self._write_acks)
        await self._acks.put(entry_id, None)

    async def renew(self, lease_s: float) -> set[str]:
        lost, gone = await self._leases.renew(lease_s, tuple(self._known))
        # What another lane has answered is gone too; here only its output stream's fence can tell.
        lost |= gone - self._distrusted
        self._distrusted &= self._known
        self._known -= lost
        self._ready = deque(entry for entry in self._ready if entry.entry_id not in lost)
        return lost

    def distrust(self) -> None:
        self._distrusted = set(self._known)

    async def take_over(self, lease_s: float, max_items: int) -> list[RequestEntry]:
        """Takes over at most `TAKE_OVER_PAGE` at a time."""
        raw = await self._leases.take_over(lease_s, max_items)
        redis = self._commands.redis
        entries = await self._commands.shielded(
            persist(self._server, "requests", lambda: self._read_entries(redis, raw))
        )
        return self._not_known(entries)

    async def shed(
        self, max_queued: int, answer: Callable[[RequestEntry, int], Completion], epoch: int
    ) -> int:
        """Refuses at most `SHED_PAGE` at a time."""
        queued, raw = await self._leases.excess(max_queued)
        if not raw:
            return 0
        redis = self._commands.redis
        entries = await self._commands.shielded(
            persist(self._server, "requests", lambda: self._read_entries(redis, raw))
        )
        answered = await self._answer(refusals_of(entries, queued, answer), epoch)
        return await self._leases.remove(answered)

    async def bury(self, entry: RequestEntry, error: ErrorInfo, deaths: int) -> None:
        """Keeps a letter; the oldest go when there are more than `KEPT_DEAD`."""
        letter = msgspec.json.encode(dead_letter(entry, error, deaths, time.time_ns()))
        redis = self._commands.redis
        command = ("XADD", self._keys.dead, "MAXLEN", "~", KEPT_DEAD, "*", JSON, letter)
        await self._commands.shielded(
            persist(self._server, "dead letters", lambda: execute(redis, *command))
        )

    async def dead_letters(self) -> list[DeadLetter]:
        redis, key = self._commands.redis, self._keys.dead
        entries = await self._commands.once(lambda: execute(redis, "XRANGE", key, "-", "+"))
        letters = []
        for letter_id, fields in entries:
            try:
                letter = msgspec.json.decode(fields[JSON], type=DeadLetter)
            except (KeyError, ValueError, RecursionError) as error:
                log.warning("bus.undecodable_entry", stream="dead", error=str(error))
                continue
            letters.append(msgspec.structs.replace(letter, letter_id=letter_id.decode()))
        return letters

    async def drop_dead_letter(self, letter_id: str) -> bool:
        redis, key = self._commands.redis, self._keys.dead
        return bool(await self._commands.once(lambda: execute(redis, "XDEL", key, letter_id)))

    async def count_queue(self, begun: int | None) -> int:
        return await self._queue_length.count(begun)

    async def backlog(self) -> Backlog:
        redis, keys = self._commands.redis, self._keys
        commands = [
            ("XLEN", keys.requests),
            ("XLEN", keys.dead),
            ("GET", keys.queue_length),
            ("XPENDING", keys.requests, self._config.group),
        ]
        length, dead, queue_length, pending = await self._commands.once(
            lambda: execute_all(redis, commands, raise_on_error=False)
        )
        for reply in (length, dead, queue_length):
            if isinstance(reply, Exception):
                raise self._server.explain(reply)
        # It fails while nobody has made the group, so nobody has taken anything either.
        taken = 0 if isinstance(pending, Exception) else int(pending["pending"])
        # What is answered is deleted, so the rest has not been taken.
        waiting = max(0, int(length) - taken)
        # Where no lane lives, nothing has begun.
        return Backlog(
            waiting, taken, int(dead), int(length if queue_length is None else queue_length)
        )

    async def aclose(self, patience_s: float) -> None:
        """Writes what was acknowledged. What was taken and not acknowledged stays ours."""
        self._closed = True
        if self._fetching is not None:
            await end_tasks({self._fetching})
        if self._acks is not None:
            await self._acks.aclose(patience_s)
        await self._redis.aclose()

    async def _write_acks(self, batch: list[str]) -> int:
        await self._leases.acknowledge(batch)
        self._known.difference_update(batch)
        self._answered.update(batch)
        return ACK_BATCH

    async def _answer(self, refusals: Sequence[Refusal], epoch: int) -> list[str]:
        """Answers entries; returns those whose request has ended.

        Whoever takes an entry claims its request's id first, and finds that we have; where he was
        first, it is his. An entry without an id of its own may be taken at the very moment: then
        the answer stands, and what he writes is dropped.
        """
        claims = [(refusal.key, refusal.entry_id) for refusal in refusals]
        owners = await self._results.claim(claims)
        answers: list[tuple[str, Completion | None]] = []
        for refusal, owner in zip(refusals, owners, strict=True):
            if owner is None:
                answers.append((refusal.key, refusal.answer))
            elif owner == refusal.entry_id:
                answers.append((refusal.key, None))
            else:  # the id is another request's
                answers.append((refusal.entry_id, refusal.answer))
        ended = await self._results.answer(answers, epoch)
        return [
            refusal.entry_id
            for refusal, (key, _) in zip(refusals, answers, strict=True)
            if key in ended
        ]

    async def _fetch(self, max_items: int) -> None:
        """Adds at least one entry to `_ready`."""
        backoff = Backoff()
        failed = False
        while not self._ready:
            self._answered.clear()
            try:
                if self._drain_first:
                    entries = await self._drain(self._redis)
                    self._drain_first = False
                else:
                    entries = await self._read_new(max_items)
                handled = self._known | self._answered
                new = [entry for entry in entries if entry[0].decode() not in handled]
                read = await self._read_entries(self._redis, new)
            except (exceptions.RedisError, OSError) as error:
                if is_no_group(error):
                    await self._make_group()
                elif is_transient(error):
                    self._drain_first = failed = True
                    log.warning("bus.retrying", what="requests", error=type(error).__name__)
                else:
                    raise self._server.explain(error) from None
                await backoff.wait()
                continue
            if failed:
                self._server.reconnects += 1
            failed = False
            backoff.reset()
            self._ready.extend(self._not_known(read))

    def _not_known(self, entries: list[RequestEntry]) -> list[RequestEntry]:
        """Those that were not in hand; now they are."""
        new = [entry for entry in entries if entry.entry_id not in self._known]
        self._known.update(entry.entry_id for entry in new)
        return new

    async def _read_new(self, max_items: int) -> Entries:
        block_ms = int(TAKE_BLOCK_S * 1000)
        return await self._read_group(self._redis, ">", max_items, "BLOCK", block_ms)

    async def _drain(self, redis: Redis) -> Entries:
        """All entries that are assigned to us, oldest first; those deleted since are dropped."""
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
            log.warning("bus.requests_deleted_while_pending", entries=len(gone))
            await execute(redis, "XACK", self._key, self._config.group, *gone)
        return assigned

    async def _read_group(self, redis: Redis, start: str, count: int, *block: Any) -> Entries:
        reply = await execute(
            redis,
            "XREADGROUP",
            *("GROUP", self._config.group, self._leases.consumer, "COUNT", count),
            *block,
            *("STREAMS", self._key, start),
            key=self._key,
        )
        entries: Entries = (reply or {}).get(self._key, [])
        return entries

    async def _make_group(self) -> None:
        """Makes the group, from the stream's beginning: nothing in it has been answered."""
        try:
            command = ("XGROUP", "CREATE", self._key, self._config.group, "0", "MKSTREAM")
            await execute(self._redis, *command, key=self._key)
        except exceptions.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                log.warning("bus.group_not_made", error=str(error))
        except (exceptions.RedisError, OSError):
            self._drain_first = True

    async def _read_entries(self, redis: Redis, raw: Entries) -> list[RequestEntry]:
        """The requests in entries. The server is asked for its time only when one has a budget."""
        requests = [read_request(fields, self._config.max_request_bytes) for _, fields in raw]
        now_ms: int | None = None
        if any(budget_of(request) is not None for request in requests):
            now_ms = await time_ms(redis, self._key)
        return [
            RequestEntry(
                entry_id.decode(),
                request,
                *usable_trace(fields.get(TRACEPARENT, b""), fields.get(TRACESTATE, b"")),
                0
                if now_ms is None or budget_of(request) is None
                else max(0, now_ms - parse_id(entry_id)[0]) * 1_000_000,
            )
            for (entry_id, fields), request in zip(raw, requests, strict=True)
        ]


def read_request(fields: dict[bytes, bytes], max_bytes: int) -> GenerateRequest | Malformed:
    """The request in an entry's fields, whoever wrote them. Never raises."""
    bodies = [name for name in _BODIES if name in fields]
    if len(fields) > MAX_FIELDS or not fields.keys() <= _FIELDS or len(bodies) != 1:
        return Malformed(
            "",
            "malformed",
            "an entry of the requests stream has one field 'json' or 'msgpack', and may have "
            f"'traceparent' and 'tracestate'; this one has {_names(fields)}",
        )
    body = fields[bodies[0]]
    if bodies[0] == REFUSED:
        if len(body) > max_bytes:
            return Malformed("", "malformed", "the field 'refused' is too long")
        return decode_refused(body)
    return decode_request(body, "json" if bodies[0] == JSON else "msgpack", max_bytes)


def _names(fields: dict[bytes, bytes]) -> str:
    first = sorted(islice(fields, MAX_FIELDS))
    names = [repr(name[:40].decode("utf-8", "replace")) for name in first]
    more = f" and {len(fields) - len(first)} more" if len(fields) > len(first) else ""
    return (", ".join(names) or "none") + more


def is_no_group(error: Exception) -> bool:
    return str(error).startswith("NOGROUP")
