"""A gRPC server that answers with its inputs, and fails on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import grpc

from nano_inference.config import NanoInferenceError
from nano_inference.kserve.grpc_codec import decode_infer_request, encode_infer_response
from nano_inference.kserve.protobuf import METHODS, SERVICE, message
from nano_inference.kserve.shared_memory import SharedMemoryRegistry
from nano_inference.kserve.tensors import InferResponse

Server = TypeVar("Server", bound="EchoServer")


class Failure(NamedTuple):
    """How a call fails."""

    status: grpc.StatusCode
    text: str = "it fails on demand"
    code: str = ""
    retry_after: str = ""

    @property
    def trailers(self) -> tuple[tuple[str, str], ...]:
        trailers = {"nano-inference-code": self.code, "retry-after": self.retry_after}
        return tuple((key, value) for key, value in trailers.items() if value)


class EchoServer:
    """The methods that our client calls.

    Attributes:
        received: Messages of all calls.
        metadata: Metadata of each.
        left_s: Seconds to the deadline of each inference call; None without one.
        failures: Failures of the next inference calls, one each.
        regions: Registered regions.
        hangs: Inference calls do not end.
        cancelled: An inference call was cancelled.
        on_call: Called for each inference call.
        answers: A stream's responses to a request; None for its inputs, and then the end.
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

    async def _answer(self, name: str, request: Any, context: Any) -> Any:
        """Everything but inference."""
        self.received.append(request)
        fields: dict[str, Any] = {}
        match name:
            case "ServerReady":
                fields = {"ready": True}
            case "SystemSharedMemoryRegister":
                self.regions.register(request.name, request.key, request.offset, request.byte_size)
            case "SystemSharedMemoryUnregister":
                self.regions.unregister(request.name)
        return METHODS[name].response(**fields)

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
                answer = partial(self._answer, method.name)
                behaviour = self._infer if method.name == "ModelInfer" else answer
                handlers[method.name] = grpc.unary_unary_rpc_method_handler(behaviour, **codec)
        return grpc.method_handlers_generic_handler(SERVICE, handlers)


@asynccontextmanager
async def echo_server(
    credentials: grpc.ServerCredentials | None = None, kind: type[Server] = EchoServer
) -> AsyncIterator[Server]:
    """A server on a free port."""
    echo, server = kind(), grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
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
    """An empty response that marks the end."""
    response = message("ModelInferResponse")(model_name="echo")
    response.parameters["triton_final_response"].bool_param = True
    return streamed(response)
