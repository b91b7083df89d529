"""Calls that are kept on the bus, so that any gateway can go on with their answers."""

from __future__ import annotations

import asyncio
from asyncio import Task
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine, Iterable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec

from ...bus import OutputStream
from ...bus.public import Completion, GenerateRequest, Output
from ...config import BusError, Config, NanoInferenceError, shown
from ...config.logger import get_logger
from ...pipeline.cancellations import Cancellations
from ...pipeline.client import BusClient
from ...store.calls import KeptCall
from ...store.registry import NOT_LOADED
from ...telemetry import TraceContext
from ..server.http import EngineError

_UNKNOWN = "unknown_request"
_LONGEST_PERIOD_S, _SHORTEST_PERIOD_S = 5.0, 0.05


class _Call(msgspec.Struct, frozen=True):
    model: str = ""
    of_model: str = ""


class _Record(msgspec.Struct, frozen=True):
    call: _Call = _Call()


def model_of(kept: KeptCall) -> str:
    """The id of the model of a call, which all interfaces keep in one place; "" where nothing is
    kept of it but its entries."""
    try:
        call = msgspec.json.decode(kept.record, type=_Record).call
        # `model` is what its answer says, which may be an adapter.
        return call.of_model or call.model
    except (ValueError, RecursionError):
        return ""


class Attendance:
    """One connection's share in a call.

    Attributes:
        call_id: Which call, which is the answer's own id.
        name: What the call has claimed, "" for nothing.
        resumable: Its client may come back to it.
        background: It goes on without any client.
        entries: By request id, the entries of its requests that are known to be published; "" of
            one that was ended before that.
        cut_short: Somebody has ended it; what is not published is not to be any more.
        failed: One of its requests has failed, and the others are to end.
        noted: Called when the bus knows what became of one of its requests' publishing.
    """

    def __init__(
        self,
        engine: BusClient,
        call_id: str,
        request_ids: Iterable[str],
        *,
        name: str = "",
        resumable: bool = False,
        background: bool = False,
        kept: KeptCall | None = None,
    ) -> None:
        """`kept`: what there is of it, if it was begun before."""
        self.call_id = call_id
        self.name = name
        self.resumable = resumable
        self.background = background
        self.entries = dict(kept.entries) if kept else {}
        self.cut_short = kept is not None and "cancelled" in kept.marks
        self.failed = False
        self.noted: Callable[[], None] = lambda: None
        self._engine = engine
        self._unfinished = set(request_ids)
        self._publishing: set[Task[str]] = set()

    @property
    def begun_before(self) -> Collection[str]:
        """The requests that need no place: those that were published, or will not be."""
        return set(self._unfinished) if self.cut_short else set(self.entries)

    @property
    def ended(self) -> bool:
        """Whether all of its requests have."""
        return not self._unfinished

    def begins(self, request_id: str) -> bool:
        """Whether a request may be begun, or has been."""
        entry_id = self.entries.get(request_id)
        return not self.cut_short if entry_id is None else bool(entry_id)

    def end(self) -> None:
        """Nothing more comes of it."""
        self._unfinished.clear()

    async def end_early(self, request_id: str) -> None:
        """Somebody has ended a request before it was published."""
        self._unfinished.discard(request_id)
        await self._note(request_id, "")

    def fail(self, error: NanoInferenceError) -> None:
        """The call has ended with an error."""
        gone = isinstance(error, BusError) and error.code != NOT_LOADED
        if gone or (error.code == "shutting_down" and self.entries):
            # The bus may come back, or the client go to another gateway.
            self.resumable = True
        else:
            self.failed = True

    async def outputs(
        self, request: GenerateRequest, trace: TraceContext
    ) -> AsyncGenerator[Output, None]:
        """What comes of a request, which is published unless it was before.

        Two gateways may both have published it; then one of the entries was refused.

        Raises:
            EngineError: stream_not_found: it was published, and its outputs are gone.
        """
        request_id = request.request_id
        known = self.entries.get(request_id, "")
        for entry_id in (known or await self._publish(request, trace), ""):
            followed = self._engine.follow(request_id, entry_id, just_published=not known)
            async with aclosing(self._found(followed)) as outputs:
                async for output in outputs:
                    if entry_id and _is_duplicate(output):
                        break
                    if not entry_id:
                        await self._note(request_id, output.entry_id)
                    if isinstance(output, Completion):
                        self._unfinished.discard(request_id)
                    yield output
                else:
                    return

    async def published(self) -> None:
        """Waits until all that is being published is."""
        if self._publishing:
            await asyncio.wait(self._publishing)

    async def _found(self, followed: OutputStream[Output]) -> AsyncGenerator[Output, None]:
        async with aclosing(followed) as outputs:
            try:
                async for output in outputs:
                    yield output
            except BusError as error:
                raise not_found(self.call_id) if error.code == _UNKNOWN else error from None

    async def _publish(self, request: GenerateRequest, trace: TraceContext) -> str:
        """Goes on when the caller is cancelled, so that what is published is known to be."""
        publishing = asyncio.create_task(self._publish_and_note(request, trace))
        self._publishing.add(publishing)
        return await asyncio.shield(publishing)

    async def _publish_and_note(self, request: GenerateRequest, trace: TraceContext) -> str:
        entry_id = await self._engine.publish(request, trace)
        # Before anything of it is sent: whoever comes back finds it.
        if await self._note(request.request_id, entry_id):
            self.cut_short = True
            await self._engine.cancel(request.request_id, entry_id)
        return entry_id

    async def _note(self, request_id: str, entry_id: str) -> bool:
        """Which entry a request has, unless that is known; returns as `Calls.note`."""
        if self.entries.get(request_id) == entry_id:
            return False
        self.entries[request_id] = entry_id
        cancelled = await self._engine.bus.store.calls.note(self.call_id, request_id, entry_id)
        self.noted()
        return cancelled


class KeptCalls:
    """The calls of a model that connections of this gateway attend, and those that nobody does.

    Attributes:
        stopping: The gateway closes connections, and their clients may go to another one.
    """

    def __init__(self, engine: BusClient, config: Config) -> None:
        self._engine = engine
        self._calls = engine.bus.store.calls
        self._model = config.bus.model
        self._grace_s = config.gateway.resume_grace_s
        self._period_s = telling_period_s(config)
        self._attended: dict[str, list[Attendance]] = {}
        self._ended: set[str] = set()
        self._leaving = Cancellations()
        self._tasks: set[Task[None]] = set()
        self.stopping = False
        self._adopt: Callable[[str, KeptCall], bool] = lambda call_id, kept: False
        self._log = get_logger()

    def adopted_by(self, adopt: Callable[[str, KeptCall], bool]) -> None:
        """Args: `adopt` is asked first about a call that nobody attends, whether it takes it."""
        self._adopt = adopt

    @asynccontextmanager
    async def begun(
        self,
        call_id: str,
        record: bytes,
        request_ids: Iterable[str],
        name: str = "",
    ) -> AsyncIterator[Attendance]:
        """Keeps a new call, and attends it.

        Args:
            name: What was claimed for it; with that it is kept already, and its client may come
                back.

        Raises:
            BusError: The bus can't be reached.
        """
        if not name:
            await self._calls.keep(call_id, record, self._attended_s())
        attendance = Attendance(self._engine, call_id, request_ids, name=name, resumable=bool(name))
        async with self._attending(attendance):
            yield attendance

    @asynccontextmanager
    async def resumed(
        self,
        call_id: str,
        kept: KeptCall,
        request_ids: Iterable[str],
        name: str = "",
        *,
        background: bool = False,
    ) -> AsyncIterator[Attendance]:
        """Attends a call for a client that has come back to it, and may do so again.

        Args:
            background: It goes on without any client.

        Raises:
            BusError: The bus can't be reached.
        """
        await self._calls.mark(call_id, "resumed")
        await self._calls.attend({call_id: name}, self._attended_s(background))
        attendance = Attendance(
            *(self._engine, call_id, request_ids),
            name=name,
            resumable=True,
            background=background,
            kept=kept,
        )
        async with self._attending(attendance):
            yield attendance

    @asynccontextmanager
    async def _attending(self, attendance: Attendance) -> AsyncIterator[None]:
        """Attends a call. When its connection closes before the end, the call ends as well, unless
        its client may come back to it, or another connection of this gateway attends it."""
        self._attended.setdefault(attendance.call_id, []).append(attendance)
        try:
            yield
        finally:
            others = self._attended[attendance.call_id]
            others.remove(attendance)
            if not others:
                del self._attended[attendance.call_id]
            if attendance.ended:
                self._ended.add(attendance.call_id)
            elif attendance.failed or not others:
                await self._leaving.begin(self._leave(attendance))

    async def claim(
        self, name: str, call_id: str, record: bytes, *, background: bool = False
    ) -> str:
        """Keeps a call under a name, unless another call has it.

        Returns:
            The id of the call that has it.

        Raises:
            BusError: The bus can't be reached.
        """
        # Whoever finds the name finds the call.
        await self._calls.keep(call_id, record, self._attended_s(background))
        owner = await self._calls.claim(name, call_id)
        if owner != call_id:
            await self._calls.drop(call_id)
        return owner

    async def find(self, call_id: str) -> KeptCall | None:
        """What is kept of a call, unless it is another model's. Raises BusError when the bus can't
        be reached."""
        kept = await self._calls.read(call_id)
        if kept is None or (self._model and model_of(kept) not in ("", self._model)):
            return None
        return kept

    async def last_output(self, call_id: str, kept: KeptCall, request_id: str) -> Output | None:
        """What has come last of a request of a call; None when there is nothing yet.

        Raises:
            EngineError: stream_not_found: it was published, and its outputs are gone.
            BusError: The bus can't be reached.
        """
        results = self._engine.bus.results
        for entry_id in dict.fromkeys((kept.entries.get(request_id, ""), "")):
            try:
                output = await results.last(request_id, entry_id)
            except BusError as error:
                raise not_found(call_id) if error.code == _UNKNOWN else error from None
            if output is not None and not (entry_id and _is_duplicate(output)):
                return output
        return None

    async def keep(self, call_id: str, record: bytes) -> None:
        """Keeps a call that goes on without any client.

        Raises:
            BusError: The bus can't be reached.
        """
        await self._calls.keep(call_id, record, self._attended_s(background=True))

    async def replace(self, call_id: str, record: bytes) -> None:
        """Keeps something else of a call. Raises BusError as `keep`."""
        await self._calls.keep(call_id, record, 0)

    async def forget(self, call_id: str, name: str = "") -> None:
        """Keeps a call no longer, nor the name that it has claimed. Raises BusError as `keep`."""
        await self._calls.drop(call_id, name)

    async def cancel(self, call_id: str) -> None:
        """Ends a call, whoever attends it; what is not published yet is not published any more.

        Raises:
            BusError: The bus can't be reached.
        """
        await self._calls.mark(call_id, "cancelled")
        for attendance in self._attended.get(call_id, ()):
            attendance.cut_short = True
        kept = await self._calls.read(call_id)
        if kept is not None:
            await self._cancel(kept.entries)

    @property
    def idle(self) -> bool:
        """Whether no call is attended here."""
        return not (self._attended or self._tasks)

    def attends(self, call_id: str) -> bool:
        """Whether a connection of this gateway, or a task of its own, attends a call."""
        return call_id in self._attended

    def stop(self) -> None:
        """From now on it is the gateway that closes connections, and their clients may go to
        another one."""
        self.stopping = True

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Attends a call in a task of its own, without any connection."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def aclose(self) -> None:
        """Leaves all calls to others, and waits for what is still to be said of them."""
        if self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
        await self._leaving.wait()

    def _done(self, task: Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("call_failed", exc_info=error)

    def _attended_s(self, background: bool = False) -> float:
        """For how long a call counts as attended once that was said."""
        if background:
            return max(self._grace_s, self._period_s) + self._period_s
        return self._grace_s + self._period_s if self._grace_s else 0.0

    async def tell(self) -> None:
        """Says on the bus which calls are attended here. Raises BusError when it can't be
        reached."""
        ended, self._ended = self._ended - self._attended.keys(), set()
        names: dict[bool, dict[str, str]] = {True: {}, False: dict.fromkeys(ended, "")}
        for call_id, (first, *_) in self._attended.items():
            names[first.background][call_id] = first.name
        for background, each in names.items():
            await self._calls.attend(each, self._attended_s(background))
        await self._calls.leave(ended)

    async def _leave(self, attendance: Attendance) -> None:
        await attendance.published()
        call_id = attendance.call_id
        if attendance.background:
            # Whoever finds that nobody attends it goes on with it.
            await self._calls.attend({call_id: attendance.name}, self._attended_s(background=True))
            return
        if self._grace_s and not attendance.failed and await self._may_resume(attendance):
            await self._calls.attend({call_id: attendance.name}, self._grace_s)
            return
        if attendance.failed and not attendance.entries:
            # It was refused here; sent again, it may be taken.
            await self._calls.drop(call_id, attendance.name)
            return
        await self._cancel(attendance.entries)
        await self._calls.leave([call_id])

    async def _may_resume(self, attendance: Attendance) -> bool:
        """Its client may have come back at another gateway before it was seen to have left; and it
        has not left when this one does."""
        if attendance.resumable or self.stopping:
            return True
        kept = await self._calls.read(attendance.call_id)
        return kept is not None and "resumed" in kept.marks

    async def end_abandoned(self, call_id: str, kept: KeptCall) -> None:
        """Ends a call that nobody attends, unless it is one to go on with here.

        Raises:
            BusError: The bus can't be reached.
        """
        if not self._adopt(call_id, kept):
            self._log.info("call_abandoned", call=call_id)
            await self._cancel(kept.entries)

    async def _cancel(self, entries: dict[str, str]) -> None:
        for request_id, entry_id in [each for each in entries.items() if each[1]]:
            await self._engine.cancel(request_id, entry_id)


def telling_period_s(config: Config) -> float:
    """So often `KeptCalls.tell` is to be called."""
    ttl_s = float(config.bus.results_ttl_s)
    shortest_s = min(config.gateway.resume_grace_s or ttl_s, ttl_s)
    return min(_LONGEST_PERIOD_S, max(_SHORTEST_PERIOD_S, shortest_s / 4))


def not_found(call_id: str) -> EngineError:
    """There is no such call, it is another tenant's, or by a model that the key is not for."""
    return EngineError(
        f"there is no stream {shown(call_id)} here: it never began, is another tenant's "
        "(X-Tenant) or by a model that the key is not for, or ended longer ago than its results "
        "are kept (bus.results_ttl_s)",
        code="stream_not_found",
    )


def _is_duplicate(output: Output) -> bool:
    error = output.error if isinstance(output, Completion) else None
    return error is not None and error.code == "duplicate_request"
