"""A server over gRPC that answers with what it is sent, and fails as it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import grpc

from nano_inference.config import NanoInferenceError
from nano_inference.kserve.codec import (
    decode_infer_request,
    encode_infer_response,
    encode_model_config,
    encode_model_metadata,
    encode_repository_index,
)
from nano_inference.kserve.protobuf import METHODS, SERVICE, message
from nano_inference.kserve.shared_memory import SharedMemoryRegistry
from nano_inference.kserve.tensors import InferResponse, ModelSpec, TensorSpec

SPEC = ModelSpec(
    name="echo",
    inputs=(TensorSpec("a", "FP32", (-1,)), TensorSpec("b", "BYTES", (-1,), optional=True)),
    outputs=(TensorSpec("a", "FP32", (-1,)), TensorSpec("b", "BYTES", (-1,))),
    decoupled=True,
)


class Failure(NamedTuple):
    """How a call ends that fails."""

    status: grpc.StatusCode
    text: str = "it is told to fail"
    code: str = ""
    retry_after: str = ""

    @property
    def trailers(self) -> tuple[tuple[str, str], ...]:
        told = {"nano-inference-code": self.code, "retry-after": self.retry_after}
        return tuple((key, value) for key, value in told.items() if value)


class EchoServer:
    """The methods of the service that a client of ours calls.

    Attributes:
        received: The messages of all calls.
        metadata: What came with each.
        left_s: How long each call of inference may take by its deadline; None without one.
        failures: Of the next calls of inference, one each.
        regions: What was registered.
        hangs: Calls of inference do not end.
        cancelled: A call of inference was cancelled.
        on_call: What happens when one has come.
        answers: What a stream answers to a request; None for what it was sent, and then the end.
    """

    def __init__(self) -> None:
        self.received: list[Any] = []
        self.metadata: list[dict[str, str]] = []
        self.left_s: list[float | None] = []
        self.failures: list[Failure] = []
        self.regions = SharedMemoryRegistry()
        self.hangs = False
        self.cancelled = asyncio.Event()
        self.on_call: Callable[[], None] = lambda: None
        self.answers: list[Any] | None = None
        self.address = ""

    def of(self, name: str) -> list[Any]:
        """The messages of one type."""
        return [each for each in self.received if isinstance(each, message(name))]

    async def _infer(self, request: Any, context: Any) -> Any:
        await self._begin(request, context)
        try:
            decoded = decode_infer_request(request, self.regions)
            response = InferResponse(
                model_name=decoded.model_name, id=decoded.id, outputs=decoded.inputs
            )
            return encode_infer_response(response, decoded.outputs, self.regions)
        except NanoInferenceError as error:
            failure = Failure(grpc.StatusCode.INVALID_ARGUMENT, error.message, error.code)
            await context.abort(failure.status, failure.text, failure.trailers)

    async def _stream(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            if self.answers is None:
                yield streamed(await self._infer(request, context))
                yield final()
                continue
            await self._begin(request, context)
            for answer in self.answers:
                yield answer

    async def _begin(self, request: Any, context: Any) -> None:
        self.received.append(request)
        self.metadata.append({key: str(value) for key, value in context.invocation_metadata()})
        self.left_s.append(context.time_remaining())
        self.on_call()
        if self.failures:
            failure = self.failures.pop(0)
            await context.abort(failure.status, failure.text, failure.trailers)
        if self.hangs:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()

    async def _tell(self, request: Any, context: Any) -> Any:
        """Everything but inference."""
        self.received.append(request)
        match type(request).DESCRIPTOR.name:
            case "ServerReadyRequest":
                return message("ServerReadyResponse")(ready=True)
            case "ModelReadyRequest":
                return message("ModelReadyResponse")(ready=request.name == "echo")
            case "ModelMetadataRequest":
                return encode_model_metadata(SPEC)
            case "ModelConfigRequest":
                return encode_model_config(SPEC)
            case "RepositoryIndexRequest":
                return encode_repository_index([("echo", True), ("other", False)])
            case "SystemSharedMemoryRegisterRequest":
                self.regions.register(request.name, request.key, request.offset, request.byte_size)
                return message("SystemSharedMemoryRegisterResponse")()
            case "SystemSharedMemoryUnregisterRequest":
                self.regions.unregister(request.name)
                return message("SystemSharedMemoryUnregisterResponse")()

    def handler(self) -> Any:
        handlers = {}
        for method in METHODS.values():
            codec = {
                "request_deserializer": method.request.FromString,
                "response_serializer": method.response.SerializeToString,
            }
            if method.streams:
                handlers[method.name] = grpc.stream_stream_rpc_method_handler(self._stream, **codec)
            else:
                behaviour = self._infer if method.name == "ModelInfer" else self._tell
                handlers[method.name] = grpc.unary_unary_rpc_method_handler(behaviour, **codec)
        return grpc.method_handlers_generic_handler(SERVICE, handlers)


@asynccontextmanager
async def echo_server(
    credentials: grpc.ServerCredentials | None = None,
) -> AsyncIterator[EchoServer]:
    """One on a free port."""
    echo, server = EchoServer(), grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    server.add_generic_rpc_handlers((echo.handler(),))
    place = "127.0.0.1:0"
    port = (
        server.add_insecure_port(place)
        if credentials is None
        else server.add_secure_port(place, credentials)
    )
    echo.address = f"127.0.0.1:{port}"
    await server.start()
    try:
        yield echo
    finally:
        await server.stop(None)
        echo.regions.unregister()


def streamed(response: Any) -> Any:
    return message("ModelStreamInferResponse")(infer_response=response)


def final() -> Any:
    """An answer without outputs that says that it is the last one."""
    response = message("ModelInferResponse")(model_name="echo")
    response.parameters["triton_final_response"].bool_param = True
    return streamed(response)
