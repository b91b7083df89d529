"""Whom `models` asks, and has load and unload them: a server, or a deployment over its bus."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from ..config import BusError, ModelConfig
from ..pipeline.client import BusClient
from ..pipeline.models import ModelStatus
from .answerer import Place, ServedModel, Server
from .terminal import complain


class AdministersModels(Protocol):
    """All methods raise NanoInferenceError when it can't be reached, or refuses."""

    async def models(self) -> Sequence[ServedModel | ModelStatus]:
        """Those that there are, with as much as it tells of them."""

    async def load(self, model: str | ModelConfig) -> ModelStatus: ...

    async def unload(self, model: str, timeout_s: float | None) -> ModelStatus: ...

    async def remove(self, model: str, timeout_s: float | None) -> str:
        """Returns the id that it had."""


@asynccontextmanager
async def administering_models(place: Place) -> AsyncIterator[AdministersModels]:
    """A connection to it.

    Raises:
        NanoInferenceError: There is nobody.
    """
    # Each loads only what it takes.
    if isinstance(place, Server):
        from .http_models import HttpModels

        async with HttpModels(place) as server:
            yield server
    else:
        from .connection import connected

        async with connected(place) as client:
            yield BusModels(client)


class BusModels:
    """Over the bus."""

    def __init__(self, client: BusClient) -> None:
        self._client = client

    async def models(self) -> Sequence[ServedModel | ModelStatus]:
        found = await self._client.models()
        # As `BusAnswerer.check`: nobody is there, or what is there loads.
        if len(found) <= 1 and (trouble := await self._client.trouble()):
            if not found and not await self._client.reports():
                raise BusError(trouble)
            complain(f"waiting: {trouble}")
        return found

    async def load(self, model: str | ModelConfig) -> ModelStatus:
        return await self._client.load_model(model)

    async def unload(self, model: str, timeout_s: float | None) -> ModelStatus:
        return await self._client.unload_model(model, timeout_s=timeout_s)

    async def remove(self, model: str, timeout_s: float | None) -> str:
        removed = await self._client.unload_model(model, timeout_s=timeout_s, remove=True)
        return removed.id
