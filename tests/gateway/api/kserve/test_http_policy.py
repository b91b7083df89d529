"""KServe over HTTP where callers are known: what each may see and do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import httpx
import pytest

from nano_inference.config import load_config
from nano_inference.gateway.app import ModelGatewayApp, make_app
from nano_inference.gateway.policy.administration import Administration

from ...fake import FakeEngine
from .http_calls import failed
from .served import Echo

BODY: dict[str, Any] = {"inputs": [{"name": "INT8", "datatype": "INT8", "shape": [1], "data": [1]}]}


@pytest.fixture
def app(engine: FakeEngine) -> Iterator[ModelGatewayApp]:
    overrides = {"policy.backend": "bus", "gateway.shared_memory": True}
    made = make_app(engine, load_config(env={}, overrides=overrides))  # type: ignore[arg-type]
    made.kserve.service.add(Echo("echo"))
    made.kserve.service.add(Echo("other"))
    yield made
    made.kserve.regions.close()


@pytest.fixture
async def http(app: ModelGatewayApp) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


async def key(app: ModelGatewayApp, *scopes: str, **fields: object) -> dict[str, str]:
    """The header that brings a new key."""
    wish = {"name": "somebody", "scopes": scopes, **fields}
    made = await Administration(app.policy.store).create_key(wish)
    return {"Authorization": f"Bearer {made['key']}"}


async def test_without_a_key_only_health_is_told(
    app: ModelGatewayApp, http: httpx.AsyncClient
) -> None:
    await key(app, "read")
    for path in ("health/live", "health/ready", "models/echo/ready"):
        assert (await http.get(f"/v2/{path}")).status_code == 200
    for path in ("", "/models/echo", "/models/stats", "/models/echo/stats", "/logging"):
        answer = await http.get(f"/v2{path}")
        assert failed(answer, 401) == "missing_api_key"
        assert answer.headers["WWW-Authenticate"] == "Bearer"
    for path in ("models/echo/infer", "repository/index", "systemsharedmemory/unregister"):
        assert failed(await http.post(f"/v2/{path}", json=BODY), 401) == "missing_api_key"


async def test_scopes(app: ModelGatewayApp, http: httpx.AsyncClient) -> None:
    reads, generates = await key(app, "read"), await key(app, "generate")
    admin = await key(app, "admin")
    assert (await http.get("/v2/models/echo", headers=reads)).status_code == 200
    for headers in (reads, admin):
        answer = await http.post("/v2/models/echo/infer", json=BODY, headers=headers)
        assert failed(answer, 403) == "insufficient_scope"
    answer = await http.post("/v2/models/echo/infer", json=BODY, headers=generates)
    assert answer.status_code == 200
    load = "/v2/repository/models/echo/load"
    assert failed(await http.post(load, json={}, headers=generates), 403) == "insufficient_scope"
    assert failed(await http.post(load, json={}, headers=admin), 400) == "unsupported"


async def test_a_key_for_one_model_sees_no_other(
    app: ModelGatewayApp, http: httpx.AsyncClient
) -> None:
    headers = await key(app, "generate", models=["echo"])
    for what in ("", "/config", "/stats"):
        assert (await http.get(f"/v2/models/echo{what}", headers=headers)).status_code == 200
        answer = await http.get(f"/v2/models/other{what}", headers=headers)
        assert failed(answer, 404) == "model_not_found"
    for what in ("infer", "generate", "generate_stream"):
        answer = await http.post(f"/v2/models/other/{what}", json=BODY, headers=headers)
        assert failed(answer, 404) == "model_not_found"
    index = (await http.post("/v2/repository/index", headers=headers)).json()
    assert {each["name"] for each in index} == {"echo"}
    statistics = (await http.get("/v2/models/stats", headers=headers)).json()["model_stats"]
    assert {each["name"] for each in statistics} == {"echo"}


async def test_regions_are_their_tenant_s(app: ModelGatewayApp, http: httpx.AsyncClient) -> None:
    one = await key(app, "generate", tenant="one")
    other = await key(app, "generate", tenant="other")
    memory = SharedMemory(create=True, size=4096)
    try:
        body = {"key": f"/{memory.name.lstrip('/')}", "byte_size": 4096}
        base = "/v2/systemsharedmemory"
        answer = await http.post(f"{base}/region/mine/register", json=body, headers=one)
        assert answer.status_code == 200
        # Whatever a client calls its tenant.
        for headers in (other, other | {"X-Tenant": "one"}):
            assert (await http.get(f"{base}/status", headers=headers)).json() == []
            assert (await http.post(f"{base}/unregister", headers=headers)).status_code == 200
        assert len((await http.get(f"{base}/status", headers=one)).json()) == 1
    finally:
        memory.close()
        memory.unlink()


async def test_a_region_of_another_key_is_neither_read_nor_written(
    app: ModelGatewayApp, http: httpx.AsyncClient
) -> None:
    """Nor does it stand in the way of one of the same name; a key of the same tenant has it too."""
    mine, same = [await key(app, "generate", tenant="one") for _ in range(2)]
    other = await key(app, "generate", tenant="other")
    reader = await key(app, "read", tenant="one")
    base = "/v2/systemsharedmemory"
    memories = [SharedMemory(create=True, size=4096) for _ in range(2)]
    place = {"shared_memory_region": "mine", "shared_memory_byte_size": 1}
    read = {"inputs": [BODY["inputs"][0] | {"parameters": place}]}
    del read["inputs"][0]["data"]
    write = BODY | {"outputs": [{"name": "INT8", "parameters": place}]}

    async def inferred(body: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
        return await http.post("/v2/models/echo/infer", json=body, headers=headers)

    async def registered(memory: SharedMemory, headers: dict[str, str]) -> int:
        body = {"key": f"/{memory.name.lstrip('/')}", "byte_size": 4096}
        answer = await http.post(f"{base}/region/mine/register", json=body, headers=headers)
        return answer.status_code

    try:
        for number, memory in enumerate(memories):
            memory.buf[0] = 7 + number
        assert await registered(memories[0], mine) == 200
        for body in (read, write):
            assert failed(await inferred(body, other), 404) == "unknown_region"
        for method, path in (
            ("GET", f"{base}/status"),
            ("POST", f"{base}/unregister"),
            ("POST", f"{base}/region/new/register"),
        ):
            answer = await http.request(method, path, headers=reader, json={})
            assert failed(answer, 403) == "insufficient_scope"
        assert await registered(memories[1], other) == 200
        for headers, held in ((mine, 7), (same, 7), (other, 8)):
            assert (await inferred(read, headers)).json()["outputs"][0]["data"] == [held]
        assert (await inferred(write, same)).status_code == 200
        assert [memory.buf[0] for memory in memories] == [1, 8]
    finally:
        app.kserve.regions.close()
        for memory in memories:
            memory.close()
            memory.unlink()
