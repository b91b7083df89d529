"""Triton's own clients, unmodified: HTTP and gRPC, each blocking and of asyncio."""

from __future__ import annotations

import asyncio
import os
import queue
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from google.protobuf import json_format
from google.protobuf.message import Message
from tritonclient.utils import InferenceServerException, shared_memory

from nano_inference.gateway.api.kserve.served import ServedModel
from nano_inference.kserve.tensors import DATATYPES, DTYPES

from .calls import LIMIT_S, Echo, Several, Slow, served, until


class Kind(NamedTuple):
    """One of the clients.

    Attributes:
        tensors: The module that has its inputs and outputs.
        client: Its class.
        grpc: Whether it speaks gRPC.
        blocking: Whether its calls wait.
    """

    tensors: Any
    client: Any
    grpc: bool
    blocking: bool


KINDS = {
    "http": Kind(tritonclient.http, tritonclient.http.InferenceServerClient, False, True),
    "http.aio": Kind(tritonclient.http, tritonclient.http.aio.InferenceServerClient, False, False),
    "grpc": Kind(tritonclient.grpc, tritonclient.grpc.InferenceServerClient, True, True),
    "grpc.aio": Kind(tritonclient.grpc, tritonclient.grpc.aio.InferenceServerClient, True, False),
}


class Triton:
    """A client of a gateway, whose responses become JSON."""

    def __init__(self, kind: Kind, place: str, client: Any) -> None:
        self.kind, self.place, self.client = kind, place, client

    async def __call__(self, name: str, *given: Any, **more: Any) -> Any:
        """Call a method; a blocking client is made and called in a thread."""
        if self.kind.blocking:
            found = await anyio.to_thread.run_sync(self._ask, name, given, more)
        else:
            found = await getattr(self.client, name)(*given, **more)
        return _told(found) if isinstance(found, Message) else found

    def _ask(self, name: str, given: tuple[Any, ...], more: dict[str, Any]) -> Any:
        with self.kind.client(self.place) as client:
            return getattr(client, name)(*given, **more)

    def input(self, name: str, data: Any) -> Any:
        """A tensor that is sent with the request."""
        datatype = name if name in DATATYPES else "INT32"
        made = self.kind.tensors.InferInput(name, list(data.shape), datatype)
        return made.set_data_from_numpy(data)

    def output(self, name: str, **more: Any) -> Any:
        return self.kind.tensors.InferRequestedOutput(name, **more)


def _told(message: Message) -> Any:
    return json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


@asynccontextmanager
async def triton(name: str, *models: ServedModel, **settings: Any) -> AsyncIterator[Triton]:
    """A client of a kind, and a gateway that serves some models; `settings` are the gateway's."""
    kind = KINDS[name]
    async with served(*models, **settings) as (gateway, _):
        place = f"127.0.0.1:{gateway.grpc_port if kind.grpc else gateway.port}"
        if kind.blocking:
            yield Triton(kind, place, None)
            return
        async with kind.client(place) as client:
            yield Triton(kind, place, client)


@pytest.fixture(params=KINDS)
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


def array(datatype: str) -> Any:
    if datatype == "BYTES":
        return np.array([b"a", "zwölf".encode(), b""], dtype=np.object_)
    return np.array([0, 1, 1]).astype(DTYPES[datatype])  # type: ignore[index]


def same(result: Any, datatypes: Any) -> None:
    for datatype in datatypes:
        found, expected = result.as_numpy(datatype), array(datatype)
        texts = [each.encode() if isinstance(each, str) else each for each in found.tolist()]
        assert texts == expected.tolist(), datatype


# --- tensors -------------------------------------------------------------------------------------


async def test_tensors_as_bytes(name: str) -> None:
    async with triton(name, Echo()) as ask:
        inputs = [ask.input(each, array(each)) for each in DATATYPES]
        for packed in (None, "gzip", "deflate"):
            coded = {"compression_algorithm": packed}
            if not ask.kind.grpc:
                coded = {
                    f"{each}_compression_algorithm": packed for each in ("request", "response")
                }
            result = await ask("infer", "echo", inputs, request_id="mine", **coded)
            same(result, DATATYPES)
            response = result.get_response()
            assert (response.id if ask.kind.grpc else response["id"]) == "mine"


@contextmanager
def shared(name: str, size: int) -> Iterator[tuple[Any, str]]:
    """Shared memory, made by Triton's own utilities, and its key."""
    key = f"/ni-triton-{name}-{os.getpid()}"
    region = shared_memory.create_shared_memory_region("mine", key, size)
    try:
        yield region, key
    finally:
        shared_memory.destroy_shared_memory_region(region)


async def test_tensors_in_shared_memory(name: str) -> None:
    data = np.arange(1000, dtype=np.float32)
    with shared(name, 8000) as (region, key):
        async with triton(name, Echo(), shared_memory=True) as ask:
            shared_memory.set_shared_memory_region(region, [data])
            given = ask.kind.tensors.InferInput("FP32", [1000], "FP32")
            given.set_shared_memory("mine", 4000)
            wanted = ask.output("FP32")
            wanted.set_shared_memory("mine", 4000, offset=4000)
            await ask("unregister_system_shared_memory")
            await ask("unregister_cuda_shared_memory")
            await ask("register_system_shared_memory", "mine", key, 8000)
            (answered,) = regions(await ask("get_system_shared_memory_status"))
            assert (answered["name"], answered["key"], int(answered["byte_size"])) == (
                "mine",
                key,
                8000,
            )
            assert len(regions(await ask("get_system_shared_memory_status", "mine"))) == 1
            result = await ask("infer", "echo", [given], outputs=[wanted])
            place = result.get_output("FP32")
            place = _told(place) if ask.kind.grpc else place
            assert set(place["parameters"]) >= {"shared_memory_region", "shared_memory_byte_size"}
            found = shared_memory.get_contents_as_numpy(region, np.float32, [1000], offset=4000)
            assert np.array_equal(found, data)
            assert regions(await ask("get_cuda_shared_memory_status")) == []
            await ask("unregister_system_shared_memory", "mine")
            assert regions(await ask("get_system_shared_memory_status")) == []


def regions(answered: Any) -> list[Any]:
    """The regions of a status over HTTP or gRPC."""
    return list(answered["regions"].values()) if isinstance(answered, dict) else answered


# --- what there is -------------------------------------------------------------------------------


async def test_information(name: str) -> None:
    ill = Slow("ill")
    ill.why_not = "it has no weights"
    models = ("echo", "org/echo", "1.5 b%")
    async with triton(name, *map(Echo, models), ill) as ask:
        assert await ask("is_server_live")
        assert await ask("is_server_ready")
        assert not await ask("is_model_ready", "ill")
        assert not await ask("is_model_ready", "none")
        assert "binary_tensor_data" in (await ask("get_server_metadata"))["extensions"]
        for model in models:
            assert await ask("is_model_ready", model, "3")
            answered = await ask("get_model_metadata", model)
            assert [(each["name"], each["datatype"]) for each in answered["inputs"]] == [
                (each, each) for each in DATATYPES
            ]
            assert [int(each) for each in answered["outputs"][0]["shape"]] == [-1]
            assert answered["versions"] == ["1", "3"]
            config = await ask("get_model_config", model, "1")
            config = config["config"] if ask.kind.grpc else config
            assert config["name"] == model
            assert not config["model_transaction_policy"]["decoupled"]
        index = await ask("get_model_repository_index")
        states = {
            each["name"]: (each["state"], each["reason"])
            for each in (index["models"] if ask.kind.grpc else index)
        }
        assert {states[model] for model in models} == {("READY", "")}
        assert states["ill"] == ("UNAVAILABLE", "it has no weights")


async def test_statistics_count_calls(name: str) -> None:
    async with triton(name, Echo()) as ask:
        for _ in range(3):
            await ask("infer", "echo", [ask.input("INT8", array("INT8"))])
        with pytest.raises(InferenceServerException):
            await ask("infer", "echo", [ask.input("more", array("INT32"))])
        answered = (await ask("get_inference_statistics", "echo", "3"))["model_stats"][0]
        found = answered["inference_stats"]
        assert int(found["success"]["count"]) == int(answered["inference_count"]) == 3
        assert int(found["success"]["ns"]) > 0
        every = (await ask("get_inference_statistics"))["model_stats"]
        assert "echo" in {each["name"] for each in every}


ERRORS: tuple[tuple[str, tuple[Any, ...], str, str], ...] = (
    ("infer", ("none", []), "404", "NOT_FOUND"),
    ("infer", ("several", []), "400", "INVALID_ARGUMENT"),
    ("get_model_metadata", ("echo", "7"), "404", "NOT_FOUND"),
    ("get_model_config", ("none",), "404", "NOT_FOUND"),
    ("get_inference_statistics", ("none",), "404", "NOT_FOUND"),
    ("get_system_shared_memory_status", ("none",), "404", "NOT_FOUND"),
    ("register_system_shared_memory", ("mine", "/none", 8), "403", "PERMISSION_DENIED"),
    ("register_cuda_shared_memory", ("mine", b"", 0, 8), "400", "UNIMPLEMENTED"),
    ("load_model", ("echo",), "400", "UNIMPLEMENTED"),
    ("unload_model", ("echo",), "400", "UNIMPLEMENTED"),
    ("update_trace_settings", ("echo", {}), "400", "UNIMPLEMENTED"),
    ("get_log_settings", (), "400", "UNIMPLEMENTED"),
)


async def test_errors_have_status_and_message(name: str) -> None:
    async with triton(name, Echo(), Several()) as ask:
        for method, given, status, code in ERRORS:
            with pytest.raises(InferenceServerException) as caught:
                await ask(method, *given)
            wanted = f"StatusCode.{code}" if ask.kind.grpc else status
            assert caught.value.status() == wanted, method
            assert len(caught.value.message()) > 20


# --- calls that take long ------------------------------------------------------------------------


async def test_tritons_timeout_holds(name: str) -> None:
    """The request's own timeout, in microseconds, which is Triton's parameter."""
    slow = Slow()
    async with triton(name, slow) as ask:
        with pytest.raises(InferenceServerException) as caught:
            await ask("infer", "slow", [], timeout=20_000)
        wanted = "StatusCode.DEADLINE_EXCEEDED" if ask.kind.grpc else "504"
        assert caught.value.status() == wanted
        await until(lambda: len(slow.ended) == 1)


# --- streams -------------------------------------------------------------------------------------


class Streamed(NamedTuple):
    """An answer of a stream.

    Attributes:
        request: The id of the request.
        number: Its output of that name; None where it has none.
        final: Whether it is the request's last.
        error: What went wrong; "" when nothing did.
    """

    request: str
    number: int | None
    final: bool
    error: str


def streamed(result: Any, error: Any) -> Streamed:
    if error is not None:
        return Streamed("", None, False, error.message())
    response = result.get_response()
    number = result.as_numpy("number")
    final = response.parameters["triton_final_response"].bool_param
    return Streamed(response.id, None if number is None else int(number[0]), final, "")


class Stream:
    """One of a client of gRPC."""

    def __init__(self, ask: Triton) -> None:
        self._ask = ask
        self._answers: queue.Queue[Streamed] = queue.Queue()
        self._requests: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._client: Any = ask.client

    async def __aenter__(self) -> Stream:
        if self._ask.kind.blocking:
            self._client = self._ask.kind.client(self._ask.place)
            self._client.start_stream(
                lambda result, error: self._answers.put(streamed(result, error))
            )
        else:
            self._found = self._client.stream_infer(self._asked())
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._ask.kind.blocking:
            await anyio.to_thread.run_sync(self._client.stop_stream)
            self._client.close()
        else:
            await self._requests.put(None)
            assert [each async for each in self._found] == []

    async def send(
        self, request_id: str, times: int, *, told_of_the_end: bool = False, **more: Any
    ) -> None:
        given = {
            "model_name": "several",
            "inputs": [self._ask.input("times", np.array([times], dtype=np.int32))],
            "request_id": request_id,
        }
        if self._ask.kind.blocking:
            more |= {"enable_empty_final_response": told_of_the_end}
            self._client.async_stream_infer(**given, **more)
        else:
            await self._requests.put(given | more)

    async def answer(self) -> Streamed:
        """The next one."""
        if self._ask.kind.blocking:
            return await anyio.to_thread.run_sync(lambda: self._answers.get(timeout=LIMIT_S))
        return streamed(*await anext(self._found))

    async def _asked(self) -> AsyncIterator[dict[str, Any]]:
        while (given := await self._requests.get()) is not None:
            yield given


GRPC = [name for name, kind in KINDS.items() if kind.grpc]


@pytest.mark.parametrize("name", GRPC)
async def test_a_stream_has_each_answer_of_each_request(name: str) -> None:
    async with triton(name, Several()) as ask, Stream(ask) as stream:
        await stream.send("a", 3)
        # Triton's client of asyncio has no way to ask for the empty answer after the last.
        tells_end = ask.kind.blocking
        await stream.send("c", 1, model_version="7")
        await stream.send("b", 2, told_of_the_end=tells_end)
        found = [await stream.answer() for _ in range(6 + tells_end)]
        assert ["several" in each.error for each in found if each.error] == [True]
        numbers = {
            name: [(each.number, each.final) for each in found if each.request == name]
            for name in ("a", "b")
        }
        assert numbers["a"] == [(0, False), (1, False), (2, False)]
        assert numbers["b"] == [(0, False), (1, False), (None, True)][: 2 + tells_end]
