"""Control messages to the stages of a pipeline, and their outcomes."""

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
from ..config import REPLICATED, BusError, NanoInferenceError, WeightsError, role_of, split_role
from ..store.board import StageReport
from ..store.registry import Records
from .health import replicas_of

T = TypeVar("T")

Recipients = list[tuple[str, str]]
"""(lane, role) of each."""

LOOK_S = 2.0
"""Interval of the check whether the stages that have not answered are still the same ones."""

PARTING_S = 1.0
"""Longest wait for remaining answers after a stage was lost."""

_POLL_S = 0.05


class SharedCall(Generic[T]):
    """One call for many concurrent callers, who share its result.

    A caller gets the result of a call that began after its own, so no result is out of date. All
    callers during one call share the next one: a thousand at a time cost two calls.
    """

    def __init__(self, call: Callable[[], Awaitable[T]]) -> None:
        self._call = call
        self._running: asyncio.Task[T] | None = None
        self._next: asyncio.Task[T] | None = None

    async def result(self) -> T:
        """Return the result of the next call to begin."""
        if self._next is None:
            self._next = asyncio.create_task(self._run_after(self._running))
        return await asyncio.shield(self._next)

    async def _run_after(self, running: asyncio.Task[T] | None) -> T:
        if running is not None:
            await asyncio.wait([running])
        self._running, self._next = self._next, None
        return await self._call()


class StageControl:
    """Finds the stages that a client controls, sends them messages, and collects their outcomes."""

    def __init__(self, bus: Bus, sender: str) -> None:
        """`sender`: the name under which control messages are sent."""
        self._bus = bus
        self._sender = sender
        self._lanes = SharedCall(bus.lanes)
        self._models = SharedCall(bus.store.models.read)

    async def models(self) -> Records:
        """Return the models of the deployment by id; none on the bus of one model."""
        return {} if self._bus.model else await self._models.result()

    async def recipients(self, stage: str, lane: str | None = None) -> Recipients:
        """Return a stage and its replicas in every living lane, or in `lane` alone.

        Raises:
            BusError: `unknown_lane`: the lane is not alive. `model_required`: the bus is that of
                several models (`Bus.of_model`).
        """
        if models := await self.models():
            raise BusError(
                f"there are several models here; name one of them: {', '.join(models)}",
                code="model_required",
            )
        lanes = sorted(await self._lanes.result())
        if lane is not None:
            if lane not in lanes:
                raise BusError(
                    f"no lane {lane!r:.80} lives here; living lanes: {', '.join(lanes)}",
                    code="unknown_lane",
                )
            lanes = [lane]
        if stage not in REPLICATED:
            return [(name, stage) for name in lanes]
        reports = await self._bus.store.board.read()
        return [
            (name, role_of(stage, replica))
            for name in lanes
            for replica in replicas_of(report.stage for report in reports if report.lane == name)
        ]

    async def ready_recipients(
        self, stage: str, limit_s: float, lane: str | None = None
    ) -> Recipients:
        """As `recipients`, once all have loaded: before that they receive no messages.

        Raises:
            BusError: Some are still loading after `limit_s`; or as `recipients`.
        """
        recipients, end = await self.recipients(stage, lane), time.monotonic() + limit_s
        while True:
            reports = await self._reports()
            loading = [
                each[1]
                for each in recipients
                if each in reports and reports[each].state == "starting"
            ]
            if not loading:
                return recipients
            if time.monotonic() > end:
                raise BusError(
                    f"{', '.join(loading)} can't answer while it is loading; wait until "
                    "`nano-inference status` says that it is ready",
                    code="no_answer",
                )
            await anyio.sleep(_POLL_S)

    async def send(
        self,
        stage: str,
        body: Message | Callable[[int], Message],
        recipients: Recipients,
        operation_id: str = "",
    ) -> None:
        """Send a message, which may depend on the recipient's index.

        `operation_id`: the id of their answers; "" for no answers.
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

    async def request(
        self,
        stage: str,
        body: Message | Callable[[int], Message],
        limit_s: float,
        recipients: Recipients,
    ) -> list[Outcome]:
        """Send a message, and return the outcomes that come within `limit_s`.

        A stage that restarts loses the message, which ends the wait.
        """
        operation_id, end = uuid.uuid4().hex, time.monotonic() + limit_s
        before = await self._reports()
        await self.send(stage, body, recipients, operation_id)
        replies = self._bus.replies
        while True:
            left_s = max(0.0, end - time.monotonic())
            outcomes = await replies.outcomes(operation_id, len(recipients), min(left_s, LOOK_S))
            if len(outcomes) >= len(recipients) or left_s <= LOOK_S:
                return outcomes
            answered = {(outcome.lane, outcome.role) for outcome in outcomes}
            waiting = [recipient for recipient in recipients if recipient not in answered]
            now = await self._reports()
            if any(_restarted(before.get(each), now.get(each)) for each in waiting):
                # It may have answered before its end.
                return await replies.outcomes(operation_id, len(recipients), PARTING_S)

    async def _reports(self) -> dict[tuple[str, str], StageReport]:
        """Return the last report of each stage, by lane and role."""
        last: dict[tuple[str, str], StageReport] = {}
        for report in await self._bus.store.board.read():  # the youngest of a role comes first
            last.setdefault((report.lane, report.stage), report)
        return last


def _restarted(before: StageReport | None, now: StageReport | None) -> bool:
    if before is None or now is None or not before.incarnation or not now.incarnation:
        return False
    return before.incarnation != now.incarnation


def least_version(
    recipients: Recipients,
    outcomes: Sequence[Outcome],
    waited_s: float,
    error: type[NanoInferenceError] = WeightsError,
) -> int:
    """Return the least version in the outcomes of all recipients.

    Raises:
        NanoInferenceError: A stage refused; of the class `error`.
        BusError: A stage did not answer.
    """
    for outcome in outcomes:
        if outcome.code:
            where = f"lane {outcome.lane}, {outcome.role}: " if len(recipients) > 1 else ""
            raise error(where + outcome.message, code=outcome.code)
    answered = {(outcome.lane, outcome.role) for outcome in outcomes}
    for lane, role in recipients:
        if (lane, role) not in answered:
            raise BusError(
                f"{role} of lane {lane} did not answer within {waited_s:.0f} s: it has restarted, "
                "or still has requests in flight; look at `nano-inference status`",
                code="no_answer",
            )
    return min(outcome.weight_version for outcome in outcomes)
