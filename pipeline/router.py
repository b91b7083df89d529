"""The router of several models: moves each request from the deployment's stream to its model's."""

from __future__ import annotations

import time

import anyio

from ..bus import Bus, RequestEntry
from ..bus.public import Completion, ErrorInfo
from ..bus.routing import Unrouted
from ..config import BusError, ChannelClosed, RequestError, shown
from ..config.logger import get_logger
from ..store.registry import MALFORMED, NOT_LOADED, Records, find_model
from ..telemetry import Metrics, instruments, names
from .deployment import terminal_message

READ_EVERY_S = 1.0
"""Seconds for which the models' records are cached. The bus itself checks whether a model takes
requests, atomically with the move.
"""

_RETRY_S = 1.0


class Router:
    """Moves requests to the streams of their models, and refuses those of unknown models.

    It reads `model` alone: tokenizer and limits belong to each model's admission. One router is
    enough, and any number of processes may run one; without any, requests wait.
    """

    def __init__(self, bus: Bus, metrics: Metrics | None = None) -> None:
        """`bus`: the bus of the deployment, not of a model."""
        self._bus = bus
        self._metrics = metrics or Metrics()
        self._records: Records = {}
        self._read_at = -READ_EVERY_S

    async def run_forever(self) -> None:
        """Route requests until the bus is closed; retry while it can't be reached."""
        log = get_logger()
        while True:
            try:
                await self.route_once()
            except ChannelClosed:
                return
            except BusError as error:
                log.warning("requests_not_routed", error=str(error))
                await anyio.sleep(_RETRY_S)

    async def route_once(self) -> None:
        """Wait for requests, and move or refuse each of them.

        Raises:
            ChannelClosed: The bus was closed.
            BusError: The transport refuses, or can't be reached.
        """
        waiting = await self._bus.routing.unrouted()
        await self._read_models()
        moves: list[tuple[str, str]] = []
        errors: dict[str, ErrorInfo] = {}
        for request in waiting:
            try:
                moves.append((request.entry_id, await self._model_of(request)))
            except RequestError as error:
                errors[request.entry_id] = ErrorInfo(code=error.code, message=error.message)
        models = dict(moves)
        for entry_id, code in await self._bus.routing.move(moves):
            message = self._not_moved(code, models.pop(entry_id))
            errors[entry_id] = ErrorInfo(code=code, message=message)
        for model in models.values():
            self._metrics.record(instruments.MODEL_ROUTES, 1, {names.REQUEST_MODEL: model})
        if errors:
            await self._refuse(errors)

    async def _model_of(self, request: Unrouted) -> str:
        try:
            return find_model(request.model, self._records.values()).id
        except RequestError:
            # The model may be new.
            await self._read_models(anew=True)
            return find_model(request.model, self._records.values()).id

    async def _read_models(self, *, anew: bool = False) -> None:
        now = time.monotonic()
        if anew or now - self._read_at >= READ_EVERY_S:
            self._records = await self._bus.store.models.read()
            self._read_at = now

    def _not_moved(self, code: str, model: str) -> str:
        """Return why the bus did not move a request."""
        if code == NOT_LOADED:
            record = self._records.get(model)
            state = record.state if record else "unloaded"
            return (
                f"the model {shown(model)} takes no requests: it is {state}; load it, or choose "
                "another"
            )
        if code == MALFORMED:
            return "the entry has more fields than any request"
        return (
            f"the stream of the model {shown(model)} has a later entry, so the request could not "
            "be put there in its order; send it again"
        )

    async def _refuse(self, errors: dict[str, ErrorInfo]) -> None:
        def answer(entry: RequestEntry) -> Completion:
            return terminal_message(entry, errors[entry.entry_id])

        for error in errors.values():
            labels = {names.STATUS: "error", names.ERROR_TYPE: error.code}
            self._metrics.record(instruments.REQUESTS, 1, labels)
        await self._bus.routing.refuse(list(errors), answer, await self._bus.next_epoch())
