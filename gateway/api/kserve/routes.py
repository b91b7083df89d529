"""The endpoints of HTTP, each with what it asks of its callers."""

from __future__ import annotations

from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response

from ....config import GatewayConfig, RequestError
from ...policy.chain import PolicyRoute
from ...policy.document import Needed
from ...server.callers import Endpoint
from ...serving.lane_state import Readiness
from .http_generate import GenerateCalls
from .http_infer import InferCalls
from .http_info import InfoCalls
from .http_memory import MemoryCalls, no_regions, nothing_to_unregister
from .http_repository import RepositoryCalls
from .shared import NO_CUDA, NO_LOGGING, NO_TRACING, KServe


class _Name(Convertor[str]):
    """A name in a path, which may have slashes: clients send them as they are, or as %2F."""

    regex = ".+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("name", _Name())

_MODEL = "/v2/models/{model:name}"
_VERSION = "/versions/{version}"


def kserve_routes(kserve: KServe, readiness: Readiness, config: GatewayConfig) -> list[PolicyRoute]:
    """All of them. The first that fits a path is taken."""
    most = config.max_body_bytes
    info = InfoCalls(kserve, readiness, most)
    infer = InferCalls(kserve, most)
    generate = GenerateCalls(kserve.service, config)
    return [
        _route("GET", "/v2", "read", info.server),
        _route("GET", "/v2/health/live", "nothing", info.live),
        _route("GET", "/v2/health/ready", "nothing", info.ready),
        _route("GET", "/v2/models/stats", "read", info.statistics),
        *_model_routes("POST", "/infer", "generate", infer.infer),
        *_model_routes("POST", "/generate", "generate", generate.generate),
        *_model_routes("POST", "/generate_stream", "generate", generate.generate_stream),
        *_model_routes("GET", "/ready", "nothing", info.model_ready),
        *_model_routes("GET", "/config", "read", info.config),
        *_model_routes("GET", "/stats", "read", info.statistics),
        _route("POST", "/v2/repository/index", "read", info.index),
        *_memory_routes(MemoryCalls(kserve.regions, most)),
        *_repository_routes(RepositoryCalls(kserve.repository, most)),
        *_unsupported_routes(),
        # Behind all that begin like them.
        *_model_routes("GET", "", "read", info.metadata),
    ]


def _model_routes(method: str, what: str, needed: Needed, endpoint: Endpoint) -> list[PolicyRoute]:
    """Of a model's version, and of the model."""
    return [
        _route(method, f"{_MODEL}{_VERSION}{what}", needed, endpoint),
        _route(method, f"{_MODEL}{what}", needed, endpoint),
    ]


def _memory_routes(calls: MemoryCalls) -> list[PolicyRoute]:
    system, cuda = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
    region = "/region/{region:name}"
    refused = _refusing(NO_CUDA)
    routes = [_route("POST", f"{system}{region}/register", "generate", calls.register)]
    routes.append(_route("POST", f"{cuda}{region}/register", "generate", refused))
    for which in (region, ""):
        routes += [
            _route("GET", f"{system}{which}/status", "generate", calls.status),
            _route("POST", f"{system}{which}/unregister", "generate", calls.unregister),
            # Clients that clean up ask for these two, whether or not they use any.
            _route("GET", f"{cuda}{which}/status", "generate", no_regions),
            _route("POST", f"{cuda}{which}/unregister", "generate", nothing_to_unregister),
        ]
    return routes


def _repository_routes(calls: RepositoryCalls) -> list[PolicyRoute]:
    model = "/v2/repository/models/{model:name}"
    return [
        _route("POST", f"{model}/load", "admin", calls.load),
        _route("POST", f"{model}/unload", "admin", calls.unload),
    ]


def _unsupported_routes() -> list[PolicyRoute]:
    tracing = _refusing(NO_TRACING)
    settings = [
        ("/v2/trace/setting", tracing),
        ("/v2/models/{model:name}/trace/setting", tracing),
        ("/v2/logging", _refusing(NO_LOGGING)),
    ]
    return [
        PolicyRoute(path, endpoint, needed="admin", methods=["GET", "POST"])
        for path, endpoint in settings
    ]


def _route(method: str, path: str, needed: Needed, endpoint: Endpoint) -> PolicyRoute:
    return PolicyRoute(path, endpoint, needed=needed, methods=[method])


def _refusing(why: str) -> Endpoint:
    async def answer(request: Request) -> Response:
        raise RequestError(why, code="unsupported")

    return answer
