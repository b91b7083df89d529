"""The ASGI application of a gateway, and the interfaces to one model."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.routing import BaseRoute

from ..config import Config, GatewayConfig, NanoInferenceError
from ..config.logger import get_logger
from ..pipeline.client import BusClient
from ..store.blobs import blobs_at
from ..store.calls import DurableCall
from ..telemetry import instruments
from .api import anthropic, ollama, vllm
from .api.kserve import http as kserve_http
from .api.kserve.http import kserve_routes
from .api.kserve.regions import TenantRegions
from .api.kserve.repository import open_service
from .api.kserve.service import KServe
from .api.openai import ModelInfoCalls, ResponseCalls, openai_routes
from .api.openai.batches import batch_routes
from .api.openai.files import file_routes, takes_files
from .api.openai.uploads import upload_routes
from .api.replays import ReplayCalls
from .api.requests import RequestCalls
from .api.results import ResultCalls
from .api.routes import IndexedRouter, PolicyRoute
from .api.sglang import sglang_routes
from .api.token_trees import TokenTreeCalls
from .batches.files import Files
from .batches.observed import ObservedBatches
from .batches.runner import BatchRunner
from .batches.uploads import Uploads
from .call import Call
from .console.feed import Feed
from .console.routes import console_routes
from .dead_letters import dead_letter_routes
from .endpoints import gateway_routes, recent_status, single_model_routes
from .operations import operation_routes
from .policy.policy import Policy
from .server.callers import JsonOnly
from .server.http import Answered, Response, error_handler, error_response, noted
from .server.measures import Measures
from .serving.chain import PolicyChain
from .serving.durable_calls import DurableCalls, watch_orphans
from .serving.lane_state import Readiness
from .serving.model_names import check_aliases
from .serving.request_log import RequestLog
from .serving.services import ChainOf, Services


@dataclass(eq=False)
class Interfaces(Services):
    """All interfaces to one model, and what they share.

    Raises:
        ConfigError: `gateway.message_format` or `gateway.models` is invalid.

    Attributes:
        kserve: The models and services of KServe V2.
        info: OpenAI's endpoints about the model.
        responses: OpenAI's responses.
        ollama: Ollama's endpoints about the model.
        routes: Routes of all interfaces, without those of the gateway as a whole.
    """

    regions: InitVar[TenantRegions]

    def __post_init__(self, chain_of: ChainOf, regions: TenantRegions) -> None:
        super().__post_init__(chain_of)
        self.kserve = KServe(open_service(self), regions, self.readiness)
        self.info = ModelInfoCalls(self)
        self.responses = ResponseCalls(self)
        self.ollama = ollama.ModelCalls(self, self.info.cards)
        self.routes: list[PolicyRoute] = [
            *anthropic.model_routes(self.info.cards, self.info.card_of),
            *vllm.vllm_routes(self),
            *sglang_routes(self),
            *openai_routes(self, self.info, self.responses),
            *anthropic.anthropic_routes(self),
            *ollama.ollama_routes(self, self.ollama),
            *kserve_routes(self.kserve, self.config.gateway),
            PolicyRoute("POST /v1/replay/{id:path}", "generate", ReplayCalls(self).replay),
            PolicyRoute("POST /v1/requests", "generate", RequestCalls(self).run),
            *TokenTreeCalls(self).routes(),
        ]


class Application(Starlette):
    """Routes behind a policy chain. Errors are answered in the form of the called interface.

    Attributes:
        chain: The policy chain of every call.
        unknown_fields: As the setting.
    """

    def __init__(
        self,
        routes: Sequence[BaseRoute],
        chain: PolicyChain,
        measures: Measures,
        config: GatewayConfig,
    ) -> None:
        self.chain, self.unknown_fields = chain, config.unknown_fields
        answer = error_handler(self.respond)
        kinds = (kserve_http.is_called, ollama.is_called, kserve_http.takes_compressed, takes_files)
        super().__init__(routes=routes)
        self.router = self._indexed = IndexedRouter(self.router.routes)
        # In place of Starlette's layers, one of which raises an error again after it has answered
        # 500, so that the server closes the connection after an answer that doesn't announce that.
        self.middleware_stack = ExceptionMiddleware(
            JsonOnly(self.router, measures, self.respond, *kinds),
            handlers=dict.fromkeys((Exception, HTTPException), answer),
        )

    async def answer_own(self, call: Call, body: bytes) -> Answered:
        """Answer a call of the gateway itself, past the layers that check clients' calls.

        Args:
            call: The call, with its caller. The response is not a stream.
            body: The call's body.
        """
        response = await self.response_to(call, body)
        return Answered(response.status_code, response.headers, bytes(response.body))

    async def response_to(self, call: Call, body: bytes) -> Response:
        """Return the response of `answer_own`."""
        call.body = body
        try:
            route = self._indexed.route_of(call)
            return await route.answer(call, self.chain, self.unknown_fields)
        except Exception as error:  # noqa: BLE001
            return self.respond(call, noted(call, error))

    @staticmethod
    def respond(call: Call, error: NanoInferenceError) -> Response:
        """Return the response to a call that has an error."""
        call.code, call.message = error.code, error.message
        if anthropic.is_called(call):
            return anthropic.respond(call, error)
        if kserve_http.is_called(call):
            return kserve_http.respond(call, error)
        if ollama.is_called(call):
            return ollama.respond(call, error)
        if vllm.is_called(call):
            return vllm.respond(call, error)
        return error_response(error)


class GatewayApp(Application):
    """The application of a gateway, with what `Gateway` runs and closes around it.

    Attributes:
        policy: Opened before the first call, closed at the end.
        kserve: Models and services that gRPC serves as well, through `chain`.
        services: Returns those of each loaded model.
        durable_calls: Returns the durable calls of all models of this gateway.
        background: Tasks beside the connections, by name.
        batches: Runs the lines of batches.
        feed: The live state for the console; None without it.
        request_log: The last requests; None without the console.
    """

    def __init__(
        self,
        client: BusClient,
        config: Config,
        measures: Measures,
        log: RequestLog | None,
        routes: Sequence[BaseRoute],
        chain: PolicyChain,
        *,
        policy: Policy,
        kserve: KServe,
        durable_calls: Callable[[], list[DurableCalls]],
        owner_of: Callable[[DurableCall], DurableCalls | None],
        services: Callable[[], Sequence[Services]],
    ) -> None:
        """`owner_of`: as of `watch_orphans`."""
        self.services = services
        looks = recent_status(client, config)
        own = gateway_routes(looks, config, policy, kserve.readiness, measures.metrics)
        self.feed: Feed | None = None
        self.request_log = log
        if log is not None:
            record = client.bus.store.history
            self.feed = Feed(looks.get, log, lambda: _numbers(services()), record)
            own += console_routes(config, self.feed, log, kserve.readiness, services)
        own += dead_letter_routes(client, policy.audit)
        own += operation_routes(client, config, kserve.readiness, policy.audit)
        store = client.bus.store
        files = Files(store.files, blobs_at(config.batches.storage, store.blobs), config.batches)
        self.batches = BatchRunner(
            self.answer_own,
            store.batches,
            store.calls if client.bus.durable else None,
            files,
            config.batches,
            lambda: kserve.readiness.draining,
            lambda: any(each.submissions.runs_calls for each in services()),
            config.gateway.max_body_bytes,
            ObservedBatches(measures),
        )
        own += [*file_routes(files, store.batches), *upload_routes(Uploads(files))]
        own += ResultCalls(client, config.gateway.comment_s, kserve.readiness, services).routes()
        own += [*batch_routes(self.batches), *anthropic.batch_routes(self.batches)]
        super().__init__([*own, *routes], chain, measures, config.gateway)
        self.policy, self.kserve, self.durable_calls = policy, kserve, durable_calls
        orphans = partial(watch_orphans, client.bus.store.calls, config, durable_calls, owner_of)
        self.background: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "policy": policy.run_forever,
            "durable calls": orphans,
            "weight updates": self._recover,
            "batches": self.batches.run_forever,
        }
        if self.feed is not None:
            self.background["console"] = self.feed.keep

    def on_call(self, call: Call, route: str, fields: dict[str, Any]) -> None:
        """Note an ended call, as `OnCall`: in the audit log, and if it was refused in the list of
        the last requests."""
        if self.policy.on_call is not None:
            self.policy.on_call(call, route, fields)
        if self.request_log is not None and call.code:
            self.request_log.refused(call)

    async def _recover(self) -> None:
        """Complete the weight updates that killed gateways have decided."""
        for each in self.services():
            try:
                await each.weight_sync.recover()
            except NanoInferenceError as error:
                # The next call about weights tries again, and returns the error.
                get_logger().warning("weight_update_not_completed", reason=str(error))

    async def warm_up(self) -> None:
        """Load what the first calls to the loaded models would wait for."""
        for each in self.services():
            await each.warm_up()

    def stop(self) -> None:
        """The gateway closes connections from now on; their clients may go to another one."""
        if self.feed is not None:
            self.feed.close()
        for each in self.durable_calls():
            each.stopping = True

    async def aclose(self) -> None:
        """Leave durable calls to other gateways, and close what the application holds."""
        for each in self.durable_calls():
            await each.aclose()
        await self.policy.aclose()
        self.kserve.regions.close()


def make_app(
    client: BusClient,
    config: Config,
    measures: Measures | None = None,
    readiness: Readiness | None = None,
) -> GatewayApp:
    """Return the application of a gateway with one model. `HttpServer` authenticates its callers.

    Args:
        client: The client of the engine.
        config: The engine's settings, and the gateway's own.
        measures: Spans and metrics; None for none.
        readiness: Whether the gateway takes requests; None for that of the engine.

    Raises:
        ConfigError: The policy's settings, `gateway.message_format` or `gateway.model_aliases` are
            invalid.
    """
    measures, readiness = measures or Measures(), readiness or Readiness(client.deployment)
    engine = config.engine
    served = {engine.model_name, *engine.model_aliases, *engine.adapters}
    check_aliases(config.gateway.model_aliases, served)
    policy = Policy(client, config, measures)
    log, regions = log_of(config, measures), TenantRegions(config.gateway)
    model = Interfaces(client, config, policy.chain_of, measures, readiness, log, regions)
    measures.watch(instruments.GATEWAY_WAITING, lambda: model.submissions.waiting)
    return GatewayApp(
        client,
        config,
        measures,
        log,
        [*model.routes, *single_model_routes(client)],
        model.chain,
        policy=policy,
        kserve=model.kserve,
        durable_calls=lambda: [model.durable],
        owner_of=lambda call: model.durable,
        services=lambda: [model],
    )


def log_of(config: Config, measures: Measures) -> RequestLog | None:
    """Return the log of a gateway's last requests; None without the console."""
    return RequestLog(metrics=measures.metrics) if config.gateway.console else None


def _numbers(services: Sequence[Services]) -> dict[str, int]:
    """Return the numbers of a gateway for the console."""
    submissions = [each.submissions for each in services]
    return {
        "waiting": sum(each.waiting for each in submissions),
        "in_flight": sum(each.in_flight for each in submissions),
    }
