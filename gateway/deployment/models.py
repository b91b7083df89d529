"""The models of a deployment, as this gateway knows and serves them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import anyio

from ...config import (
    BusError,
    ChannelClosed,
    ModelConfig,
    NanoInferenceError,
    RequestError,
    shown,
)
from ...config.logger import get_logger
from ...pipeline.client import BusClient
from ...store.calls import KeptCall
from ...store.registry import ModelRecord, Records, find_model
from ..server.http import EngineError
from ..serving.durable_calls import KeptCalls, model_of, not_found
from ..serving.recent import Recent
from .model_app import ModelApp, UnknownModel

READ_EVERY_S = 0.5
"""So often it is looked what models there are."""

_ANEW_S = 0.2
# How many models are told of at most where none can serve.
_MOST_TOLD = 3

Make = Callable[[ModelRecord, BusClient], ModelApp]


class Models:
    """Makes the application of each model that there is, and lets go of those that are gone."""

    def __init__(self, engine: BusClient, known: Sequence[ModelConfig]) -> None:
        """Args: `engine` is the client of the deployment; `known` are the models of the settings,
        which count while nothing is written down."""
        self._engine = engine
        self._known = {spec.id: ModelRecord(spec=spec) for spec in known}
        self._apps: dict[str, ModelApp] = {}
        self._retired: list[ModelApp] = []
        self._failed: dict[str, tuple[ModelConfig, str]] = {}
        self._records: Records = {}
        self._recent = Recent(self._read, _ANEW_S)
        self._make: Make
        self._changed: Callable[[ModelApp, bool], None] = lambda app, there: None

    def made_by(self, make: Make, changed: Callable[[ModelApp, bool], None]) -> None:
        """Args: `make` makes the application of a model, or raises NanoInferenceError; `changed` is
        told of each that is there from now on, or not any more."""
        self._make = make
        self._changed = changed
        self._take(self._known)

    @property
    def apps(self) -> list[ModelApp]:
        """Of all models, in the order of their ids."""
        return [app for _, app in sorted(self._apps.items())]

    @property
    def attending(self) -> list[KeptCalls]:
        """Who attends calls here, those of models that are gone included."""
        return [app.interfaces.kept for app in (*self._apps.values(), *self._retired)]

    @property
    def waiting(self) -> int:
        """How many requests wait here, whatever they are for."""
        return sum(app.interfaces.submissions.waiting for app in self.apps)

    def names(self) -> set[str]:
        """All names by which a model may be asked for."""
        return {name for record in self._records.values() for name in record.names}

    def engines(self) -> Iterable[BusClient]:
        """The clients of all models that take requests."""
        return [app.engine for app in self._apps.values() if app.record.takes_requests]

    async def find(self, name: str = "") -> ModelApp:
        """The model that a name is of; with "" the default.

        Raises:
            RequestError: model_not_found; model_not_loaded, of one that can't be served here.
        """
        try:
            return self._find(name)
        except UnknownModel:
            # It may have come a moment ago.
            await self.look()
            return self._find(name)

    async def loaded(self, name: str = "") -> ModelApp:
        """As `find`, of a model that takes requests. Raises also: model_not_loaded."""
        app = await self.find(name)
        if app.trouble():
            await self.look()
            app = await self.find(name)
        app.check_loaded()
        return app

    async def of_call(self, call_id: str) -> ModelApp:
        """The model of a call that is kept, or the default where there is no such call.

        Raises:
            RequestError: stream_not_found: its model is gone.
            BusError: The bus can't be reached.
        """
        kept = await self._engine.bus.store.calls.read(call_id)
        try:
            return await self.find(model_of(kept) if kept is not None else "")
        except UnknownModel:
            raise not_found(call_id) from None

    def owner_of(self, kept: KeptCall) -> KeptCalls | None:
        """Who sees to a call that nobody attends; None where its model is gone."""
        app = self._apps.get(model_of(kept))
        return app.interfaces.kept if app else None

    async def trouble(self) -> str:
        """Why no model would serve a request; "" when one would, or none is meant to.

        Raises:
            BusError: Nobody can tell.
        """
        troubles: list[str] = []
        for app in self.apps:
            if app.record.state != "unloaded":
                trouble = await app.interfaces.readiness.model_trouble()
                if not trouble:
                    return ""
                troubles.append(trouble)
        return "; ".join(troubles[:_MOST_TOLD])

    async def look(self) -> None:
        """Looks what models there are now. While the bus is away it is as it was."""
        try:
            await self._recent.get()
        except BusError as error:
            get_logger().debug("models_not_read", error=error.message)

    async def run_forever(self) -> None:
        """Looks again and again. Returns when the bus was closed."""
        while True:
            try:
                await self._recent.get()
            except ChannelClosed:
                return
            except BusError as error:
                get_logger().debug("models_not_read", error=error.message)
            await self._close_idle()
            await anyio.sleep(READ_EVERY_S)

    def stop(self) -> None:
        """As `KeptCalls.stop`, of all."""
        for kept in self.attending:
            kept.stop()

    async def aclose(self) -> None:
        """Lets go of all, whose calls have ended or go on at other gateways."""
        for app in (*self._apps.values(), *self._retired):
            await app.aclose()

    def _find(self, name: str) -> ModelApp:
        try:
            model = find_model(name, self._records.values()).id
        except RequestError as error:
            raise UnknownModel(error.message) from None
        if model in self._failed:
            raise EngineError(
                f"the model {shown(model)} can't be served here: {self._failed[model][1]}",
                code="model_not_loaded",
            )
        if (app := self._apps.get(model)) is None:
            raise UnknownModel(f"the model {shown(model)} is gone")
        return app

    async def _read(self) -> None:
        records = await self._engine.bus.store.models.read()
        self._take(records or self._known)

    def _take(self, records: Records) -> None:
        for model, record in records.items():
            app = self._apps.get(model)
            if app is not None and app.record.spec == record.spec:
                app.record = record
                continue
            failed = self._failed.get(model)
            if failed is None or failed[0] != record.spec:
                self._retire(model)
                self._begin(record)
        for model in self._apps.keys() - records.keys():
            self._retire(model)
        self._failed = {name: each for name, each in self._failed.items() if name in records}
        self._records = records

    def _begin(self, record: ModelRecord) -> None:
        model = record.spec.id
        self._failed.pop(model, None)
        engine = self._engine.of_model(model)
        try:
            app = self._make(record, engine)
            self._changed(app, True)
        except NanoInferenceError as error:
            log = get_logger()
            log.error("model_not_served", model=model, error=error.message)
            self._failed[model] = (record.spec, error.message)
            return
        self._apps[model] = app

    def _retire(self, model: str) -> None:
        if (app := self._apps.pop(model, None)) is not None:
            self._changed(app, False)
            self._retired.append(app)

    async def _close_idle(self) -> None:
        idle = [app for app in self._retired if app.idle]
        self._retired = [app for app in self._retired if app not in idle]
        for app in idle:
            await app.aclose()
