"""Long texts are tokenised, images decoded, and constraints compiled, in threads: a few at a time,
round robin by tenant, while other requests pass.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

from ...bus.entries import RequestEntry
from ...bus.public import GenerateRequest
from ...config import RequestError
from ...telemetry import now_ns
from .refusals import is_of_the_entry


class FairSemaphore:
    """A semaphore that serves waiting tenants round robin, each in its own order."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: OrderedDict[str, deque[anyio.Event]] = OrderedDict()

    async def acquire(self, tenant: str) -> None:
        """Wait for a place; `release` hands it on."""
        if self._free:
            self._free -= 1
            return
        event = anyio.Event()
        queue = self._waiting.setdefault(tenant, deque())
        queue.append(event)
        try:
            await event.wait()
        except BaseException:
            if event.is_set():
                self.release()
            else:
                queue.remove(event)
                if not queue:
                    del self._waiting[tenant]
            raise

    def release(self) -> None:
        """Hand the place to the next tenant."""
        if not self._waiting:
            self._free += 1
            return
        tenant, queue = self._waiting.popitem(last=False)
        queue.popleft().set()
        if queue:
            self._waiting[tenant] = queue


T = TypeVar("T")

LONG_TEXT = 16_384
"""Characters of a long text, at the least."""

MESSAGE_TEXT = 64
"""Characters that a message counts besides its content, for the template."""

AT_A_TIME = 2
"""Texts tokenised in parallel. Constraints go one at a time, since one process tries them all."""


def is_long(entry: RequestEntry) -> bool:
    """Return whether an entry's texts take long to tokenise, its images to decode, or its
    constraint to compile."""
    request = entry.request
    if not isinstance(request, GenerateRequest):
        return False
    return bool(request.sampling.constraint is not None or request.images or _is_long_text(request))


def _is_long_text(request: GenerateRequest) -> bool:
    size = len(request.prompt or "")
    if isinstance(request.prediction, str):
        size += len(request.prediction)
    if request.messages:
        size += sum(MESSAGE_TEXT + len(message.text) for message in request.messages)
    return size >= LONG_TEXT


class LongPrompts:
    """Entries whose texts are tokenised, or constraints compiled, in threads."""

    def __init__(self) -> None:
        self._texts = FairSemaphore(AT_A_TIME)
        self._constraints = FairSemaphore(1)
        self._waiting: dict[str, anyio.CancelScope] = {}

    async def run(
        self,
        entry: RequestEntry,
        deadline_ns: int | None,
        work: Callable[[GenerateRequest], T],
        *,
        is_constraint: bool = False,
    ) -> T | Exception:
        """Tokenise an entry's texts, or compile its constraint, in a thread.

        Constraints and long texts wait for their tenant's turn. There is no work for an entry whose
        deadline passes before, or that `stop_waiting` names. A running thread is awaited: threads
        can't be stopped, and must stay few.

        Returns:
            The result of `work`, or why the entry is refused.
        """
        request = entry.request
        assert isinstance(request, GenerateRequest)
        turns = self._constraints if is_constraint else None
        if turns is None and (request.images or _is_long_text(request)):
            turns = self._texts
        with anyio.CancelScope() as waiting:
            if deadline_ns is not None:
                waiting.deadline = anyio.current_time() + (deadline_ns - now_ns()) / 1e9
            self._waiting[entry.key] = waiting
            try:
                if turns is not None:
                    await turns.acquire(request.tenant)
            finally:
                del self._waiting[entry.key]
        if waiting.cancelled_caught:
            return RequestError(
                "the request's time was over before its prompt was tokenised; give it more",
                code="expired",
            )
        try:
            return await anyio.to_thread.run_sync(work, request, abandon_on_cancel=True)
        except Exception as error:
            if not is_of_the_entry(error):
                raise
            return error
        finally:
            if turns is not None:
                turns.release()

    def stop_waiting(self, key: str | None = None) -> None:
        """End the wait of the entry with a key for its turn; by default the wait of all entries."""
        for waiting, scope in list(self._waiting.items()):
            if key in (None, waiting):
                scope.cancel()
