"""The ASGI application of a gateway with one model, and the interfaces to one model."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import Scope

from ..config import Config, NanoInferenceError
from ..pipeline.client import BusClient
from ..telemetry import instruments
from .api import anthropic
from .api.kserve import http as kserve_http
from .api.kserve.http import kserve_routes
from .api.kserve.regions import TenantRegions
from .api.kserve.repository import open_service
from .api.kserve.service import KServe
from .api.openai import ModelInfoCalls, ResponseCalls, openai_routes
from .api.sglang import sglang_routes
from .endpoints import gateway_routes, single_model_routes
from .policy.chain import PolicyChain, PolicyRoute
from .policy.policy import Policy
from .server.application import Application
from .server.http import ERROR_CODE, error_response
from .serving.chat_templates import AT_ONCE, ChatTemplates, LazyFormat, check_format
from .serving.durable_calls import DurableCalls, watch_orphans
from .serving.lane_state import Readiness, ServedModels
from .serving.measures import Measures
from .serving.services import Services
from .serving.submissions import Submissions
from .serving.turns import Turns
from .serving.words import LazyWords


class Interfaces:
    """All interfaces to one model, and what they share.

    Attributes:
        config: The settings of the model.
        chain: The policy chain of its calls.
        readiness: Whether the model takes requests.
        submissions: Requests that wait or are in the pipeline.
        durable: Calls stored on the bus.
        kserve: What KServe V2 serves.
        info: OpenAI's endpoints about the model.
        responses: OpenAI's responses.
        routes: Routes of all interfaces, without those of the gateway as a whole.
    """

    def __init__(
        self,
        engine: BusClient,
        config: Config,
        policy: Policy,
        measures: Measures,
        readiness: Readiness,
        regions: TenantRegions,
    ) -> None:
        """Raises ConfigError when `gateway.message_format` or `gateway.models` is invalid."""
        check_format(config)
        words = LazyWords(config.engine.model_folder)
        served = ServedModels(engine, config)
        several = bool(config.bus.model)
        self.config = config
        self.chain = policy.chain_of(engine, config, words, served, one_of_several=several)
        self.readiness = readiness
        self.submissions = Submissions(engine, config, measures, readiness, self.chain)
        length = self.submissions.length
        templates = ChatTemplates(
            words,
            length.get,
            config.gateway.template_timeout_s,
            Turns(AT_ONCE, config.gateway.max_waiting, measures),
            LazyFormat(config, words),
            config.admission.max_constraint_bytes,
        )
        self.durable = DurableCalls(engine, config)
        service = open_service(
            self.submissions, config, words, readiness, measures, packages=not several
        )
        self.kserve = KServe(service, regions)
        services = Services(
            engine=engine,
            config=config,
            measures=measures,
            readiness=readiness,
            words=words,
            templates=templates,
            submissions=self.submissions,
            durable=self.durable,
            length=length,
            served=served,
        )
        self.info = ModelInfoCalls(services)
        self.responses = ResponseCalls(services)
        self.routes: list[PolicyRoute] = [
            *anthropic.model_routes(self.info.cards, self.info.card_of),
            *sglang_routes(services),
            *openai_routes(services, self.info, self.responses),
            *anthropic.anthropic_routes(services),
            *kserve_routes(self.kserve, readiness, config.gateway),
        ]


class InterfacesApp(Application):
    """Routes of interfaces behind a policy chain."""

    def __init__(self, routes: Sequence[BaseRoute], chain: PolicyChain, measures: Measures) -> None:
        super().__init__(
            routes, chain, measures, respond, kserve_http.is_called, kserve_http.takes_compressed
        )


class GatewayApp(InterfacesApp):
    """The application of a gateway, with what `Gateway` runs and closes around it.

    Attributes:
        policy: Opened before the first call, closed at the end.
        readiness: Whether the gateway takes requests.
        kserve: What gRPC serves as well, through `chain`.
        background: Tasks beside the connections, by name.
    """

    def __init__(
        self,
        routes: Sequence[BaseRoute],
        chain: PolicyChain,
        measures: Measures,
        *,
        policy: Policy,
        readiness: Readiness,
        kserve: KServe,
        background: Mapping[str, Callable[[], Coroutine[Any, Any, None]]],
    ) -> None:
        super().__init__(routes, chain, measures)
        self.policy = policy
        self.readiness = readiness
        self.kserve = kserve
        self.background = {"policy": policy.run_forever, **background}

    def stop(self) -> None:
        """The gateway closes connections from now on; their clients may go to another one."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Leave durable calls to other gateways, and close what the application holds."""
        await self.policy.aclose()
        self.kserve.regions.close()


class ModelGatewayApp(GatewayApp):
    """The application of a gateway with one model. `durable`: its durable calls."""

    def __init__(
        self, engine: BusClient, config: Config, measures: Measures, readiness: Readiness
    ) -> None:
        policy = Policy(engine, config, measures)
        model = Interfaces(
            engine, config, policy, measures, readiness, TenantRegions(config.gateway)
        )
        self.durable = durable = model.durable
        measures.watch(instruments.GATEWAY_WAITING, lambda: model.submissions.waiting)
        super().__init__(
            [
                *gateway_routes(engine, config, policy, readiness, measures.metrics),
                *model.routes,
                *single_model_routes(engine),
            ],
            model.chain,
            measures,
            policy=policy,
            readiness=readiness,
            kserve=model.kserve,
            background={
                "durable calls": partial(
                    watch_orphans,
                    engine.bus.store.calls,
                    config,
                    lambda: [durable],
                    lambda call: durable,
                ),
            },
        )

    def stop(self) -> None:
        self.durable.stop()

    async def aclose(self) -> None:
        await self.durable.aclose()
        await super().aclose()


def make_app(
    engine: BusClient,
    config: Config,
    measures: Measures | None = None,
    readiness: Readiness | None = None,
) -> ModelGatewayApp:
    """Return an application that serves an engine. `HttpServer` authenticates its callers.

    Args:
        engine: The client of the engine.
        config: The engine's settings, and the gateway's own.
        measures: Spans and metrics; None for none.
        readiness: Whether the gateway takes requests; None for that of the engine.

    Raises:
        ConfigError: The policy's settings or `gateway.message_format` are invalid.
    """
    return ModelGatewayApp(engine, config, measures or Measures(), readiness or Readiness(engine))


def respond(scope: Scope, error: NanoInferenceError) -> Response:
    """Return the response to a call that has an error, in the form of the called interface."""
    scope.setdefault("state", {})[ERROR_CODE] = error.code
    if anthropic.is_called(scope):
        return anthropic.respond(scope, error)
    if kserve_http.is_called(scope):
        return kserve_http.respond(scope, error)
    return error_response(error)
