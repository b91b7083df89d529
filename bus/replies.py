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
        newest_version: That the lane is known to have had, where that is a larger one.
    """

    lane: str
    role: str
    code: str = ""
    message: str = ""
    weight_version: int = 0
    newest_version: int = 0


class Replies(Protocol):
    """Answers by the id of the operation. Not durable; kept for `KEPT_S`."""

    async def answer(self, operation_id: str, outcome: Outcome) -> None:
        """Tells whoever asked. Without an id nobody wants to know.

        Raises:
            BusError: The transport can't be reached.
        """

    async def outcomes(self, operation_id: str, number: int, timeout_s: float) -> list[Outcome]:
        """Waits for so many answers, and gives those that came in time. May be asked again then.

        Raises:
            BusError: The transport can't be reached.
        """


class MemoryReplies:
    """`Replies` within one event loop."""

    def __init__(self) -> None:
        self._answers: dict[str, _Answers] = {}

    async def answer(self, operation_id: str, outcome: Outcome) -> None:
        if operation_id:
            answers = self._answers_to(operation_id)
            answers.outcomes.append(outcome)
            answers.news.set()

    async def outcomes(self, operation_id: str, number: int, timeout_s: float) -> list[Outcome]:
        answers = self._answers_to(operation_id)
        try:
            async with asyncio.timeout(timeout_s):
                while len(answers.outcomes) < number:
                    answers.news.clear()
                    await answers.news.wait()
        except TimeoutError:
            return list(answers.outcomes)
        self._answers.pop(operation_id, None)
        return answers.outcomes

    def _answers_to(self, operation_id: str) -> _Answers:
        now = time.monotonic()
        if operation_id not in self._answers:
            # Oldest first: who has left without its answer does not come back for it.
            while self._answers and next(iter(self._answers.values())).since < now - KEPT_S:
                del self._answers[next(iter(self._answers))]
            self._answers[operation_id] = _Answers(now)
        return self._answers[operation_id]


class _Answers:
    """The answers to an operation. `news` is set when there are more."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.outcomes: list[Outcome] = []
        self.news = asyncio.Event()
