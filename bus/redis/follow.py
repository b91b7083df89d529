"""Follow one request, or tail the results of all requests, on Redis."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Self, TypeVar

from redis import exceptions

from ...config import BusError, ChannelClosed
from ...store.records import readable
from ...store.redis.client import Commands
from ...store.redis.keys import JSON, Keys, parse_id, split_entry
from ..codec import decode_output
from ..positions import results_lost
from ..public import Completion, CompletionChunk, Output
from .given import Given
from .readers import Readers, Subscription

T = TypeVar("T")

Fields = dict[bytes, bytes]

IDLE_CHECK_S = 30.0
"""Interval at which a silent request is checked for being lost."""

LOST_CHECKS = 4
"""Checks in a row that find no entry and no new output, after which a begun request is lost, too.

A server that has lost the entry may have got later output of the lane that ran it, and that lane
may have died since, or may still be at it.
"""

ADDED_CHECK_S = 1.0
"""Interval at which a reader of all results looks for added shards."""

CHECKED_ENTRIES = 128
"""Entries after which a reader that must not miss one checks that none was trimmed."""

IsLost = Callable[[bytes, bytes], Awaitable[bool]]
"""Returns whether an entry, by its stream's key and its id, is no longer there."""

UNKNOWN = "unknown_request"


class RedisFollow:
    """Outputs of one request; see `ResultStreams.follow`."""

    def __init__(
        self,
        readers: Readers,
        keys: Keys,
        commands: Commands,
        request_id: str,
        entry_id: str,
        *,
        check_first: bool,
    ) -> None:
        self._readers = readers
        self._commands = commands
        self._keys = keys
        self._request_id = request_id
        self._entry_id = entry_id
        self._check_first = check_first
        self._outs = out_keys(keys, request_id, entry_id)
        self._subscription: Subscription | None = None
        self._done = False
        # By sample index.
        self._given: dict[int, Given] = {}

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        if self._done:
            raise StopAsyncIteration
        try:
            output = await self._next()
        except ChannelClosed:
            if self._done:  # by our own `aclose`
                raise StopAsyncIteration from None
            raise
        except BusError as error:
            if self._subscription is not None or error.code == UNKNOWN:
                await self.aclose()
            raise
        if isinstance(output, Completion):
            await self.aclose()
        return output

    async def aclose(self) -> None:
        """Stops reading."""
        self._done = True
        if self._subscription is not None:
            self._subscription.close()

    def __del__(self) -> None:
        if self._subscription is not None:
            self._subscription.close()

    async def _next(self) -> Output:
        if self._subscription is None:
            if self._check_first:
                await self._check_known()
            self._subscription = self._readers.subscribe(dict.fromkeys(self._outs, b"0-0"))
        silent = 0
        while True:
            try:
                async with asyncio.timeout(IDLE_CHECK_S):
                    key, _, fields = await self._subscription.next()
            except TimeoutError:
                # The server may have lost the request and its outputs.
                begun_counts = silent + 1 < LOST_CHECKS
                queued = await self._check_known(begun_counts=begun_counts)
                silent = 0 if queued else silent + 1
                continue
            output = read_output(key, fields.get(JSON, b""))
            if not is_of(output, self._request_id, self._entry_id):
                continue  # another request of the same id
            if isinstance(output, CompletionChunk):
                given = self._given.setdefault(output.sample_index, Given())
                if (following := given.next_of(output)) is None:
                    continue
                output = following
            self._subscription.keep_only(key)
            return output

    async def _check_known(self, *, begun_counts: bool = True) -> bool:
        if not self._entry_id:
            return True
        about = (self._commands, self._keys, self._entry_id, self._outs)
        return await check_known(*about, begun_counts=begun_counts)


class RedisTail(Generic[T]):
    """The entries of one stream, from a position on, as `T`."""

    def __init__(self, subscription: Subscription, read: Callable[[Fields], T | None]) -> None:
        """Args: the stream; `read` decodes an entry, and returns None to skip it."""
        self._subscription = subscription
        self._read = read
        self._done = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while not self._done:
            try:
                fields = await self._entry()
            except ChannelClosed:
                if self._done:  # by our own `aclose`
                    break
                raise
            if (found := self._read(fields)) is not None:
                return found
        raise StopAsyncIteration

    async def _entry(self) -> Fields:
        """Wait for the next entry."""
        return (await self._subscription.next())[2]

    async def aclose(self) -> None:
        """Stops reading."""
        self._done = True
        self._subscription.close()

    def __del__(self) -> None:
        self._subscription.close()


class ResultsTail(RedisTail[Completion]):
    """The results streams of all shards; see `ResultStreams.tail` and `ended`."""

    def __init__(
        self,
        subscription: Subscription,
        readers: Readers,
        added: Callable[[], Awaitable[dict[bytes, bytes]]],
        is_lost: IsLost | None = None,
    ) -> None:
        """Args: the streams; `added` returns those of shards that were added, and where each
        begins; `is_lost`: for a reader that must not miss an entry."""
        super().__init__(subscription, _completion)
        self._readers = readers
        self._added = added
        self._is_lost = is_lost
        self._returned = dict(subscription.positions)
        # Of each stream, an entry that nothing was lost before, and how many came since.
        self._anchors = dict(subscription.positions)
        self._since: Counter[bytes] = Counter()
        # Where reading paused, or began: entries after it may be gone when it goes on.
        self._gaps = dict(subscription.positions)

    @property
    def position(self) -> str:
        """The ids of the last returned entries, by shard."""
        return ",".join(entry_id.decode() for entry_id in self._returned.values())

    async def _entry(self) -> Fields:
        while True:
            added = await self._added()
            known = self._subscription.positions
            new = {key: last for key, last in added.items() if key not in known}
            if new:
                self._readers.extend(self._subscription, new)
                for each in (self._returned, self._anchors, self._gaps):
                    each.update(new)
            was_full = not self._subscription.wants_more
            try:
                async with asyncio.timeout(ADDED_CHECK_S):
                    key, entry_id, fields = await self._subscription.next()
            except TimeoutError:
                continue
            if was_full:
                self._gaps = dict(known) | self._gaps
            await self._check(key, entry_id)
            self._returned[key] = entry_id
            return fields

    async def _check(self, key: bytes, entry_id: bytes) -> None:
        """Check that no entry before this one was trimmed unread.

        Streams are trimmed from their beginning, so nothing after an entry that is still there was.

        Raises:
            BusError: results_lost.
        """
        if self._is_lost is None:
            return
        self._since[key] += 1
        gap = self._gaps.get(key)
        is_after_gap = gap is not None and parse_id(entry_id) > parse_id(gap)
        if not is_after_gap and self._since[key] < CHECKED_ENTRIES:
            return
        if await self._is_lost(key, self._anchors[key]):
            await self.aclose()
            raise results_lost("the results stream was trimmed before they were read")
        if is_after_gap:
            del self._gaps[key]
        self._anchors[key], self._since[key] = entry_id, 0


def _completion(fields: Fields) -> Completion | None:
    """Return a completion; None for a foreign entry."""
    output = readable(decode_output, fields.get(JSON, b""), "results")
    return output if isinstance(output, Completion) else None


def read_output(key: bytes, raw: bytes) -> Output:
    """Decode an output of the stream `key`. Raises BusError: malformed_output."""
    try:
        return decode_output(raw)
    except (ValueError, RecursionError) as error:
        raise BusError(
            f"the stream {key.decode('utf-8', 'replace')} holds something that is not an "
            f"output: {error}",
            code="malformed_output",
        ) from None


def is_of(output: Output, request_id: str, entry_id: str) -> bool:
    """Return whether an output is of the request that has this id and entry.

    Args:
        output: The output; of a request whose id can't be used, it has its entry's.
        request_id: "", or the entry's, if the request's is unknown to the caller.
        entry_id: "" for any.
    """
    if not entry_id:
        return True
    is_named = request_id in ("", entry_id) or output.request_id in (request_id, entry_id)
    return output.entry_id == entry_id and is_named


def out_keys(keys: Keys, request_id: str, entry_id: str) -> list[bytes]:
    """Return the streams that may hold a request's outputs."""
    return [keys.out(key) for key in dict.fromkeys((request_id, entry_id)) if key]


async def check_known(
    commands: Commands,
    keys: Keys,
    entry_id: str,
    outs: Sequence[bytes],
    *,
    begun_counts: bool = True,
) -> bool:
    """Check that outputs exist or can still come: an entry leaves the queue after its terminal
    message.

    Args:
        commands, keys: Of the bus.
        entry_id: The entry.
        outs: The streams that may hold its outputs.
        begun_counts: Whether more outputs can come because there are some.

    Returns:
        Whether the entry is in a queue, as far as this user may know.

    Raises:
        BusError: The entry is in no queue, and there are no outputs.
    """
    # The order matters: an entry leaves the shared requests stream before it reaches a model's.
    raw, shard = split_entry(entry_id)
    queued = await _is_in(commands, [keys.of_shard(shard).entrance], raw)
    if queued is False and not shard:
        queued = await _is_in(commands, await _behind_entrance(commands, keys), entry_id)
    written = await commands.retry_all("follow", [("EXISTS", out) for out in outs])
    if queued is None:
        return True  # who may not read the queue has to trust that it holds his request
    if queued or (begun_counts and any(written)):
        return queued
    if any(written):
        reason = "output does not go on, since the server has lost the request; send it again"
    else:
        reason = "outputs are no longer readable; they are kept for bus.results_ttl_s after its end"
    entry = f"entry {entry_id[:80]!r} is not in the requests queue"
    raise BusError(f"{entry}, and its {reason}", code=UNKNOWN)


async def _is_in(commands: Commands, streams: Sequence[bytes], entry_id: str) -> bool | None:
    """Return whether an entry is in one of the streams; None without the right to read them."""
    asks = [("XRANGE", stream, entry_id, entry_id) for stream in streams]
    replies = await commands.retry_all("follow", asks, raise_on_error=False)
    if any(isinstance(reply, exceptions.NoPermissionError) for reply in replies):
        return None
    # Any other error: the entry id is not a Redis stream id.
    return any(reply for reply in replies if not isinstance(reply, Exception))


async def _behind_entrance(commands: Commands, keys: Keys) -> list[bytes]:
    """Return the requests streams of all models, present and past."""
    if keys.model:
        return [keys.requests]
    names = await commands.retry_all("follow", [("HKEYS", keys.models), ("HKEYS", keys.closed)])
    return [keys.requests_of(name.decode()) for name in sorted({*names[0], *names[1]})]
