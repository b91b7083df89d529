"""The pipeline behind the gateway as `nano-inference status` and `top` show it."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..pipeline.client import BusClient
from ..pipeline.status import of_models, pipeline_status
from .policy.caller import caller_of
from .policy.models import may_use
from .policy.routes import PolicyRoute
from .serving.readiness import ASKED_EVERY_S
from .serving.recent import Recent


def status_routes(engine: BusClient) -> list[PolicyRoute]:
    """The endpoint."""
    looks = Recent(lambda: pipeline_status(engine), ASKED_EVERY_S)

    async def status(request: Request) -> Response:
        """Lanes, stages and what waits, with status 200 in any state of the pipeline."""
        found, caller = await looks.get(), caller_of(request)
        if found.models:
            found = of_models(found, [model for model in found.models if may_use(caller, model)])
        return Response(msgspec.json.encode(found), media_type="application/json")

    return [PolicyRoute("/status", status, needed="read", methods=["GET"])]
