"""The ASGI application of a deployment of several models."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

from starlette.types import ASGIApp

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
from ..api.routes import PolicyRoute
from ..app import Application, GatewayApp, Interfaces, log_of
from ..call import Call
from ..endpoints import probe_routes
from ..policy.policy import Policy
from ..server.http import EngineError, Response
from ..server.measures import Measures
from ..serving.lane_state import Readiness
from ..serving.model_names import check_aliases
from .dispatch import ABORT, Entrance, ForwardedResponse, ModelDispatch, ModelPathRoute
from .models import ModelApp, Models
from .routes import ModelControl, OllamaModels, deployment_routes

_BY_ID = ("/v1/streams", "/v1/responses/{")


class DeploymentApp(GatewayApp):
    """The application of a gateway before all models of a deployment. `models`: those models."""

    def __init__(self, client: BusClient, config: Config, measures: Measures | None = None) -> None:
        """Args: the client of the deployment, its settings, and as for `make_app`.

        Raises:
            ConfigError: As `make_app`.
        """
        self._config, self._measures = config, measures or Measures()
        aliases = config.gateway.model_aliases
        # Without models in the settings, the registry alone has them.
        check_aliases(aliases, {name for spec in config.models for name in spec.names})
        self.models = models = Models(client, config.models, aliases)
        readiness = Readiness(models)
        policy = Policy(client, config, self._measures, models.clients)
        control = ModelControl(client, policy.audit)
        self._ollama = OllamaModels(models, control)
        service = InferenceService(metrics=self._measures.metrics)
        kserve = KServe(service, TenantRegions(config.gateway), readiness, control)
        limit = config.gateway.max_body_bytes
        super().__init__(
            client,
            config,
            self._measures,
            log_of(config, self._measures),
            [
                *deployment_routes(client, models, control, self._ollama, readiness, limit),
                *_dispatched(client, config, policy, models),
                *kserve_routes(kserve, config.gateway),
            ],
            policy.chain_of_all(),
            policy=policy,
            kserve=kserve,
            durable_calls=lambda: models.durable_calls,
            owner_of=models.owner_of,
            services=lambda: [app.interfaces for app in models.apps if app.record.takes_requests],
        )
        # A model's own address counts before all other routes.
        self.router.routes.insert(0, ModelPathRoute(models))
        # Answers requests on the deployment's requests stream when no other router does.
        router = Router(client.bus, self._measures.metrics)
        self.background |= {"models": models.run_forever, "router": router.run_forever}
        models.build_with(self._model_app, partial(_serve_kserve, service))
        add_packages(service, config)
        self._measures.watch(instruments.GATEWAY_WAITING, lambda: models.waiting)

    def entrance(self, calls: ASGIApp) -> ASGIApp:
        return Entrance(calls, self.models.names)

    async def response_to(self, call: Call, body: bytes) -> Response:
        response = await super().response_to(call, body)
        return await response.to_own(call) if isinstance(response, ForwardedResponse) else response

    async def aclose(self) -> None:
        await super().aclose()
        await self.models.aclose()

    def _model_app(self, record: ModelRecord, client: BusClient) -> ModelApp:
        """Return the application of one model. Raises NanoInferenceError for invalid settings."""
        readiness = Readiness(client.deployment, self.kserve.readiness)
        config, regions = self._config.of_model(record.spec), self.kserve.regions
        chain_of, log = self.policy.chain_of, self.request_log
        own = Interfaces(client, config, chain_of, self._measures, readiness, log, regions)
        own.kserve.service.statistics = self.kserve.service.statistics
        own.ollama.manager = self._ollama
        own.responses.conversation_of = partial(_conversation, self.models, own)
        routes = [*probe_routes(readiness), *own.routes]
        app = Application(routes, own.chain, self._measures, config.gateway)
        return ModelApp(record, client, own, app)


async def _conversation(
    models: Models, own: Interfaces, call: Call, response_id: str
) -> list[dict[str, Any]]:
    """Return the conversation of a response, read by the model that made it."""
    interfaces = own
    # If that model is gone, the own interface answers that the response is unknown.
    with suppress(EngineError):
        interfaces = (await models.of_call(response_id)).interfaces
    return await interfaces.responses.stored.conversation(call, response_id)


def _serve_kserve(service: InferenceService, app: ModelApp, there: bool) -> None:
    """Add a model's KServe models to the deployment's service, or remove them."""
    for model, aliases in app.interfaces.kserve.service.models:
        if not there:
            service.remove(model.spec.name)
            continue
        try:
            service.add(model, aliases)
        except ConfigError as error:
            # Another model has the name of one of these.
            get_logger().warning("model_without_kserve", model=model.spec.name, error=str(error))


def _dispatched(
    client: BusClient, config: Config, policy: Policy, models: Models
) -> list[PolicyRoute]:
    """Return the endpoints of every model, called without the model's own address."""
    dispatch = ModelDispatch(models, config.gateway.max_body_bytes)
    # The table of routes is the same for every model.
    own = config.of_model(ModelConfig(id="any", path=config.engine.model_path))
    regions = TenantRegions(config.gateway)
    parts = (policy.chain_of, Measures(), Readiness(models), None, regions)
    table = Interfaces(client, own, *parts).routes

    def endpoint_of(path: str) -> Any:
        if path.startswith(_BY_ID):
            return dispatch.by_id
        return dispatch.abort if path == ABORT else dispatch.by_body

    return [
        PolicyRoute(
            f"{','.join(route.methods or ())} {route.path}", route.needed, endpoint_of(route.path)
        )
        for route in table
        if not kserve_http.is_called(Call(path=route.path))
    ]
