"""The ASGI application, where there is one model."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import Scope

from ..config import Config, NanoInferenceError
from ..pipeline.client import BusClient
from ..telemetry import instruments
from .api import anthropic
from .api.kserve import http as kserve_http
from .api.kserve.regions import TenantRegions
from .interfaces import Interfaces
from .metrics import metrics_routes
from .model_statuses import single_model_routes
from .policy.admin import admin_routes
from .policy.policy import Policy
from .probes import probe_routes
from .root import root_routes
from .server.callers import JsonOnly
from .server.http import ERROR_CODE, error_handler, error_response
from .serving.measures import Measures
from .serving.readiness import Readiness
from .status import status_routes

_ANSWERED = (NanoInferenceError, HTTPException, ClientDisconnect)


def make_app(
    engine: BusClient,
    config: Config,
    measures: Measures | None = None,
    readiness: Readiness | None = None,
) -> Starlette:
    """An application that serves an engine, to whoever calls it; `HttpServer` asks who that is.

    Args:
        engine: The client that reaches it.
        config: The engine's settings as far as clients ask for them, and the gateway's own.
        measures: Where it tells what it does; None for nowhere.
        readiness: Whether it takes requests; None for one that nobody changes.

    Returns:
        The application. Whoever serves it opens its `state.policy` before, runs all of its
        `state.beside` beside it, closes its `state.kept_calls` at the end, and answers what it
        refuses itself by its `state.respond`. What is behind its `state.kserve` may be served over
        gRPC as well, to calls that go through its `state.chain`.

    Raises:
        ConfigError: The policy's settings can't be obeyed, or `gateway.message_format` names no
            format.
    """
    measures = measures or Measures()
    readiness = readiness or Readiness(engine)
    policy = Policy(engine, config, measures)
    model = Interfaces(engine, config, policy, measures, readiness, TenantRegions(config.gateway))
    measures.watch(instruments.GATEWAY_WAITING, lambda: model.submissions.waiting)
    app = application(
        [
            *root_routes(),
            *probe_routes(readiness),
            *metrics_routes(measures.metrics),
            *status_routes(engine),
            *model.routes,
            *admin_routes(policy, config),
            *single_model_routes(engine),
        ],
        measures,
    )
    app.state.chain = model.chain
    app.state.kept_calls = model.kept
    app.state.readiness = readiness
    app.state.beside = {
        "kept calls": model.abandoned.run_forever,
        "policy": policy.run_forever,
    }
    app.state.kserve = model.kserve
    app.state.policy = policy
    return app


def application(routes: Sequence[BaseRoute], measures: Measures) -> Starlette:
    """An application with some routes, whose errors are as the clients of each interface read
    them, by its `state.respond`."""
    answer = error_handler(respond)
    app = Starlette(
        routes=routes,
        middleware=[
            # Starlette raises what it answers with 500 once more, and the server then closes the
            # connection behind an answer that does not say so.
            Middleware(ExceptionMiddleware, handlers={Exception: answer}),
            Middleware(
                JsonOnly,
                measures,
                respond,
                takes_bytes=kserve_http.is_called,
                takes_compressed=kserve_http.takes_compressed,
            ),
        ],
        exception_handlers=dict.fromkeys(_ANSWERED, answer),
    )
    app.state.respond = respond
    return app


def respond(scope: Scope, error: NanoInferenceError) -> Response:
    """The answer to a call that has an error, as clients of what is called read it."""
    scope.setdefault("state", {})[ERROR_CODE] = error.code
    if anthropic.is_called(scope):
        return anthropic.respond(scope, error)
    if kserve_http.is_called(scope):
        return kserve_http.respond(scope, error)
    return error_response(error)
