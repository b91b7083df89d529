"""What a client of a deployment of several models asks of all of them together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec.json import decode

from ..bus import Bus, RequestEntry
from ..bus.control import Cancel
from ..bus.public import Completion, ErrorInfo, Timings
from ..config import NOT_PERMITTED, BusError, FairnessConfig
from ..store.board import StageReport
from ..telemetry import now_ns
from .health import lanes_of, verdict, weights_trouble
from .operators import Operators


class Deployment:
    """All models of a deployment, or the only one, which is nowhere written down."""

    def __init__(
        self, bus: Bus, operators: Operators, bus_of: Callable[[str], Bus], sender: str
    ) -> None:
        """Args: the client's bus, and who operates on it; the bus of a model by its id, which
        stays open; who sends."""
        self._bus = bus
        self._operators = operators
        self._bus_of = bus_of
        self._sender = sender

    async def cancel(self, cancel: Cancel) -> None:
        """Ends a request, whatever its model and wherever it waits.

        Each lane is told, since whose it is, only they know. What it is told before it takes the
        request, it remembers.
        """
        models = await self._operators.models()
        if not models:
            await _tell(self._operators, cancel)
            return
        if cancel.entry_id:
            await self._end_at_entrance(cancel)
        there = [id for id, each in models.items() if each.state not in ("unloaded", "failed")]
        each = [Operators(self._bus_of(model), self._sender) for model in there]
        await asyncio.gather(*(_tell(operators, cancel) for operators in each))

    async def _end_at_entrance(self, cancel: Cancel) -> None:
        def answer(entry: RequestEntry) -> Completion:
            return Completion(
                request_id=cancel.request_id,
                entry_id=entry.entry_id,
                status="cancelled",
                error=ErrorInfo(code=cancel.code, message=cancel.message),
                timings=Timings(finished_ns=now_ns()),
            )

        try:
            epoch = await self._bus.next_epoch()
            await self._bus.routing.refuse([cancel.entry_id], answer, epoch)
        except BusError as error:
            # Who may only ask for it: the lane that gets the request ends it.
            if error.code != NOT_PERMITTED:
                raise

    async def reports(self) -> list[StageReport]:
        """How the stages of all models are, by model."""
        models = await self._operators.models()
        boards = [self._bus_of(model).store.board.read() for model in models or [self._bus.model]]
        return [report for board in await asyncio.gather(*boards) for report in board]

    async def trouble(self) -> str:
        """Why no model would serve requests, in one sentence; "" when one does."""
        lanes = lanes_of(await self.reports())
        models = await self._operators.models()
        if not models:
            return verdict(lanes) or weights_trouble(lanes)
        reasons: list[str] = []
        for model, record in models.items():
            reason = f"it is {record.state}" + (f": {record.reason}" if record.reason else "")
            if record.state in ("ready", "draining"):
                own = [lane for lane in lanes if lane.model == model]
                reason = verdict(own) or weights_trouble(own)
            if not reason:
                return ""
            reasons.append(f"model {model}: {reason}")
        return "; ".join(reasons)

    async def fairness(self) -> dict[str, FairnessConfig]:
        """The fairness settings in force, by lane, or model and lane."""
        return {
            f"{report.model}:{report.lane}".removeprefix(":"): decode(settings, type=FairnessConfig)
            for report in await self.reports()
            if isinstance(settings := report.load.get("settings"), str)
        }


async def _tell(operators: Operators, cancel: Cancel) -> None:
    await operators.tell("admission", cancel, await operators.everyone("admission"))
