"""A gateway with fake models, and calls to it over HTTP and gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, cast

import anyio
import grpc
import httpx
import numpy as np
import tritonclient.http

from nano_inference.config import NanoInferenceError, load_config
from nano_inference.gateway.api.kserve.served import Answer, ModelCall, ServedModel
from nano_inference.gateway.gateway import Gateway
from nano_inference.gateway.serving.lane_state import Readiness
from nano_inference.kserve.protobuf import METHODS, message
from nano_inference.kserve.tensors import DATATYPES, DTYPES, ModelSpec, NamedTensor, TensorSpec
from nano_inference.pipeline.client import BusClient

from ...fake import FakeEngine, app_of

LIMIT_S = 30
JSON = {"Content-Type": "application/json"}
BYTES = {"Content-Type": "application/octet-stream"}
LENGTH = "Inference-Header-Content-Length"
INT8 = {"name": "INT8", "datatype": "INT8", "shape": [1], "data": [1]}
"""An input of `Echo`, as JSON."""


async def until(holds: Callable[[], Any]) -> None:
    """Let the server work until something holds."""
    async with asyncio.timeout(LIMIT_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


# --- models ---------------------------------------------------------------------------------------


class FakeModel:
    """A model that never answers, unless a subclass does.

    Attributes:
        spec: Its interface.
        calls: Its calls.
        ended: How calls ended: "done", "cancelled" or "failed".
        why_not: Its trouble.
        trouble_error: What `trouble` raises.
    """

    def __init__(self, name: str, **spec: Any) -> None:
        self.spec = ModelSpec(name=name, **{"inputs": (), "outputs": (), **spec})
        self.calls: list[ModelCall] = []
        self.ended: list[str] = []
        self.why_not = ""
        self.trouble_error: NanoInferenceError | None = None

    async def infer(self, call: ModelCall, answer: Answer) -> None:
        self.calls.append(call)
        end = "cancelled"
        try:
            await self.answer_all(call, answer)
            end = "done"
        except Exception:
            end = "failed"
            raise
        finally:
            self.ended.append(end)

    async def answer_all(self, call: ModelCall, answer: Answer) -> None:
        await anyio.sleep_forever()

    async def trouble(self) -> str:
        if self.trouble_error is not None:
            raise self.trouble_error
        return self.why_not


class Slow(FakeModel):
    """Never answers."""

    def __init__(self, name: str = "slow") -> None:
        super().__init__(name)


class Echo(FakeModel):
    """Returns each input as the output of that name: one of each datatype."""

    def __init__(self, name: str = "echo", shape: tuple[int, ...] = (-1,)) -> None:
        super().__init__(
            name,
            inputs=tuple(TensorSpec(each, each, shape, optional=True) for each in DATATYPES),
            outputs=tuple(TensorSpec(each, each, shape) for each in DATATYPES),
            versions=("1", "3"),
        )

    async def answer_all(self, call: ModelCall, answer: Answer) -> None:
        await answer(call.request.inputs)


class Model(FakeModel):
    """Returns its input "x", once it may.

    Attributes:
        free: Set while it may answer; not from the beginning if it is `held`.
        answers: Answers to a call that takes many.
        failure: Raised after the answers.
        sent: Number of answers.
    """

    def __init__(
        self, name: str = "echo", *, decoupled: bool = False, held: bool = False, answers: int = 1
    ) -> None:
        tensors = (TensorSpec("x", "FP32", (-1,)),)
        super().__init__(name, inputs=tensors, outputs=tensors, decoupled=decoupled)
        self.free = asyncio.Event()
        if not held:
            self.free.set()
        self.answers = answers
        self.failure: Exception | None = None
        self.sent = 0

    async def answer_all(self, call: ModelCall, answer: Answer) -> None:
        await self.free.wait()
        for _ in range(self.answers if call.many else 1):
            await answer(call.request.inputs)
            self.sent += 1
        if self.failure is not None:
            raise self.failure


class Several(FakeModel):
    """Answers `times` times; where one answer is taken, with the last.

    Attributes:
        go_on: Set while answers after the first may come.
        failure: Raised after the answers.
    """

    def __init__(self, name: str = "several", failure: NanoInferenceError | None = None) -> None:
        super().__init__(
            name,
            inputs=(TensorSpec("times", "INT32", (1,)), TensorSpec("text", "BYTES", (1,), True)),
            outputs=(TensorSpec("number", "INT64", (1,)), TensorSpec("word", "BYTES", (1,))),
            decoupled=True,
        )
        self.go_on = anyio.Event()
        self.go_on.set()
        self.failure = failure

    async def answer_all(self, call: ModelCall, answer: Answer) -> None:
        times = call.request.input("times")
        numbers = range(int(times[0]))
        for number in numbers if call.many else numbers[-1:]:
            if call.many and number:
                await self.go_on.wait()
            word = np.array([b"number %d" % number], dtype=np.object_)
            await answer([NamedTensor("number", np.array([number])), NamedTensor("word", word)])
        if self.failure is not None:
            raise self.failure


# --- gateways -------------------------------------------------------------------------------------


@asynccontextmanager
async def served(
    *models: ServedModel,
    engine: FakeEngine | None = None,
    limit_s: float | None = LIMIT_S,
    **settings: Any,
) -> AsyncIterator[tuple[Gateway, Client]]:
    """A gateway, and a client of it over gRPC. A setting "a__b" is "a.b", others are the
    gateway's."""
    own = {
        name.replace("__", ".") if "__" in name else f"gateway.{name}": value
        for name, value in settings.items()
    }
    config = load_config(env={}, overrides={"gateway.grpc_port": 0, "gateway.port": 0} | own)
    async with (
        asyncio.timeout(limit_s),
        Gateway(cast(BusClient, engine or FakeEngine()), config) as gateway,
        grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel,
    ):
        for model in models:
            gateway.kserve.service.add(model)
        yield gateway, Client(channel)


@asynccontextmanager
async def listening(*models: ServedModel, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """The same, and a client over HTTP."""
    async with (
        served(*models, **settings) as (gateway, _),
        httpx.AsyncClient(base_url=gateway.url) as http,
    ):
        yield http


@asynccontextmanager
async def asking(
    *models: ServedModel,
    engine: FakeEngine | None = None,
    readiness: Readiness | None = None,
    **settings: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application alone; `settings` are the gateway's."""
    config = load_config(env={}, overrides={f"gateway.{name}": settings[name] for name in settings})
    app = app_of(engine or FakeEngine(), config, readiness=readiness)
    for model in models:
        app.kserve.service.add(model)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client
    app.kserve.regions.close()


# --- HTTP -----------------------------------------------------------------------------------------


def failed(answer: httpx.Response, status: int) -> str:
    """The stable code of an error's response."""
    assert answer.status_code == status, answer.text
    answered = answer.json()
    assert list(answered) == ["error"]
    assert isinstance(answered["error"], str)
    return answer.headers["X-Error-Code"]


def of_each() -> list[NamedTensor]:
    """A tensor of each datatype."""
    words = np.array([b"", b"\x00\xff", "zwölf".encode()], dtype=np.object_)
    return [
        NamedTensor(each, words if each == "BYTES" else np.array([1, 0, 1]).astype(DTYPES[each]))
        for each in DATATYPES
    ]


def body_of(tensors: Sequence[NamedTensor]) -> tuple[bytes, dict[str, str]]:
    """The body that Triton's client makes, with binary data, and its headers."""
    inputs = []
    for tensor in tensors:
        inputs.append(tritonclient.http.InferInput(tensor.name, tensor.shape, tensor.datatype))
        inputs[-1].set_data_from_numpy(tensor.data)
    body, length = tritonclient.http._utils._get_inference_request(
        inputs, "mine", None, 0, False, False, 0, None, None
    )
    return body, BYTES | ({} if length is None else {LENGTH: str(length)})


async def infer(
    http: httpx.AsyncClient, tensors: Sequence[NamedTensor], headers: dict[str, str] | None = None
) -> httpx.Response:
    """Call `Echo` with binary data."""
    body, own = body_of(tensors)
    return await http.post("/v2/models/echo/infer", content=body, headers=own | (headers or {}))


def read(answer: httpx.Response) -> tritonclient.http.InferResult:
    assert answer.status_code == 200, answer.text
    length = answer.headers.get(LENGTH)
    return tritonclient.http.InferResult.from_response_body(
        answer.content, header_length=None if length is None else int(length)
    )


# --- gRPC -----------------------------------------------------------------------------------------


class Failed(NamedTuple):
    """A call's failure: its code and message."""

    code: str
    stable: str
    details: str
    trailers: dict[str, str]


class Client:
    """Calls a gateway over gRPC."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    def begin(self, method: str, data: bytes, **options: Any) -> Any:
        """A unary call in flight."""
        return self.channel.unary_unary(METHODS[method].path)(data, **options)

    async def __call__(self, method: str, request: Any = None, **options: Any) -> Any:
        """The response to a message, or to bytes; an error as `Failed`."""
        if not isinstance(request, bytes):
            request = (
                METHODS[method].request() if request is None else request
            ).SerializeToString()
        return await self.end(method, self.begin(method, request, **options))

    async def end(self, method: str, call: Any) -> Any:
        """Return the end of a call."""
        try:
            return METHODS[method].response.FromString(await call)
        except grpc.aio.AioRpcError as error:
            return failure(error)

    def stream(self, **options: Any) -> Stream:
        path = METHODS["ModelStreamInfer"].path
        return Stream(self.channel.stream_stream(path)(**options))


class Stream:
    """The requests and responses of a stream."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, *requests: Any) -> None:
        for request in requests:
            data = request if isinstance(request, bytes) else request.SerializeToString()
            await self.call.write(data)

    async def read(self) -> Any:
        """The next response; None after the last; `Failed` if the stream did."""
        try:
            data = await self.call.read()
        except grpc.aio.AioRpcError as error:
            return failure(error)
        if data is grpc.aio.EOF:
            return None
        return METHODS["ModelStreamInfer"].response.FromString(data)

    async def read_all(self, *, ends: bool = True) -> list[Any]:
        """All further responses. `ends`: after the last request; otherwise the server ends it."""
        if ends:
            await self.call.done_writing()
        found = []
        while (answer := await self.read()) is not None:
            found.append(answer)
            if isinstance(answer, Failed):
                break
        return found


def failure(error: grpc.aio.AioRpcError) -> Failed:
    trailers = {key: str(value) for key, value in error.trailing_metadata() or ()}
    stable = trailers.get("nano-inference-code", "")
    return Failed(error.code().name, stable, error.details() or "", trailers)


def request(
    name: str = "echo", values: Iterable[float] = (1, 2), *, request_id: str = "", **parameters: Any
) -> Any:
    """A request with a tensor "x"."""
    data = np.array(list(values), dtype="<f4")
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    return message("ModelInferRequest")(
        model_name=name,
        id=request_id,
        inputs=[{"name": "x", "datatype": "FP32", "shape": data.shape}],
        raw_input_contents=[data.tobytes()],
        parameters={key: {kinds[type(value)]: value} for key, value in parameters.items()},
    )


def values(response: Any) -> list[float]:
    """The values of a response with one tensor."""
    (raw,) = response.raw_output_contents
    return list(np.frombuffer(raw, "<f4"))


def code_of(part: Any) -> str:
    """The stable code of an error in a stream's response."""
    return part.infer_response.parameters["nano-inference-code"].string_param if part else ""
