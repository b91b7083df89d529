"""What Prometheus asks for, on the port of the gateway itself."""

from __future__ import annotations

import anyio
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ..telemetry import Metrics
from .policy.routes import PolicyRoute


def metrics_routes(metrics: Metrics) -> list[PolicyRoute]:
    """The endpoint, which shows what `telemetry.metrics_port` does, and needs no such port."""
    # Whoever asks for it over and over takes one thread, and waits.
    one_at_a_time = anyio.CapacityLimiter(1)

    async def told(request: Request) -> Response:
        """The metrics of this process."""
        accept = request.headers.get("accept", "")
        found = await anyio.to_thread.run_sync(metrics.exposition, accept, limiter=one_at_a_time)
        if found is None:
            raise HTTPException(
                404,
                "there are no metrics; set gateway.metrics, in Python Pipeline(with_metrics=True)",
            )
        text, media_type = found
        return Response(text, media_type=media_type)

    return [PolicyRoute("/metrics", told, needed="read", methods=["GET"])]
