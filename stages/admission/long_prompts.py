"""Long texts are tokenised and constraints compiled in threads, and images loaded: a few at a time,
in turns of tenants, while other requests pass.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import anyio
import anyio.to_thread

from ...bus.entries import RequestEntry
from ...bus.public import GenerateRequest
from ...config import RequestError
from ...media.turns import FairSemaphore
from ...telemetry import now_ns
from .refusals import is_of_the_entry

T = TypeVar("T")

LONG_TEXT = 16_384
"""Characters of a long text, at the least."""

MESSAGE_TEXT = 64
"""Characters that a message counts besides its content, for the template."""

AT_A_TIME = 2
"""Texts tokenised in parallel. Constraints go one at a time, since one process tries them all."""


def is_long(entry: RequestEntry) -> bool:
    """Return whether an entry's texts take long to tokenise, its images to decode, its constraint
    to compile, or its prompt to be found: that of a fork is in another request's output."""
    request = entry.request
    if not isinstance(request, GenerateRequest):
        return False
    return bool(
        request.sampling.constraint is not None
        or request.images
        or request.fork is not None
        or _is_long_text(request)
    )


def is_fork(entry: RequestEntry) -> bool:
    """Return whether an entry's prompt is to be found in another request's output."""
    return isinstance(entry.request, GenerateRequest) and entry.request.fork is not None


def _is_long_text(request: GenerateRequest) -> bool:
    size = len(request.prompt or "")
    if isinstance(request.prediction, str):
        size += len(request.prediction)
    if request.messages:
        size += sum(MESSAGE_TEXT + len(message.text) for message in request.messages)
    return size >= LONG_TEXT


class LongPrompts:
    """Entries whose texts are tokenised, constraints compiled, or images loaded, beside others."""

    def __init__(self) -> None:
        self._texts = FairSemaphore(AT_A_TIME)
        self._constraints = FairSemaphore(1)
        # Texts of images wait for no turn: an image takes the time.
        self._threads = anyio.CapacityLimiter(2 * AT_A_TIME + 1)
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
        if turns is None and _is_long_text(request):
            turns = self._texts
        start_s = 0.0
        if turns is not None:
            wait = partial(turns.acquire, request.tenant)
            if (refusal := await self.wait(entry, deadline_ns, wait)) is not None:
                return refusal
            start_s = anyio.current_time()
        try:
            return await anyio.to_thread.run_sync(
                work, request, abandon_on_cancel=True, limiter=self._threads
            )
        except Exception as error:
            if not is_of_the_entry(error):
                raise
            return error
        finally:
            if turns is not None:
                turns.release(request.tenant, anyio.current_time() - start_s)

    async def wait(
        self, entry: RequestEntry, deadline_ns: int | None, work: Callable[[], Awaitable[T]]
    ) -> T | Exception:
        """Await work of an entry that its deadline and `stop_waiting` end.

        Returns:
            The result of `work`, or why the entry is refused.
        """
        with anyio.CancelScope() as waiting:
            if deadline_ns is not None:
                waiting.deadline = anyio.current_time() + (deadline_ns - now_ns()) / 1e9
            self._waiting[entry.key] = waiting
            try:
                return await work()
            except Exception as error:
                if not is_of_the_entry(error):
                    raise
                return error
            finally:
                del self._waiting[entry.key]
        return RequestError(
            "the request's time was over before its prompt was tokenised; give it more",
            code="expired",
        )

    def stop_waiting(self, key: str | None = None) -> None:
        """End the wait of the entry with a key for its turn; by default the wait of all entries."""
        for waiting, scope in list(self._waiting.items()):
            if key in (None, waiting):
                scope.cancel()
