"""Operations of KServe V2 besides inference, one definition for HTTP and gRPC.

An operation returns the body of its HTTP response: JSON, or None for an empty one. A health check
returns the reason why it fails, "" if it passes.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from functools import cache
from importlib import metadata
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from ....config import BusError, Int64, RequestError, shown
from ....kserve.codec import Json, model_config, model_metadata
from ....kserve.tensors import ModelSpec
from ...call import Call
from ...caller import Needed
from ..routes import NO_LOADING
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
        request: The HTTP request, or the gRPC call in its form.
        name: Name of the model or region; "" for all.
        version: Version of the model; "" for any.
        body: Has the operation's other fields: the decoded body over HTTP, the message over gRPC.
    """

    kserve: KServe
    call: Call
    name: str
    version: str
    body: Any

    @property
    def spec(self) -> ModelSpec:
        """The model's. Raises RequestError: model_not_found."""
        return self.kserve.service.spec(self.name, self.version, self.call.caller)


class Operation(NamedTuple):
    """An operation.

    Attributes:
        method: gRPC's name.
        needed: The scope that callers need.
        run: Returns the HTTP response's body, or a reason; raises NanoInferenceError.
        route: HTTP's methods and path, such as "GET /v2"; parts of the path in brackets are
            optional.
        field: The field of the gRPC response that holds the result; "" for all of the response.
        body: The HTTP request's body; None for none.
    """

    method: str
    needed: Needed
    run: Callable[[OperationCall], Awaitable[Any]]
    route: str
    field: str = ""
    body: type[msgspec.Struct] | None = None


@cache
def paths_of(path: str) -> tuple[str, ...]:
    """Return the paths with and without the optional parts of a path, longest first."""
    if optional := re.search(r"\[([^][]*)\]", path):
        before, after = path[: optional.start()], path[optional.end() :]
        both = (paths_of(before + part + after) for part in (optional[1], ""))
        return tuple(dict.fromkeys(chain.from_iterable(both)))
    return (re.sub(r"{(model|region)}", r"{\1:name}", path),)


# --- the server and its models --------------------------------------------------------------------


async def _server_metadata(call: OperationCall) -> Json:
    memory = ["system_shared_memory"] if call.kserve.regions.is_on else []
    return {"name": SERVER_NAME, "version": VERSION, "extensions": [*_EXTENSIONS, *memory]}


async def _ready(call: OperationCall) -> str:
    try:
        return await call.kserve.readiness.trouble()
    except BusError as error:
        return error.message


async def _statistics(call: OperationCall) -> Json:
    service = call.kserve.service
    return {
        "model_stats": [
            service.statistics.model(spec.name).to_json(spec.name, version)
            for spec in service.specs(call.name, call.version, call.call.caller)
            for version in spec.versions
            if call.version in ("", version)
        ]
    }


async def _model_ready(call: OperationCall) -> str:
    try:
        return await call.kserve.service.trouble(call.name, call.version)
    except (BusError, RequestError) as error:
        return error.message


async def _model_metadata(call: OperationCall) -> Json:
    return model_metadata(call.spec)


async def _model_config(call: OperationCall) -> Json:
    return model_config(call.spec)


async def _index(call: OperationCall) -> list[Json]:
    service = call.kserve.service
    names = {each.name for each in service.specs(caller=call.call.caller)}
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


async def _load(call: OperationCall) -> None:
    await _repository(call).load(call.call, call.name)


async def _unload(call: OperationCall) -> None:
    await _repository(call).unload(call.call, call.name)


def _repository(call: OperationCall) -> ModelRepository:
    """Return the repository.

    Raises:
        RequestError: unsupported: there is none, or the call has Triton's parameters.
    """
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


async def _register(call: OperationCall) -> None:
    body, tenant = call.body, call.call.tenant
    call.kserve.regions.register(call.name, body.key, body.offset, body.byte_size, tenant)


async def _regions(call: OperationCall) -> list[Json]:
    regions = call.kserve.regions.status(call.name, call.call.tenant)
    return [{"name": name, **region._asdict()} for name, region in regions.items()]


async def _unregister(call: OperationCall) -> None:
    call.kserve.regions.unregister(call.name, call.call.tenant)


def _always(result: Any) -> Callable[[OperationCall], Awaitable[Any]]:
    async def run(call: OperationCall) -> Any:
        return result

    return run


def _unsupported(why: str) -> Callable[[OperationCall], Awaitable[None]]:
    async def refuse(call: OperationCall) -> None:
        raise RequestError(why, code="unsupported")

    return refuse


_no_cuda = _unsupported(
    "memory of CUDA can't be shared; use that of the system, or send tensors in the body"
)
_no_tracing = _unsupported("traces are set up by the gateway's settings (docs/telemetry.md)")
_no_logging = _unsupported("logs are set up by the gateway's settings (docs/telemetry.md)")


# --- the table ------------------------------------------------------------------------------------


class IndexBody(msgspec.Struct):
    """`/v2/repository/index`."""

    ready: bool = False


class ModelLoadBody(msgspec.Struct):
    """`/v2/repository/models/{model}/load` and `/unload`."""

    parameters: dict[str, Any] = {}


class RegisterBody(msgspec.Struct):
    """`/v2/systemsharedmemory/region/{region}/register`."""

    key: str
    byte_size: Int64
    offset: Int64 = 0


MODEL = "/v2/models/{model}[/versions/{version}]"
_ALL_MODELS = "/v2/models[/{model}[/versions/{version}]]"
_LOADED = "/v2/repository/models/{model}"
_REGION = "/v2/systemsharedmemory/region/{region}"
_REGIONS = "/v2/systemsharedmemory[/region/{region}]"
_CUDA = "/v2/cudasharedmemory/region/{region}"
_ALL_CUDA = "/v2/cudasharedmemory[/region/{region}]"
_TRACE = "/v2[/models/{model}]/trace/setting"

OPERATIONS = (
    Operation("ServerMetadata", "read", _server_metadata, "GET /v2"),
    Operation("ServerLive", "nothing", _always(""), "GET /v2/health/live", "live"),
    Operation("ServerReady", "nothing", _ready, "GET /v2/health/ready", "ready"),
    Operation("ModelReady", "nothing", _model_ready, f"GET {MODEL}/ready", "ready"),
    Operation("ModelConfig", "read", _model_config, f"GET {MODEL}/config", "config"),
    Operation("ModelStatistics", "read", _statistics, f"GET {_ALL_MODELS}/stats"),
    Operation("RepositoryIndex", "read", _index, "POST /v2/repository/index", "models", IndexBody),
    Operation("RepositoryModelLoad", "admin", _load, f"POST {_LOADED}/load", "", ModelLoadBody),
    Operation(
        "RepositoryModelUnload", "admin", _unload, f"POST {_LOADED}/unload", "", ModelLoadBody
    ),
    Operation(
        "SystemSharedMemoryRegister",
        "generate",
        _register,
        f"POST {_REGION}/register",
        body=RegisterBody,
    ),
    Operation(
        "SystemSharedMemoryStatus", "generate", _regions, f"GET {_REGIONS}/status", "regions"
    ),
    Operation(
        "SystemSharedMemoryUnregister", "generate", _unregister, f"POST {_REGIONS}/unregister"
    ),
    # Triton's clients call status and unregister to clean up, with or without CUDA regions.
    Operation(
        "CudaSharedMemoryStatus", "generate", _always([]), f"GET {_ALL_CUDA}/status", "regions"
    ),
    Operation(
        "CudaSharedMemoryUnregister", "generate", _always(None), f"POST {_ALL_CUDA}/unregister"
    ),
    Operation("CudaSharedMemoryRegister", "generate", _no_cuda, f"POST {_CUDA}/register"),
    Operation("TraceSetting", "admin", _no_tracing, f"GET,POST {_TRACE}"),
    Operation("LogSettings", "admin", _no_logging, "GET,POST /v2/logging"),
    # Last, because its path matches the paths of other operations on models.
    Operation("ModelMetadata", "read", _model_metadata, f"GET {MODEL}"),
)
"""All operations. Over HTTP the first one whose path matches is called."""
