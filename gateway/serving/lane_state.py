"""The state of the lanes behind a gateway: readiness, context length, adapters."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import anyio
import anyio.to_thread

from ...bus.public import GenerateRequest
from ...config import BusError, Config, NanoInferenceError, RequestError, shown, split_role
from ...pipeline.client import BusClient
from ...pipeline.models import adapters_of, admits, expert_owners
from ...store.loaded_adapter import LoadedAdapter
from ...text.context_length import longest_context_of
from ..call import Call
from ..caller import Caller, check_allowed
from .model_names import adapter_of

if TYPE_CHECKING:
    from .adapter_folders import AdapterFolders

T = TypeVar("T")

ASKED_EVERY_S = 0.5
"""Lifetime of a cached state. The lanes report once a second."""

DRAINING = "the gateway is stopping and takes nothing new"

_REPORTED_WITHIN_S = 5.0


class Recent(Generic[T]):
    """A cached result. Concurrent readers of an expired one wait for a single new call."""

    def __init__(self, ask: Callable[[], Awaitable[T]], lasts_s: float) -> None:
        """Args: the function, and the lifetime of its result or error."""
        self._ask = ask
        self._lasts_s = lasts_s
        self._asking = anyio.Lock()
        self._results: list[T] = []
        self._error: NanoInferenceError | None = None
        self._until_s = -1.0

    async def get(self) -> T:
        """Return the result, or raise the function's NanoInferenceError."""
        async with self._asking:
            if anyio.current_time() >= self._until_s:
                self._results, self._error = [], None
                try:
                    self._results = [await self._ask()]
                except NanoInferenceError as error:
                    self._error = error
                self._until_s = anyio.current_time() + self._lasts_s
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._results[0]


class Engine(Protocol):
    """Lanes that serve requests."""

    async def trouble(self) -> str:
        """Return why requests would not be served now; "" if they would. Raises BusError."""

    async def role_trouble(self, role: str) -> str:
        """Return why no replica with a role works; "" if one does. Raises BusError."""


class Readiness:
    """Whether a gateway and the lanes behind it would serve a request.

    Methods raise BusError when the bus can't be reached.
    """

    def __init__(self, client: Engine, within: Readiness | None = None) -> None:
        """`within`: the gateway's, for the readiness of one of its models."""
        self._draining = False
        self._within = within
        self._lanes = Recent(client.trouble, ASKED_EVERY_S)
        self._roles = {
            role: Recent(partial(client.role_trouble, role), ASKED_EVERY_S)
            for role in ("prefill", "decode")
        }
        self._known_here: list[Callable[[], str]] = []

    @property
    def draining(self) -> bool:
        """Whether new requests are refused, since the gateway is to stop."""
        return self._draining or (self._within is not None and self._within.draining)

    @draining.setter
    def draining(self, draining: bool) -> None:
        self._draining = draining

    def consider(self, trouble: Callable[[], str]) -> None:
        """Add a local check, run before the lanes' checks; it returns "" for no trouble."""
        self._known_here.append(trouble)

    async def trouble(self) -> str:
        """Return why a request would not be served now, in one sentence; "" if it would."""
        return DRAINING if self.draining else await self.model_trouble()

    async def role_trouble(self, role: str) -> str:
        """Return the trouble of the replicas with a role: "prefill" or "decode"."""
        return await self.trouble() or await self._roles[role].get()

    async def model_trouble(self) -> str:
        """Return the trouble of the lanes alone: whether one works, and has weights and memory."""
        here = next(filter(None, (trouble() for trouble in self._known_here)), "")
        return here or await self._lanes.get()


class ModelLength:
    """Most tokens of a prompt with its completion.

    The executors report it, since the model's own limit may be below the setting. For a model that
    isn't loaded, its files have it.
    """

    def __init__(self, client: BusClient, config: Config) -> None:
        self._most = config.engine.max_model_len
        self._folder = config.engine.model_folder
        self._of_files: int | None = None
        self._reports = Recent(client.deployment.reports, ASKED_EVERY_S)

    async def get(self) -> int:
        """Return the least length of all lanes, since any of them may take a request."""
        try:
            reports = await self._reports.get()
        except BusError:
            reports = []
        reported = [
            int(report.load["max_model_len"])
            for report in reports
            if split_role(report.stage)[0] == "executor" and "max_model_len" in report.load
        ]
        if not reported and self._of_files is None:
            found = await anyio.to_thread.run_sync(
                longest_context_of, self._folder, limiter=anyio.CapacityLimiter(1)
            )
            self._of_files = found or self._most
        return min([self._most, *(reported or [self._of_files or self._most])])


class ServedModels:
    """The names that requests may give in `model`: the model's, and those of loaded adapters.

    An adapter loaded by another gateway is known within `ASKED_EVERY_S` and a second.

    Attributes:
        default: The model of requests that name none.
    """

    def __init__(self, client: BusClient, config: Config) -> None:
        self.default = config.engine.model_name
        self._config = config
        self._client = client
        self._reports = Recent(client.deployment.reports, ASKED_EVERY_S)
        self._adapters: tuple[LoadedAdapter, ...] = ()
        self._folders: AdapterFolders | None = None
        if config.gateway.adapter_folder:
            from .adapter_folders import AdapterFolders

            self._folders = AdapterFolders(client, config.gateway.adapter_folder)

    async def adapters(self) -> tuple[LoadedAdapter, ...]:
        """Return the adapters of every lane; the last known ones while no admission is ready."""
        with suppress(BusError):
            reports = await self._reports.get()
            if admits(reports):
                self._adapters = adapters_of(reports)
        return self._adapters

    async def expert_owners(self) -> tuple[int, ...]:
        """Return the rank of each expert, in the first executor that has owners; () in none."""
        try:
            reports = await self._reports.get()
        except BusError:
            return ()
        owners = (expert_owners(report.load) for report in reports)
        return next(filter(None, owners), ())

    async def model_facts(self) -> dict[str, int | float | str]:
        """Return facts of the model: "kv_dtype" and "kv_token_bytes", and what few have:
        "state_bytes", the size of a sequence's recurrent state, and "quantization", the forms of
        its codes; {} while unknown."""
        try:
            reports = await self._reports.get()
        except BusError:
            return {}
        names = ("kv_dtype", "kv_token_bytes", "state_bytes", "quantization")
        loads = [report.load for report in reports]
        found = {name: [each[name] for each in loads if each.get(name)] for name in names}
        return {name: each[0] for name, each in found.items() if each}

    async def check(self, model: str, caller: Caller) -> None:
        """Check that a name exists, and that the caller may use it. An adapter of
        `gateway.adapter_folder` is loaded.

        Raises:
            RequestError: unknown_model, model_not_found.
            AdapterError: The named adapter can't be loaded.
        """
        adapter = adapter_of(model, self._config)
        check_allowed(caller, adapter or self.default)
        if not adapter:
            return
        adapters, folders = [each.id for each in await self.adapters()], self._folders
        if adapter in adapters:
            if folders is not None:
                folders.note(adapter)
        elif folders is None or not await folders.load(adapter, self):
            raise unknown_model(model, self.default, *adapters)

    @asynccontextmanager
    async def admit(self, call: Call, requests: Sequence[GenerateRequest]) -> AsyncIterator[None]:
        """Refuse requests for an unknown model; a link of the policy."""
        for request in requests:
            await self.check(request.model, call.caller)
        yield

    async def wait_for(self, id: str, *, loaded: bool) -> None:
        """Wait a few seconds until an adapter is reported as loaded, or as unloaded."""
        with anyio.move_on_after(_REPORTED_WITHIN_S):
            while (id in [each.id for each in await self.adapters()]) != loaded:  # noqa: ASYNC110
                await anyio.sleep(ASKED_EVERY_S / 5)


def unknown_model(model: str, *known: str) -> RequestError:
    """Return the error for an unknown name. `known`: the names that exist."""
    return RequestError(
        f"there is no model {shown(model)} here; ask for {' or '.join(map(repr, known))}, or have "
        "gateway.model_aliases serve it as another",
        code="unknown_model",
    )
