"""The order of a request: who calls, what he may, how much, and what may be said.

    authenticate → scope → model → limits → guardrail → execution → audit

The first two need a call's head only. The others are about the requests that it makes; a link holds
on to them until they have ended. What an answer may say, and what is told of it, hangs at the
outputs and at the end of the call.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import wraps
from typing import Protocol

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...bus.public import GenerateRequest, Output
from ..serving.origin import Origin
from .caller import ANYBODY, CALLER, NOBODY, ROUTE, Caller
from .document import Needed


class PolicyCall:
    """A call of which only the head is known.

    Attributes:
        request: The call.
        needed: What its endpoint asks for.
        caller: Who calls, as far as a link has found that out.
    """

    def __init__(self, request: Request, needed: Needed, caller: Caller) -> None:
        self.request = request
        self.needed = needed
        self.caller = caller


class HeadLink(Protocol):
    """Judges a call by its head."""

    async def check(self, call: PolicyCall) -> None:
        """Raises NanoInferenceError when it may not go on."""


class RequestsLink(Protocol):
    """Judges the requests of a call."""

    def admit(
        self, origin: Origin, requests: Sequence[GenerateRequest]
    ) -> AbstractAsyncContextManager[None]:
        """Entered before any of them is published, left when all have ended.

        Entering raises NanoInferenceError when they may not go on.
        """


class OutputsLink(Protocol):
    """Judges what the engine makes of a request."""

    def outputs(
        self,
        origin: Origin,
        request: GenerateRequest,
        outputs: AsyncGenerator[Output, None],
        before: str,
    ) -> AsyncGenerator[Output, None]:
        """Gives what of them may leave. Closes them when it is closed itself.

        Args:
            outputs: From the first one on, or the last one alone, which has all.
            before: What of the prompt is shown before each sample.
        """


class PolicyChain:
    """Its links, in their order. Without any, everybody may do everything."""

    def __init__(
        self,
        head: Sequence[HeadLink] = (),
        requests: Sequence[RequestsLink] = (),
        outputs: Sequence[OutputsLink] = (),
        stranger: Caller = ANYBODY,
    ) -> None:
        """Args: `stranger` is who calls as long as no link has found that out."""
        self._head = head
        self._requests = requests
        self._outputs = outputs
        self._stranger = stranger

    async def enter(self, request: Request, needed: Needed) -> None:
        """Finds out who calls, which `caller_of` then tells.

        Raises:
            NanoInferenceError: He may not.
        """
        state = request.scope.setdefault("state", {})
        if needed == "nothing":
            state[CALLER] = NOBODY
            return
        call = PolicyCall(request, needed, self._stranger)
        try:
            for link in self._head:
                await link.check(call)
        finally:
            # Of one that is refused, the audit log tells.
            state[CALLER] = call.caller

    @asynccontextmanager
    async def admitted(
        self, origin: Origin, requests: Sequence[GenerateRequest]
    ) -> AsyncIterator[None]:
        """Open while the requests of a call are on their way.

        Raises:
            NanoInferenceError: They may not go on.
        """
        async with AsyncExitStack() as links:
            for link in self._requests:
                await links.enter_async_context(link.admit(origin, requests))
            yield

    def outputs(
        self,
        origin: Origin,
        request: GenerateRequest,
        outputs: AsyncGenerator[Output, None],
        before: str = "",
    ) -> AsyncGenerator[Output, None]:
        """What leaves of what the engine makes of a request; see `OutputsLink`."""
        for link in self._outputs:
            outputs = link.outputs(origin, request, outputs, before)
        return outputs


class PolicyRoute(Route):
    """A route whose calls go through the application's `chain` first.

    Attributes:
        needed: What it asks of its callers.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        *,
        needed: Needed,
        methods: Collection[str],
        middleware: Sequence[Middleware] = (),
    ) -> None:
        @wraps(endpoint)
        async def checked(request: Request) -> Response:
            request.scope.setdefault("state", {})[ROUTE] = (self.path_format, needed)
            chain: PolicyChain = request.app.chain
            await chain.enter(request, needed)
            return await endpoint(request)

        super().__init__(path, checked, methods=list(methods), middleware=list(middleware))
        self.needed = needed
