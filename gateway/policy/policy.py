"""The policy of one gateway: its links, and what they are made of."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import anyio
import anyio.to_thread

from ...config import BusError, Config
from ...pipeline.client import BusClient
from ..serving.lane_state import OnlyServed, ServedModels
from ..serving.measures import Measures
from ..serving.words import LazyWords
from .audit import AuditLog
from .audited_calls import AuditedCalls, AuditedHeads
from .backend import open_backend
from .caller import ANYBODY, NOBODY, Caller
from .chain import HeadLink, OutputsLink, PolicyChain, RequestsLink
from .document import Guardrails, PolicyDocument
from .guardrail import Guardrail
from .keys import AllowedModels, Authenticate, RequireScope, caller_with, tenant_in, with_tenant
from .limits import ReserveLimits
from .oidc import Tokens, is_token
from .opa import OpenPolicyAgent
from .store import BlockLists, PolicyStore, TenantWeights


class Policy:
    """Who may do what at a gateway, whichever of its models it is about.

    Attributes:
        store: Keys, tenants and guardrails; None where there are none.
        audit: The audit log; None where there is none.
    """

    def __init__(
        self,
        engine: BusClient,
        config: Config,
        measures: Measures,
        engines: Callable[[], Iterable[BusClient]] | None = None,
    ) -> None:
        """Args: `engines` gives the clients of all models, where there are several.

        Raises:
            ConfigError: Its settings can't be obeyed.
        """
        own = config.policy
        self._engines = engines or (lambda: [engine])
        self._limits = engine.bus.store.limits
        self._config = own
        self._measures = measures
        self.store: PolicyStore | None = None
        self._lists: BlockLists | None = None
        self._tokens = Tokens(own) if own.oidc_issuer else None
        if own.backend != "off":
            self.store = PolicyStore(open_backend(own, engine.bus.store.policy), own.refresh_s)
            self._lists = BlockLists(self._read_guardrails, own.guardrail_max_match)
        self._agent = OpenPolicyAgent(own) if own.opa_url else None
        self.audit = AuditLog(own, measures.audit_lost) if own.audit_file else None

    def chain_of(
        self,
        engine: BusClient,
        config: Config,
        words: LazyWords,
        served: ServedModels,
        *,
        one_of_several: bool = False,
    ) -> PolicyChain:
        """What every call about a model goes through.

        Args:
            engine: The client of that model.
            config: Its settings.
            words: Its tokenizer.
            served: What its lanes serve.
            one_of_several: Whether a key may be for other models, so that it is looked at before
                anything is told of this one.
        """
        name, measures = config.engine.model_name, self._measures
        head: list[HeadLink] = []
        requests: list[RequestsLink] = [OnlyServed(served)]
        outputs: list[OutputsLink] = []
        if self._config.knows_callers:
            models = AllowedModels(name)
            head += [Authenticate(self._know), RequireScope()]
            head += [models] if one_of_several else []
            # To whom a model is not allowed it is not there in any case.
            requests.insert(0, models)
            requests += [ReserveLimits(self._limits, config, measures)]
        if self._lists is not None or self._agent is not None:
            guardrail = Guardrail(self._lists, self._agent, words, measures, engine.cancel, name)
            requests += [guardrail]
            outputs += [guardrail]
        if self.audit is not None:
            audited = AuditedCalls(self.audit, words, measures, name)
            head += [audited]
            # Before whatever refuses them, so that it is told what was.
            requests.insert(0, audited)
            outputs += [audited]
        return PolicyChain(head, requests, outputs, self._stranger)

    def chain_of_all(self) -> PolicyChain:
        """What calls go through that are about no model, or of which it is not known yet."""
        head: list[HeadLink] = []
        if self._config.knows_callers:
            head += [Authenticate(self._know), RequireScope()]
        if self.audit is not None:
            head += [AuditedHeads(self.audit, self._measures)]
        return PolicyChain(head, stranger=self._stranger)

    @property
    def _stranger(self) -> Caller:
        return NOBODY if self._config.knows_callers else ANYBODY

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
                group.start_soon(TenantWeights(self._engines, self.store).run_forever)

    async def aclose(self) -> None:
        """Lets go of what it holds."""
        if self._tokens is not None:
            await self._tokens.aclose()
        if self.store is not None:
            await self.store.aclose()
        if self._agent is not None:
            await self._agent.aclose()
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
