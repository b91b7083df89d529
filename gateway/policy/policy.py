"""The policy of one gateway, assembled from its settings."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

import anyio
import anyio.to_thread

from ...config import BusError, Config
from ...pipeline.client import BusClient
from ..call import Call
from ..caller import ANYBODY, NOBODY
from ..server.calls import OnCall
from ..server.measures import Measures
from ..serving.chain import HeadLink, OutputsLink, PolicyChain, RequestsLink
from ..serving.lane_state import ServedModels
from ..serving.tokenizer import LazyTokenizer
from .audit import AuditLog, audit_call
from .audited_calls import AuditedCalls, AuditedHeads
from .backend import open_backend
from .document import PolicyDocument
from .guardrail import Guardrail, OpenPolicyAgent
from .keys import caller_again, caller_with, check_scope, credential_of, tenant_in, with_tenant
from .limits import ReserveLimits
from .oidc import TokenAuthenticator, is_token
from .store import BlockLists, PolicyStore, apply_weights_forever


class Policy:
    """The policy of a gateway, shared by all of its models.

    Attributes:
        store: Keys, tenants and guardrails; None without a backend.
        audit: The audit log; None without one.
        on_call: Writes the line of a call in it.
    """

    def __init__(
        self,
        client: BusClient,
        config: Config,
        measures: Measures,
        clients: Callable[[], Iterable[BusClient]] | None = None,
    ) -> None:
        """`clients`: returns the clients of all models, if there are several.

        Raises:
            ConfigError: The settings are invalid.
        """
        own = config.policy
        self._clients = clients or (lambda: [client])
        self._limits = client.bus.store.limits
        self._config = own
        self._measures = measures
        self.store: PolicyStore | None = None
        self._lists: BlockLists | None = None
        self._tokens = TokenAuthenticator(own) if own.oidc_issuer else None
        if own.backend != "off":
            backend = open_backend(own, client.bus.store.policy)
            without = not own.oidc_issuer
            self.store = PolicyStore(backend, own.refresh_s, needs_keys=without)
            self._lists = BlockLists(self.store, own.guardrail_max_match)
        self._agent = OpenPolicyAgent(own) if own.opa_url else None
        self.audit = AuditLog(own, measures.audit_lost) if own.audit_file else None
        self.on_call: OnCall | None = partial(audit_call, self.audit) if self.audit else None
        self._stranger = NOBODY if own.knows_callers else ANYBODY

    def chain_of(
        self,
        client: BusClient,
        config: Config,
        tokenizer: LazyTokenizer,
        served: ServedModels,
    ) -> PolicyChain:
        """Return the chain of every call about a model.

        Args:
            client: The model's client.
            config: The model's settings.
            tokenizer: The model's tokenizer.
            served: The names that the model's lanes serve.
        """
        name, measures = config.engine.model_name, self._measures
        head = self._head()
        requests: list[RequestsLink] = [served]
        outputs: list[OutputsLink] = []
        if self._config.knows_callers:
            if config.bus.model:
                # One of several: a forbidden model looks like a missing one, so a call's head is
                # checked before it learns anything of this one.
                head.append(lambda call: served.check("", call.caller))
            requests.append(ReserveLimits(self._limits, config, measures))
        if self._lists is not None or self._agent is not None:
            guardrail = Guardrail(
                self._lists, self._agent, tokenizer, measures, client.cancel, name
            )
            requests.append(guardrail)
            outputs.append(guardrail)
        if self.audit is not None:
            audited = AuditedCalls(self.audit, tokenizer, measures, name)
            head.append(audited.check)
            # First, so that it logs requests that other links refuse.
            requests.insert(0, audited)
            outputs.append(audited)
        return PolicyChain(head, requests, outputs, self._stranger)

    def chain_of_all(self) -> PolicyChain:
        """Return the chain of calls about no model, or about one that isn't known yet."""
        head = self._head()
        if self.audit is not None:
            head.append(AuditedHeads(self.audit, self._measures).check)
        return PolicyChain(head, stranger=self._stranger)

    async def open(self) -> None:
        """Read the policy. While the bus is away, all calls are refused, and it is read later.

        Raises:
            NanoInferenceError: The backend, or the file of the audit log, can't be used.
        """
        if self.audit is not None:
            self.audit.open()
        if self.store is not None:
            with suppress(BusError):
                await self.store.refresh()

    async def run_forever(self) -> None:
        """Run the background tasks."""
        if self.store is not None:
            async with anyio.create_task_group() as group:
                group.start_soon(self.store.run_forever)
                group.start_soon(apply_weights_forever, self._clients, self.store)

    async def aclose(self) -> None:
        """Close all parts."""
        for part in (self._tokens, self.store, self._agent):
            if part is not None:
                await part.aclose()
        if self.audit is not None:
            await anyio.to_thread.run_sync(self.audit.close, limiter=anyio.CapacityLimiter(1))

    def client_of(self, head: bytes) -> bytes:
        """Return the client whose turn a request takes, by the request's head; b"" if unknown.

        Only existing keys count: with invented names or keys, a caller would have many turns.
        """
        document = None if self.store is None else self.store.at_hand
        return b"" if document is None else tenant_in(document, head).encode()

    def _head(self) -> list[HeadLink]:
        return [self._authenticate] if self._config.knows_callers else []

    async def _authenticate(self, call: Call) -> None:
        credential = "" if call.batch_line else credential_of(call)
        document = PolicyDocument() if self.store is None else await self.store.document()
        if call.batch_line:
            call.caller = caller_again(document, call.caller, time.time_ns())
        elif self._tokens is not None and is_token(credential):
            call.caller = with_tenant(document, await self._tokens.caller(credential))
        else:
            call.caller = caller_with(document, credential, time.time_ns())
        assert call.needed is not None, "the chain has set it"
        check_scope(call.caller, call.needed)
