"""What an orchestrator asks, whatever interface it runs the gateway for: alive, well, ready?

Bodies say in which role, and why not. All answer however busy the gateway is, since one that
is not answered would have it killed for its load.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ..config import BusError
from .policy.routes import PolicyRoute
from .server.http import JsonResponse
from .serving.readiness import Readiness

PROBES = frozenset(
    ("/livez", "/healthz", "/readyz", "/health", "/v2/health/live", "/v2/health/ready")
)
"""Paths that no limit on calls concerns; `/health` is SGLang's, those below `/v2` are KServe's."""

ROLE = "unified"
"""Of a lane whose replicas both prefill and decode, as all do."""


def probe_routes(readiness: Readiness) -> list[PolicyRoute]:
    """The endpoints."""

    async def livez(request: Request) -> Response:
        """Whether the event loop turns."""
        return JsonResponse({"status": "alive"})

    async def healthz(request: Request) -> Response:
        """Whether there is a model that works, told with status 200 in either case."""
        reason, message = "model_not_loaded", ""
        try:
            message = await readiness.model_trouble()
        except BusError as error:
            reason, message = error.code, error.message
        if message:
            told = {"status": "degraded", "role": ROLE, "reason": reason, "message": message}
            return JsonResponse(told)
        return JsonResponse({"status": "ok", "role": ROLE})

    async def readyz(request: Request) -> Response:
        """Whether requests shall be sent here."""
        try:
            reason = await readiness.trouble()
        except BusError as error:
            reason = error.message
        if reason:
            return JsonResponse({"status": "not_ready", "role": ROLE, "reason": reason}, 503)
        return JsonResponse({"status": "ready", "role": ROLE})

    return [
        PolicyRoute("/livez", livez, needed="nothing", methods=["GET"]),
        PolicyRoute("/healthz", healthz, needed="nothing", methods=["GET"]),
        PolicyRoute("/readyz", readyz, needed="nothing", methods=["GET"]),
    ]
