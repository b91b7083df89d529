"""The policy of one gateway: its links, and what they are made of."""

from __future__ import annotations

import time

import anyio

from ...config import BusError, Config
from ...pipeline.client import BusClient
from ..measures import Measures
from .backend import open_backend
from .caller import Caller
from .chain import HeadLink, PolicyChain, RequestsLink
from .document import PolicyDocument
from .keys import Authenticate, RequireScope, caller_with, tenant_in, with_tenant
from .limits import TakeLimits
from .models import AllowedModels
from .oidc import Tokens, is_token
from .store import PolicyStore
from .weights import TenantWeights


class Policy:
    """Who may do what at a gateway.

    Attributes:
        chain: Through which every call goes.
        store: Keys, tenants and guardrails; None where there are none.
    """

    def __init__(self, engine: BusClient, config: Config, measures: Measures) -> None:
        """Raises ConfigError when its settings can't be obeyed."""
        own = config.policy
        self._engine = engine
        self.store: PolicyStore | None = None
        self._tokens = Tokens(own) if own.oidc_issuer else None
        if own.backend != "off":
            self.store = PolicyStore(open_backend(own, engine.bus.policy), own.refresh_s)
        head: list[HeadLink] = []
        requests: list[RequestsLink] = []
        if own.knows_callers:
            head += [Authenticate(self._know), RequireScope()]
            requests += [
                AllowedModels(config.engine.model_name),
                TakeLimits(engine.bus.limits, config, measures),
            ]
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
        if self._tokens is not None:
            await self._tokens.aclose()
        if self.store is not None:
            await self.store.aclose()

    def client_of(self, head: bytes) -> bytes:
        """Whose turn a request takes that comes with this head; b"" where it does not say.

        By a key that there is, and not by a name or a key that somebody makes up: whoever could
        make up many would have as many turns.
        """
        document = None if self.store is None else self.store.at_hand
        return b"" if document is None else tenant_in(document, head).encode()

    async def _know(self, credential: str) -> Caller:
        document = PolicyDocument() if self.store is None else await self.store.document()
        if self._tokens is not None and is_token(credential):
            return with_tenant(document, await self._tokens.caller(credential))
        return caller_with(document, credential, time.time_ns())
