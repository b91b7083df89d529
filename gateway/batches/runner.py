"""Runs unfinished batches: every gateway takes segments of them, so that one that dies loses none.

    validating ──► in_progress ──► finalizing ──► completed
                        └─ all lines ended, or the batch was cancelled or its time is over

The steps that are no segment's are taken under the lease `_WHOLE`. Each may be repeated by another
gateway, with the same outcome.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import anyio
import msgspec
from anyio.abc import TaskGroup
from msgspec.structs import replace

from ...config import BatchesConfig, BusError, ChannelClosed, NanoInferenceError, RequestError
from ...config.logger import get_logger
from ...store.batches import (
    ENDED,
    BatchFault,
    BatchState,
    BatchStore,
    SegmentResult,
    Status,
    StoredBatch,
)
from ...store.calls import CallStore
from ...store.files import FileRecord, Piece
from ..call import Call
from ..caller import Caller
from ..server.http import DEFAULT_RETRY_S, Answered
from ..serving.begun_calls import name_of_key
from .files import Files
from .lines import FORMATS, Line, LineFormat, Unrun, call_id, lines_of, prefix_of, too_long
from .observed import ObservedBatches
from .validation import scan

T = TypeVar("T")

LOOK_S = 1.0
"""Period in which a gateway looks for batches, and at the states of those that it runs."""

SEGMENTS = 2
"""Segments of a batch that a gateway has at once: the next one's lines fill the last one's gaps."""

QUIET_S = 3.0
"""Time without other calls after which all lines may be in flight."""

MOST_BATCHES = 64
"""Batches that a gateway runs at once."""

MOST_OF_TENANT = 8
"""Batches of a tenant that a gateway runs at once, so that those of others run, too."""

MOST_LISTED = 4096
"""Unfinished batches among which a gateway looks for those that it runs."""

PURGE_S = 60.0
"""Period in which expired files are deleted."""

_WHOLE = -1
_RETRIED = (429, 503)
_LOST = "stream_not_found"
_MOST_WAIT_S = 30.0


@dataclass(eq=False)
class _Running:
    """A batch that this gateway runs.

    Attributes:
        stop: Why its lines run no further; None while they do. "left": other gateways run them.
        away: Whether the bus could not be reached at the last look.
        taken: The segments that this gateway computes, each with its work.
        changed: Set when a segment has ended, so that another one is taken at once.
    """

    state: BatchState
    stop: Unrun | Literal["left"] | None = None
    away: bool = False
    taken: dict[int, anyio.CancelScope] = field(default_factory=dict)
    changed: anyio.Event = field(default_factory=anyio.Event)


@dataclass(eq=False)
class _Segment:
    """A segment in progress: its lines, and what is written for each."""

    number: int
    lines: list[Line]
    answers: dict[int, Answered] = field(default_factory=dict)
    failed: int = 0


@dataclass(eq=False)
class BatchRunner:
    """The batches of all tenants, as far as this gateway runs them.

    Attributes:
        answer: Answers the call of a line, by its body.
        calls: The durable calls, of which each line is one; None on a bus in memory, which no other
            gateway shares.
        stopping: Returns whether the gateway takes no more lines.
        runs_calls: Returns whether calls run here that are no lines.
        max_line_bytes: Longest line that may be run.
        observed: Spans, metrics and progress.
    """

    answer: Callable[[Call, bytes], Awaitable[Answered]]
    store: BatchStore
    calls: CallStore | None
    files: Files
    config: BatchesConfig
    stopping: Callable[[], bool]
    runs_calls: Callable[[], bool]
    max_line_bytes: int
    observed: ObservedBatches

    def __post_init__(self) -> None:
        self._owner = uuid.uuid4().hex
        self._running: dict[str, _Running] = {}
        self._tenants: dict[str, str] = {}
        self._slots = anyio.CapacityLimiter(max(1, self.config.max_in_flight))
        self._woken = anyio.Event()

    def wake(self) -> None:
        """Look for batches at once: one was made, or cancelled."""
        self._woken.set()

    async def run_forever(self) -> None:
        """Run batches until the bus is closed."""
        if not self.config.max_in_flight:
            return
        away, purged_s = False, time.monotonic()
        async with anyio.create_task_group() as group:
            group.start_soon(self._make_room)
            while True:
                try:
                    if not self.stopping():
                        await self._begin_more(group)
                    if time.monotonic() - purged_s > PURGE_S:
                        purged_s = time.monotonic()
                        await self.files.purge()
                    away = False
                except ChannelClosed:
                    group.cancel_scope.cancel()
                    return
                except BusError as error:
                    if not away:
                        get_logger().warning("batches_not_read", error=str(error))
                    away = True
                await self._pause()

    async def _make_room(self) -> None:
        """Limit the lines in flight while other calls run, and for a moment after."""
        most, seen_s = self.config.max_in_flight, float("-inf")
        while True:
            if self.runs_calls():
                seen_s = time.monotonic()
            beside = time.monotonic() - seen_s < QUIET_S
            self._slots.total_tokens = min(most, self.config.max_beside) if beside else most
            await anyio.sleep(QUIET_S / 30)

    async def _pause(self) -> None:
        with anyio.move_on_after(LOOK_S):
            await self._woken.wait()
        self._woken = anyio.Event()

    async def _begin_more(self, group: TaskGroup) -> None:
        """Begin to run unfinished batches as far as there is room, the oldest first."""
        listed = await self.store.unfinished(MOST_LISTED)
        self.observed.unfinished = len(listed)
        self._tenants = {each: self._tenants[each] for each in listed if each in self._tenants}
        of_tenant = Counter(self._tenants[each] for each in self._running if each in self._tenants)
        for batch_id in listed:
            if len(self._running) >= MOST_BATCHES:
                return
            known = self._tenants.get(batch_id)
            if batch_id in self._running or of_tenant[known or ""] >= MOST_OF_TENANT:
                continue
            if (stored := await self.store.read(batch_id)) is None:
                await self.store.close(batch_id)
                continue
            tenant = self._tenants[batch_id] = stored.state.tenant
            if of_tenant[tenant] < MOST_OF_TENANT:
                of_tenant[tenant] += 1
                running = self._running[batch_id] = _Running(stored.state)
                group.start_soon(self._run, running)

    async def _run(self, running: _Running) -> None:
        batch_id = running.state.id
        try:
            async with anyio.create_task_group() as group:
                while await self._look(running, group):
                    with anyio.move_on_after(LOOK_S):
                        await running.changed.wait()
                    running.changed = anyio.Event()
        except* ChannelClosed:
            pass
        except* Exception as errors:  # noqa: BLE001
            # Another batch goes on; this one is tried again.
            get_logger().error("batch_failed", batch=batch_id, exc_info=errors)
            await anyio.sleep(LOOK_S)
        finally:
            self._running.pop(batch_id, None)
            self.observed.left(batch_id)

    async def _look(self, running: _Running, group: TaskGroup) -> bool:
        """Do as `_advance`. While the bus is away, lines in flight go on."""
        try:
            going_on = await self._advance(running, group)
        except ChannelClosed:
            raise
        except BusError as error:
            if not running.away:
                get_logger().warning("batch_waits", batch=running.state.id, error=str(error))
            running.away = True
            return True
        running.away = False
        return going_on

    async def _advance(self, running: _Running, group: TaskGroup) -> bool:
        """Do what a batch's state needs; return whether to look at it again."""
        if self.stopping():
            # Another gateway goes on at once, and finds the lines that have ended.
            _stop(running, "left")
            return False
        stored = await self.store.read(running.state.id)
        if stored is None or stored.state.status in ENDED:
            _stop(running, "left")
            await self.store.close(running.state.id)
            return False
        running.state = state = stored.state
        await self.store.note_progress(self.observed.seen(stored))
        if state.status == "validating":
            async with self._whole(state) as own:
                if own:
                    await self._validate(state)
            return True
        if state.status == "cancelling":
            _stop(running, "cancelled")
        elif state.expires_s <= time.time():
            _stop(running, "expired")
        for number in running.taken.keys() & stored.done.keys():
            # Its lease had expired, for want of time or of the bus. Another gateway has recorded it
            # and deleted its calls, so that its lines would begin again.
            running.taken[number].cancel()
        missing = [number for number in range(state.segments) if number not in stored.done]
        if not missing and not running.taken:
            async with self._whole(state) as own:
                if own:
                    await self._finalize(stored)
            return True
        if running.stop in FORMATS[state.interface].unwritten:
            if await self._skip(state, [each for each in missing if each not in running.taken]):
                running.changed.set()
            return True
        for number in missing:
            if len(running.taken) >= SEGMENTS:
                break
            if number not in running.taken and await self._take(state, number):
                running.taken[number] = anyio.CancelScope()
                group.start_soon(self._segment, running, number)
        return True

    async def _take(self, state: BatchState, number: int) -> bool:
        return await self.store.take(state.id, number, self._owner, self.config.lease_s)

    async def _skip(self, state: BatchState, numbers: Sequence[int]) -> bool:
        """Record that no line of segments runs, unless another gateway computes them; return
        whether any was recorded. A million lines are no work then."""
        results = {
            number: SegmentResult(cancelled=state.starts[number + 1][1] - state.starts[number][1])
            for number in numbers
        }
        batch_id, lease_s = state.id, self.config.lease_s
        skipped = await self.store.skip(batch_id, results, self._owner, lease_s)
        for number in skipped:
            self.observed.recorded(results[number])
        return bool(skipped)

    @asynccontextmanager
    async def _whole(self, state: BatchState) -> AsyncIterator[bool]:
        own = await self._take(state, _WHOLE)
        try:
            yield own
        finally:
            if own:
                await self.store.release(state.id, _WHOLE)
                self._running[state.id].changed.set()

    # --- before and after the lines -----------------------------------------------------------

    async def _validate(self, state: BatchState) -> None:
        """Find a batch's lines, or why it can't be begun."""
        try:
            record = await self.files.find(state.tenant, state.input_file)
            found = await scan(self.files.content(record), self.config, self.max_line_bytes)
            faults, starts, total = found.faults, found.starts, found.total
        except NanoInferenceError as error:
            if isinstance(error, BusError):
                raise
            faults, starts, total = [BatchFault(error.code, error.message)], (), 0
        now_s = int(time.time())
        if faults:
            ended = {"status": "failed", "faults": tuple(faults), "ended_s": now_s}
            changed = await self._change(state.id, "validating", **ended)
        else:
            begun = {"status": "in_progress", "began_s": now_s, "starts": starts, "total": total}
            changed = await self._change(state.id, "validating", **begun)
        if changed is not None:
            self.observed.began(changed)

    async def _finalize(self, stored: StoredBatch) -> None:
        """Make the files of results, and end the batch."""
        state = stored.state
        if state.status == "in_progress":
            now = {"status": "finalizing", "finalizing_s": int(time.time())}
            await self._change(state.id, "in_progress", **now)
            return
        results = [stored.done[number] for number in range(state.segments)]
        fields: dict[str, Any] = {
            "output_file": await self._compose(state, "output", [each.output for each in results]),
            "error_file": await self._compose(state, "error", [each.errors for each in results]),
        }
        ended: Status = "completed"
        if any(each.cancelled for each in results) or state.status == "cancelling":
            ended = "cancelled"
        elif any(each.expired for each in results):
            ended = "expired"
        pieces = (piece for each in results for piece in (each.output, each.errors))
        counting = {piece.blob for piece in pieces if piece is not None}
        await self.files.blobs.delete(sorted(stored.blobs - counting))
        fields |= {"status": ended, "ended_s": int(time.time())}
        if (changed := await self._change(state.id, state.status, **fields)) is not None:
            self.observed.ended(changed, stored.counts)

    async def _compose(
        self, state: BatchState, kind: Literal["output", "error"], pieces: Sequence[Piece | None]
    ) -> str:
        """Record the file of a batch's results, if there are any; return its id."""
        found = tuple(piece for piece in pieces if piece is not None)
        if not found:
            return ""
        now_s = int(time.time())
        record = FileRecord(
            id=f"file-{state.id.removeprefix('batch_')}-{kind}",
            tenant=state.tenant,
            filename=f"{state.id}_{kind}.jsonl",
            purpose="batch_output",
            num_bytes=sum(piece.num_bytes for piece in found),
            created_s=now_s,
            expires_s=now_s + (state.results_ttl_s or self.config.files_ttl_s),
            pieces=found,
        )
        await self.files.records.put(record)
        return record.id

    async def _change(
        self, batch_id: str, known: Status | None, **fields: Any
    ) -> BatchState | None:
        """Change a batch's state and return it; None if its status is not the `known` one (None for
        any that is no end) by now."""
        while (stored := await self.store.read(batch_id)) is not None:
            status = stored.state.status
            if status in ENDED or known not in (None, status):
                return None
            state = replace(stored.state, **fields)
            if await self.store.replace(stored, state) is not None:
                return state
        return None

    # --- segments -----------------------------------------------------------------------------

    async def _segment(self, running: _Running, number: int) -> None:
        """Run a segment's lines, and record its result."""
        state = running.state
        try:
            segment = _Segment(number, await self._lines(state, number))
            async with anyio.create_task_group() as keeping:
                keeping.start_soon(self._keep, running, segment)
                with running.taken[number] as scope:
                    if running.stop:
                        scope.cancel()
                    await self._answer_all(running, segment)
                left = running.stop == "left" or (scope.cancel_called and not running.stop)
                if not left:
                    await self._record(running, segment)
                keeping.cancel_scope.cancel()
            if left:
                return
            with suppress(BusError):  # they expire
                await self._forget(state, segment.answers)
        except RequestError as error:  # its file is gone
            fault = BatchFault(error.code, error.message)
            ended = {"status": "failed", "faults": (fault,), "ended_s": int(time.time())}
            await self._change(state.id, None, **ended)
        except ChannelClosed:
            raise
        except BusError as error:  # its lines can't be read now
            get_logger().warning("batch_lines_not_read", batch=state.id, error=str(error))
            await anyio.sleep(LOOK_S)
        finally:
            del running.taken[number]
            running.changed.set()
            with (
                anyio.CancelScope(shield=True),
                anyio.move_on_after(LOOK_S),
                suppress(BusError),  # it expires
            ):
                await self.store.release(state.id, number)

    async def _lines(self, state: BatchState, number: int) -> list[Line]:
        record = await self.files.find(state.tenant, state.input_file)
        (start, first), (stop, _) = state.starts[number : number + 2]
        kind, most = FORMATS[state.interface], self.max_line_bytes
        lines: list[Line] = []
        async for text in lines_of(self.files.content(record, start, stop), most):
            place = first + len(lines)
            long = len(text.content) > most
            lines.append(too_long(place, most) if long else kind.read(state, place, text.content))
        return lines

    async def _keep(self, running: _Running, segment: _Segment) -> None:
        """Renew a segment's lease."""
        while True:
            await anyio.sleep(min(LOOK_S, self.config.lease_s / 3))
            counts = len(segment.answers) - segment.failed, segment.failed
            # While the bus is away, the lines go on; should the lease expire, one result counts.
            with suppress(BusError):
                batch_id, lease_s = running.state.id, self.config.lease_s
                await self.store.renew(batch_id, segment.number, lease_s, *counts)

    async def _answer_all(self, running: _Running, segment: _Segment) -> None:
        """Run the lines, those together whose prompts begin alike."""
        runnable = [(line, line.body) for line in segment.lines if line.body is not None]
        runnable.sort(key=lambda each: prefix_of(each[1]))
        own = anyio.Semaphore(self.config.max_in_flight)
        async with anyio.create_task_group() as group:
            for line, body in runnable:
                await own.acquire()
                group.start_soon(self._answer, running, segment, line, body, own)

    async def _answer(
        self,
        running: _Running,
        segment: _Segment,
        line: Line,
        body: bytes,
        own: anyio.Semaphore,
    ) -> None:
        """Run a line. While it waits after a refusal, lines of others take its place."""
        try:
            for wait_s in _waits():
                call = _call(running.state, line, durable=self.calls is not None)
                async with self._slots:
                    with self.observed.line(running.state, call, line.number):
                        answer = await self.answer(call, body)
                if call.aborted or call.code == _LOST:
                    # By an operator, or because no gateway took it over in time; or a failover of
                    # the bus has lost its request. Its key leads to what it has come to.
                    await self._patiently(partial(self._forget, running.state, [line.number]))
                elif answer.status not in _RETRIED:
                    break
                after = answer.headers.get("retry-after", "")
                await anyio.sleep(max(wait_s, float(after) if after.isdigit() else 0))
            segment.answers[line.number] = answer
            segment.failed += answer.status >= 400
        finally:
            own.release()

    async def _forget(self, state: BatchState, numbers: Collection[int]) -> None:
        """Delete the durable calls of lines."""
        if self.calls is not None:
            names = [name_of_key(state.tenant, call_id(state, number)) for number in numbers]
            await self.calls.drop_named(names)

    async def _record(self, running: _Running, segment: _Segment) -> None:
        """Write a segment's results, unless another gateway has."""
        state, stop = running.state, running.stop
        assert stop != "left", "its lines are other gateways'"
        result, output, errors = _results(state, segment, stop)
        ttl_s = (state.results_ttl_s or self.config.files_ttl_s) + max(
            0, state.expires_s - int(time.time())
        )
        name = f"{state.id}/{segment.number}-{uuid.uuid4().hex}"
        written = {"output": output, "errors": errors}
        blobs = {kind: f"{name}-{kind}" for kind, lines in written.items() if lines}
        note = partial(self.store.note_blobs, state.id, [*blobs.values()])
        await self._patiently(note)
        for kind, blob in blobs.items():
            size = await self._patiently(partial(self._write, blob, written[kind], ttl_s))
            result = replace(result, **{kind: Piece(blob, size)})
        finish = partial(self.store.finish, state.id, segment.number, result)
        if not await self._patiently(finish):
            with suppress(BusError):  # deleted with the batch's end
                await self.files.blobs.delete(blobs.values())
            return
        self.observed.recorded(result)

    async def _write(self, name: str, lines: Sequence[bytes], ttl_s: int) -> int:
        return await self.files.blobs.write(name, _parts(lines), ttl_s)

    async def _patiently(self, write: Callable[[], Awaitable[T]]) -> T:
        """Repeat a write until the bus and the storage take it: the answers are nowhere else."""
        for wait_s in _waits():
            try:
                return await write()
            except ChannelClosed:
                raise
            except BusError as error:
                get_logger().warning("batch_result_not_written", error=str(error))
                await anyio.sleep(wait_s)
        raise AssertionError("the waits have no end")


def _stop(running: _Running, why: Unrun | Literal["left"]) -> None:
    running.stop = running.stop or why
    for scope in running.taken.values():
        scope.cancel()


def _waits() -> Iterator[float]:
    """Yield the seconds to wait after each refusal for load, without end."""
    wait_s = DEFAULT_RETRY_S
    while True:
        yield wait_s
        wait_s = min(2 * wait_s, _MOST_WAIT_S)


def _call(state: BatchState, line: Line, *, durable: bool) -> Call:
    name = call_id(state, line.number)
    call = Call(
        id=name,
        caller=msgspec.json.decode(state.caller, type=Caller),
        headers=(
            (b"content-type", b"application/json"),
            # Another gateway that runs the line again finds this call.
            *([(b"idempotency-key", name.encode())] if durable else []),
            # The results of the whole batch can be followed.
            (b"x-request-tag", state.id.encode()),
            *FORMATS[state.interface].headers,
        ),
        path=state.endpoint,
        named_model=state.model,
        batch_line=True,
    )
    call.tenant = state.tenant
    return call


def _results(
    state: BatchState, segment: _Segment, stop: Unrun | None
) -> tuple[SegmentResult, list[bytes], list[bytes]]:
    """Return a segment's counts, and its lines of the output and of the error file."""
    kind: LineFormat = FORMATS[state.interface]
    counts = Counter[str]()
    output: list[bytes] = []
    errors = output if state.interface == "anthropic" else []
    for line in segment.lines:
        answer = segment.answers.get(line.number)
        if answer is not None:
            failed = answer.status >= 400
            counts["failed" if failed else "completed"] += 1
            written = kind.answered(state, line, answer)
            place = errors if failed else output
        elif line.refused is not None:
            counts["failed"] += 1
            written, place = kind.refused(state, line), errors
        else:
            assert stop is not None, "a line without an answer was not run"
            counts[stop] += 1
            if stop in kind.unwritten:
                continue
            written, place = kind.unrun(state, line, stop), errors
        place.append(msgspec.json.encode(written) + b"\n")
    result = SegmentResult(
        completed=counts["completed"],
        failed=counts["failed"],
        expired=counts["expired"],
        cancelled=counts["cancelled"],
    )
    return result, output, [] if errors is output else errors


async def _parts(lines: Sequence[bytes]) -> AsyncIterator[bytes]:
    yield b"".join(lines)
