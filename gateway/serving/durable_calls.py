"""Durable calls: any gateway can continue the answer to a call that is stored on the bus."""

from __future__ import annotations

import asyncio
from asyncio import Task
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import msgspec

from ...bus.public import Completion, GenerateRequest, Output
from ...config import BusError, ChannelClosed, Config, NanoInferenceError, shown
from ...config.logger import get_logger
from ...pipeline.cancellations import Cancellations
from ...pipeline.client import BusClient
from ...pipeline.scoring import is_duplicate
from ...store.calls import CallsFull, CallStore, DurableCall
from ...store.registry import NOT_LOADED
from ...telemetry import TraceContext
from ..server.http import EngineError

_UNKNOWN = "unknown_request"
_LONGEST_PERIOD_S, _SHORTEST_PERIOD_S = 5.0, 0.05

_MOST_ORPHANS = 64
"""Orphaned calls that one round ends or takes over."""


class _CallModel(msgspec.Struct, frozen=True):
    model: str = ""
    of_model: str = ""


class IdempotencyKey(msgspec.Struct, frozen=True):
    """The identity of a call with an idempotency key.

    Attributes:
        name: Digest of the tenant and the key.
        digest: Digest of the call that was made with the key.
        attempt: Number of its calls that have failed before this one.
    """

    name: str
    digest: str
    attempt: int = 0

    @property
    def claimed(self) -> str:
        """The name that the call claims on the bus."""
        return f"{self.name}.{self.attempt}" if self.attempt else self.name


class _StoredRecord(msgspec.Struct, frozen=True):
    call: _CallModel = _CallModel()
    keyed: IdempotencyKey | None = None


def model_of(stored: DurableCall) -> str:
    """Return the id of a call's model, which all interfaces store in one place; "" if only the
    entries are stored."""
    try:
        call = msgspec.json.decode(stored.record, type=_StoredRecord).call
        # `model` is the name in the answer, which may be an adapter.
        return call.of_model or call.model
    except (ValueError, RecursionError):
        return ""


class CallHead(msgspec.Struct, frozen=True, kw_only=True):
    """The beginning of every call's record.

    Attributes:
        id: The answer's.
        created: When the call came, seconds since the Unix epoch.
        model: The model, or the adapter, that its requests are for.
        of_model: The id of the model; `model` may be an adapter's.
    """

    id: str
    created: int
    model: str
    of_model: str = ""


class DurableRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A call, as the bus keeps it.

    Attributes:
        keyed: None without an idempotency key.
    """

    tenant: str
    call: CallHead
    keyed: IdempotencyKey | None = None

    @property
    def id(self) -> str:
        """The answer's."""
        return self.call.id

    @property
    def request_ids(self) -> list[str]:
        raise NotImplementedError

    @property
    def is_complete(self) -> bool:
        """Whether the record has all that another gateway needs to submit the requests."""
        raise NotImplementedError

    @property
    def is_durable(self) -> bool:
        """Whether the bus keeps it."""
        raise NotImplementedError

    @property
    def is_promised(self) -> bool:
        """Whether it is refused if the bus has no room for it; any other then ends with its
        connection."""
        return self.is_durable

    @property
    def background(self) -> bool:
        """Whether it goes on without its client."""
        return False

    @property
    def name(self) -> str:
        """The name that the call has claimed; "" without an idempotency key."""
        return self.keyed.claimed if self.keyed else ""

    def encode(self) -> bytes:
        # JSON: schemas may hold integers that MessagePack has no room for.
        return msgspec.json.encode(self)


@dataclass(eq=False)
class Attachment:
    """One connection's attachment to a call.

    Attributes:
        record: The call.
        resumable: The client may come back to the call.
        entries: Stream entries of the requests known to be published, by request id; "" of a
            request that was ended before it was published.
        cut_short: The call was cancelled; its unpublished requests stay unpublished.
        failed: One request has failed, and the others are to end.
        noted: Called once the bus has recorded the publishing of a request.
        unfinished: Ids of the requests that have not ended.
    """

    client: BusClient
    record: DurableRecord
    resumable: bool = False
    entries: dict[str, str] = field(default_factory=dict)
    cut_short: bool = False
    failed: bool = False
    noted: Callable[[], None] = lambda: None
    _publishing: set[Task[str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.unfinished = set(self.record.request_ids)

    @property
    def begun_before(self) -> Collection[str]:
        """Requests that need no place: those published, or never to be published."""
        return set(self.unfinished) if self.cut_short else set(self.entries)

    @property
    def ended(self) -> bool:
        """Whether all requests have ended."""
        return not self.unfinished

    def begins(self, request_id: str) -> bool:
        """Return whether a request may begin, or has begun."""
        entry_id = self.entries.get(request_id)
        return not self.cut_short if entry_id is None else bool(entry_id)

    def end(self) -> None:
        """Mark all requests as ended."""
        self.unfinished.clear()

    async def end_early(self, request_id: str) -> None:
        """Record that a request was ended before it was published."""
        self.unfinished.discard(request_id)
        await self._note(request_id, "")

    def fail(self, error: NanoInferenceError) -> None:
        """End the call with an error."""
        gone = isinstance(error, BusError) and error.code != NOT_LOADED
        if gone or (error.code == "shutting_down" and self.entries):
            # The bus may come back, or the client go to another gateway.
            self.resumable = True
        else:
            self.failed = True

    async def outputs(
        self, request: GenerateRequest, trace: TraceContext
    ) -> AsyncGenerator[Output, None]:
        """Publish a request, unless it was published before, and yield its outputs.

        Two gateways may both have published it; then one of the entries was refused.

        Raises:
            EngineError: stream_not_found: it was published, and its outputs have expired.
        """
        request_id = request.request_id
        known = self.entries.get(request_id, "")
        for entry_id in (known or await self._publish(request, trace), ""):
            followed = self.client.follow(request_id, entry_id, just_published=not known)
            async with _unexpired(self.record.id), aclosing(followed) as outputs:
                async for output in outputs:
                    if entry_id and is_duplicate(output):
                        break
                    if not entry_id:
                        await self._note(request_id, output.entry_id)
                    if isinstance(output, Completion):
                        self.unfinished.discard(request_id)
                    yield output
                else:
                    return

    async def published(self) -> None:
        """Wait until no request is being published."""
        if self._publishing:
            await asyncio.wait(self._publishing)

    async def _publish(self, request: GenerateRequest, trace: TraceContext) -> str:
        """Publish in a task that outlives a cancelled caller, so that the entry is recorded."""
        publishing = asyncio.create_task(self._publish_and_note(request, trace))
        self._publishing.add(publishing)
        # A caller that has left awaits the error no more.
        publishing.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(publishing)

    async def _publish_and_note(self, request: GenerateRequest, trace: TraceContext) -> str:
        entry_id = await self.client.publish(request, trace)
        # Before any output is sent, so that a client that comes back finds the entry.
        if await self._note(request.request_id, entry_id):
            self.cut_short = True
            await self.client.cancel(request.request_id, entry_id)
        return entry_id

    async def _note(self, request_id: str, entry_id: str) -> bool:
        """Record a request's entry, unless it is known; return as `CallStore.note`."""
        if self.entries.get(request_id) == entry_id:
            return False
        self.entries[request_id] = entry_id
        cancelled = await self.client.bus.store.calls.note(self.record.id, request_id, entry_id)
        self.noted()
        return cancelled


class DurableCalls:
    """The durable calls of one model, and this gateway's attachments to them.

    Methods raise BusError when the bus can't be reached.

    Attributes:
        stopping: Set when the gateway itself closes connections from now on; their clients may go
            to another gateway.
    """

    def __init__(self, client: BusClient, config: Config) -> None:
        self._client = client
        self._calls = client.bus.store.calls
        self._model = config.bus.model
        self._grace_s = config.gateway.resume_grace_s
        self._period_s = _attach_period_s(config)
        self._attached: dict[str, list[Attachment]] = {}
        self._ended: set[str] = set()
        self._leaving = Cancellations()
        self._tasks: set[Task[None]] = set()
        self.stopping = False
        self._take_over: Callable[[str, DurableCall], bool] = lambda call_id, stored: False

    def taken_over_by(self, take_over: Callable[[str, DurableCall], bool]) -> None:
        """Set the function that may take over an orphaned call; it returns whether it does."""
        self._take_over = take_over

    @asynccontextmanager
    async def begun(self, record: DurableRecord) -> AsyncIterator[Attachment | None]:
        """Store a new call, and attach to it; unless it is not durable, or is a call without a name
        for which there is no room.

        A call with a name was stored when it claimed the name, and its client may come back.
        """
        if not record.is_durable:
            yield None
            return
        if not record.name:
            try:
                await self.keep(record)
            except CallsFull:
                if record.is_promised:
                    raise
                yield None
                return
        async with self._attaching(record, resumable=bool(record.name)) as attachment:
            yield attachment

    @asynccontextmanager
    async def resumed(
        self, record: DurableRecord, stored: DurableCall
    ) -> AsyncIterator[Attachment]:
        """Attach to a call for a client that has come back to it, and may do so again."""
        await self._calls.mark(record.id, "resumed")
        await self._calls.attach({record.id: record.name}, self._attached_s(record.background))
        entries, cut_short = dict(stored.entries), "cancelled" in stored.marks
        async with self._attaching(
            record, resumable=True, entries=entries, cut_short=cut_short
        ) as attachment:
            yield attachment

    @asynccontextmanager
    async def _attaching(self, record: DurableRecord, **state: Any) -> AsyncIterator[Attachment]:
        """Attach to a call. When the connection closes early, the call ends as well, unless its
        client may come back or another connection of this gateway is attached.

        Args:
            state: Other attributes of the attachment.
        """
        attachment, call_id = Attachment(self._client, record, **state), record.id
        self._attached.setdefault(call_id, []).append(attachment)
        try:
            yield attachment
        except NanoInferenceError as error:
            attachment.fail(error)
            raise
        finally:
            others = self._attached[call_id]
            others.remove(attachment)
            if not others:
                del self._attached[call_id]
            if attachment.ended:
                self._ended.add(call_id)
            elif attachment.failed or not others:
                await self._leaving.begin(self._leave(attachment))

    async def claim(self, record: DurableRecord) -> str:
        """Store a call under its name, unless another call has the name; return the owner's id.

        Raises:
            CallsFull: There is no room for a new call.
        """
        # The call first: a reader that finds the name finds the call.
        try:
            await self.keep(record)
        except CallsFull:
            if owner := await self._calls.named(record.name):
                return owner
            raise
        owner = await self._calls.claim(record.name, record.id)
        if owner != record.id:
            await self._calls.drop(record.id)
        return owner

    async def find(self, call_id: str) -> DurableCall | None:
        """Return a stored call of this model; None if there is none."""
        stored = await self._calls.read(call_id)
        if stored is None or (self._model and model_of(stored) not in ("", self._model)):
            return None
        return stored

    async def has_failed(self, record: DurableRecord, stored: DurableCall) -> bool:
        """Return whether a call has ended without an answer: with an error, or because its client
        was away for longer than the grace."""
        for request_id in record.request_ids:
            if not stored.entries.get(request_id):
                continue
            try:
                output = await self.last_output(request_id, stored)
            except EngineError:
                return True
            if isinstance(output, Completion) and output.error is not None:
                return output.status != "cancelled" or "cancelled" not in stored.marks
        return False

    async def extend(self, record: DurableRecord) -> None:
        """Keep a call's record and name for as long as if it had ended now."""
        await self._calls.attach({record.id: record.name}, 0)

    async def last_output(self, request_id: str, stored: DurableCall) -> Output | None:
        """Return the last output of a call's only request; None if there is none yet.

        Raises:
            EngineError: stream_not_found: it was published, and its outputs have expired.
        """
        results = self._client.bus.results
        for entry_id in dict.fromkeys((stored.entries.get(request_id, ""), "")):
            async with _unexpired(request_id):
                output = await results.last(request_id, entry_id)
            if output is not None and not (entry_id and is_duplicate(output)):
                return output
        return None

    async def keep(self, record: DurableRecord) -> None:
        """Store a call. Raises CallsFull when there is no room for it."""
        attached_s = self._attached_s(record.background)
        await self._calls.keep(record.id, record.encode(), attached_s, record.tenant)

    async def replace(self, call_id: str, record: bytes) -> None:
        """Replace a call's record."""
        await self._calls.keep(call_id, record, 0)

    async def forget(self, record: DurableRecord) -> None:
        """Delete a call, and the name that it has claimed."""
        await self._calls.drop(record.id, record.name)

    async def cancel(self, call_id: str) -> None:
        """End a call at all gateways; its unpublished requests stay unpublished."""
        await self._calls.mark(call_id, "cancelled")
        for attachment in self._attached.get(call_id, ()):
            attachment.cut_short = True
        if (stored := await self._calls.read(call_id)) is not None:
            await self._cancel(stored.entries)

    @property
    def idle(self) -> bool:
        """Whether this gateway is attached to no call."""
        return not (self._attached or self._tasks)

    def is_attached(self, call_id: str) -> bool:
        """Return whether a connection or a task of this gateway is attached to a call."""
        return call_id in self._attached

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a call in a task of its own, without a connection."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def aclose(self) -> None:
        """Leave all calls to other gateways, and write what remains to be written."""
        if self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
        await self._leaving.wait()

    def _done(self, task: Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            get_logger().error("call_failed", exc_info=error)

    def _attached_s(self, background: bool = False) -> float:
        """Return how long one attachment lasts on the bus."""
        if background:
            return max(self._grace_s, self._period_s) + self._period_s
        return self._grace_s + self._period_s if self._grace_s else 0.0

    async def renew(self) -> None:
        """Renew this gateway's attachments on the bus."""
        ended, self._ended = self._ended - self._attached.keys(), set()
        names: dict[bool, dict[str, str]] = {True: {}, False: dict.fromkeys(ended, "")}
        for call_id, (first, *_) in self._attached.items():
            names[first.record.background][call_id] = first.record.name
        for background, each in names.items():
            await self._calls.attach(each, self._attached_s(background))
        await self._calls.detach(ended)

    async def _leave(self, attachment: Attachment) -> None:
        await attachment.published()
        record = attachment.record
        if record.background:
            # Orphaned after that; another gateway takes it over.
            await self._calls.attach({record.id: record.name}, self._attached_s(background=True))
        elif (
            self._grace_s
            and not (attachment.failed or attachment.cut_short)
            and await self._may_resume(attachment)
        ):
            await self._calls.attach({record.id: record.name}, self._grace_s)
        elif attachment.failed and not attachment.entries:
            # Refused here; sent again, it may be accepted.
            await self.forget(record)
        else:
            await self._cancel(attachment.entries)
            await self._calls.detach([record.id])

    async def _may_resume(self, attachment: Attachment) -> bool:
        """The client may have resumed at another gateway before its old connection was seen to
        close; and it hasn't left when this gateway closes the connection."""
        if attachment.resumable or self.stopping:
            return True
        stored = await self._calls.read(attachment.record.id)
        return stored is not None and "resumed" in stored.marks

    async def end_orphaned(self, call_id: str, stored: DurableCall) -> None:
        """End an orphaned call, unless it is taken over."""
        if not stored.entries and not await self._has_its_name(call_id, stored):
            await self._calls.drop(call_id)
            return
        if not self._take_over(call_id, stored):
            get_logger().info("call_orphaned", call=call_id)
            await self._cancel(stored.entries)

    async def _has_its_name(self, call_id: str, stored: DurableCall) -> bool:
        """Claim the name of a call whose gateway may have been killed before it did; meanwhile
        another call may have come with the same key."""
        try:
            keyed = msgspec.json.decode(stored.record, type=_StoredRecord).keyed
        except (ValueError, RecursionError):
            return True
        return keyed is None or await self._calls.claim(keyed.claimed, call_id) == call_id

    async def _cancel(self, entries: dict[str, str]) -> None:
        for request_id, entry_id in [each for each in entries.items() if each[1]]:
            await self._client.cancel(request_id, entry_id)


async def watch_orphans(
    store: CallStore,
    config: Config,
    here: Callable[[], Iterable[DurableCalls]],
    owner_of: Callable[[DurableCall], DurableCalls | None],
) -> None:
    """Renew this gateway's attachments, and end orphaned calls, also those of killed gateways.

    Returns when the bus was closed.

    Args:
        here: Returns the durable calls of all models of this gateway.
        owner_of: Returns the model's calls that end an orphan or take it over; None if the model
            is gone.
    """
    logged = False
    while True:
        await anyio.sleep(_attach_period_s(config))
        try:
            for each in list(here()):
                await each.renew()
            # An orphan is returned once: a stopping gateway would lose it.
            if not any(each.stopping for each in here()):
                for call_id in await store.orphaned(_MOST_ORPHANS):
                    if any(each.is_attached(call_id) for each in here()):
                        continue  # the next round renews it
                    stored = await store.read(call_id)
                    if stored is not None and (owner := owner_of(stored)) is not None:
                        await owner.end_orphaned(call_id, stored)
            logged = False
        except ChannelClosed:
            return
        except BusError as error:
            if not logged:
                get_logger().warning("calls_not_renewed", error=str(error))
            logged = True


def _attach_period_s(config: Config) -> float:
    """Return the period of `watch_orphans` in seconds."""
    ttl_s = float(config.bus.results_ttl_s)
    shortest_s = min(config.gateway.resume_grace_s or ttl_s, ttl_s)
    return min(_LONGEST_PERIOD_S, max(_SHORTEST_PERIOD_S, shortest_s / 4))


def not_found(call_id: str) -> EngineError:
    """Return the error for an unknown call, another tenant's call, or another model's."""
    return EngineError(
        f"there is no stream {shown(call_id)} here: it never began, is another tenant's "
        "(X-Tenant) or by a model that the key is not for, or ended longer ago than its results "
        "are kept (bus.results_ttl_s); send the call again",
        code="stream_not_found",
    )


@asynccontextmanager
async def _unexpired(call_id: str) -> AsyncIterator[None]:
    """Turn the bus's error for expired outputs into that for an unknown call."""
    try:
        yield
    except BusError as error:
        raise not_found(call_id) if error.code == _UNKNOWN else error from None
