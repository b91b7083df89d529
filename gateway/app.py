"""The ASGI application."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Scope

from ..config import Config, NanoInferenceError
from ..pipeline.client import BusClient
from . import anthropic
from .callers import JsonOnly
from .chat_templates import ChatTemplates
from .http import ERROR_CODE, error_handler, error_response
from .kept_calls import KeptCalls
from .kserve import http_errors as kserve_http
from .kserve.regions import Regions
from .kserve.repository import open_service
from .kserve.routes import kserve_routes
from .kserve.shared import KServe
from .measures import Measures
from .metrics import metrics_routes
from .model_length import ModelLength
from .openai import openai_routes
from .policy.admin import admin_routes
from .policy.policy import Policy
from .probes import probe_routes
from .readiness import Readiness
from .sglang import sglang_routes
from .submissions import Submissions
from .words import LazyWords

_ANSWERED = (NanoInferenceError, HTTPException, ClientDisconnect, Exception)


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
        The application. Whoever serves it opens its `state.policy` before, runs `run_forever` of
        that and of its `state.kept_calls` beside it, and answers what it refuses itself by its
        `state.respond`. What is behind its `state.kserve` may be served over gRPC as well.

    Raises:
        ConfigError: The policy's settings can't be obeyed.
    """
    measures = measures or Measures()
    words = LazyWords(config.engine.model_folder)
    templates = ChatTemplates(words, config.engine.max_model_len, config.gateway.template_timeout_s)
    readiness = readiness or Readiness(engine)
    policy = Policy(engine, config, words, measures)
    submissions = Submissions(engine, config, measures, readiness, policy.chain)
    kept = KeptCalls(engine, config)
    length = ModelLength(engine, config)
    models = open_service(submissions, config, words, readiness, measures)
    kserve = KServe(models, Regions(config.gateway))
    app = Starlette(
        routes=[
            *probe_routes(readiness),
            *metrics_routes(measures.metrics),
            *sglang_routes(engine, config, words, submissions, measures, readiness, length),
            *openai_routes(config, words, submissions, kept, templates, length),
            *anthropic.anthropic_routes(config, words, submissions, templates),
            *kserve_routes(kserve, readiness, config.gateway),
            *admin_routes(policy, config),
        ],
        middleware=[
            Middleware(
                JsonOnly,
                measures,
                respond,
                takes_bytes=kserve_http.is_called,
                takes_compressed=kserve_http.takes_compressed,
            )
        ],
        exception_handlers=dict.fromkeys(_ANSWERED, error_handler(respond)),
    )
    app.state.kept_calls = kept
    app.state.kserve = kserve
    app.state.respond = respond
    app.state.policy = policy
    return app


def respond(scope: Scope, error: NanoInferenceError) -> Response:
    """The answer to a call that has an error, as clients of what is called read it."""
    scope.setdefault("state", {})[ERROR_CODE] = error.code
    if anthropic.is_called(scope):
        return anthropic.respond(scope, error)
    if kserve_http.is_called(scope):
        return kserve_http.respond(scope, error)
    return error_response(error)
