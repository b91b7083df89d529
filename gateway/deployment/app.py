"""The ASGI application of a deployment of several models."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

from starlette.applications import Starlette

from ...config import Config, ConfigError, ModelConfig
from ...config.logger import get_logger
from ...pipeline.client import BusClient
from ...pipeline.router import Router
from ...store.registry import ModelRecord
from ...telemetry import instruments
from ..api.kserve import http as kserve_http
from ..api.kserve.http import kserve_routes
from ..api.kserve.regions import TenantRegions
from ..api.kserve.repository import add_packages
from ..api.kserve.service import InferenceService, KServe
from ..app import application
from ..interfaces import Interfaces
from ..metrics import metrics_routes
from ..policy.admin import admin_routes
from ..policy.caller import Caller
from ..policy.policy import Policy
from ..policy.routes import PolicyRoute
from ..probes import probe_routes
from ..root import root_routes
from ..server.http import EngineError
from ..serving.measures import Measures
from ..serving.orphaned_calls import AbandonedCalls
from ..serving.readiness import Readiness
from ..status import status_routes
from .control import ModelControl
from .dispatch import Dispatch, OfModel
from .entrance import Entrance
from .model_app import ModelApp
from .models import Models
from .routes import DeploymentCalls, deployment_routes

_BY_ID = ("/v1/streams/{", "/v1/responses/{")
_ABORT = "/abort_request"


def make_deployment_app(
    engine: BusClient,
    config: Config,
    measures: Measures | None = None,
) -> Starlette:
    """As `make_app`, of all models of a deployment.

    Args:
        engine: The client of the deployment, and of none of its models.
        config: Its settings.
        measures: As of `make_app`.

    Returns:
        As `make_app`. Besides, `state.entrance` makes of an application one that is reached by the
        models' own addresses.

    Raises:
        ConfigError: As `make_app`.
    """
    measures = measures or Measures()
    models = Models(engine, config.models)
    readiness = Readiness(models)
    policy = Policy(engine, config, measures, models.engines)
    control = ModelControl(engine, policy.audit)
    service = InferenceService(metrics=measures.metrics)
    kserve = KServe(service, TenantRegions(config.gateway), control)
    make = partial(_model_app, models, config, policy, measures, readiness, kserve)
    models.made_by(make, partial(_changed, service))
    add_packages(service, config)
    measures.watch(instruments.GATEWAY_WAITING, lambda: models.waiting)
    calls = DeploymentCalls(models, control, readiness, config.gateway.max_body_bytes)
    app = application(
        [
            OfModel(models),
            *root_routes(),
            *probe_routes(readiness),
            *metrics_routes(measures.metrics),
            *status_routes(engine),
            *deployment_routes(calls),
            *admin_routes(policy, config),
            *_dispatched(engine, config, policy, models),
            *kserve_routes(kserve, readiness, config.gateway),
        ],
        measures,
    )
    app.state.chain = policy.chain_of_all()
    abandoned = AbandonedCalls(
        engine.bus.store.calls, config, lambda: models.attending, models.owner_of
    )
    app.state.beside = {
        "models": models.run_forever,
        "kept calls": abandoned.run_forever,
        "policy": policy.run_forever,
        # So that what is not asked of a gateway is answered where nobody else sees to it.
        "router": Router(engine.bus, measures.metrics).run_forever,
    }
    app.state.readiness = readiness
    app.state.kept_calls = app.state.models = models
    app.state.kserve = kserve
    app.state.policy = policy
    app.state.entrance = partial(Entrance, names=models.names)
    return app


def _model_app(
    models: Models,
    config: Config,
    policy: Policy,
    measures: Measures,
    readiness: Readiness,
    kserve: KServe,
    record: ModelRecord,
    engine: BusClient,
) -> ModelApp:
    """The application of one model. Raises NanoInferenceError when its settings can't be obeyed."""
    own = config.of_model(record.spec)
    of_model = Readiness(engine, readiness)
    interfaces = Interfaces(engine, own, policy, measures, of_model, kserve.regions)
    interfaces.kserve.service.statistics = kserve.service.statistics
    interfaces.responses.conversation_of = partial(_conversation, models, interfaces)
    app = application([*probe_routes(of_model), *interfaces.routes], measures)
    app.state.chain = interfaces.chain
    return ModelApp(record, engine, interfaces, app)


async def _conversation(
    models: Models, own: Interfaces, response_id: str, tenant: str, caller: Caller
) -> list[dict[str, Any]]:
    """The conversation of a response, read by the model that has made it."""
    interfaces = own
    # Of one whose model is gone, its own interface knows nothing, and says so in its words.
    with suppress(EngineError):
        interfaces = (await models.of_call(response_id)).interfaces
    return await interfaces.responses.conversation(response_id, tenant, caller)


def _changed(service: InferenceService, app: ModelApp, there: bool) -> None:
    """Has KServe serve what a model offers, or no longer."""
    for model, aliases in app.interfaces.kserve.service.models:
        if not there:
            service.remove(model.spec.name)
            continue
        try:
            service.add(model, aliases)
        except ConfigError as error:
            # Another model is called as one of those that this one offers.
            log = get_logger()
            log.warning("model_without_kserve", model=model.spec.name, error=error.message)


def _dispatched(
    engine: BusClient, config: Config, policy: Policy, models: Models
) -> list[PolicyRoute]:
    """The endpoints that each model has, as they are called without its address."""
    dispatch = Dispatch(models, config.gateway.max_body_bytes)
    # All have the same, whatever they are.
    any_model = ModelConfig(id="any", path=config.engine.model_path)
    template = Interfaces(
        engine,
        config.of_model(any_model),
        policy,
        Measures(),
        Readiness(models),
        TenantRegions(config.gateway),
    )
    routes = []
    for route in template.routes:
        if kserve_http.is_called({"path": route.path}):
            continue
        endpoint = dispatch.by_body
        if route.path.startswith(_BY_ID):
            endpoint = dispatch.by_id
        elif route.path == _ABORT:
            endpoint = dispatch.abort
        routes.append(
            PolicyRoute(
                route.path, endpoint, needed=route.needed, methods=sorted(route.methods or ())
            )
        )
    return routes
