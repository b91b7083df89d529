"""Replies to control messages."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import msgspec

from .public import KVSessionResult

KEPT_S = 600
"""Seconds that a reply is kept."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Result of an operation in one lane.

    Attributes:
        lane: The lane.
        role: Role of the replying stage.
        code: An error's stable code; "" for success.
        message: The error's message.
        weight_version: Version of the weights in place afterwards, for weight operations.
        newest_version: The lane's newest known version, if larger.
        kv_session: Result of a ControlSession message.
    """

    lane: str
    role: str
    code: str = ""
    message: str = ""
    weight_version: int = 0
    newest_version: int = 0
    kv_session: KVSessionResult | None = None


class Replies(Protocol):
    """Replies by operation id. Not durable; kept for `KEPT_S`."""

    async def answer(self, operation_id: str, outcome: Outcome) -> None:
        """Reply to the sender of an operation; without an id do nothing.

        Raises:
            BusError: The transport can't be reached.
        """

    async def outcomes(self, operation_id: str, number: int, timeout_s: float) -> list[Outcome]:
        """Wait for `number` replies, and return those that arrived in time. May be called again.

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
            # Oldest first: an operation's sender doesn't return after that time.
            while self._answers and next(iter(self._answers.values())).since < now - KEPT_S:
                del self._answers[next(iter(self._answers))]
            self._answers[operation_id] = _Answers(now)
        return self._answers[operation_id]


class _Answers:
    """Replies to an operation. `news` is set when there are more."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.outcomes: list[Outcome] = []
        self.news = asyncio.Event()
