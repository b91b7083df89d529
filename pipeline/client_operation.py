"""The span and the metrics of a request that a program submits."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing

from ..bus.codec import check_request
from ..bus.entries import Malformed
from ..bus.public import AnyRequest, Completion, GenerateRequest, Output
from ..config import NanoInferenceError
from ..telemetry import Metrics, Operation, TraceContext, Tracing, names, now_ns


class ClientOperation(Operation):
    """An operation of one request, from its submission to its terminal message."""

    __slots__ = ("_context", "_metrics", "_request_id", "_since_ns", "_tracing")

    def __init__(
        self, request: GenerateRequest, context: TraceContext, tracing: Tracing, metrics: Metrics
    ) -> None:
        self._since_ns, self._request_id = now_ns(), request.request_id
        super().__init__(self._since_ns, request.model, request.request_id)
        self.begin(request)
        self._tracing, self._metrics = tracing, metrics
        self._context = context

    async def observing(
        self, outputs: AsyncGenerator[Output, None]
    ) -> AsyncGenerator[Output, None]:
        """Yield all outputs; then make the span and measure."""
        failure = "cancelled"
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    if isinstance(output, Completion):
                        self._request_id, failure = output.request_id, ""
                        self.end(output)
                        self._close("")
                    elif not self.first_chunk_ns:
                        self.first_chunk_ns = now_ns()
                    yield output
        except NanoInferenceError as error:
            failure = error.code
            raise
        finally:
            if failure:
                self._close(failure)

    def _close(self, failure: str) -> None:
        """Make the span and measure. `failure`: the code of an error without a terminal message."""
        ended_ns, error = now_ns(), failure or self.error
        if self._metrics.enabled:
            self.measure(self._metrics, ended_ns, error)
        if self._context.sampled:
            self._tracing.span(
                self.span_name,
                TraceContext(),
                self._since_ns,
                ended_ns,
                {names.REQUEST_ID: self._request_id, **self.attributes},
                error=error,
                own=self._context,
                kind="client",
            )


def observed(
    request: AnyRequest, tracing: Tracing, metrics: Metrics
) -> tuple[TraceContext, ClientOperation | None]:
    """Return the context of a new trace, and the operation of a request; None if nothing of it is
    recorded, or it can't be read."""
    context = tracing.begin()
    if not (context.sampled or metrics.enabled):
        return context, None
    checked = check_request(request, sys.maxsize)
    if isinstance(checked, Malformed):
        return TraceContext(), None  # then admission begins the trace
    return context, ClientOperation(checked, context, tracing, metrics)
