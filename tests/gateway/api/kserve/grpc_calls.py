"""A gateway with a port for gRPC, models that are none, and calls to it in bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, cast

import grpc
import numpy as np

from nano_inference.config import load_config
from nano_inference.gateway.api.kserve.served import Answer, ModelCall, ServedModel
from nano_inference.gateway.gateway import Gateway
from nano_inference.kserve.protobuf import METHODS, message
from nano_inference.kserve.tensors import ModelSpec, NamedTensor, TensorSpec
from nano_inference.pipeline.client import BusClient
from nano_inference.telemetry import Metrics, Tracing

from ...fake import FakeEngine

LIMIT_S = 30
MESSAGE = METHODS["ModelInfer"].request


class Engine(FakeEngine):
    def __init__(self) -> None:
        super().__init__()
        self.tracing = Tracing()
        self.metrics = Metrics()


class Model:
    """Gives what it is given, once it may.

    Attributes:
        calls: That have come.
        free: Set while it may answer.
        left: Ids of requests that were cancelled.
        answers: How often it answers a call that takes many.
        failure: What it raises behind its answers.
    """

    def __init__(self, name: str = "echo", *, decoupled: bool = False) -> None:
        tensors = (TensorSpec("x", "FP32", (-1,)),)
        self.spec = ModelSpec(name=name, inputs=tensors, outputs=tensors, decoupled=decoupled)
        self.calls: list[ModelCall] = []
        self.free = asyncio.Event()
        self.free.set()
        self.left: list[str] = []
        self.answers = 1
        self.failure: Exception | None = None
        self.sent = 0
        self.why_not = ""

    async def infer(self, call: ModelCall, answer: Answer) -> None:
        self.calls.append(call)
        try:
            await self.free.wait()
            for _ in range(self.answers if call.many else 1):
                data = call.request.input("x")
                assert data is not None
                await answer([NamedTensor("x", data)])
                self.sent += 1
            if self.failure is not None:
                raise self.failure
        except asyncio.CancelledError:
            self.left.append(call.request.id)
            raise

    async def trouble(self) -> str:
        return self.why_not


class Failed(NamedTuple):
    """How a call ended that has an error."""

    code: str
    stable: str
    details: str
    trailers: dict[str, str]


class Client:
    """Calls a gateway."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    def begin(self, method: str, data: bytes, **options: Any) -> Any:
        """A call under way that has one answer."""
        return self.channel.unary_unary(METHODS[method].path)(data, **options)

    async def __call__(self, method: str, request: Any = None, **options: Any) -> Any:
        """What a method answers to a message, or to bytes; its error as `Failed`."""
        if not isinstance(request, bytes):
            request = (
                METHODS[method].request() if request is None else request
            ).SerializeToString()
        return await self.end(method, self.begin(method, request, **options))

    async def end(self, method: str, call: Any) -> Any:
        """How a call ends."""
        try:
            return METHODS[method].response.FromString(await call)
        except grpc.aio.AioRpcError as error:
            return failed(error)

    def stream(self, **options: Any) -> Stream:
        path = METHODS["ModelStreamInfer"].path
        return Stream(self.channel.stream_stream(path)(**options))


class Stream:
    """Requests and answers."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, *requests: Any) -> None:
        for request in requests:
            data = request if isinstance(request, bytes) else request.SerializeToString()
            await self.call.write(data)

    async def read(self) -> Any:
        """The next answer; None behind the last; `Failed` when the stream did."""
        try:
            data = await self.call.read()
        except grpc.aio.AioRpcError as error:
            return failed(error)
        if data is grpc.aio.EOF:
            return None
        return METHODS["ModelStreamInfer"].response.FromString(data)

    async def read_all(self) -> list[Any]:
        """All answers that are still to come, when there are no more requests."""
        await self.call.done_writing()
        found = []
        while (answer := await self.read()) is not None:
            found.append(answer)
            if isinstance(answer, Failed):
                break
        return found


def failed(error: grpc.aio.AioRpcError) -> Failed:
    trailers = {key: str(value) for key, value in error.trailing_metadata() or ()}
    stable = trailers.get("nano-inference-code", "")
    return Failed(error.code().name, stable, error.details() or "", trailers)


def request(
    name: str = "echo", values: Iterable[float] = (1, 2), *, request_id: str = "", **parameters: Any
) -> Any:
    """A request with a tensor "x"."""
    data = np.array(list(values), dtype="<f4")
    asked = message("ModelInferRequest")(model_name=name, id=request_id)
    asked.inputs.add(name="x", datatype="FP32", shape=data.shape)
    asked.raw_input_contents.append(data.tobytes())
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    for key, value in parameters.items():
        setattr(asked.parameters[key], kinds[type(value)], value)
    return asked


def values(response: Any) -> list[float]:
    """Those of an answer with one tensor."""
    (raw,) = response.raw_output_contents
    return list(np.frombuffer(raw, "<f4"))


def code_of(part: Any) -> str:
    """The stable code of the error that a stream's answer tells of."""
    return part.infer_response.parameters["nano-inference-code"].string_param if part else ""


@asynccontextmanager
async def served(
    *models: ServedModel, engine: FakeEngine | None = None, **settings: Any
) -> AsyncIterator[tuple[Gateway, Client]]:
    """A gateway, and a client of it. A setting "a__b" is "a.b"; one without is the gateway's."""
    own = {
        name.replace("__", ".") if "__" in name else f"gateway.{name}": value
        for name, value in settings.items()
    }
    config = load_config(env={}, overrides={"gateway.grpc_port": 0} | own)
    async with (
        asyncio.timeout(LIMIT_S),
        Gateway(cast(BusClient, engine or Engine()), config) as gateway,
        grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel,
    ):
        for model in models:
            gateway.kserve.service.add(model)
        yield gateway, Client(channel)


async def until(holds: Any) -> None:
    """Lets the server do what it has to."""
    async with asyncio.timeout(LIMIT_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0)
