"""Answers to control messages: whether what was asked for has been done."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import msgspec

KEPT_S = 600
"""How long an answer is kept for whoever asked."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of an operation in one lane.

    Attributes:
        lane: Which one.
        role: Of the stage that did it.
        code: An error's stable code; "" when it was done.
        message: The error's sentence.
        weight_version: Of the weights in place afterwards, where weights are concerned.
    """

    lane: str
    role: str
    code: str = ""
    message: str = ""
    weight_version: int = 0


class Replies(Protocol):
    """Answers by the id of the operation. Not durable; kept for `KEPT_S`."""

    async def answer(self, operation_id: str, outcome: Outcome) -> None:
        """Tells whoever asked. Without an id nobody wants to know.

        Raises:
            BusError: The transport can't be reached.
        """

    async def outcomes(self, operation_id: str, number: int, timeout_s: float) -> list[Outcome]:
        """Waits for so many answers, and gives those that came in time.

        Raises:
            BusError: The transport can't be reached.
        """


class MemoryReplies:
    """See `Replies`; within one event loop."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[float, asyncio.Queue[Outcome]]] = {}

    async def answer(self, operation_id: str, outcome: Outcome) -> None:
        """See `Replies.answer`."""
        if operation_id:
            self._queue(operation_id).put_nowait(outcome)

    async def outcomes(self, operation_id: str, number: int, timeout_s: float) -> list[Outcome]:
        """See `Replies.outcomes`."""
        queue = self._queue(operation_id)
        found: list[Outcome] = []
        try:
            async with asyncio.timeout(timeout_s):
                while len(found) < number:
                    found.append(await queue.get())
        except TimeoutError:
            pass
        self._told.pop(operation_id, None)
        return found

    def _queue(self, operation_id: str) -> asyncio.Queue[Outcome]:
        now = time.monotonic()
        if operation_id not in self._told:
            # Oldest first: who has left without its answer does not come back for it.
            while self._told and next(iter(self._told.values()))[0] < now - KEPT_S:
                del self._told[next(iter(self._told))]
            self._told[operation_id] = now, asyncio.Queue()
        return self._told[operation_id][1]
