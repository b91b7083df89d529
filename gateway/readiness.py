"""Whether a request would be served, and why not: what the probes of all interfaces ask."""

from __future__ import annotations

from collections.abc import Callable

from ..pipeline.client import BusClient
from .recent import Recent

ASKED_EVERY_S = 0.5
"""The lanes tell once a second how they are; who asks more often gets the same answer."""

DRAINING = "the gateway is stopping and takes nothing new"


class Readiness:
    """Of a gateway and the lanes behind it.

    Attributes:
        draining: Whether it takes no new requests any more, since it is to stop.
    """

    def __init__(self, engine: BusClient) -> None:
        self.draining = False
        self._lanes = Recent(engine.trouble, ASKED_EVERY_S)
        self._known_here: list[Callable[[], str]] = []

    def consider(self, trouble: Callable[[], str]) -> None:
        """Has `model_trouble` ask this first: what is known here at once, "" for nothing."""
        self._known_here.append(trouble)

    async def trouble(self) -> str:
        """Why a request would not be served now, in one sentence; "" when it would.

        Raises:
            BusError: Nobody can tell.
        """
        return DRAINING if self.draining else await self.model_trouble()

    async def model_trouble(self) -> str:
        """The same of the lanes alone: whether one works, and lacks neither weights nor memory.

        Raises:
            BusError: Nobody can tell.
        """
        here = next(filter(None, (trouble() for trouble in self._known_here)), "")
        return here or await self._lanes.get()
