"""Texts that take long to tokenise: in threads, a few at a time, while others go past them."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.to_thread

from ...bus.channel import RequestEntry
from ...bus.public import GenerateRequest
from ...config import RequestError
from ...telemetry import now_ns
from .events import Tokenized, Tokens
from .poison import is_of_the_entry

LONG_TEXT = 16_384
"""Characters from which on a text is long."""

MESSAGE_TEXT = 64
"""What a message counts besides its content: the template is run for each."""

AT_A_TIME = 2


def is_long(entry: RequestEntry) -> bool:
    """Whether an entry's texts take so long to tokenise, or its constraint to compile, that others
    should not wait for it."""
    request = entry.request
    if not isinstance(request, GenerateRequest):
        return False
    if request.sampling.constraint is not None:
        return True
    size = len(request.prompt or "")
    if isinstance(request.prediction, str):
        size += len(request.prediction)
    if request.messages:
        size += sum(MESSAGE_TEXT + len(message.content) for message in request.messages)
    return size >= LONG_TEXT


class LongPrompts:
    """Entries that are taken and not let in yet, since their prompts are being tokenised."""

    def __init__(self) -> None:
        self._few = anyio.Semaphore(AT_A_TIME)
        self._waiting: dict[str, anyio.CancelScope] = {}

    async def tokenize(
        self,
        entry: RequestEntry,
        deadline_ns: int | None,
        tokenize: Callable[[GenerateRequest], Tokens],
    ) -> Tokenized:
        """The tokens of an entry's texts, once it is its turn.

        An entry whose time is over before that, or that `hurry` names, is not tokenised any more.
        One whose thread runs is waited for: threads can't be stopped, and they must stay few.
        """
        assert isinstance(entry.request, GenerateRequest), "there is no prompt to tokenise"
        with anyio.CancelScope() as waiting:
            if deadline_ns is not None:
                waiting.deadline = anyio.current_time() + (deadline_ns - now_ns()) / 1e9
            self._waiting[entry.entry_id] = waiting
            try:
                await self._few.acquire()
            finally:
                del self._waiting[entry.entry_id]
        if waiting.cancelled_caught:
            return RequestError("the request's time (budget_ns) was over", code="expired")
        try:
            return await anyio.to_thread.run_sync(tokenize, entry.request, abandon_on_cancel=True)
        except Exception as error:
            if not is_of_the_entry(error):
                raise
            return error
        finally:
            self._few.release()

    def hurry(self, entry_id: str | None = None) -> None:
        """The tokens of an entry are not needed any more; by default of none that waits."""
        for waiting, scope in list(self._waiting.items()):
            if entry_id in (None, waiting):
                scope.cancel()
