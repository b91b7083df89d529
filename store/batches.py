"""Batches: their states, and the results of their lines, by segments of lines.

A batch's lines are divided into segments. A gateway takes a segment's lease, computes its lines and
records its result; the first recorded result of a segment counts, so that a segment which two
gateways have computed has one result nevertheless. A lease only spares double work. It expires with
the gateway that holds it, and another one takes the segment over.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from .files import Piece
from .records import Command, Records, readable
from .redis.keys import Keys

_STATE, _DONE, _LIVE, _PIECE = b"state", b"done:", b"live:", b"piece:"

_LONGEST_WINDOW_S = 30 * 86_400
"""Longest time from the making of a batch until its lines run no more."""

_MOST_SHOWN = 4096
"""Unfinished batches that `progress` counts."""

_FORGOTTEN_S = 86_400
"""Time to live of a batch that is written to after it was deleted."""

Status = Literal[
    "validating",
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
]
"""The status of a batch, as in OpenAI's interface."""

ENDED: frozenset[Status] = frozenset(("completed", "failed", "expired", "cancelled"))


class BatchFault(msgspec.Struct, frozen=True):
    """The reason why a batch was not begun. `line`: the line's number from 1; None for all."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class SegmentResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of a segment.

    Attributes:
        completed: Lines with an answer.
        failed: Lines with an error.
        expired: Lines that were not run since the batch's time was over.
        cancelled: Lines that were not run since the batch was cancelled.
        output: Its lines of the output file; None without any.
        errors: Its lines of the error file; None without any.
        prompt_tokens, completion_tokens, cached_tokens: The tokens of its lines.
    """

    OUTCOMES: ClassVar = ("completed", "failed", "expired", "cancelled")

    completed: int = 0
    failed: int = 0
    expired: int = 0
    cancelled: int = 0
    output: Piece | None = None
    errors: Piece | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class BatchState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of a batch. Times are in seconds since the Unix epoch, 0 for not yet.

    Attributes:
        id: Its id, unique over all tenants.
        tenant: The tenant whose batch it is.
        interface: The interface that made it: "openai" or "anthropic".
        endpoint: The path that its lines call.
        input_file: The id of the file of its lines.
        model: The model's own address that it was made at; "" for none.
        caller: The caller whose permissions and limits apply, opaque to the store.
        metadata: Its client's own.
        window: The completion window as its client wrote it.
        created_s, expires_s: When it was made, and when its lines run no more.
        status: Its status.
        began_s, finalizing_s, ended_s, cancelling_s: When it changed to these states.
        starts: Where each segment begins in the input file, in bytes, and its first line's number
            from 0; at last the file's end.
        total: The number of all lines.
        faults: Why it failed.
        output_file, error_file: The ids of its results; "" for none.
        results_ttl_s: How long those are kept.
        counts: Of a batch that has ended and was closed, the sum of its segments' results.
    """

    id: str
    tenant: str
    interface: Literal["openai", "anthropic"] = "openai"
    endpoint: str
    input_file: str
    model: str = ""
    caller: bytes = b""
    metadata: dict[str, str] | None = None
    window: str = "24h"
    created_s: int
    expires_s: int
    status: Status = "validating"
    began_s: int = 0
    finalizing_s: int = 0
    ended_s: int = 0
    cancelling_s: int = 0
    starts: tuple[tuple[int, int], ...] = ()
    total: int = 0
    faults: tuple[BatchFault, ...] = ()
    output_file: str = ""
    error_file: str = ""
    results_ttl_s: int = 0
    counts: SegmentResult | None = None

    @property
    def segments(self) -> int:
        """The number of its segments."""
        return max(0, len(self.starts) - 1)


class BatchProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of an unfinished batch, as a gateway that runs it last saw it.

    Attributes:
        id, tenant, endpoint, status, created_s, total: As of `BatchState`.
        completed, failed: Lines with an answer, and with an error.
        lines_per_s: Lines that have ended per second, over the last looks of that gateway.
        seen_s: When it was seen, in seconds since the Unix epoch.
    """

    id: str
    tenant: str
    endpoint: str
    status: Status
    created_s: int
    total: int
    completed: int
    failed: int
    lines_per_s: float
    seen_s: int

    @property
    def open(self) -> int:
        """The number of lines without an answer."""
        return self.total - self.completed - self.failed


class StoredBatch(NamedTuple):
    """A batch as it was read.

    Attributes:
        state: Its state.
        raw: The state's encoding, which the next write compares.
        done: The results of its segments, by number.
        live: Of segments in progress, the lines with an answer and those with an error.
        blobs: The blobs that were written for its results, whether they count or not.
    """

    state: BatchState
    raw: bytes
    done: Mapping[int, SegmentResult]
    live: Mapping[int, tuple[int, int]]
    blobs: frozenset[str]

    @property
    def counts(self) -> SegmentResult:
        """The sum of the results, without the pieces."""
        return self.state.counts or _sum(self.done.values())

    @property
    def completed(self) -> int:
        """The number of lines with an answer."""
        return self.counts.completed + sum(live[0] for live in self.live.values())

    @property
    def failed(self) -> int:
        """The number of lines with an error, without those that were not run."""
        return self.counts.failed + sum(live[1] for live in self.live.values())


def _closed(stored: StoredBatch) -> SegmentResult:
    return replace(stored.counts, completed=stored.completed, failed=stored.failed)


_SUMMED = tuple(
    name for name in SegmentResult.__struct_fields__ if name not in ("output", "errors")
)


def _sum(results: Collection[SegmentResult]) -> SegmentResult:
    return SegmentResult(**{name: sum(getattr(each, name) for each in results) for name in _SUMMED})


_decode = msgspec.json.Decoder(BatchState).decode
_decode_segment = msgspec.json.Decoder(SegmentResult).decode
_decode_progress = msgspec.json.Decoder(BatchProgress).decode
_decode_live = msgspec.json.Decoder(tuple[int, int]).decode


class BatchStore:
    """Batches by id.

    Methods raise BusError when the transport can't be reached; a write may have happened
    nevertheless.
    """

    def __init__(self, keys: Keys, records: Records) -> None:
        self._keys, self._records = keys, records

    async def create(self, state: BatchState, ttl_s: int) -> None:
        """Store a new batch, which gateways find among the unfinished ones; again to repeat.

        Args:
            ttl_s: Seconds after which it is forgotten, finished or not.
        """
        key, listed = self._keys.batch(state.id), self._keys.batches(state.tenant)
        # First: on a cluster the lists are on other servers, and their readers look for the state.
        await self._records.run_all(
            [("HSET", key, _STATE, msgspec.json.encode(state)), ("EXPIRE", key, ttl_s)]
        )
        # Kept longer than any batch in it.
        kept: Command = ("EXPIRE", listed, ttl_s + _LONGEST_WINDOW_S)
        await self._records.run_all([("HSET", listed, state.id, state.created_s), kept])
        await self.reopen(state)

    async def reopen(self, state: BatchState) -> None:
        """Add a batch to the unfinished ones, unless it is among them."""
        opened = ("ZADD", self._keys.open_batches, "GT", state.created_s, state.id)
        await self._records.run(*opened)

    async def read(self, batch_id: str) -> StoredBatch | None:
        """Return a batch; None if it is unknown, forgotten, or of another version."""
        return _stored(await self._records.run("HGETALL", self._keys.batch(batch_id)))

    async def listed(self, tenant: str) -> list[StoredBatch]:
        """Return the batches of a tenant, the newest first."""
        listed = self._keys.batches(tenant)
        made = await self._records.run("HGETALL", listed)
        ids = sorted(made, key=lambda each: (int(made[each]), each), reverse=True)
        commands: list[Command] = [("HGETALL", self._keys.batch(each.decode())) for each in ids]
        found = await self._records.run_all(commands)
        if gone := [each for each, fields in zip(ids, found, strict=True) if _STATE not in fields]:
            await self._records.run("HDEL", listed, *gone)
        return [batch for fields in found if (batch := _stored(fields)) is not None]

    async def unfinished(self, most: int) -> list[str]:
        """Return the ids of unfinished batches, those first that were made first."""
        key, latest = self._keys.open_batches, int(time.time()) + 10**9
        found = await self._records.run("ZRANGE", key, "-inf", latest, "BYSCORE", "LIMIT", 0, most)
        return [each.decode() for each in found]

    async def close(self, batch_id: str) -> None:
        """Take a batch from the unfinished ones, if it has ended or was forgotten.

        What is kept of its segments is replaced by their sum. A batch that this version can't read
        stays, for a gateway of the version that wrote it.
        """
        key = self._keys.batch(batch_id)
        fields = await self._records.run("HGETALL", key)
        if (stored := _stored(fields)) is None:
            if _STATE in fields:
                return
        elif stored.state.status not in ENDED:
            return
        elif len(fields) > 1:
            whole = replace(stored.state, counts=_closed(stored), starts=())
            if await self.replace(stored, whole) is None:
                return
            await self._records.run("HDEL", key, *(each for each in fields if each != _STATE))
        await self._records.run_all(
            [
                ("ZREM", self._keys.open_batches, batch_id),
                ("HDEL", self._keys.batch_progress, batch_id),
            ]
        )

    async def note_progress(self, progress: BatchProgress) -> None:
        """Record the progress of an unfinished batch, for operators."""
        key, raw = self._keys.batch_progress, msgspec.json.encode(progress)
        await self._records.run_all(
            [("HSET", key, progress.id, raw), ("EXPIRE", key, _FORGOTTEN_S)]
        )

    async def progress(self) -> tuple[int, list[BatchProgress]]:
        """Return the number of unfinished batches, up to 4,096, and the progress of those that
        gateways have begun to run, the oldest first."""
        ids, fields = await self.unfinished(_MOST_SHOWN), {}
        if ids:
            fields = await self._records.run("HGETALL", self._keys.batch_progress)
        raws = (fields.get(each.encode()) for each in ids)
        found = (readable(_decode_progress, raw, "batch") for raw in raws if raw is not None)
        return len(ids), [each for each in found if each is not None]

    async def replace(self, known: StoredBatch, state: BatchState) -> StoredBatch | None:
        """Replace a batch's state if it is still the known one; None if it may have changed.

        Other writes to the batch at the same moment count as a change.
        """
        raw, key = msgspec.json.encode(state), self._keys.batch(state.id)
        if not await self._records.replace(key, _STATE, known.raw, {_STATE: raw}):
            return None
        return known._replace(state=state, raw=raw)

    async def delete(self, tenant: str, batch_id: str) -> None:
        """Forget a batch that has ended."""
        await self._records.run_all(
            [
                ("DEL", self._keys.batch(batch_id)),
                ("HDEL", self._keys.batches(tenant), batch_id),
                ("ZREM", self._keys.open_batches, batch_id),
                ("HDEL", self._keys.batch_progress, batch_id),
            ]
        )

    # --- segments -----------------------------------------------------------------------------

    async def take(self, batch_id: str, number: int, owner: str, lease_s: int) -> bool:
        """Take the lease of a segment; return whether it was free or the owner's."""
        (before,) = await self._records.run_all([self._taken(batch_id, number, owner, lease_s)])
        return before is None or before == owner.encode()

    def _taken(self, batch_id: str, number: int, owner: str, lease_s: int) -> Command:
        return ("SET", self._keys.segment(batch_id, number), owner, "NX", "GET", "EX", lease_s)

    async def renew(
        self, batch_id: str, number: int, lease_s: int, completed: int = 0, failed: int = 0
    ) -> None:
        """Extend a lease that the caller holds, and record how many of its lines have ended."""
        live: Command = (
            "HSET",
            self._keys.batch(batch_id),
            _LIVE + b"%d" % number,
            msgspec.json.encode((completed, failed)),
        )
        lease: Command = ("EXPIRE", self._keys.segment(batch_id, number), lease_s)
        kept: Command = ("EXPIRE", self._keys.batch(batch_id), _FORGOTTEN_S, "NX")
        await self._records.run_all([lease, live, kept] if completed or failed else [lease])

    async def release(self, batch_id: str, number: int) -> None:
        """Give up a lease that the caller holds."""
        await self._records.run("DEL", self._keys.segment(batch_id, number))

    async def note_blobs(self, batch_id: str, names: Sequence[str]) -> None:
        """Record blobs before they are written for a batch's results, so that those that a killed
        gateway leaves are deleted with the batch's end."""
        key = self._keys.batch(batch_id)
        noted: list[Command] = [("HSET", key, _PIECE + name.encode(), b"") for name in names]
        await self._records.run_all([*noted, ("EXPIRE", key, _FORGOTTEN_S, "NX")])

    async def finish(self, batch_id: str, number: int, result: SegmentResult) -> bool:
        """Record a segment's result unless it has one; return whether this one counts."""
        field, raw = _DONE + b"%d" % number, msgspec.json.encode(result)
        key = self._keys.batch(batch_id)
        added, kept, _ = await self._records.run_all(
            [
                ("HSETNX", key, field, raw),
                ("HGET", key, field),
                ("EXPIRE", key, _FORGOTTEN_S, "NX"),
            ]
        )
        # A write whose reply was lost finds its own result.
        return bool(added) or kept == raw

    async def skip(
        self, batch_id: str, results: Mapping[int, SegmentResult], owner: str, lease_s: int
    ) -> list[int]:
        """Record results of many segments, except of those whose lease is held or that have one;
        return the segments whose result counts."""
        takes = [self._taken(batch_id, number, owner, lease_s) for number in results]
        before = await self._records.run_all(takes)
        free = [number for number, held in zip(results, before, strict=True) if held is None]
        key = self._keys.batch(batch_id)
        found = [(_DONE + b"%d" % each, msgspec.json.encode(results[each])) for each in free]
        added: list[Command] = [("HSETNX", key, field, raw) for field, raw in found]
        *new, _ = await self._records.run_all([*added, ("EXPIRE", key, _FORGOTTEN_S, "NX")])
        await self._records.run_all(
            [("DEL", self._keys.segment(batch_id, number)) for number in free]
        )
        return [number for number, is_new in zip(free, new, strict=True) if is_new]


def _stored(fields: Mapping[bytes, bytes]) -> StoredBatch | None:
    raw = fields.get(_STATE)
    state = None if raw is None else readable(_decode, raw, "batch")
    if raw is None or state is None:
        return None
    done = {
        int(field.removeprefix(_DONE)): result
        for field, value in fields.items()
        if field.startswith(_DONE)
        and (result := readable(_decode_segment, value, "batch")) is not None
    }
    live = {
        number: counts
        for field, value in fields.items()
        if field.startswith(_LIVE)
        and state.counts is None
        and (number := int(field.removeprefix(_LIVE))) not in done
        and (counts := readable(_decode_live, value, "batch")) is not None
    }
    names = (field.removeprefix(_PIECE).decode() for field in fields if field.startswith(_PIECE))
    return StoredBatch(state, raw, done, live, frozenset(names))
