"""KServe over HTTP where callers are known: what each may see and do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from multiprocessing.shared_memory import SharedMemory

import httpx
import pytest
from starlette.applications import Starlette

from nano_inference.config import load_config
from nano_inference.gateway.app import make_app
from nano_inference.gateway.policy.administration import Administration

from ..fake import FakeEngine
from .http_calls import failed
from .served import Echo

BODY = {"inputs": [{"name": "INT8", "datatype": "INT8", "shape": [1], "data": [1]}]}


@pytest.fixture
def app(engine: FakeEngine) -> Iterator[Starlette]:
    overrides = {"policy.backend": "bus", "gateway.shared_memory": True}
    made = make_app(engine, load_config(env={}, overrides=overrides))  # type: ignore[arg-type]
    made.state.kserve.service.add(Echo("echo"))
    made.state.kserve.service.add(Echo("other"))
    yield made
    made.state.kserve.regions.close()


@pytest.fixture
async def http(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


async def key(app: Starlette, *scopes: str, **fields: object) -> dict[str, str]:
    """The header that brings a new key."""
    wish = {"name": "somebody", "scopes": scopes, **fields}
    made = await Administration(app.state.policy.store).create_key(wish)
    return {"Authorization": f"Bearer {made['key']}"}


async def test_without_a_key_only_health_is_told(app: Starlette, http: httpx.AsyncClient) -> None:
    await key(app, "read")
    for path in ("health/live", "health/ready", "models/echo/ready"):
        assert (await http.get(f"/v2/{path}")).status_code == 200
    for path in ("", "/models/echo", "/models/stats", "/models/echo/stats", "/logging"):
        answer = await http.get(f"/v2{path}")
        assert failed(answer, 401) == "missing_api_key"
        assert answer.headers["WWW-Authenticate"] == "Bearer"
    for path in ("models/echo/infer", "repository/index", "systemsharedmemory/unregister"):
        assert failed(await http.post(f"/v2/{path}", json=BODY), 401) == "missing_api_key"


async def test_scopes(app: Starlette, http: httpx.AsyncClient) -> None:
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


async def test_a_key_for_one_model_sees_no_other(app: Starlette, http: httpx.AsyncClient) -> None:
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


async def test_regions_are_their_tenant_s(app: Starlette, http: httpx.AsyncClient) -> None:
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
