"""The entrance of a deployment of several models: each request goes to the stream of its model."""

from __future__ import annotations

import time

import anyio

from ..bus import Bus, RequestEntry
from ..bus.public import Completion, ErrorInfo, Timings
from ..bus.routing import Unrouted
from ..config import BusError, ChannelClosed, RequestError, shown
from ..config.logger import get_logger
from ..stages.admission.checks import request_id_of
from ..store.registry import MALFORMED, NOT_LOADED, NOT_ROUTED, Records, find_model
from ..telemetry import Metrics, instruments, names, now_ns

READ_EVERY_S = 1.0
"""For how long what was read of the models counts. Whether one takes requests is looked at by the
bus itself, in the same step in which a request is moved."""

_RETRY_S = 1.0


class Router:
    """Moves requests from the entrance to their models, and refuses those that have none.

    It decides by `model` alone, so it needs no tokenizer and no limits: those are the model's own
    admission's. Any number of processes may run one, and one of them is enough; while none runs,
    requests wait at the entrance.
    """

    def __init__(self, bus: Bus, metrics: Metrics | None = None) -> None:
        """`bus`: of the deployment, and of none of its models."""
        self._bus = bus
        self._metrics = metrics or Metrics()
        self._records: Records = {}
        self._read_at = -READ_EVERY_S

    async def run_forever(self) -> None:
        """Routes what comes. While the bus is away it waits.

        Returns when the bus was closed.
        """
        log = get_logger()
        while True:
            try:
                await self.route_once()
            except ChannelClosed:
                return
            except BusError as error:
                log.warning("requests_not_routed", error=error.message)
                await anyio.sleep(_RETRY_S)

    async def route_once(self) -> None:
        """Waits for requests, and moves or refuses each of them.

        Raises:
            ChannelClosed: The bus was closed.
            BusError: The transport refuses, or can't be reached.
        """
        waiting = await self._bus.routing.unrouted()
        await self._read_models()
        places: list[tuple[str, str]] = []
        errors: dict[str, ErrorInfo] = {}
        for request in waiting:
            try:
                places.append((request.entry_id, await self._place_of(request)))
            except RequestError as error:
                errors[request.entry_id] = ErrorInfo(code=error.code, message=error.message)
        models = dict(places)
        for entry_id, code in await self._bus.routing.move(places):
            model = models.pop(entry_id)
            errors[entry_id] = self._unmoved(code, model)
        for model in models.values():
            self._metrics.record(instruments.MODEL_ROUTES, 1, {names.REQUEST_MODEL: model})
        if errors:
            await self._refuse(errors)

    async def _place_of(self, request: Unrouted) -> str:
        try:
            return find_model(request.model, self._records.values()).id
        except RequestError:
            # It may have come a moment ago.
            await self._read_models(anew=True)
            return find_model(request.model, self._records.values()).id

    async def _read_models(self, *, anew: bool = False) -> None:
        now = time.monotonic()
        if anew or now - self._read_at >= READ_EVERY_S:
            self._records = await self._bus.store.models.read()
            self._read_at = now

    def _unmoved(self, code: str, model: str) -> ErrorInfo:
        if code == NOT_LOADED:
            return self._not_loaded(model)
        if code == MALFORMED:
            return ErrorInfo(code=MALFORMED, message="the entry has more fields than any request")
        return _not_routed(model)

    def _not_loaded(self, model: str) -> ErrorInfo:
        record = self._records.get(model)
        state = record.state if record else "unloaded"
        return ErrorInfo(
            code=NOT_LOADED,
            message=f"the model {shown(model)} takes no requests: it is {state}; load it, or ask "
            "for another",
        )

    async def _refuse(self, errors: dict[str, ErrorInfo]) -> None:
        def answer(entry: RequestEntry) -> Completion:
            return Completion(
                request_id=request_id_of(entry),
                entry_id=entry.entry_id,
                status="error",
                error=errors[entry.entry_id],
                timings=Timings(finished_ns=now_ns()),
            )

        for error in errors.values():
            labels = {names.STATUS: "error", names.ERROR_TYPE: error.code}
            self._metrics.record(instruments.REQUESTS, 1, labels)
        epoch = await self._bus.next_epoch()
        await self._bus.routing.refuse(list(errors), answer, epoch)


def _not_routed(model: str) -> ErrorInfo:
    return ErrorInfo(
        code=NOT_ROUTED,
        message=f"the stream of the model {shown(model)} has a later entry, so the request could "
        "not be put there in its order; send it again",
    )
