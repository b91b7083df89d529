"""The policy of one gateway: its links, and what they are made of."""

from __future__ import annotations

import time

import anyio

from ...config import BusError, Config
from ...pipeline.client import BusClient
from .backend import open_backend
from .caller import Caller
from .chain import HeadLink, PolicyChain, RequestsLink
from .keys import Authenticate, RequireScope, caller_with
from .models import AllowedModels
from .store import PolicyStore
from .weights import TenantWeights


class Policy:
    """Who may do what at a gateway.

    Attributes:
        chain: Through which every call goes.
        store: Keys, tenants and guardrails; None where there are none.
    """

    def __init__(self, engine: BusClient, config: Config) -> None:
        """Raises ConfigError when its settings can't be obeyed."""
        own = config.policy
        self._engine = engine
        self.store: PolicyStore | None = None
        if own.backend != "off":
            self.store = PolicyStore(open_backend(own, engine.bus.policy), own.refresh_s)
        head: list[HeadLink] = []
        requests: list[RequestsLink] = []
        if own.knows_callers:
            head += [Authenticate(self._know), RequireScope()]
            requests += [AllowedModels(config.engine.model_name)]
        self.chain = PolicyChain(head, requests)

    async def open(self) -> None:
        """Reads what there is. While the bus is away nobody may anything, and it is read later.

        Raises:
            NanoInferenceError: The backend can't be used.
        """
        if self.store is not None:
            try:
                await self.store.refresh()
            except BusError:
                return

    async def run_forever(self) -> None:
        """What goes on beside the calls."""
        async with anyio.create_task_group() as group:
            if self.store is not None:
                group.start_soon(self.store.run_forever)
                group.start_soon(TenantWeights(self._engine, self.store).run_forever)

    async def aclose(self) -> None:
        """Lets go of what it holds."""
        if self.store is not None:
            await self.store.aclose()

    async def _know(self, credential: str) -> Caller:
        assert self.store is not None
        return caller_with(await self.store.document(), credential, time.time_ns())
