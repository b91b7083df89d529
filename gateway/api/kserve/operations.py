"""Operations of KServe V2 besides inference, one definition for HTTP and gRPC.

An operation returns the body of its HTTP response: JSON, or None for an empty one. A health check
returns the reason why it fails, "" if it passes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from importlib import metadata
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request

from ....config import BusError, Int64, RequestError, shown
from ....kserve.tensor_codec import Json, model_config, model_metadata
from ....kserve.tensors import ModelSpec
from ...model_statuses import NO_LOADING
from ...policy.caller import caller_of
from ...policy.scopes import Needed
from ...serving.readiness import Readiness
from ...serving.tenants import tenant_of
from .service import KServe, ModelRepository

SERVER_NAME = "nano_inference"
VERSION = metadata.version("nano-inference")

_EXTENSIONS = (
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "parameters",
    "statistics",
)


class OperationCall(NamedTuple):
    """A call of an operation.

    Attributes:
        kserve: The served models and regions.
        readiness: Of the gateway.
        request: The HTTP request, or the gRPC call in its form.
        name: Of the model or region; "" for all.
        version: Of the model; "" for any.
        body: Has the operation's other fields: the decoded body over HTTP, the message over gRPC.
    """

    kserve: KServe
    readiness: Readiness
    request: Request
    name: str
    version: str
    body: Any

    @property
    def spec(self) -> ModelSpec:
        """The model's. Raises RequestError: model_not_found."""
        return self.kserve.service.spec(self.name, self.version, caller_of(self.request))


class Operation(NamedTuple):
    """An operation.

    Attributes:
        method: gRPC's name.
        needed: The scope that callers need.
        run: Returns the HTTP response's body, or a reason; raises NanoInferenceError.
        routes: HTTP's methods, such as "GET POST", and paths.
        body: The HTTP request's body; None for none.
        field: The field of the gRPC response that holds the result; "" for all of the response.
    """

    method: str
    needed: Needed
    run: Callable[[OperationCall], Awaitable[Any]]
    routes: tuple[tuple[str, str], ...]
    body: type[msgspec.Struct] | None
    field: str


OPERATIONS: list[Operation] = []
"""All operations. Over HTTP the first one whose path matches is called."""

Run = TypeVar("Run", bound=Callable[[OperationCall], Awaitable[Any]])


def _operation(
    method: str,
    needed: Needed,
    *routes: tuple[str, str],
    body: type[msgspec.Struct] | None = None,
    field: str = "",
) -> Callable[[Run], Run]:
    def add(run: Run) -> Run:
        OPERATIONS.append(Operation(method, needed, run, routes, body, field))
        return run

    return add


def model_routes(http: str, suffix: str = "") -> tuple[tuple[str, str], tuple[str, str]]:
    """Return the routes of a model's version, and of the model."""
    model = "/v2/models/{model:name}"
    return (http, f"{model}/versions/{{version}}{suffix}"), (http, f"{model}{suffix}")


def _region_routes(http: str, kind: str, suffix: str) -> tuple[tuple[str, str], tuple[str, str]]:
    memory = f"/v2/{kind}sharedmemory"
    return (http, f"{memory}/region/{{region:name}}{suffix}"), (http, f"{memory}{suffix}")


# --- the server and its models --------------------------------------------------------------------


@_operation("ServerMetadata", "read", ("GET", "/v2"))
async def _server_metadata(call: OperationCall) -> Json:
    memory = ["system_shared_memory"] if call.kserve.regions.is_on else []
    return {"name": SERVER_NAME, "version": VERSION, "extensions": [*_EXTENSIONS, *memory]}


@_operation("ServerLive", "nothing", ("GET", "/v2/health/live"), field="live")
async def _live(call: OperationCall) -> str:
    return ""


@_operation("ServerReady", "nothing", ("GET", "/v2/health/ready"), field="ready")
async def _ready(call: OperationCall) -> str:
    try:
        return await call.readiness.trouble()
    except BusError as error:
        return error.message


@_operation("ModelStatistics", "read", ("GET", "/v2/models/stats"), *model_routes("GET", "/stats"))
async def _statistics(call: OperationCall) -> Json:
    service = call.kserve.service
    return {
        "model_stats": [
            service.statistics.model(spec.name).to_json(spec.name, version)
            for spec in service.specs(call.name, call.version, caller_of(call.request))
            for version in spec.versions
            if call.version in ("", version)
        ]
    }


@_operation("ModelReady", "nothing", *model_routes("GET", "/ready"), field="ready")
async def _model_ready(call: OperationCall) -> str:
    try:
        return await call.kserve.service.trouble(call.name, call.version)
    except (BusError, RequestError) as error:
        return error.message


@_operation("ModelConfig", "read", *model_routes("GET", "/config"), field="config")
async def _model_config(call: OperationCall) -> Json:
    return model_config(call.spec)


class IndexBody(msgspec.Struct):
    """The body of RepositoryIndex."""

    ready: bool = False


@_operation(
    "RepositoryIndex", "read", ("POST", "/v2/repository/index"), body=IndexBody, field="models"
)
async def _index(call: OperationCall) -> list[Json]:
    service = call.kserve.service
    names = {each.name for each in service.specs(caller=caller_of(call.request))}
    return [
        {
            "name": each.name,
            "version": each.version,
            "state": "READY" if each.ready else "UNAVAILABLE",
            "reason": each.reason,
        }
        for each in await service.states(names)
        if each.ready or not call.body.ready
    ]


class LoadBody(msgspec.Struct):
    """The body of RepositoryModelLoad and RepositoryModelUnload."""

    parameters: dict[str, Any] = {}


@_operation(
    "RepositoryModelLoad",
    "admin",
    ("POST", "/v2/repository/models/{model:name}/load"),
    body=LoadBody,
)
async def _load(call: OperationCall) -> None:
    await _repository(call).load(call.request, call.name)


@_operation(
    "RepositoryModelUnload",
    "admin",
    ("POST", "/v2/repository/models/{model:name}/unload"),
    body=LoadBody,
)
async def _unload(call: OperationCall) -> None:
    await _repository(call).unload(call.request, call.name)


def _repository(call: OperationCall) -> ModelRepository:
    """The repository. Raises RequestError (unsupported) without one, or for Triton's parameters."""
    if call.kserve.repository is None:
        raise RequestError(NO_LOADING, code="unsupported")
    parameters: Iterable[str] = call.body.parameters
    for name in parameters:
        # A model has no dependents here.
        if name != "unload_dependents":
            raise RequestError(
                f"the parameter {shown(name)} is not supported here; give a model's configuration "
                "and files in the setting models, or to POST /admin/models",
                code="unsupported",
            )
    return call.kserve.repository


# --- shared memory --------------------------------------------------------------------------------


class RegisterBody(msgspec.Struct):
    """The body of SystemSharedMemoryRegister."""

    key: str
    byte_size: Int64
    offset: Int64 = 0


@_operation(
    "SystemSharedMemoryRegister",
    "generate",
    _region_routes("POST", "system", "/register")[0],
    body=RegisterBody,
)
async def _register(call: OperationCall) -> None:
    body, tenant = call.body, tenant_of(call.request)
    call.kserve.regions.register(call.name, body.key, body.offset, body.byte_size, tenant)


@_operation(
    "SystemSharedMemoryStatus",
    "generate",
    *_region_routes("GET", "system", "/status"),
    field="regions",
)
async def _memory_status(call: OperationCall) -> list[Json]:
    regions = call.kserve.regions.status(call.name, tenant_of(call.request))
    return [{"name": name, **region._asdict()} for name, region in regions.items()]


@_operation(
    "SystemSharedMemoryUnregister", "generate", *_region_routes("POST", "system", "/unregister")
)
async def _unregister(call: OperationCall) -> None:
    call.kserve.regions.unregister(call.name, tenant_of(call.request))


# --- what is not supported ------------------------------------------------------------------------


# Triton's clients clean up with the status and unregister calls, also without CUDA regions.
@_operation(
    "CudaSharedMemoryStatus", "generate", *_region_routes("GET", "cuda", "/status"), field="regions"
)
async def _cuda_status(call: OperationCall) -> list[Json]:
    return []


@_operation(
    "CudaSharedMemoryUnregister", "generate", *_region_routes("POST", "cuda", "/unregister")
)
async def _cuda_unregister(call: OperationCall) -> None:
    return None


@_operation("CudaSharedMemoryRegister", "generate", _region_routes("POST", "cuda", "/register")[0])
async def _cuda_register(call: OperationCall) -> None:
    raise RequestError(
        "memory of CUDA can't be shared; use that of the system, or send tensors in the body",
        code="unsupported",
    )


@_operation(
    "TraceSetting",
    "admin",
    ("GET POST", "/v2/trace/setting"),
    ("GET POST", "/v2/models/{model:name}/trace/setting"),
)
async def _trace_setting(call: OperationCall) -> None:
    raise RequestError(
        "traces are set up by the gateway's settings (docs/telemetry.md)", code="unsupported"
    )


@_operation("LogSettings", "admin", ("GET POST", "/v2/logging"))
async def _log_settings(call: OperationCall) -> None:
    raise RequestError(
        "logs are set up by the gateway's settings (docs/telemetry.md)", code="unsupported"
    )


# Last, because its path matches the paths of other operations on models.
@_operation("ModelMetadata", "read", *model_routes("GET"))
async def _model_metadata(call: OperationCall) -> Json:
    return model_metadata(call.spec)
