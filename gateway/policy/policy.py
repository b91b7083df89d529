"""The policy of one gateway: its links, and what they are made of."""

from __future__ import annotations

import time

import anyio
import anyio.to_thread

from ...config import BusError, Config
from ...pipeline.client import BusClient
from ..measures import Measures
from ..words import LazyWords
from .audit import AuditLog
from .audited_calls import AuditedCalls
from .backend import open_backend
from .block_lists import BlockLists
from .caller import ANYBODY, NOBODY, Caller
from .chain import HeadLink, OutputsLink, PolicyChain, RequestsLink
from .document import Guardrails, PolicyDocument
from .guardrail import Guardrail
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
        audit: The audit log; None where there is none.
    """

    def __init__(
        self, engine: BusClient, config: Config, words: LazyWords, measures: Measures
    ) -> None:
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
        outputs: list[OutputsLink] = []
        self._guardrail: Guardrail | None = None
        if self.store is not None or own.opa_url:
            lists = None
            if self.store is not None:
                lists = BlockLists(self._read_guardrails, own.guardrail_max_match)
            self._guardrail = Guardrail(lists, own, words, measures, engine.cancel)
            requests += [self._guardrail]
            outputs += [self._guardrail]
        self.audit: AuditLog | None = None
        if own.audit_file:
            self.audit = AuditLog(own, measures.audit_lost)
            audited = AuditedCalls(self.audit, words, measures, config.engine.model_name)
            head += [audited]
            # Before whatever refuses them, so that it is told what was.
            requests.insert(0, audited)
            outputs += [audited]
        stranger = NOBODY if own.knows_callers else ANYBODY
        self.chain = PolicyChain(head, requests, outputs, stranger)

    async def open(self) -> None:
        """Reads what there is. While the bus is away nobody may anything, and it is read later.

        Raises:
            NanoInferenceError: The backend, or the file of the audit log, can't be used.
        """
        if self.audit is not None:
            self.audit.open()
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
        if self._guardrail is not None:
            await self._guardrail.aclose()
        if self.audit is not None:
            await anyio.to_thread.run_sync(self.audit.close)

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

    async def _read_guardrails(self) -> Guardrails:
        assert self.store is not None
        return (await self.store.document()).guardrails
