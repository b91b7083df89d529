"""The names that requests may give in `model`: the model's, and those of its adapters."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio

from ...bus.public import GenerateRequest
from ...config import BusError, Config, RequestError, shown
from ...pipeline.client import BusClient
from ...pipeline.models import adapters_of
from ...store.board import LoadedAdapter
from ..policy.caller import Caller
from ..policy.models import check_allowed
from .origin import Origin
from .readiness import ASKED_EVERY_S
from .recent import Recent

_TOLD_WITHIN_S = 5.0


class ServedModels:
    """What every lane behind a gateway serves, as the stages have told lately.

    Of an adapter that somebody else has loaded it knows within `ASKED_EVERY_S` and the second in
    which stages report.

    Attributes:
        default: The model of requests that name none.
    """

    def __init__(self, engine: BusClient, config: Config) -> None:
        self.default = config.engine.model_name
        self._own = ("", self.default, *config.engine.model_aliases)
        self._engine = engine
        self._reports = Recent(engine.reports, ASKED_EVERY_S)

    async def adapters(self) -> tuple[LoadedAdapter, ...]:
        """Those that requests may name; none while nobody has told."""
        try:
            return adapters_of(await self._reports.get())
        except BusError:
            return ()

    async def check(self, model: str, caller: Caller) -> None:
        """Check that a caller may use what has a name; a refusal names nothing else.

        Raises:
            RequestError: unknown_model, model_not_found.
        """
        own = model in self._own
        check_allowed(caller, self.default if own else model)
        if own:
            return
        adapters = [adapter.id for adapter in await self.adapters()]
        if model not in adapters:
            raise unknown_model(model, self.default, *adapters)

    async def wait_for(self, id: str, *, loaded: bool) -> None:
        """Waits until an adapter that was loaded, or unloaded, is known to be; not for long."""
        with anyio.move_on_after(_TOLD_WITHIN_S):
            while (id in [each.id for each in await self.adapters()]) != loaded:  # noqa: ASYNC110
                await anyio.sleep(ASKED_EVERY_S / 5)


def unknown_model(model: str, *known: str) -> RequestError:
    """Nothing has this name; `known`: what does."""
    return RequestError(
        f"there is no model {shown(model)} here; ask for {' or '.join(map(repr, known))}",
        code="unknown_model",
    )


class OnlyServed:
    """Refuses requests for a model that there is not, whatever interface they came by."""

    def __init__(self, served: ServedModels) -> None:
        self._served = served

    @asynccontextmanager
    async def admit(
        self, origin: Origin, requests: Sequence[GenerateRequest]
    ) -> AsyncIterator[None]:
        for request in requests:
            await self._served.check(request.model, origin.caller)
        yield
