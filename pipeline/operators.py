"""The stages that do what a client asks for: who they are, telling them, and their answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

import anyio
import msgspec

from ..bus import Bus, Outcome, StageReport
from ..bus.links import CONTROL, at
from ..bus.messages import Message
from ..config import REPLICATED, BusError, role_of, split_role
from .health import replicas_of

Told = list[tuple[str, str]]
"""(lane, role) of each."""

LOOK_S = 2.0
"""How often to look whether those who have not answered are still there."""

PARTING_S = 1.0
"""How long to wait for the last answers once somebody is lost."""

_POLL_S = 0.05


class Operators:
    """Those that can be heard of on a bus."""

    def __init__(self, bus: Bus, sender: str) -> None:
        """`sender`: in whose name they are told."""
        self._bus = bus
        self._sender = sender

    async def everyone(self, stage: str, lane: str | None = None) -> Told:
        """A stage, and each of its replicas that was heard of lately, in every lane that lives.

        Args:
            stage: One of the five.
            lane: Only this lane.

        Raises:
            BusError: `unknown_lane`: it does not live.
        """
        lanes = sorted(await self._bus.lanes())
        if lane is not None:
            if lane not in lanes:
                raise BusError(
                    f"no lane {lane!r:.80} lives here; those that do: {', '.join(lanes)}",
                    code="unknown_lane",
                )
            lanes = [lane]
        found: Told = []
        for each in lanes:
            replicas = [0]
            if stage in REPLICATED:
                reports = await self._bus.stages.read()
                replicas = replicas_of(report.stage for report in reports if report.lane == each)
            found += [(each, role_of(stage, replica)) for replica in replicas]
        return found

    async def started(self, stage: str, limit_s: float, lane: str | None = None) -> Told:
        """As `everyone`, once all have loaded what they need: before that they hear nothing.

        Raises:
            BusError: Some are still loading after this time; or as `everyone`.
        """
        told, end = await self.everyone(stage, lane), time.monotonic() + limit_s
        while loading := await self._loading(told):
            if time.monotonic() > end:
                raise BusError(
                    f"{', '.join(loading)} can't answer while it is loading; wait until "
                    "`nano-inference status` says that it is ready",
                    code="no_answer",
                )
            await anyio.sleep(_POLL_S)
        return told

    async def tell(self, stage: str, body: Message | Callable[[int], Message], told: Told) -> None:
        """Sends them a message, which may depend on the index of who is told."""
        senders = [
            self._bus.sender(at(CONTROL[stage], split_role(role)[1]), self._sender, lane)
            for lane, role in told
        ]
        for index, sender in enumerate(senders):
            await sender.send(body(index) if callable(body) else body)
        for sender in senders:
            await sender.flush()

    async def ask(
        self, stage: str, body: Message | Callable[[int], Message], limit_s: float, told: Told
    ) -> list[Outcome]:
        """Tells them, and gives the answers that come in time.

        What a stage was told is lost when it is started anew, and then not waited for any more.
        """
        operation_id, end = uuid.uuid4().hex, time.monotonic() + limit_s
        before = await self._incarnations()

        def named(index: int) -> Message:
            wish = body(index) if callable(body) else body
            return msgspec.structs.replace(wish, operation_id=operation_id)

        await self.tell(stage, named, told)
        replies = self._bus.replies
        while True:
            left_s = max(0.0, end - time.monotonic())
            outcomes = await replies.outcomes(operation_id, len(told), min(left_s, LOOK_S))
            if len(outcomes) >= len(told) or left_s <= LOOK_S:
                return outcomes
            answered = {(outcome.lane, outcome.role) for outcome in outcomes}
            waiting = [each for each in told if each not in answered and each in before]
            now = await self._incarnations()
            if any(now.get(each, before[each]) != before[each] for each in waiting):
                # It may have answered as its last act.
                return await replies.outcomes(operation_id, len(told), PARTING_S)

    async def _last_words(self) -> dict[tuple[str, str], StageReport]:
        """What was heard last, by lane and role."""
        found: dict[tuple[str, str], StageReport] = {}
        for report in await self._bus.stages.read():  # the youngest of a role comes first
            found.setdefault((report.lane, report.stage), report)
        return found

    async def _incarnations(self) -> dict[tuple[str, str], str]:
        """The stage objects, of those that are known."""
        words = await self._last_words()
        return {each: word.incarnation for each, word in words.items() if word.incarnation}

    async def _loading(self, told: Told) -> list[str]:
        """The roles of those that are loading, as far as is known."""
        words = await self._last_words()
        return [each[1] for each in told if each in words and words[each].state == "starting"]
