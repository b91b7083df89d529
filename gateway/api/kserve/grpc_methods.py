"""The methods of gRPC, each with what it asks of its callers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import anyio.to_thread
from google.protobuf.message import Message
from starlette.requests import Request

from ....config import BusError, RequestError
from ....kserve import codec
from ....kserve.keys import FINAL_PARAM, WANTS_FINAL_PARAM
from ....kserve.memory import TensorMemory
from ....kserve.protobuf import METHODS
from ....kserve.tensors import InferRequest, InferResponse, ModelSpec
from ...policy.caller import caller_of
from ...policy.document import Needed
from ...serving.lane_state import Readiness
from ...serving.origin import Origin, origin_of, tenant_of
from .http_repository import check_parameters, checked
from .shared import (
    NO_CUDA,
    NO_LOGGING,
    NO_TRACING,
    SERVER_NAME,
    VERSION,
    KServe,
)
from .statistics import encode_statistics

# What is copied faster than a thread is asked to.
_MOST_HERE_BYTES = 1 << 18

Answer = Callable[[Request, Any], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class GrpcMethod(NamedTuple):
    """A method that takes one message and gives one.

    Attributes:
        needed: What it asks of its callers.
        answer: Gives the answer to a call; raises NanoInferenceError.
    """

    needed: Needed
    answer: Answer


class GrpcMethods:
    """What is done for each method.

    Attributes:
        unary: Those with one answer, by their names.
        stream_needs: What the one with many asks of its callers.
    """

    stream_needs: Needed = "generate"

    def __init__(self, kserve: KServe, readiness: Readiness) -> None:
        self._service = kserve.service
        self._regions = kserve.regions
        self._extensions = kserve.extensions
        self._repository = kserve.repository
        self._readiness = readiness
        self.unary: Mapping[str, GrpcMethod] = {
            "ServerLive": GrpcMethod("nothing", self._server_live),
            "ServerReady": GrpcMethod("nothing", self._server_ready),
            "ModelReady": GrpcMethod("nothing", self._model_ready),
            "ServerMetadata": GrpcMethod("read", self._server_metadata),
            "ModelMetadata": GrpcMethod("read", self._model_metadata),
            "ModelConfig": GrpcMethod("read", self._model_config),
            "ModelStatistics": GrpcMethod("read", self._model_statistics),
            "RepositoryIndex": GrpcMethod("read", self._repository_index),
            "ModelInfer": GrpcMethod("generate", self._model_infer),
            "SystemSharedMemoryStatus": GrpcMethod("generate", self._memory_status),
            "SystemSharedMemoryRegister": GrpcMethod("generate", self._memory_register),
            "SystemSharedMemoryUnregister": GrpcMethod("generate", self._memory_unregister),
            # Clients that clean up ask for these two, whether or not they use any.
            "CudaSharedMemoryStatus": GrpcMethod("generate", _empty("CudaSharedMemoryStatus")),
            "CudaSharedMemoryUnregister": GrpcMethod(
                "generate", _empty("CudaSharedMemoryUnregister")
            ),
            "CudaSharedMemoryRegister": GrpcMethod("generate", _refusing(NO_CUDA)),
            "RepositoryModelLoad": GrpcMethod("admin", self._model_load),
            "RepositoryModelUnload": GrpcMethod("admin", self._model_unload),
            "TraceSetting": GrpcMethod("admin", _refusing(NO_TRACING)),
            "LogSettings": GrpcMethod("admin", _refusing(NO_LOGGING)),
        }

    async def stream(self, request: Request, message: Any, send: Send) -> None:
        """Answers one request of a stream, as often as its model does.

        Raises:
            NanoInferenceError: It can't be done. There may have been answers.
        """
        origin = _origin(request)
        memory = self._regions.memory(origin.tenant)
        asked = await _decode(message, memory)
        many = self._service.spec(asked.model_name, asked.model_version).decoupled
        tells_end = many and asked.parameters.get(WANTS_FINAL_PARAM) is True

        async def respond(response: InferResponse) -> None:
            encoded = await _encode(response, asked, memory)
            encoded.parameters[FINAL_PARAM].bool_param = not many
            await send(_part(encoded))

        await self._service.infer(origin, asked, respond, many=many)
        if tells_end:
            last = codec.encode_infer_response(
                InferResponse(model_name=asked.model_name, id=asked.id)
            )
            last.parameters[FINAL_PARAM].bool_param = True
            await send(_part(last))

    def answers_in_order(self, message: Any) -> bool:
        """Whether a stream's answer to a request waits for those to the requests before it: as
        Triton has it where there is one answer to each, since few clients name their requests."""
        try:
            return not self._service.spec(message.model_name, message.model_version).decoupled
        except RequestError:
            return True

    # --- health ---------------------------------------------------------------------------------

    async def _server_live(self, request: Request, message: Any) -> Message:
        return _response("ServerLive", live=True)

    async def _server_ready(self, request: Request, message: Any) -> Message:
        try:
            ready = not await self._readiness.trouble()
        except BusError:
            ready = False
        return _response("ServerReady", ready=ready)

    async def _model_ready(self, request: Request, message: Any) -> Message:
        try:
            ready = await self._service.is_ready(message.name, message.version)
        except (RequestError, BusError):
            ready = False
        return _response("ModelReady", ready=ready)

    # --- what there is --------------------------------------------------------------------------

    async def _server_metadata(self, request: Request, message: Any) -> Message:
        return _response(
            "ServerMetadata", name=SERVER_NAME, version=VERSION, extensions=self._extensions
        )

    async def _model_metadata(self, request: Request, message: Any) -> Message:
        return codec.encode_model_metadata(self._spec(request, message))

    async def _model_config(self, request: Request, message: Any) -> Message:
        return codec.encode_model_config(self._spec(request, message))

    async def _model_statistics(self, request: Request, message: Any) -> Message:
        caller = caller_of(request)
        told: Message = encode_statistics(self._service, message.name, message.version, caller)
        return told

    async def _repository_index(self, request: Request, message: Any) -> Message:
        names = {each.name for each in self._service.specs(caller=caller_of(request))}
        states = [
            each for each in await self._service.states(names) if each.ready or not message.ready
        ]
        return codec.encode_repository_index(
            codec.ModelIndex(each.name, each.ready, each.version, each.reason) for each in states
        )

    async def _model_load(self, request: Request, message: Any) -> Message:
        repository = checked(self._repository)
        check_parameters(message.parameters)
        await repository.load(request, message.model_name)
        return _response("RepositoryModelLoad")

    async def _model_unload(self, request: Request, message: Any) -> Message:
        repository = checked(self._repository)
        check_parameters(message.parameters)
        await repository.unload(request, message.model_name)
        return _response("RepositoryModelUnload")

    def _spec(self, request: Request, message: Any) -> ModelSpec:
        return self._service.spec(message.name, message.version, caller_of(request))

    # --- inference ------------------------------------------------------------------------------

    async def _model_infer(self, request: Request, message: Any) -> Message:
        origin = _origin(request)
        memory = self._regions.memory(origin.tenant)
        asked = await _decode(message, memory)
        return await _encode(await self._service.infer_once(origin, asked), asked, memory)

    # --- shared memory --------------------------------------------------------------------------

    async def _memory_status(self, request: Request, message: Any) -> Message:
        response: Any = _response("SystemSharedMemoryStatus")
        for name, region in self._regions.status(tenant_of(request), message.name).items():
            told = response.regions[name]
            told.name, told.key = name, region.key
            told.offset, told.byte_size = region.offset, region.byte_size
        return response

    async def _memory_register(self, request: Request, message: Any) -> Message:
        tenant = tenant_of(request)
        self._regions.register(tenant, message.name, message.key, message.offset, message.byte_size)
        return _response("SystemSharedMemoryRegister")

    async def _memory_unregister(self, request: Request, message: Any) -> Message:
        self._regions.unregister(tenant_of(request), message.name)
        return _response("SystemSharedMemoryUnregister")


def _origin(request: Request) -> Origin:
    """Raises RequestError: invalid_tenant, invalid_budget."""
    return origin_of(request, tenant_of(request), None)


def _response(method: str, /, **fields: Any) -> Message:
    return METHODS[method].response(**fields)


def _empty(name: str) -> Answer:
    async def answer(request: Request, message: Any) -> Message:
        return _response(name)

    return answer


def _refusing(why: str) -> Answer:
    async def answer(request: Request, message: Any) -> Message:
        raise RequestError(why, code="unsupported")

    return answer


def _part(response: Any) -> Message:
    """An answer of a stream."""
    return METHODS["ModelStreamInfer"].response(infer_response=response)


async def _decode(message: Any, memory: TensorMemory) -> InferRequest:
    """A request's tensors; large ones are copied out of shared memory in a thread."""
    if not any(each.parameters for each in message.inputs):
        # Without a copy.
        return codec.decode_infer_request(message, memory)
    return await anyio.to_thread.run_sync(codec.decode_infer_request, message, memory)


async def _encode(response: InferResponse, asked: InferRequest, memory: TensorMemory) -> Any:
    """An answer; large outputs are copied in a thread."""
    if sum(each.data.nbytes for each in response.outputs) <= _MOST_HERE_BYTES:
        return codec.encode_infer_response(response, asked.outputs, memory)
    return await anyio.to_thread.run_sync(
        codec.encode_infer_response, response, asked.outputs, memory
    )
