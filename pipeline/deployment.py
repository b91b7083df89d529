"""The models of a deployment: their state, loading and unloading, cancelling."""

from __future__ import annotations

import asyncio
import math
from typing import Literal

from msgspec.json import decode

from ..bus import Bus, RequestEntry
from ..bus.backlog import Backlog
from ..bus.control import Cancel, LoadModel, UnloadModel
from ..bus.entries import queued_only
from ..bus.links import MODEL_MANAGER
from ..bus.public import Completion, ErrorInfo
from ..config import NOT_PERMITTED, BusError, FairnessConfig, ModelError, RequestError, shown
from ..stages.admission.checks import request_id_of
from ..store.board import StageReport
from ..store.registry import ModelRecord, find_model
from ..telemetry import now_ns
from .health import lanes_of, reason_of, role_trouble, roles_of
from .models import ModelStatus, only_model, served_names, status_of
from .stage_control import StageControl


class Deployment:
    """All models of a deployment; a single model needs no registry."""

    def __init__(self, bus: Bus, control: StageControl, sender: str) -> None:
        """`bus` and `control` are the client's; `sender` is the name of its messages."""
        self._bus = bus
        self._control = control
        self._sender = sender
        # Buses of other models, and of the whole deployment ("").
        self._buses: dict[str, Bus] = {}

    async def aclose(self) -> None:
        """Close the buses of other models."""
        for model in list(self._buses):
            await self._buses.pop(model).aclose()

    async def cancel(self, cancel: Cancel) -> None:
        """End a request of any model, in whichever stage it is.

        Every lane gets the message, since only lanes have their requests. A lane that gets the
        message before the request remembers it.
        """
        models = await self._control.models()
        if not models:
            await _cancel_in_lanes(self._control, cancel)
            return
        if cancel.entry_id:
            await self._cancel_unrouted(cancel)
        there = [id for id, each in models.items() if each.state not in ("unloaded", "failed")]
        controls = [StageControl(self._bus_of(model), self._sender) for model in there]
        await asyncio.gather(*(_cancel_in_lanes(control, cancel) for control in controls))

    async def _cancel_unrouted(self, cancel: Cancel) -> None:
        def answer(entry: RequestEntry) -> Completion | None:
            if entry.key != cancel.key:
                return None
            error = ErrorInfo(code=cancel.code, message=cancel.message)
            return terminal_message(entry, error, "cancelled")

        try:
            await self._bus.routing.refuse([cancel.entry_id], answer, await self._bus.next_epoch())
        except BusError as error:
            # Without permission, the lane that gets the request ends it.
            if error.code != NOT_PERMITTED:
                raise

    async def reports(self) -> list[StageReport]:
        """Return the reports of all models' stages, of the last seconds, by model."""
        models = await self._control.models()
        boards = [self._bus_of(model).store.board.read() for model in models or [self._bus.model]]
        return [report for board in await asyncio.gather(*boards) for report in board]

    async def trouble(self) -> str:
        """Return why no model would serve requests with the current weights; "" if one would.

        About a second old, the interval of the stages' reports.
        """
        lanes = lanes_of(await self.reports())
        states = {
            id: f"{each.state}: {each.reason}" if each.reason else each.state
            for id, each in (await self._control.models()).items()
        }
        return reason_of(states, lanes, weights=True)

    async def role_trouble(self, role: str) -> str:
        """Return why no model has a replica with a role that works; "" if one has.

        Args:
            role: "prefill" or "decode".
        """
        lanes = lanes_of(await self.reports())
        models = sorted({lane.model for lane in lanes}) or [""]
        reasons = [role_trouble([e for e in lanes if e.model == model], role) for model in models]
        return "" if "" in reasons else "; ".join(reasons)

    async def roles(self) -> dict[str, tuple[str, ...]]:
        """Return the replicas' roles by lane, as `fairness`."""
        return {
            f"{lane.model}:{lane.lane}".removeprefix(":"): tuple(roles_of(lane).values())
            for lane in lanes_of(await self.reports())
        }

    async def fairness(self) -> dict[str, FairnessConfig]:
        """Return the fairness settings by lane, about a second old.

        With several models the keys are `MODEL:LANE`.
        """
        return {
            f"{report.model}:{report.lane}".removeprefix(":"): decode(settings, type=FairnessConfig)
            for report in await self.reports()
            if isinstance(settings := report.load.get("settings"), str)
        }

    async def models(self) -> list[ModelStatus]:
        """Return the models of the deployment, in the order of their ids."""
        records = await self._bus.store.models.read()
        if not records:
            return only_model(
                await self._bus.store.board.read(), await self._bus.requests.backlog()
            )
        for model in set(self._buses) - {*records, ""}:
            await self._buses.pop(model).aclose()
        statuses = [self._status(record) for _, record in sorted(records.items())]
        return list(await asyncio.gather(*statuses))

    async def find(self, name: str) -> str:
        """Return the id of the model with this name; "" for the only one.

        Raises:
            RequestError: unknown_model.
        """
        if records := await self._bus.store.models.read():
            return find_model(name, records.values()).id
        # A single model needs no name.
        known = sorted({name for status in await self.models() for name in served_names(status)})
        if known and name not in known:
            raise RequestError(
                f"there is no model {shown(name)} here; known: {', '.join(known)}",
                code="unknown_model",
            )
        return ""

    async def backlog(self) -> Backlog:
        """Return the numbers of waiting and running requests, of a model's client or of all models.

        Raises:
            BusError: The bus can't be reached.
        """
        models = await self._control.models()
        if not models:
            return await self._bus.requests.backlog()
        buses = [self._bus_of(model) for model in ("", *models)]
        unrouted, *each = await asyncio.gather(*(bus.requests.backlog() for bus in buses))
        return Backlog(
            waiting=unrouted.waiting + sum(one.waiting for one in each),
            # Requests that a router has taken are on their way to their models.
            pending=sum(one.pending for one in each),
            dead=unrouted.dead,  # all models share the dead letters
            queue_length=unrouted.queue_length + sum(one.queue_length for one in each),
        )

    async def manage(self, wish: LoadModel | UnloadModel) -> ModelStatus:
        """Have the model manager load or unload a model, and return its status then.

        Raises:
            ModelError: The manager refused or failed.
            BusError: `no_model_manager`; or the manager did not answer.
        """
        bus = self._bus_of("")
        reports = await bus.store.board.read()  # the youngest of a role comes first
        manager = next((each for each in reports if each.stage == MODEL_MANAGER), None)
        if manager is None:
            raise BusError(
                "no process loads and unloads models here; start `nano-inference up` with `models` "
                "in its settings",
                code="no_model_manager",
            )
        before = await bus.store.models.read()
        control, recipients = StageControl(bus, self._sender), [(manager.lane, MODEL_MANAGER)]
        outcomes = await control.request(MODEL_MANAGER, wish, math.inf, recipients)
        if not outcomes:
            raise BusError(
                "the deployment has stopped or restarted before it answered; look at "
                "`nano-inference models`",
                code="no_answer",
            )
        if outcomes[0].code:
            raise ModelError(outcomes[0].message, code=outcomes[0].code)
        after = await bus.store.models.read()
        records = before | after
        record = records[find_model(wish.id, records.values()).id]
        if record.spec.id not in after:
            record = ModelRecord(spec=record.spec, reason="it is removed")
        return await self._status(record)

    async def _status(self, record: ModelRecord) -> ModelStatus:
        bus = self._bus_of(record.spec.id)
        reports, backlog = await asyncio.gather(bus.store.board.read(), bus.requests.backlog())
        return status_of(record, reports, backlog)

    def _bus_of(self, model: str) -> Bus:
        """Return the bus of a model, or of the whole deployment (""); `aclose` closes it."""
        if model == self._bus.model:
            return self._bus
        if model not in self._buses:
            self._buses[model] = self._bus.of_model(model)
        return self._buses[model]


def terminal_message(
    entry: RequestEntry,
    error: ErrorInfo,
    status: Literal["error", "cancelled"] = "error",
    *,
    model: str = "",
) -> Completion:
    """Return the terminal message of a request that no lane has taken."""
    usage, timings = queued_only(entry, now_ns())
    return Completion(
        request_id=request_id_of(entry),
        entry_id=entry.entry_id,
        status=status,
        error=error,
        model=model,
        usage=usage,
        timings=timings,
    )


async def _cancel_in_lanes(control: StageControl, cancel: Cancel) -> None:
    await control.send("admission", cancel, await control.recipients("admission"))
