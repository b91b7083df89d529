"""Result streams on Redis: one stream per request, and one with every terminal message.

Entries of a request's stream have explicit ids `<epoch>-<n>`; n counts the stream's entries from 1.
Redis refuses an id that is not above the last one. So a retried write can't double an entry, and
after a recovery in a larger epoch the old writer can't append any more.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from itertools import chain, count
from typing import Any

import msgspec
from redis import exceptions

from ...config import BusConfig, BusError
from ...config.logger import get_logger
from ...store.records import readable
from ...store.redis.client import (
    Backoff,
    Commands,
    execute,
    execute_all,
    is_transient,
    persist,
)
from ...store.redis.keys import JSON, Keys, id_after, parse_id, split_entry
from ..codec import decode_output, encode_output
from ..positions import invalid_position
from ..public import Completion, Output, OutputBatch
from ..recipes import has_id
from .entries import Entries, entries_of
from .follow import RedisFollow, ResultsTail, check_known, is_of, out_keys, read_output
from .layout import LayoutRecord
from .readers import readers_of
from .result_parts import REFUSED, TOO_LARGE, StreamPart, ending, part_of
from .result_scripts import ANSWER, APPEND, FENCE, LOOK, TELL

REMEMBERED_STREAMS = 65_536
"""Streams whose next entry number is cached. For others, Redis is queried."""

KEYS_PER_FLUSH = 256

LARGE_BYTES = 1 << 20
"""The smallest configurable limit of a server (`proto-max-bulk-len`, `client-query-buffer-limit`).
Larger payloads are written alone.
"""

LARGE_ATTEMPTS = 4

_ANY_AGE_S = 1e9

_POSITION = re.compile(r"\d{1,15}-\d{1,15}(,\d{1,15}-\d{1,15}){0,63}", re.ASCII)


class _TooLarge(Exception):
    """The server answers, but refuses the size."""


class RedisResults:
    """`ResultStreams` on Redis."""

    def __init__(
        self, config: BusConfig, keys: Keys, commands: Commands, record: LayoutRecord
    ) -> None:
        self._record = record
        self._config = config
        self._keys = keys
        self._server = commands.server
        self._commands = commands
        self._readers = readers_of(keys, commands)
        self._next: OrderedDict[str, int] = OrderedDict()
        self._writing = asyncio.Lock()

    async def deliver(self, batch: OutputBatch, epoch: int = 1) -> set[str]:
        of_key: dict[str, list[Output]] = {}
        for key, outputs in batch:
            of_key.setdefault(key, []).extend(outputs)
        limit = self._config.max_result_bytes
        parts = {key: part_of(outputs, limit) for key, outputs in of_key.items()}
        return await self._commands.shielded(self._deliver(parts, epoch))

    async def recover(self, keys: Sequence[str], epoch: int) -> list[list[Output]]:
        return await self._commands.shielded(self._recover(keys, epoch))

    async def claim(self, claims: Sequence[tuple[str, str]]) -> list[str | None]:
        if not claims:
            return []
        commands = [
            # No other entry can have the key, but an earlier taker may have begun to write.
            ("EXISTS", self._keys.out(key))
            if key == entry_id
            else ("SET", self._keys.own(key), entry_id, "NX", "GET")
            for key, entry_id in claims
        ]
        owners = await self._commands.retry_all("claims", commands)
        return [
            owner.decode() if isinstance(owner, bytes) else entry_id if owner else None
            for owner, (_, entry_id) in zip(owners, claims, strict=True)
        ]

    async def answer(
        self, answers: Sequence[tuple[str, Completion | None]], epoch: int
    ) -> set[str]:
        """End streams without output. Returns the keys of streams that have ended.

        Args:
            answers: (key, terminal message); None only checks whether the stream has ended.
        """
        limits = (self._config.results_ttl_s, self._config.results_maxlen)
        commands = [
            (
                *("EVAL", ANSWER),
                *self._places(key, None if completion is None else completion.entry_id),
                *(epoch, *limits),
                b"" if completion is None else encode_output(completion),
            )
            for key, completion in answers
        ]
        return await self._commands.shielded(self._answer([key for key, _ in answers], commands))

    def marks_of(self, entry_id: str, request_id: str) -> tuple[bytes, bytes]:
        """Return two keys, one of which exists once an entry's terminal message is in the results
        stream."""
        return self._keys.told(request_id, entry_id), self._keys.told(entry_id, entry_id)

    async def unanswered(self, entries: Sequence[tuple[str, str]]) -> set[tuple[str, str]]:
        """Return the entries whose terminal message is missing from the results stream or from its
        own stream.

        Args:
            entries: Of each the entry id and the request id.
        """
        looks: list[Sequence[Any]] = []
        for entry_id, request_id in entries:
            outs = (self._keys.out(request_id), self._keys.out(entry_id))
            looks.append(("EXISTS", *self.marks_of(entry_id, request_id)))
            looks.extend(("XREVRANGE", out, "+", "-", "COUNT", 1) for out in outs)
        found = iter(await self._commands.retry_all("acknowledgements", looks))
        missing: set[tuple[str, str]] = set()
        for about in entries:
            is_told, *tails = (next(found) for _ in range(3))
            lasts = _readable([entry for tail in tails for entry in tail])
            last = next((each for each in lasts if (each.entry_id, each.request_id) == about), None)
            if not is_told or (last is not None and not isinstance(last, Completion)):
                missing.add(about)
        return missing

    def follow(
        self, request_id: str, entry_id: str, *, just_published: bool = False, keep: bool = False
    ) -> RedisFollow:
        return RedisFollow(
            *(self._readers, self._keys, self._commands, request_id, entry_id),
            check_first=not just_published,
        )

    async def last(self, request_id: str, entry_id: str) -> Output | None:
        outs = out_keys(self._keys, request_id, entry_id)
        asks = [("XREVRANGE", out, "+", "-", "COUNT", 1) for out in outs]
        for out, entries in zip(outs, await self._commands.run_all(asks), strict=True):
            for _, fields in entries:
                output = read_output(out, fields.get(JSON, b""))
                if is_of(output, request_id, entry_id):
                    return output
        if entry_id:
            await check_known(self._commands, self._keys, entry_id, outs)
        return None

    async def tail(self) -> ResultsTail:
        positions = await self._lasts()
        return ResultsTail(self._readers.subscribe(positions), self._readers, self._added)

    async def ended(self, after: str = "") -> ResultsTail:
        positions = self._positions(after) if after else await self._lasts()
        subscription = self._readers.subscribe(positions)
        return ResultsTail(subscription, self._readers, self._added, self._is_trimmed)

    def _positions(self, position: str) -> dict[bytes, bytes]:
        """Return a position of `ended`. Raises RequestError: invalid_position."""
        if not _POSITION.fullmatch(position):
            raise invalid_position(position)
        return {
            self._keys.results_of(shard): entry_id.encode()
            for shard, entry_id in enumerate(position.split(","))
        }

    async def _is_trimmed(self, key: bytes, entry_id: bytes) -> bool:
        """Return whether an entry of a results stream is no longer there; of 0-0, which stands for
        an empty stream, whether the first entry may not be."""
        if entry_id == b"0-0":
            length: int = await self._commands.retry("results", "XLEN", key)
            return length >= self._config.results_maxlen
        return not await self._commands.retry("results", "XRANGE", key, entry_id, entry_id)

    async def _added(self) -> dict[bytes, bytes]:
        """Return the shards' results streams, and where those begin that a change has added."""
        try:
            starts = (await self._record.fresh()).starts
        except BusError:
            return {}  # what reads the streams waits for the server
        return {self._keys.results_of(shard): last.encode() for shard, last in starts.items()}

    async def _lasts(self) -> dict[bytes, bytes]:
        """Return the shards' results streams, each with the id of its last entry; 0-0 for none."""
        streams = (await self._record.fresh(waits=True)).streams
        keys = [self._keys.results_of(shard) for shard in range(streams)]
        looks = [("XREVRANGE", key, "+", "-", "COUNT", 1) for key in keys]
        lasts = await self._commands.retry_all("results", looks)
        return {key: last[0][0] if last else b"0-0" for key, last in zip(keys, lasts, strict=True)}

    async def newest(self, within_s: float) -> AsyncIterator[Completion]:
        """Yield recent completions; entries added while it reads are left out."""
        lasts = await self._lasts()
        since_ms = max(parse_id(last)[0] for last in lasts.values()) - within_s * 1e3
        if len(lasts) == 1:
            (key,) = lasts
            async for _, completion in self._between(key, since_ms, lasts[key]):
                yield completion
            return
        # The streams may be on several nodes, so they have to be merged here.
        found = [
            each for key, last in lasts.items() async for each in self._between(key, since_ms, last)
        ]
        for _, completion in sorted(found, key=lambda each: each[0]):
            yield completion

    async def recorded(self, id: str, *, search: bool = True) -> list[Completion]:
        found: list[Completion] = []
        ids: Iterator[str] = chain((id,), (f"{id}_{place}" for place in count()))
        for each in ids:
            last = await self.last(each, "")
            if isinstance(last, Completion):
                found.append(last)
            if found if each == id else last is None:
                break
        if search and not found:
            found = [each async for each in self.newest(_ANY_AGE_S) if has_id(each, id)]
        return found

    async def _between(
        self, key: bytes, since_ms: float, until: bytes
    ) -> AsyncIterator[tuple[tuple[int, int], Completion]]:
        """Yield the completions of one results stream with their ids."""
        position, page = str(max(0, int(since_ms))), ("COUNT", KEYS_PER_FLUSH)
        while entries := await self._commands.retry(
            "results", "XRANGE", key, position, until, *page
        ):
            for entry_id, fields in entries:
                output = readable(decode_output, fields.get(JSON, b""), "results")
                if isinstance(output, Completion):
                    yield parse_id(entry_id), output
            position = id_after(entries[-1][0])

    async def aclose(self) -> None:
        """End all `follow` and `tail` iterators."""
        await self._readers.aclose()

    async def _answer(self, keys: list[str], commands: Sequence[Sequence[Any]]) -> set[str]:
        redis = self._commands.redis
        replies = await persist(self._server, "answers", lambda: execute_all(redis, commands))
        answered = zip(keys, replies, strict=True)
        ended = {key: raw for key, raw in answered if raw and _is_terminal(raw)}
        await self._conclude(ended)
        return set(ended)

    async def _recover(self, keys: Sequence[str], epoch: int) -> list[list[Output]]:
        recovered: list[list[Output]] = []
        for start in range(0, len(keys), KEYS_PER_FLUSH):
            some = keys[start : start + KEYS_PER_FLUSH]
            fences = [("EVAL", FENCE, 1, self._keys.out(key), epoch) for key in some]
            fence = partial(execute_all, self._commands.redis, fences)
            async with self._writing:
                ended: dict[str, bytes] = {}
                replies = await persist(self._server, "results", fence)
                for key, entries in zip(some, replies, strict=True):
                    self._note(key, len(entries) + 1, ended=False)
                    pairs = entries_of(entries)
                    outputs = _readable(pairs)
                    if outputs and isinstance(outputs[-1], Completion):
                        ended[key] = pairs[-1][1].get(JSON, b"")
                    recovered.append(outputs)
                await self._conclude(ended)
        return recovered

    async def _deliver(self, parts: dict[str, StreamPart], epoch: int) -> set[str]:
        fenced: set[str] = set()
        async with self._writing:
            backoff = Backoff()
            left = [(key, part) for key, part in parts.items() if part.payloads]
            while left:
                now, left = left[:KEYS_PER_FLUSH], left[KEYS_PER_FLUSH:]
                again = await self._flush(now, epoch, fenced)
                if again:
                    await backoff.wait()
                else:
                    backoff.reset()
                left = again + left
        return fenced

    async def _flush(
        self, parts: list[tuple[str, StreamPart]], epoch: int, fenced: set[str]
    ) -> list[tuple[str, StreamPart]]:
        """Write to many streams in one round trip; return the parts to retry.

        Adds to `fenced` the streams that belong to a larger epoch or have to be recovered.
        """
        again: list[tuple[str, StreamPart]] = []
        ended: dict[str, bytes] = {}
        unread: dict[str, bytes] = {}
        for key, part, reply in await self._write(parts, epoch):
            if not isinstance(reply, Exception):
                self._note(key, self._next.get(key, 1) + len(part.payloads), part.ends)
                if part.ends:
                    ended[key] = part.payloads[-1]
            elif "equal or smaller" in str(reply):
                rest = await self._resolve(key, part, epoch, ended)
                if rest is None:
                    fenced.add(key)
                elif rest.payloads:
                    again.append((key, rest))
            elif str(reply).startswith("GAP "):
                get_logger().warning("bus.outputs_lost", key=key, epoch=epoch)
                self._next.pop(key, None)
                fenced.add(key)
            elif is_transient(reply):
                again.append((key, part))
            elif not part.instead:
                get_logger().error("bus.output_refused", key=key, error=str(reply))
                code = TOO_LARGE if isinstance(reply, _TooLarge) else REFUSED
                again.append((key, ending(part, code, str(reply))))
            else:  # not even that; those who follow the shared stream learn of it
                unread[key] = part.payloads[-1]
        await self._conclude(ended)
        await self._conclude(unread, unread=True)
        return again

    async def _write(
        self, parts: list[tuple[str, StreamPart]], epoch: int
    ) -> list[tuple[str, StreamPart, Any]]:
        """Return each part with Redis's reply: one round trip for all small parts, one for each
        large part."""
        small = [item for item in parts if item[1].largest_bytes < LARGE_BYTES]

        async def attempt() -> list[Any]:
            commands = [self._command(key, part, epoch) for key, part in small]
            return await execute_all(self._commands.redis, commands, raise_on_error=False)

        replies = await persist(self._server, "results", attempt) if small else []
        said = [(*item, reply) for item, reply in zip(small, replies, strict=True)]
        for key, part in parts:
            if part.largest_bytes >= LARGE_BYTES:
                said.append((key, part, await self._write_large(key, part, epoch)))
        return said

    async def _write_large(self, key: str, part: StreamPart, epoch: int) -> Any:
        """Write a part that may exceed the server's limits; return the reply.

        For a command that is too large, the server closes the connection, on every retry. After
        `LARGE_ATTEMPTS` such failures of a reachable server the part counts as too large.
        """
        redis, backoff = self._commands.redis, Backoff()
        refused = 0
        while True:
            try:
                command = self._command(key, part, epoch)
                (reply,) = await execute_all(redis, [command], raise_on_error=False)
                return _TooLarge(str(reply)) if "Protocol error" in str(reply) else reply
            except (exceptions.RedisError, OSError) as error:
                try:
                    await execute(redis, "XLEN", self._keys.results)
                    refused += 1
                except (exceptions.RedisError, OSError):
                    refused = 0
                if refused == LARGE_ATTEMPTS:
                    get_logger().error("bus.output_too_large", key=key, error=str(error))
                    return _TooLarge(
                        f"Redis took {part.largest_bytes} bytes in none of {refused} attempts"
                    )
                await backoff.wait()

    async def _conclude(self, ended: dict[str, bytes], *, unread: bool = False) -> None:
        """Add terminal messages to the results stream, and let the ids expire.

        May repeat: if this process ends before it is done, the process that recovers the stream
        does it. (In a cluster the streams are on different nodes, so it can't be one script.)

        Args:
            unread: The messages are in no stream of their own.
        """
        if not ended:
            return
        config = self._config
        commands: list[Sequence[Any]] = []
        for key, raw in ended.items():
            keys = self._told_keys(key, _entry_of(raw))
            if not unread and not self._server.is_cluster:
                keys.append(self._keys.out(key))
            limits = (config.results_ttl_s, config.results_maxlen)
            commands.append(("EVAL", TELL, len(keys), *keys, *limits, raw))
            commands.append(("EXPIRE", self._keys.own(key), config.results_ttl_s))
        await persist(self._server, "results", lambda: execute_all(self._commands.redis, commands))

    def _places(self, key: str, ends: str | None) -> list[Any]:
        """Return the number of a script's keys, and the keys.

        Args:
            ends: The entry whose terminal message the script writes, if any.
        """
        out = self._keys.out(key)
        if ends is None or self._server.is_cluster:
            return [1, out]
        return [3, out, *self._told_keys(key, ends)]

    def _told_keys(self, key: str, entry_id: str) -> list[bytes]:
        """Return the results stream of an entry's shard, and the entry's mark."""
        shard = split_entry(entry_id)[1]
        return [self._keys.results_of(shard), self._keys.told(key, entry_id)]

    def _command(self, key: str, part: StreamPart, epoch: int) -> list[Any]:
        number = self._next.get(key, 1)
        if len(part.payloads) == 1 and not part.ends:
            return ["XADD", self._keys.out(key), f"{epoch}-{number}", JSON, part.payloads[0]]
        assert part.output is not None, "what is written has an owner"
        return [
            *("EVAL", APPEND),
            *self._places(key, part.output.entry_id if part.ends else None),
            *(epoch, number, int(part.ends)),
            *(self._config.results_ttl_s, self._config.results_maxlen),
            *part.payloads,
        ]

    def _note(self, key: str, number: int, ended: bool) -> None:
        """Cache a stream's next entry number; drop a stream that has ended."""
        if ended:
            self._next.pop(key, None)
            return
        self._next[key] = number
        self._next.move_to_end(key)
        if len(self._next) > REMEMBERED_STREAMS:
            self._next.popitem(last=False)

    async def _resolve(
        self, key: str, part: StreamPart, epoch: int, ended: dict[str, bytes]
    ) -> StreamPart | None:
        """Return the payloads still to write after Redis refused an id.

        The id was taken by this process (the reply of an equal write was lost) or by another writer
        of this epoch. Returns None if the stream was recovered in a larger epoch. After a terminal
        message, which is added to `ended`, nothing is left to write.
        """
        out, number = self._keys.out(key), self._next.get(key, 1)
        redis = self._commands.redis
        command = ("EVAL", LOOK, 1, out, f"{epoch}-{number}", len(part.payloads))
        reply = await persist(self._server, "results", lambda: execute(redis, *command))
        if reply is None:  # expired in between
            self._next.pop(key, None)
            return part
        taken, tail, last_id = reply
        last = _field(tail[0]) if tail else b""
        if _is_terminal(last):
            self._next.pop(key, None)
            ended[key] = last
            return StreamPart([], False, None)
        last_epoch, last_number = parse_id(last_id)
        if last_epoch > epoch:
            get_logger().warning("bus.output_of_an_older_epoch_dropped", key=key, epoch=epoch)
            self._next.pop(key, None)
            return None
        equal = 0
        while equal < len(taken) and _field(taken[equal]) == part.payloads[equal]:
            equal += 1
        self._note(key, last_number + 1, ended=False)
        return part.rest(equal)


def _readable(entries: Entries) -> list[Output]:
    """Decode the outputs in a stream's entries; skip foreign entries."""
    outputs = (readable(decode_output, fields.get(JSON, b""), "out") for _, fields in entries)
    return [output for output in outputs if output is not None]


def _field(row: tuple[bytes, list[bytes]]) -> bytes:
    """Return the `json` field of an entry in a script's reply."""
    return next((fields.get(JSON, b"") for _, fields in entries_of([row])), b"")


class _Owned(msgspec.Struct):
    """The entry id of any output."""

    entry_id: str = ""


def _entry_of(raw: bytes) -> str:
    """Return the entry id of an encoded output."""
    return msgspec.json.decode(raw, type=_Owned).entry_id


def _is_terminal(raw: bytes) -> bool:
    try:
        return isinstance(decode_output(raw), Completion)
    except (ValueError, RecursionError):
        return False
