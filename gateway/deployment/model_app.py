"""The application of one model of a deployment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp

from ...config import RequestError, shown
from ...pipeline.client import BusClient
from ...store.registry import ModelRecord
from ..interfaces import Interfaces
from ..server.http import EngineError

RETRY_S = 5.0
"""When to come again to a model that is loading."""


class ModelApp:
    """All interfaces of a model, as an application of their own.

    Attributes:
        record: What is written down of the model, as it was last read.
        engine: The client of the model, which is closed with this.
        interfaces: To the model.
        app: What answers.
    """

    def __init__(
        self, record: ModelRecord, engine: BusClient, interfaces: Interfaces, app: ASGIApp
    ) -> None:
        self.record = record
        self.engine = engine
        self.interfaces = interfaces
        self.app = app
        self._calls = 0
        interfaces.readiness.consider(self.trouble)

    @property
    def id(self) -> str:
        return self.record.spec.id

    @property
    def idle(self) -> bool:
        """Whether no call of it is under way here."""
        used = self._calls or not self.interfaces.submissions.idle
        return not used and self.interfaces.kept.idle

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Open while a call is under way."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    def trouble(self) -> str:
        """Why it takes no requests, as far as that is written down; "" when it does."""
        record = self.record
        if record.takes_requests:
            return ""
        because = f" ({record.reason})" if record.reason else ""
        return f"the model {shown(self.id)} is {record.state}{because}"

    def check_loaded(self) -> None:
        """Raises EngineError (model_not_loaded) when it takes no requests."""
        if trouble := self.trouble():
            loading = self.record.state == "loading"
            raise EngineError(
                f"{trouble}; load it, or ask for another",
                code="model_not_loaded",
                retry_after_s=RETRY_S if loading else None,
            )

    async def aclose(self) -> None:
        """Lets go of what it holds, when no call of it is under way any more."""
        await self.interfaces.kept.aclose()
        await self.engine.aclose()


class UnknownModel(RequestError):
    """There is no such model; in a form that clients of all interfaces look for.

    Attributes:
        param: The field that names it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, code="model_not_found")
        self.param = "model"
