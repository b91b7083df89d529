"""Tensors in shared memory, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import pytest

from .http_calls import asking, failed
from .served import Echo

SIZE = 1 << 16


@pytest.fixture
def shared() -> Iterator[tuple[str, memoryview]]:
    """An object of shared memory: its key, and what is in it."""
    made = SharedMemory(create=True, size=SIZE)
    yield f"/{made.name.lstrip('/')}", made.buf
    made.close()
    made.unlink()


def in_memory(name: str, size: int, offset: int = 0) -> dict[str, Any]:
    place = {
        "shared_memory_region": "mine",
        "shared_memory_byte_size": size,
        "shared_memory_offset": offset,
    }
    return {"name": name, "parameters": place}


MOVED = {
    "inputs": [in_memory("INT32", 40) | {"datatype": "INT32", "shape": [10]}],
    "outputs": [in_memory("INT32", 40, 4096)],
}


async def test_tensors_stay_in_shared_memory(shared: tuple[str, memoryview]) -> None:
    key, view = shared
    view[:40] = np.arange(10, dtype=np.int32).tobytes()
    region = {"key": key, "byte_size": SIZE}
    base = "/v2/systemsharedmemory"
    async with asking(Echo(), shared_memory=True) as http:
        assert (await http.post(f"{base}/region/mine/register", json=region)).content == b""
        told = [{"name": "mine", "key": key, "offset": 0, "byte_size": SIZE}]
        assert (await http.get(f"{base}/status")).json() == told
        assert (await http.get(f"{base}/region/mine/status")).json() == told
        answer = await http.post("/v2/models/echo/infer", json=MOVED)
        (output,) = answer.json()["outputs"]
        assert "data" not in output
        assert output["parameters"]["shared_memory_region"] == "mine"
        assert np.frombuffer(bytes(view[4096:4136]), dtype=np.int32).tolist() == list(range(10))
        # Nobody else's.
        others = {"X-Tenant": "somebody"}
        assert (await http.get(f"{base}/status", headers=others)).json() == []
        answer = await http.post("/v2/models/echo/infer", json=MOVED, headers=others)
        assert failed(answer, 404) == "unknown_region"
        for path in (f"{base}/region/mine/unregister", f"{base}/unregister"):
            assert (await http.post(path)).status_code == 200
        assert (await http.get(f"{base}/status")).json() == []
        assert failed(await http.get(f"{base}/region/mine/status"), 404) == "unknown_region"
        answer = await http.post("/v2/models/echo/infer", json=MOVED)
        assert failed(answer, 404) == "unknown_region"


async def test_regions_that_are_none(shared: tuple[str, memoryview]) -> None:
    key, _ = shared
    path = "/v2/systemsharedmemory/region/mine/register"
    async with asking(shared_memory=True) as http:
        for wrong, code in (
            ({"key": key}, "invalid_request"),
            ({"key": 7, "byte_size": 1}, "invalid_request"),
            ({"key": key, "byte_size": 2**70}, "invalid_request"),
            ({"key": key, "byte_size": SIZE + 1}, "invalid_region"),
            ({"key": key, "byte_size": 8, "offset": -1}, "invalid_region"),
            ({"key": "/../x", "byte_size": 8}, "invalid_region"),
        ):
            assert failed(await http.post(path, json=wrong), 400) == code


async def test_shared_memory_is_off_unless_it_is_allowed() -> None:
    base = "/v2/systemsharedmemory"
    async with asking(Echo()) as http:
        answer = await http.post(f"{base}/region/mine/register", json={"key": "/x", "byte_size": 8})
        assert failed(answer, 403) == "shared_memory_off"
        assert failed(await http.post("/v2/models/echo/infer", json=MOVED), 403)
        # Triton's examples begin with it.
        assert (await http.post(f"{base}/unregister")).status_code == 200
        assert (await http.get(f"{base}/status")).json() == []


async def test_of_cuda_s_memory_there_is_none() -> None:
    async with asking() as http:
        for region in ("", "/region/mine"):
            base = f"/v2/cudasharedmemory{region}"
            assert (await http.get(f"{base}/status")).json() == []
            assert (await http.post(f"{base}/unregister")).status_code == 200
