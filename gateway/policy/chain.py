"""The order of a request's checks.

    authenticate → scope → model → limits → guardrail → execution → audit

The first two need a call's head only. The others check the requests that the call makes; a link is
entered until they have ended. Guardrail and audit also filter and record the outputs.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...bus.public import GenerateRequest, Output
from ..server.callers import Endpoint
from ..serving.origin import Origin
from .caller import ANYBODY, CALLER, NOBODY, ROUTE, Caller
from .document import Needed

Requests = Sequence[GenerateRequest]
Outputs = AsyncGenerator[Output, None]


@dataclass
class PolicyCall:
    """A call of which only the head is known.

    Attributes:
        request: The call.
        needed: The scope that its endpoint needs.
        caller: The caller, once a link has authenticated it.
    """

    request: Request
    needed: Needed
    caller: Caller


HeadLink = Callable[[PolicyCall], Awaitable[None]]
"""Checks a call by its head. Raises NanoInferenceError when the call is refused."""


class RequestsLink(Protocol):
    """Checks the requests of a call."""

    def admit(self, origin: Origin, requests: Requests) -> AbstractAsyncContextManager[None]:
        """Entered before any of them is published, left when all have ended.

        Entering raises NanoInferenceError when they are refused.
        """


class OutputsLink(Protocol):
    """Filters the outputs of a request."""

    def outputs(
        self, origin: Origin, request: GenerateRequest, outputs: Outputs, before: str
    ) -> Outputs:
        """Yield the outputs that may leave. Closes `outputs` when it is closed itself.

        Args:
            outputs: From the first one on, or the last one alone, which has everything.
            before: The part of the prompt that is shown before each sample.
        """


class PolicyChain:
    """The links, in their order. Without links, everybody may do everything."""

    def __init__(
        self,
        head: Sequence[HeadLink] = (),
        requests: Sequence[RequestsLink] = (),
        outputs: Sequence[OutputsLink] = (),
        stranger: Caller = ANYBODY,
    ) -> None:
        """`stranger`: the caller until a link has authenticated it."""
        self._head = head
        self._requests = requests
        self._outputs = outputs
        self._stranger = stranger

    async def enter(self, request: Request, needed: Needed) -> None:
        """Authenticate a call, for `caller_of`.

        Raises:
            NanoInferenceError: The call is refused.
        """
        state = request.scope.setdefault("state", {})
        if needed == "nothing":
            state[CALLER] = NOBODY
            return
        call = PolicyCall(request, needed, self._stranger)
        try:
            for link in self._head:
                await link(call)
        finally:
            # Also of a refused call, for the audit log.
            state[CALLER] = call.caller

    @asynccontextmanager
    async def admitted(self, origin: Origin, requests: Requests) -> AsyncIterator[None]:
        """Open while the requests of a call are in flight.

        Raises:
            NanoInferenceError: They are refused.
        """
        async with AsyncExitStack() as links:
            for link in self._requests:
                await links.enter_async_context(link.admit(origin, requests))
            yield

    def outputs(
        self, origin: Origin, request: GenerateRequest, outputs: Outputs, before: str = ""
    ) -> Outputs:
        """Filter a request's outputs; see `OutputsLink`."""
        for link in self._outputs:
            outputs = link.outputs(origin, request, outputs, before)
        return outputs


class PolicyRoute(Route):
    """A route whose calls pass the application's `chain` first.

    Attributes:
        needed: The scope that its callers need.
    """

    def __init__(self, route: str, needed: Needed, endpoint: Endpoint) -> None:
        """`route`: its methods and its path, such as "GET /v1/models" or "POST,PUT /generate"."""
        methods, _, path = route.partition(" ")

        @wraps(endpoint)
        async def checked(request: Request) -> Response:
            request.scope.setdefault("state", {})[ROUTE] = (self.path_format, needed)
            chain: PolicyChain = request.app.chain
            await chain.enter(request, needed)
            return await endpoint(request)

        super().__init__(path, checked, methods=methods.split(","))
        self.needed = needed
