"""The stages that do what a client asks for: who they are, telling them, and their answers."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import anyio

from ..bus import Bus, Outcome
from ..bus.links import CONTROL, at
from ..bus.messages import Message
from ..config import REPLICATED, BusError, WeightsError, role_of, split_role
from ..store.board import StageReport
from ..store.registry import Records
from .health import replicas_of

T = TypeVar("T")

Recipients = list[tuple[str, str]]
"""(lane, role) of each."""

LOOK_S = 2.0
"""How often to look whether those who have not answered are still there."""

PARTING_S = 1.0
"""How long to wait for the last answers once somebody is lost."""

_POLL_S = 0.05


class Looks(Generic[T]):
    """Calls `look` for many callers at once, who share its results.

    A caller gets the result of a call that began after it asked, so nothing is out of date. All
    who ask during one call share the next one: a thousand at a time cost two calls.
    """

    def __init__(self, look: Callable[[], Awaitable[T]]) -> None:
        self._look = look
        self._running: asyncio.Task[T] | None = None
        self._next: asyncio.Task[T] | None = None

    async def take(self) -> T:
        """The result of the next call to begin."""
        if self._next is None:
            self._next = asyncio.create_task(self._look_behind(self._running))
        return await asyncio.shield(self._next)

    async def _look_behind(self, running: asyncio.Task[T] | None) -> T:
        if running is not None:
            await asyncio.wait([running])
        self._running, self._next = self._next, None
        return await self._look()


class Operators:
    """Finds the stages that do what a client asks for, tells them, and takes their answers."""

    def __init__(self, bus: Bus, sender: str) -> None:
        """`sender`: the name under which messages to them are sent."""
        self._bus = bus
        self._sender = sender
        self._lanes = Looks(bus.lanes)
        self._models = Looks(bus.store.models.read)

    async def models(self) -> Records:
        """The models of the deployment by their ids; none on the bus of one model."""
        return {} if self._bus.model else await self._models.take()

    async def everyone(self, stage: str, lane: str | None = None) -> Recipients:
        """A stage, and each of its replicas that was heard of lately, in every lane that lives.

        Args:
            stage: One of the five.
            lane: Only this lane.

        Raises:
            BusError: `unknown_lane`: it does not live. `model_required`: the bus is that of several
                models (`Bus.of_model`).
        """
        if models := await self.models():
            raise BusError(
                f"there are several models here; say for which of them this is: "
                f"{', '.join(models)}",
                code="model_required",
            )
        lanes = sorted(await self._lanes.take())
        if lane is not None:
            if lane not in lanes:
                raise BusError(
                    f"no lane {lane!r:.80} lives here; those that do: {', '.join(lanes)}",
                    code="unknown_lane",
                )
            lanes = [lane]
        recipients: Recipients = []
        for name in lanes:
            replicas = [0]
            if stage in REPLICATED:
                reports = await self._bus.store.board.read()
                replicas = replicas_of(report.stage for report in reports if report.lane == name)
            recipients += [(name, role_of(stage, replica)) for replica in replicas]
        return recipients

    async def started(self, stage: str, limit_s: float, lane: str | None = None) -> Recipients:
        """As `everyone`, but waits until all have loaded: before that they take no message.

        Raises:
            BusError: Some are still loading after this time; or as `everyone`.
        """
        recipients, end = await self.everyone(stage, lane), time.monotonic() + limit_s
        while loading := await self._loading(recipients):
            if time.monotonic() > end:
                raise BusError(
                    f"{', '.join(loading)} can't answer while it is loading; wait until "
                    "`nano-inference status` says that it is ready",
                    code="no_answer",
                )
            await anyio.sleep(_POLL_S)
        return recipients

    async def tell(
        self,
        stage: str,
        body: Message | Callable[[int], Message],
        recipients: Recipients,
        operation_id: str = "",
    ) -> None:
        """Sends them a message, which may depend on the index of who is told.

        `operation_id`: under which they answer; "" when nobody waits for that.
        """
        senders = [
            self._bus.sender(at(CONTROL[stage], split_role(role)[1]), self._sender, lane)
            for lane, role in recipients
        ]
        for index, sender in enumerate(senders):
            message = body(index) if callable(body) else body
            await sender.send(message, operation_id=operation_id)
        for sender in senders:
            await sender.flush()

    async def ask(
        self,
        stage: str,
        body: Message | Callable[[int], Message],
        limit_s: float,
        recipients: Recipients,
    ) -> list[Outcome]:
        """Tells them, and gives the answers that come in time.

        What a stage was told is lost when it is started anew, and then not waited for any more.
        """
        operation_id, end = uuid.uuid4().hex, time.monotonic() + limit_s
        before = await self._incarnations()
        await self.tell(stage, body, recipients, operation_id)
        replies = self._bus.replies
        while True:
            left_s = max(0.0, end - time.monotonic())
            outcomes = await replies.outcomes(operation_id, len(recipients), min(left_s, LOOK_S))
            if len(outcomes) >= len(recipients) or left_s <= LOOK_S:
                return outcomes
            answered = {(outcome.lane, outcome.role) for outcome in outcomes}
            waiting = [
                recipient
                for recipient in recipients
                if recipient not in answered and recipient in before
            ]
            now = await self._incarnations()
            if any(
                now.get(recipient, before[recipient]) != before[recipient] for recipient in waiting
            ):
                # It may have answered as its last act.
                return await replies.outcomes(operation_id, len(recipients), PARTING_S)

    async def _last_words(self) -> dict[tuple[str, str], StageReport]:
        """What was heard last, by lane and role."""
        last: dict[tuple[str, str], StageReport] = {}
        for report in await self._bus.store.board.read():  # the youngest of a role comes first
            last.setdefault((report.lane, report.stage), report)
        return last

    async def _incarnations(self) -> dict[tuple[str, str], str]:
        """The stage objects, of those that are known."""
        words = await self._last_words()
        return {
            recipient: word.incarnation for recipient, word in words.items() if word.incarnation
        }

    async def _loading(self, recipients: Recipients) -> list[str]:
        """The roles of those that are loading, as far as is known."""
        words = await self._last_words()
        return [
            recipient[1]
            for recipient in recipients
            if recipient in words and words[recipient].state == "starting"
        ]


def least_version(recipients: Recipients, outcomes: Sequence[Outcome], waited_s: float) -> int:
    """The least weight version that those who were told have answered with.

    Raises:
        WeightsError: One refused.
        BusError: One did not answer.
    """
    for outcome in outcomes:
        if outcome.code:
            where = f"lane {outcome.lane}, {outcome.role}: " if len(recipients) > 1 else ""
            raise WeightsError(where + outcome.message, code=outcome.code)
    answered = {(outcome.lane, outcome.role) for outcome in outcomes}
    for lane, role in recipients:
        if (lane, role) not in answered:
            raise BusError(
                f"{role} of lane {lane} did not answer within {waited_s:.0f} s, or was "
                "started anew; look at `nano-inference status`",
                code="no_answer",
            )
    return min(outcome.weight_version for outcome in outcomes)
