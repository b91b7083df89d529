"""The order of a request's checks.

    authenticate → scope → model → limits → guardrail → execution → audit

The first two need a call's head only. The others check the requests that the call makes; a link is
entered until they have ended. Guardrail and audit also filter and record the outputs.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Protocol

from ...bus.public import GenerateRequest, Output
from ..call import Call
from ..caller import ANYBODY, NOBODY, Caller, Needed
from .request_ids import set_tag

Requests = Sequence[GenerateRequest]
Outputs = AsyncGenerator[Output, None]


HeadLink = Callable[[Call], Awaitable[None]]
"""Checks a call by its head. Raises NanoInferenceError when the call is refused."""


class RequestsLink(Protocol):
    """Checks the requests of a call."""

    def admit(self, call: Call, requests: Requests) -> AbstractAsyncContextManager[None]:
        """Entered before any of them is published, left when all have ended.

        Entering raises NanoInferenceError when they are refused.
        """


class OutputsLink(Protocol):
    """Filters the outputs of a request."""

    def outputs(
        self, call: Call, request: GenerateRequest, outputs: Outputs, before: str
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

    @property
    def filters(self) -> bool:
        """Whether outputs may be filtered."""
        return bool(self._outputs)

    async def enter(self, call: Call, needed: Needed) -> None:
        """Authenticate a call.

        Raises:
            NanoInferenceError: The call is refused.
        """
        call.needed = needed
        if not call.batch_line:
            call.caller = NOBODY if needed == "nothing" else self._stranger
        if needed != "nothing":
            for link in self._head:
                await link(call)
            set_tag(call)

    @asynccontextmanager
    async def admitted(self, call: Call, requests: Requests) -> AsyncIterator[None]:
        """Open while the requests of a call are in flight.

        Raises:
            NanoInferenceError: They are refused.
        """
        async with AsyncExitStack() as links:
            for link in self._requests:
                await links.enter_async_context(link.admit(call, requests))
            yield

    def outputs(
        self, call: Call, request: GenerateRequest, outputs: Outputs, before: str = ""
    ) -> Outputs:
        """Filter a request's outputs; see `OutputsLink`."""
        for link in self._outputs:
            outputs = link.outputs(call, request, outputs, before)
        return outputs
