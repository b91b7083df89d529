"""The models of a deployment, each with its application in this gateway."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import anyio

from ...config import BusError, ChannelClosed, ModelConfig, NanoInferenceError, RequestError, shown
from ...config.logger import get_logger
from ...pipeline.client import BusClient
from ...store.calls import DurableCall
from ...store.registry import ModelRecord, Records, find_model
from ..app import Application, Interfaces
from ..call import Call
from ..server.http import EngineError, FieldError
from ..serving.begun_calls import call_of_key
from ..serving.durable_calls import DurableCalls, model_of, not_found
from ..serving.lane_state import Readiness, Recent
from ..serving.model_names import alias_of

RETRY_S = 5.0
"""`Retry-After` for a model that is loading."""

READ_EVERY_S = 0.5
"""Period of reading the registry."""

_RECENT_S = 0.2
_MOST_TROUBLES = 3


@dataclass(eq=False)
class ModelApp:
    """All interfaces to a model, as an application of their own.

    Attributes:
        record: The model's entry in the registry, as last read.
        client: The model's client, closed with this.
        interfaces: The interfaces to the model.
        app: The ASGI application.
    """

    record: ModelRecord
    client: BusClient
    interfaces: Interfaces
    app: Application
    _calls: int = 0

    def __post_init__(self) -> None:
        self.interfaces.readiness.consider(self.trouble)

    @property
    def id(self) -> str:
        return self.record.spec.id

    @property
    def idle(self) -> bool:
        """Whether no call to the model is in flight here."""
        busy = self._calls or not self.interfaces.submissions.idle
        return not busy and self.interfaces.durable.idle

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Open while a call is in flight."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    def trouble(self) -> str:
        """Return why the model takes no requests, by the registry; "" if it does."""
        record = self.record
        if record.takes_requests:
            return ""
        reason = record.reason
        if record.state == "failed" and reason:
            reason = "/admin/models has the error"  # which may name folders of the server
        because = f" ({reason})" if reason else ""
        return f"the model {shown(self.id)} is {record.state}{because}"

    async def aclose(self) -> None:
        """Close what is held, once no call is in flight."""
        await self.interfaces.durable.aclose()
        await self.client.aclose()


class UnknownModel(FieldError):
    """There is no such model; in a form that clients of all interfaces look for."""

    def __init__(self, message: str) -> None:
        super().__init__(message, param="model", code="model_not_found")


class Models:
    """Creates the application of each model in the registry, and closes those of removed models."""

    def __init__(
        self, client: BusClient, configured: Sequence[ModelConfig], aliases: Mapping[str, str]
    ) -> None:
        """Args: the client of the deployment, the models of the settings, which count while the
        registry is empty, and `gateway.model_aliases`."""
        self._client, self._aliases = client, aliases
        self._configured = {spec.id: ModelRecord(spec=spec) for spec in configured}
        self._apps: dict[str, ModelApp] = {}
        self._retired: list[ModelApp] = []
        self._failed: dict[str, tuple[ModelConfig, str]] = {}
        self._records: Records = {}
        self._recent = Recent(self._read, _RECENT_S)
        self._make: Callable[[ModelRecord, BusClient], ModelApp]
        self._changed: Callable[[ModelApp, bool], None]

    def build_with(
        self,
        make: Callable[[ModelRecord, BusClient], ModelApp],
        changed: Callable[[ModelApp, bool], None],
    ) -> None:
        """Args: `make` creates a model's application, or raises NanoInferenceError; `changed` is
        called with each application that is added (True) or removed (False)."""
        self._make = make
        self._changed = changed
        self._take(self._configured)

    @property
    def apps(self) -> list[ModelApp]:
        """The applications of all models, by id."""
        return [app for _, app in sorted(self._apps.items())]

    @property
    def durable_calls(self) -> list[DurableCalls]:
        """The durable calls of all models, those of removed models included."""
        return [app.interfaces.durable for app in (*self._apps.values(), *self._retired)]

    @property
    def waiting(self) -> int:
        """The number of requests that wait here, for any model."""
        return sum(app.interfaces.submissions.waiting for app in self.apps)

    def names(self) -> set[str]:
        """Return the names of all models."""
        return {name for record in self._records.values() for name in record.names}

    def clients(self) -> Iterable[BusClient]:
        """Return the clients of all models that take requests."""
        return [app.client for app in self._apps.values() if app.record.takes_requests]

    async def find(self, name: str = "") -> ModelApp:
        """Return the model of a name; the default for "".

        Raises:
            RequestError: model_not_found; model_not_loaded, of one that can't be served here.
        """
        try:
            return self._find(name)
        except UnknownModel:
            # It may have just been added.
            await self.refresh()
            return self._find(name)

    async def loaded(self, name: str = "") -> ModelApp:
        """Return a model like `find`, if it takes requests. Raises also: model_not_loaded."""
        app = await self.find(name)
        if app.trouble():
            await self.refresh()
            app = await self.find(name)
        if trouble := app.trouble():
            raise EngineError(
                f"{trouble}; load it, or ask for another",
                code="model_not_loaded",
                retry_after_s=RETRY_S if app.record.state == "loading" else None,
            )
        return app

    async def of_call(self, call_id: str) -> ModelApp:
        """Return the model of a durable call, or the default if there is no such call.

        Raises:
            RequestError: stream_not_found: its model is gone.
            BusError: The bus can't be reached.
        """
        stored = await self._client.bus.store.calls.read(call_id)
        try:
            return await self.find(model_of(stored) if stored is not None else "")
        except UnknownModel:
            raise not_found(call_id) from None

    async def keyed(self, call: Call) -> str:
        """As `call_of_key`."""
        return await call_of_key(self._client.bus.store.calls, call)

    def owner_of(self, stored: DurableCall) -> DurableCalls | None:
        """Return the durable calls of a call's model; None if the model is gone."""
        app = self._apps.get(model_of(stored))
        return app.interfaces.durable if app else None

    async def trouble(self) -> str:
        """Return why no model would serve a request; "" if one would, or none is meant to.

        Raises:
            BusError: The bus can't be reached.
        """
        return await self._trouble_of_all(lambda readiness: readiness.model_trouble())

    async def role_trouble(self, role: str) -> str:
        """Return the trouble of the replicas with a role."""
        return await self._trouble_of_all(lambda readiness: readiness.role_trouble(role))

    async def _trouble_of_all(self, ask: Callable[[Readiness], Awaitable[str]]) -> str:
        troubles: list[str] = []
        for app in self.apps:
            if app.record.state != "unloaded":
                trouble = await ask(app.interfaces.readiness)
                if not trouble:
                    return ""
                troubles.append(trouble)
        return "; ".join(troubles[:_MOST_TROUBLES])

    async def refresh(self) -> None:
        """Read the registry. While the bus is away, nothing changes."""
        try:
            await self._recent.get()
        except ChannelClosed:
            raise
        except BusError as error:
            get_logger().debug("models_not_read", error=str(error))

    async def run_forever(self) -> None:
        """Read the registry periodically. Returns when the bus was closed."""
        while True:
            try:
                await self.refresh()
            except ChannelClosed:
                return
            await self._close_idle()
            await anyio.sleep(READ_EVERY_S)

    async def aclose(self) -> None:
        """Close all applications; their durable calls go on at other gateways."""
        for app in (*self._apps.values(), *self._retired):
            await app.aclose()

    def _find(self, name: str) -> ModelApp:
        if name not in self.names():
            name = alias_of(name, self._aliases) or name
        try:
            model = find_model(name, self._records.values()).id
        except RequestError as error:
            why = f"{error.message} (or have gateway.model_aliases serve it as another)"
            raise UnknownModel(why) from None
        if model in self._failed:
            raise EngineError(
                f"the model {shown(model)} can't be served here: {self._failed[model][1]}",
                code="model_not_loaded",
                remedy="load it again, or name another",
            )
        if (app := self._apps.get(model)) is None:
            raise UnknownModel(f"the model {shown(model)} is gone")
        return app

    async def _read(self) -> None:
        records = await self._client.bus.store.models.read()
        self._take(records or self._configured)

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
        try:
            app = self._make(record, self._client.of_model(model))
            self._changed(app, True)
        except NanoInferenceError as error:
            get_logger().error("model_not_served", model=model, error=str(error))
            self._failed[model] = (record.spec, error.message)
        else:
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
