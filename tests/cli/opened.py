"""A gateway in front of a pipeline that runs elsewhere."""

from __future__ import annotations

from typing import Any

from nano_inference import BusClient, Gateway
from nano_inference.config import Config


class Opened:
    """A gateway with a client of its own."""

    def __init__(self, config: Config) -> None:
        self._config = config

    async def __aenter__(self) -> Gateway:
        self._client = await BusClient.connect(self._config.bus).__aenter__()
        self._gateway = await Gateway(self._client, self._config).__aenter__()
        return self._gateway

    async def __aexit__(self, *error: Any) -> None:
        await self._gateway.__aexit__(None, None, None)
        await self._client.aclose()
