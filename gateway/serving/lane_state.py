"""What was found out a moment ago need not be asked again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar

import anyio
import anyio.to_thread

from ...bus.public import GenerateRequest
from ...config import BusError, Config, NanoInferenceError, RequestError, shown, split_role
from ...pipeline.client import BusClient
from ...pipeline.models import adapters_of
from ...store.board import LoadedAdapter
from ...text.context_length import longest_context_of
from ..policy.caller import Caller, check_allowed
from .origin import Origin

T = TypeVar("T")


class Recent(Generic[T]):
    """The answer to a question, which is asked again when the last answer is old.

    However many ask at a time, the question is asked once: the others wait for that answer.
    """

    def __init__(self, ask: Callable[[], Awaitable[T]], lasts_s: float) -> None:
        """Args: what is asked, and for how long its answer counts, be it an error."""
        self._ask = ask
        self._lasts_s = lasts_s
        self._asking = anyio.Lock()
        self._answers: list[T] = []
        self._error: NanoInferenceError | None = None
        self._until_s = -1.0

    async def get(self) -> T:
        """The answer. Raises what NanoInferenceError asking raised."""
        async with self._asking:
            if anyio.current_time() >= self._until_s:
                self._answers, self._error = [], None
                try:
                    self._answers = [await self._ask()]
                except NanoInferenceError as error:
                    self._error = error
                self._until_s = anyio.current_time() + self._lasts_s
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._answers[0]


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


class ModelLength:
    """As the executors tell it, which have the model: its own limit may be below the setting.

    Of a model that is not loaded it is what its files say.
    """

    def __init__(self, engine: BusClient, config: Config) -> None:
        self._most = config.engine.max_model_len
        self._folder = config.engine.model_folder
        self._of_files: int | None = None
        self._reports = Recent(engine.reports, ASKED_EVERY_S)

    async def get(self) -> int:
        """The least that a lane has, since any of them may take a request; where none has told
        yet, this gateway's setting or what the model's files say, whichever is less."""
        try:
            reports = await self._reports.get()
        except BusError:
            reports = []
        told = [
            int(report.load["max_model_len"])
            for report in reports
            if split_role(report.stage)[0] == "executor" and "max_model_len" in report.load
        ]
        return min([self._most, *(told or [await self._of_the_files()])])

    async def _of_the_files(self) -> int:
        if self._of_files is None:
            found = await anyio.to_thread.run_sync(longest_context_of, self._folder)
            self._of_files = found or self._most
        return self._of_files


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
