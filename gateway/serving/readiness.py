"""Whether a request would be served, and why not: what the probes of all interfaces ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .recent import Recent

ASKED_EVERY_S = 0.5
"""The lanes tell once a second how they are; who asks more often gets the same answer."""

DRAINING = "the gateway is stopping and takes nothing new"


class Engine(Protocol):
    """Whoever knows of lanes."""

    async def trouble(self) -> str:
        """Why requests would not be served now; "" when they would. Raises BusError."""


class Readiness:
    """Of a gateway and the lanes behind it.

    Attributes:
        draining: Whether it takes no new requests any more, since it is to stop.
    """

    def __init__(self, engine: Engine, within: Readiness | None = None) -> None:
        """`within`: of the gateway, where this is of one of its models."""
        self._draining = False
        self._within = within
        self._lanes = Recent(engine.trouble, ASKED_EVERY_S)
        self._known_here: list[Callable[[], str]] = []

    @property
    def draining(self) -> bool:
        return self._draining or (self._within is not None and self._within.draining)

    @draining.setter
    def draining(self, draining: bool) -> None:
        self._draining = draining

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
