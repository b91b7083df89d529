"""Triton's own clients over HTTP, unmodified: the blocking one, and that of asyncio."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio.to_thread
import numpy as np
import pytest
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException, shared_memory

from nano_inference.kserve.tensors import DATATYPES, DTYPES

from .http_calls import listening
from .served import Echo, Several, Slow

Ask = Callable[..., Awaitable[Any]]
"""Calls a method of a client."""

CLIENTS = {
    "http": tritonclient.http.InferenceServerClient,
    "http.aio": tritonclient.http.aio.InferenceServerClient,
}
IN_JSON = [each for each in DATATYPES if each not in ("FP16", "BF16")]


@asynccontextmanager
async def client(kind: str, place: str) -> AsyncIterator[Ask]:
    """Asks by a client of a kind; the blocking one in a thread, where it must be made as well."""

    def ask_blocking(name: str, given: tuple[Any, ...], more: dict[str, Any]) -> Any:
        with CLIENTS[kind](place) as asked:
            return getattr(asked, name)(*given, **more)

    async def ask_in_thread(name: str, *given: Any, **more: Any) -> Any:
        return await anyio.to_thread.run_sync(ask_blocking, name, given, more)

    if kind == "http":
        yield ask_in_thread
        return
    async with CLIENTS[kind](place) as asked:
        yield lambda name, *given, **more: getattr(asked, name)(*given, **more)


@pytest.fixture(params=CLIENTS)
def kind(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


def array(datatype: str) -> Any:
    if datatype == "BYTES":
        return np.array([b"a", "zwölf".encode(), b""], dtype=np.object_)
    return np.array([0, 1, 1]).astype(DTYPES[datatype])  # type: ignore[index]


def input_of(datatype: str, *, binary: bool) -> Any:
    made = tritonclient.http.InferInput(datatype, [3], datatype)
    return made.set_data_from_numpy(array(datatype), binary_data=binary)


def same(result: Any, datatypes: Any) -> None:
    for datatype in datatypes:
        found, expected = result.as_numpy(datatype), array(datatype)
        texts = [each.encode() if isinstance(each, str) else each for each in found.tolist()]
        assert texts == expected.tolist(), datatype


async def test_tensors_as_bytes(kind: str) -> None:
    inputs = [input_of(each, binary=True) for each in DATATYPES]
    async with listening(Echo()) as place, client(kind, place) as ask:
        for packed in (None, "gzip", "deflate"):
            result = await ask(
                "infer",
                "echo",
                inputs,
                request_id="mine",
                request_compression_algorithm=packed,
                response_compression_algorithm=packed,
            )
            same(result, DATATYPES)
            assert result.get_response()["id"] == "mine"


async def test_tensors_as_json(kind: str) -> None:
    inputs = [input_of(each, binary=False) for each in IN_JSON]
    outputs = [tritonclient.http.InferRequestedOutput(each, binary_data=False) for each in IN_JSON]
    async with listening(Echo()) as place, client(kind, place) as ask:
        same(await ask("infer", "echo", inputs, outputs=outputs), IN_JSON)


async def test_tensors_both_ways_in_one_request(kind: str) -> None:
    inputs = [input_of("INT32", binary=True), input_of("FP32", binary=False)]
    outputs = [
        tritonclient.http.InferRequestedOutput("FP32", binary_data=True),
        tritonclient.http.InferRequestedOutput("INT32", binary_data=False),
    ]
    async with listening(Echo()) as place, client(kind, place) as ask:
        same(await ask("infer", "echo", inputs, outputs=outputs), ("INT32", "FP32"))


async def test_tensors_in_shared_memory(kind: str) -> None:
    data = np.arange(1000, dtype=np.float32)
    key = f"/ni-triton-{kind}-{os.getpid()}"
    region = shared_memory.create_shared_memory_region("mine", key, 8000)
    try:
        shared_memory.set_shared_memory_region(region, [data])
        given = tritonclient.http.InferInput("FP32", [1000], "FP32")
        given.set_shared_memory("mine", 4000)
        wanted = tritonclient.http.InferRequestedOutput("FP32")
        wanted.set_shared_memory("mine", 4000, offset=4000)
        async with listening(Echo(), shared_memory=True) as place, client(kind, place) as ask:
            await ask("unregister_system_shared_memory")
            await ask("unregister_cuda_shared_memory")
            await ask("register_system_shared_memory", "mine", key, 8000)
            (told,) = await ask("get_system_shared_memory_status")
            assert (told["name"], told["byte_size"]) == ("mine", 8000)
            result = await ask("infer", "echo", [given], outputs=[wanted])
            assert result.get_output("FP32")["parameters"]["shared_memory_region"] == "mine"
            found = shared_memory.get_contents_as_numpy(region, np.float32, [1000], offset=4000)
            assert np.array_equal(found, data)
            assert await ask("get_cuda_shared_memory_status") == []
            await ask("unregister_system_shared_memory", "mine")
            assert await ask("get_system_shared_memory_status") == []
    finally:
        shared_memory.destroy_shared_memory_region(region)


@pytest.mark.parametrize("name", ["echo", "org/echo", "1.5 b%"])
async def test_what_there_is(kind: str, name: str) -> None:
    ill = Slow("ill")
    ill.why_not = "it has no weights"
    async with listening(Echo(name), ill) as place, client(kind, place) as ask:
        assert await ask("is_server_live")
        assert await ask("is_server_ready")
        assert await ask("is_model_ready", name, "3")
        assert not await ask("is_model_ready", "ill")
        assert not await ask("is_model_ready", "none")
        assert "binary_tensor_data" in (await ask("get_server_metadata"))["extensions"]
        told = await ask("get_model_metadata", name)
        assert [each["name"] for each in told["inputs"]] == list(DATATYPES)
        assert (await ask("get_model_config", name, "1"))["name"] == name
        index = {each["name"]: each["state"] for each in await ask("get_model_repository_index")}
        assert (index[name], index["ill"]) == ("READY", "UNAVAILABLE")
        await ask("infer", name, [input_of("INT8", binary=True)])
        told = (await ask("get_inference_statistics", name))["model_stats"][0]
        assert told["inference_stats"]["success"]["count"] == 1


async def test_errors_are_told(kind: str) -> None:
    refused: list[tuple[str, tuple[Any, ...], str]] = [
        ("infer", ("none", []), "404"),
        ("infer", ("several", []), "400"),
        ("get_model_metadata", ("echo", "7"), "404"),
        ("get_system_shared_memory_status", ("none",), "404"),
        ("register_system_shared_memory", ("mine", "/none", 8), "403"),
        ("load_model", ("echo",), "400"),
        ("unload_model", ("echo",), "400"),
        ("update_trace_settings", ("echo", {}), "400"),
        ("get_log_settings", (), "400"),
    ]
    async with listening(Echo(), Several()) as place, client(kind, place) as ask:
        for name, given, status in refused:
            with pytest.raises(InferenceServerException) as caught:
                await ask(name, *given)
            assert caught.value.status() == status, name
            assert len(caught.value.message()) > 20
