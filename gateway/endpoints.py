"""Endpoints of the gateway as a whole: the root page, probes, metrics, status, administration."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import metadata
from typing import Any

import anyio
import msgspec
from starlette.exceptions import HTTPException

from ..config import BusError, Config, ModelError, RequestError, shown
from ..pipeline.client import BusClient
from ..pipeline.models import ModelStatus
from ..pipeline.status import PipelineStatus, of_models, of_tenant, pipeline_status
from ..telemetry import Metrics
from .api.routes import NO_LOADING, PolicyRoute
from .call import Call
from .caller import may_use, tenant_seen_by
from .policy.administration import ROUTES as ADMINISTRATION
from .policy.administration import Administration, Shown
from .policy.audit import audit_change
from .policy.policy import Policy
from .server.http import (
    JsonResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    read_object,
)
from .serving.lane_state import ASKED_EVERY_S, Readiness, Recent

ROLE = "unified"
"""The role of lanes: together their replicas prefill and decode."""

ROLES = (ROLE, "prefill", "decode")

MODELS_PATH = "/admin/models"
MODEL_PATH = f"{MODELS_PATH}/{{model:path}}"

_ROOT = (
    f"nano-inference {metadata.version('nano-inference')}, an LLM inference server: OpenAI's "
    "interface is at /v1 (/v1/models lists the models), Ollama's at /api, the console at "
    "/console/, metrics are at /metrics, readiness is at /readyz; the documentation is in docs/ of "
    "its repository, all endpoints in docs/gateway.md\n"
)


def recent_status(client: BusClient, config: Config) -> Recent[PipelineStatus]:
    """Return the status of the pipeline, read at most every half second."""
    stall_timeout_s = config.pipeline.stall_timeout_s
    # Without keys, every caller may do everything.
    tenants = not config.policy.knows_callers
    return Recent(
        lambda: pipeline_status(client, stall_timeout_s, with_tenants=tenants), ASKED_EVERY_S
    )


def gateway_routes(
    looks: Recent[PipelineStatus],
    config: Config,
    policy: Policy,
    readiness: Readiness,
    metrics: Metrics,
) -> list[PolicyRoute]:
    """Return the endpoints of every gateway, with one model or several. `looks`: the status."""
    # Repeated scrapes take one thread, and wait.
    one_at_a_time = anyio.CapacityLimiter(1)

    async def root(call: Call) -> Response:
        if config.gateway.console and "text/html" in (call.header("accept") or ""):  # a browser
            return RedirectResponse("console/", 307)
        return PlainTextResponse(_ROOT)

    async def prometheus(call: Call) -> Response:
        """The metrics of this process, as on `telemetry.metrics_port`."""
        accept = call.header("accept") or ""
        found = await anyio.to_thread.run_sync(metrics.exposition, accept, limiter=one_at_a_time)
        if found is None:
            raise HTTPException(
                404,
                "there are no metrics; set gateway.metrics, in Python Pipeline(with_metrics=True)",
            )
        text, media_type = found
        return Response(text, media_type=media_type)

    async def status(call: Call) -> Response:
        """The pipeline as `nano-inference status` and `top` show it; status 200 in any state."""
        found, caller = await looks.get(), call.caller
        if found.models:
            found = of_models(found, [model for model in found.models if may_use(caller, model)])
        return JsonResponse(of_tenant(found, tenant_seen_by(caller)))

    async def progressz(call: Call) -> Response:
        """Whether tokens come while requests are in flight; 503 if they have not for too long."""
        try:
            progress = (await looks.get()).progress
        except BusError as error:  # a restart would not bring the bus back
            return JsonResponse({"status": "unknown", "reason": error.message})
        return JsonResponse(progress, 503 if progress.status == "stalled" else 200)

    return [
        PolicyRoute("GET /", "nothing", root),
        *probe_routes(readiness),
        PolicyRoute("GET /progressz", "nothing", progressz),
        PolicyRoute("GET /liveness", "nothing", progressz),
        PolicyRoute("GET /metrics", "read", prometheus),
        PolicyRoute("GET /status", "read", status),
        *admin_routes(policy, config),
    ]


def probe_routes(readiness: Readiness) -> list[PolicyRoute]:
    """Return the orchestrator's probes. They answer however busy the gateway is; otherwise it
    would be killed for its load."""

    async def livez(call: Call) -> Response:
        """Whether the event loop turns."""
        return JsonResponse({"status": "alive"})

    async def healthz(call: Call) -> Response:
        """Whether a model works; status 200 in either case."""
        reason, message = "model_not_loaded", ""
        try:
            message = await readiness.model_trouble()
        except BusError as error:
            reason, message = error.code, error.message
        body = {"status": "ok", "role": ROLE}
        if message:
            body |= {"status": "degraded", "reason": reason, "message": message}
        return JsonResponse(body)

    async def readyz(call: Call) -> Response:
        """Whether to send requests here; with `?role=`, whether a replica with that role works."""
        role = call.query.get("role", ROLE)
        if role not in ROLES:
            raise RequestError(
                f"there is no role {role!r:.80}; roles are {', '.join(ROLES)}",
                code="invalid_request",
            )
        try:
            if role == ROLE:
                reason = await readiness.trouble()
            else:
                reason = await readiness.role_trouble(role)
        except BusError as error:
            reason = error.message
        if reason:
            return JsonResponse({"status": "not_ready", "role": role, "reason": reason}, 503)
        return JsonResponse({"status": "ready", "role": role})

    return [
        PolicyRoute(f"GET /{probe.__name__}", "nothing", probe)
        for probe in (livez, healthz, readyz)
    ]


def admin_routes(policy: Policy, config: Config) -> list[PolicyRoute]:
    """Return the endpoints of `/admin`, for callers with the scope "admin"."""

    def route(name: str, where: str) -> PolicyRoute:
        method, _, path = where.partition(" ")

        async def endpoint(call: Call) -> Response:
            if policy.store is None:
                raise RequestError(
                    "this gateway has no keys: policy.backend is 'off'; set it to 'bus' or 'file'",
                    code="unsupported",
                )

            def changed(event: str, of: str, now: Shown) -> None:
                audit_change(policy.audit, call, event, of, now)

            arguments: list[Any] = [*call.params.values()]
            if method not in ("GET", "DELETE"):
                arguments.append(await read_object(call, config.gateway.max_body_bytes))
            administration = Administration(policy.store, changed)
            found: Any = await getattr(administration, name)(*arguments)
            if method == "DELETE":
                kind = path.removeprefix("/admin/").partition("s/")[0]
                found = {"id": arguments[0], "object": kind, "deleted": True}
            elif isinstance(found, list):
                found = {"object": "list", "data": found}
            return JsonResponse(found, 201 if method == "POST" else 200)

        return PolicyRoute(where, "admin", endpoint)

    return [route(*each) for each in ADMINISTRATION.items()]


def status_json(status: ModelStatus) -> dict[str, Any]:
    """Return one model's status, as JSON."""
    found: dict[str, Any] = msgspec.to_builtins(status)
    return {"object": "model.status"} | found


def status_routes(
    client: BusClient, id_of: Callable[[str], Awaitable[str]] | None = None
) -> list[PolicyRoute]:
    """Return the endpoints of the models' statuses.

    Args:
        id_of: Returns the id of a model by its name, or raises the error for an unknown one.
    """

    async def statuses(call: Call) -> Response:
        found = [status_json(each) for each in await client.models()]
        return JsonResponse({"object": "list", "data": found})

    async def status(call: Call) -> Response:
        name = call.params["model"]
        wanted = name if id_of is None else await id_of(name)
        for each in await client.models():
            if wanted in (each.id, *each.aliases):
                return JsonResponse(status_json(each))
        raise ModelError(f"there is no model {shown(name)} here", code="unknown_model")

    return [
        PolicyRoute(f"GET {MODELS_PATH}", "admin", statuses),
        PolicyRoute(f"GET {MODEL_PATH}", "admin", status),
    ]


def single_model_routes(client: BusClient) -> list[PolicyRoute]:
    """Return `/admin/models` of a gateway with one model, which can't be loaded or unloaded."""

    async def refuse(call: Call) -> Response:
        raise RequestError(NO_LOADING, code="unsupported")

    return [
        *status_routes(client),
        PolicyRoute(f"POST {MODELS_PATH}", "admin", refuse),
        PolicyRoute(f"POST,DELETE {MODEL_PATH}", "admin", refuse),
    ]
