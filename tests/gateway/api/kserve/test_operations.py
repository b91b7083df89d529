"""Operations besides inference. test_tritonclient.py calls them over both transports."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest

from nano_inference.config import BusError
from nano_inference.gateway.api.kserve.operations import OPERATIONS, SERVER_NAME, VERSION
from nano_inference.gateway.serving.lane_state import DRAINING, Readiness
from nano_inference.kserve.protobuf import METHODS

from ...fake import FakeEngine
from .calls import INT8, JSON, Echo, FakeModel, Slow, asking, failed, served

NAMES = (
    "org/tiny",
    "/models/tiny",
    "org/tiny/versions",
    "1.5-b.tokens",
    "a model",
    "100%",
    "ünï",
    "stats",
)


# --- health -------------------------------------------------------------------------------------


class Away(FakeEngine):
    async def trouble(self) -> str:
        raise BusError("Redis is away")


class Lost(FakeEngine):
    async def trouble(self) -> str:
        return "no lane has a model"


@pytest.mark.parametrize(
    ("engine", "draining", "why"),
    [
        (FakeEngine, False, ""),
        (Lost, False, "no lane has a model"),
        (FakeEngine, True, DRAINING),
        (Away, False, "Redis is away"),
    ],
)
async def test_readiness_says_why_not(engine: type[FakeEngine], draining: bool, why: str) -> None:
    made = engine()
    readiness = Readiness(made)  # type: ignore[arg-type]
    readiness.draining = draining
    async with asking(engine=made, readiness=readiness) as http:
        answer = await http.get("/v2/health/ready")
        if why:
            assert failed(answer, 400) == "not_ready"
            assert answer.json() == {"error": why}
        else:
            assert (answer.status_code, answer.content) == (200, b"")
        live = await http.get("/v2/health/live")
        assert (live.status_code, live.content) == (200, b"")
    if not draining:
        async with served(engine=made) as (_, call):
            assert (await call("ServerLive")).live
            assert (await call("ServerReady")).ready == (not why)


def troubled(name: str, why: str = "", error: BusError | None = None) -> FakeModel:
    model = Echo(name)
    model.why_not, model.trouble_error = why, error
    return model


async def test_readiness_of_a_model() -> None:
    models = [
        troubled("well"),
        troubled("ill", "it has no weights"),
        troubled("lost", error=BusError("Redis is away")),
    ]
    async with asking(*models) as http, served(*models) as (_, call):
        for name, version, why in (
            ("well", "", ""),
            ("well", "3", ""),
            ("ill", "", "it has no weights"),
            ("ill", "1", "it has no weights"),
            ("lost", "", "Redis is away"),
            ("none", "", "there is no model 'none'"),
            ("well", "2", "there is no model 'well' of version '2'"),
        ):
            path = f"{name}/versions/{version}" if version else name
            answer = await http.get(f"/v2/models/{path}/ready")
            if why:
                assert failed(answer, 400) == "not_ready"
                assert answer.json()["error"].startswith(why)
            else:
                assert (answer.status_code, answer.content) == (200, b"")
            asked = METHODS["ModelReady"].request(name=name, version=version)
            assert (await call("ModelReady", asked)).ready == (not why)


# --- models -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared_memory", [False, True])
async def test_only_extensions_that_are_switched_on_are_named(shared_memory: bool) -> None:
    async with asking(shared_memory=shared_memory) as http:
        answered = (await http.get("/v2")).json()
    assert (answered["name"], answered["version"]) == (SERVER_NAME, VERSION)
    assert "binary_tensor_data" in answered["extensions"]
    assert ("system_shared_memory" in answered["extensions"]) == shared_memory
    assert "cuda_shared_memory" not in answered["extensions"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("safe", ["", "/"])
async def test_names_of_models_come_as_clients_write_them(name: str, safe: str) -> None:
    echo = Echo(name)
    async with asking(echo) as http:
        path = f"/v2/models/{quote(name, safe=safe)}"
        for versioned in ("", "/versions/1"):
            if name != "stats" or versioned:
                assert (await http.get(path + versioned)).json()["name"] == name
            assert (await http.get(f"{path}{versioned}/config")).json()["name"] == name
            assert (await http.get(f"{path}{versioned}/ready")).status_code == 200
            answered = (await http.get(f"{path}{versioned}/stats")).json()["model_stats"]
            assert {each["name"] for each in answered} == {name}
            answer = await http.post(f"{path}{versioned}/infer", json={"inputs": [INT8]})
            assert answer.json()["model_name"] == name
    assert [each.request.model_version for each in echo.calls] == ["", "1"]


@pytest.mark.parametrize("path", ["none", "echo/versions/2", "echo/versions/x", " ", "echo/x"])
async def test_unknown_models_are_refused(path: str) -> None:
    async with asking(Echo()) as http:
        for what in ("", "/config", "/stats"):
            answer = await http.get(f"/v2/models/{path}{what}")
            assert failed(answer, 404) == "model_not_found"
        for what in ("/infer", "/generate", "/generate_stream"):
            answer = await http.post(f"/v2/models/{path}{what}", json={"inputs": []})
            assert failed(answer, 404) == "model_not_found"


async def test_unknown_paths_and_methods_are_refused() -> None:
    async with asking(Echo()) as http:
        for path in ("nothing", "models", "models/", "repository", "health"):
            assert failed(await http.get(f"/v2/{path}"), 404) == "not_found"
        for path in ("/config", "/versions/1"):
            assert failed(await http.get(f"/v2/models/{path}"), 404) == "model_not_found"
        assert failed(await http.post("/v2/models/echo", json={}), 405) == "method_not_allowed"
        answer = await http.put("/v2/models/echo/infer", json={})
        assert failed(answer, 405) == "method_not_allowed"
        assert answer.headers["allow"]
        # A path that only begins like the interface's is not its own.
        assert "message" in (await http.get("/v2x")).json()["error"]


async def test_the_index_has_all_models_or_the_ready_ones() -> None:
    models = [troubled("well"), Slow("ill")]
    models[1].why_not = "it has no weights"
    entries = [
        {"name": "well", "version": "1", "state": "READY", "reason": ""},
        {"name": "well", "version": "3", "state": "READY", "reason": ""},
        {"name": "ill", "version": "1", "state": "UNAVAILABLE", "reason": "it has no weights"},
    ]

    def added(index: list[Any]) -> list[Any]:
        return [each for each in index if each["name"] in ("well", "ill")]

    async with asking(*models) as http, served(*models) as (_, call):
        for body, wanted in (
            (b"", entries),
            (b"{}", entries),
            (b'{"ready": false}', entries),
            (b'{"ready": true}', entries[:2]),
        ):
            answer = await http.post("/v2/repository/index", content=body, headers=JSON)
            assert added(answer.json()) == wanted
        answer = await http.post("/v2/repository/index", json={"ready": "yes"})
        assert failed(answer, 400) == "invalid_request"
        asked = METHODS["RepositoryIndex"].request(ready=True)
        names = {each.name for each in (await call("RepositoryIndex", asked)).models}
        assert "well" in names
        assert "ill" not in names


# --- shared memory ------------------------------------------------------------------------------

SYSTEM = "/v2/systemsharedmemory"


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"key": "/x"}, "invalid_request"),
        ({"key": 7, "byte_size": 1}, "invalid_request"),
        ({"key": "/x", "byte_size": 2**70}, "invalid_request"),
        ({"key": "/x", "byte_size": 8, "offset": -1}, "invalid_region"),
        ({"key": "/../x", "byte_size": 8}, "invalid_region"),
    ],
)
async def test_impossible_regions_are_refused(wrong: dict[str, Any], code: str) -> None:
    async with asking(shared_memory=True) as http:
        answer = await http.post(f"{SYSTEM}/region/mine/register", json=wrong)
        assert failed(answer, 400) == code


@pytest.mark.parametrize("kind", ["system", "cuda"])
async def test_clients_without_shared_memory_may_clean_up(kind: str) -> None:
    """Triton's examples begin with it."""
    async with asking() as http, served() as (_, call):
        for region in ("", "/region/mine") if kind == "cuda" else ("",):
            base = f"/v2/{kind}sharedmemory{region}"
            assert (await http.get(f"{base}/status")).json() == []
            assert (await http.post(f"{base}/unregister")).status_code == 200
        method = f"{kind.capitalize()}SharedMemory"
        assert not (await call(f"{method}Status")).regions
        assert await call(f"{method}Unregister") == METHODS[f"{method}Unregister"].response()


# --- callers ------------------------------------------------------------------------------------

NEEDED = {
    "nothing": "ServerLive ServerReady ModelReady",
    "read": "ServerMetadata ModelMetadata ModelConfig ModelStatistics RepositoryIndex",
    "generate": """
        SystemSharedMemoryRegister SystemSharedMemoryStatus SystemSharedMemoryUnregister
        CudaSharedMemoryRegister CudaSharedMemoryStatus CudaSharedMemoryUnregister
    """,
    "admin": "RepositoryModelLoad RepositoryModelUnload TraceSetting LogSettings",
}


def test_each_operation_has_its_scope() -> None:
    """test_policy.py holds that it is required."""
    assert {each.method: each.needed for each in OPERATIONS} == {
        method: needed for needed, methods in NEEDED.items() for method in methods.split()
    }
