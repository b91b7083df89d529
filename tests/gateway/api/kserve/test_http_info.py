"""What there is and how it is, over HTTP."""

from __future__ import annotations

from urllib.parse import quote

import httpx
import pytest

from nano_inference.config import BusError, Config
from nano_inference.gateway.api.kserve.shared import SERVER_NAME, VERSION
from nano_inference.gateway.app import make_app
from nano_inference.gateway.policy.chain import PolicyRoute
from nano_inference.gateway.serving.lane_state import DRAINING, Readiness

from ...fake import FakeEngine
from .http_calls import JSON, Engine, asking, failed
from .served import Echo, Several, Slow

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


class Away(Engine):
    async def trouble(self) -> str:
        raise BusError("Redis is away")


# --- health -------------------------------------------------------------------------------------


async def test_one_that_lives_and_takes_requests() -> None:
    async with asking() as http:
        for path in ("/v2/health/live", "/v2/health/ready"):
            answer = await http.get(path)
            assert (answer.status_code, answer.content) == (200, b"")


async def test_one_that_takes_none_says_why() -> None:
    engine = Engine()
    engine.why_not = "no lane has a model"
    async with asking(engine=engine) as http:
        answer = await http.get("/v2/health/ready")
        assert failed(answer, 400) == "not_ready"
        assert answer.json() == {"error": "no lane has a model"}
        assert (await http.get("/v2/health/live")).status_code == 200


async def test_one_that_is_to_stop_is_not_ready() -> None:
    engine = Engine()
    readiness = Readiness(engine)  # type: ignore[arg-type]
    readiness.draining = True
    async with asking(engine=engine, readiness=readiness) as http:
        answer = await http.get("/v2/health/ready")
        assert failed(answer, 400) == "not_ready"
        assert answer.json() == {"error": DRAINING}


async def test_a_bus_that_is_away_is_no_error() -> None:
    async with asking(engine=Away()) as http:
        answer = await http.get("/v2/health/ready")
        assert failed(answer, 400) == "not_ready"
        assert answer.json() == {"error": "Redis is away"}


async def test_whether_a_model_is_ready() -> None:
    well, ill, lost = Echo("well"), Echo("ill"), Echo("lost")
    ill.why_not, lost.failure = "it has no weights", BusError("Redis is away")
    async with asking(well, ill, lost) as http:
        for path in ("well/ready", "well/versions/3/ready"):
            answer = await http.get(f"/v2/models/{path}")
            assert (answer.status_code, answer.content) == (200, b"")
        for path, why in (
            ("ill/ready", "it has no weights"),
            ("ill/versions/1/ready", "it has no weights"),
            ("lost/ready", "Redis is away"),
            ("none/ready", "there is no model 'none'"),
            ("well/versions/2/ready", "there is no model 'well' of version '2'"),
        ):
            answer = await http.get(f"/v2/models/{path}")
            assert failed(answer, 400) == "not_ready"
            assert answer.json()["error"].startswith(why)


# --- models -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared_memory", [False, True])
async def test_only_extensions_that_are_switched_on_are_named(shared_memory: bool) -> None:
    async with asking(shared_memory=shared_memory) as http:
        told = (await http.get("/v2")).json()
    assert (told["name"], told["version"]) == (SERVER_NAME, VERSION)
    assert "binary_tensor_data" in told["extensions"]
    assert ("system_shared_memory" in told["extensions"]) == shared_memory
    assert "cuda_shared_memory" not in told["extensions"]


async def test_what_a_model_takes_and_gives() -> None:
    several = {
        "name": "several",
        "versions": ["1"],
        "platform": "nano_inference",
        "inputs": [
            {"name": "times", "datatype": "INT32", "shape": [1]},
            {"name": "text", "datatype": "BYTES", "shape": [1]},
        ],
        "outputs": [
            {"name": "number", "datatype": "INT64", "shape": [1]},
            {"name": "word", "datatype": "BYTES", "shape": [1]},
        ],
    }
    async with asking(Several()) as http:
        assert (await http.get("/v2/models/several")).json() == several
        assert (await http.get("/v2/models/several/versions/1")).json() == several


async def test_a_model_s_configuration() -> None:
    async with asking(Several(), Echo()) as http:
        told = (await http.get("/v2/models/several/config")).json()
        echo = (await http.get("/v2/models/echo/versions/3/config")).json()
    assert told["name"] == "several"
    assert told["max_batch_size"] == 0
    assert told["input"] == [
        {"name": "times", "data_type": "TYPE_INT32", "dims": [1], "optional": False},
        {"name": "text", "data_type": "TYPE_STRING", "dims": [1], "optional": True},
    ]
    assert told["output"][1] == {"name": "word", "data_type": "TYPE_STRING", "dims": [1]}
    assert told["model_transaction_policy"] == {"decoupled": True}
    assert echo["model_transaction_policy"] == {"decoupled": False}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("safe", ["", "/"])
async def test_names_of_models_come_as_clients_write_them(name: str, safe: str) -> None:
    echo = Echo(name)
    body = {"inputs": [{"name": "INT8", "datatype": "INT8", "shape": [1], "data": [1]}]}
    async with asking(echo) as http:
        path = f"/v2/models/{quote(name, safe=safe)}"
        for versioned in ("", "/versions/1"):
            if name != "stats" or versioned:
                assert (await http.get(path + versioned)).json()["name"] == name
            assert (await http.get(f"{path}{versioned}/config")).json()["name"] == name
            assert (await http.get(f"{path}{versioned}/ready")).status_code == 200
            told = (await http.get(f"{path}{versioned}/stats")).json()["model_stats"]
            assert {each["name"] for each in told} == {name}
            answer = await http.post(f"{path}{versioned}/infer", json=body)
            assert answer.json()["model_name"] == name
    assert [each.request.model_version for each in echo.calls] == ["", "1"]


@pytest.mark.parametrize("path", ["none", "echo/versions/2", "echo/versions/x", " ", "echo/x"])
async def test_what_there_is_not(path: str) -> None:
    async with asking(Echo()) as http:
        for what in ("", "/config", "/stats"):
            answer = await http.get(f"/v2/models/{path}{what}")
            assert failed(answer, 404) == "model_not_found"
        for what in ("/infer", "/generate", "/generate_stream"):
            answer = await http.post(f"/v2/models/{path}{what}", json={"inputs": []})
            assert failed(answer, 404) == "model_not_found"


async def test_paths_and_methods_that_there_are_not() -> None:
    async with asking(Echo()) as http:
        for path in ("nothing", "models", "models/", "repository", "health"):
            assert failed(await http.get(f"/v2/{path}"), 404) == "not_found"
        for path in ("/config", "/versions/1"):
            assert failed(await http.get(f"/v2/models/{path}"), 404) == "model_not_found"
        assert failed(await http.post("/v2/models/echo", json={}), 405) == "method_not_allowed"
        answer = await http.put("/v2/models/echo/infer", json={})
        assert failed(answer, 405) == "method_not_allowed"
        assert answer.headers["allow"]
        # What begins like it is not of it.
        assert "message" in (await http.get("/v2x")).json()["error"]


# --- the repository -----------------------------------------------------------------------------


async def test_the_index_has_all_models_or_those_that_are_ready() -> None:
    well, ill = Echo("well"), Slow("ill")
    ill.why_not = "it has no weights"
    entries = [
        {"name": "well", "version": "1", "state": "READY", "reason": ""},
        {"name": "well", "version": "3", "state": "READY", "reason": ""},
        {"name": "ill", "version": "1", "state": "UNAVAILABLE", "reason": "it has no weights"},
    ]
    async with asking(well, ill) as http:
        assert await index(http, b"") == entries
        assert await index(http, b"{}") == entries
        assert await index(http, b'{"ready": false}') == entries
        assert await index(http, b'{"ready": true}') == entries[:2]
        answer = await http.post("/v2/repository/index", json={"ready": "yes"})
        assert failed(answer, 400) == "invalid_request"


async def index(http: httpx.AsyncClient, body: bytes) -> list[dict[str, str]]:
    """The entries of the models that the test has added."""
    answer = await http.post("/v2/repository/index", content=body, headers=JSON)
    return [each for each in answer.json() if each["name"] in ("well", "ill")]


async def test_statistics_count_calls() -> None:
    body = {"inputs": [{"name": "INT8", "datatype": "INT8", "shape": [1], "data": [1]}]}
    async with asking(Echo(), Echo("other")) as http:
        await http.post("/v2/models/echo/infer", json=body)
        told = (await http.get("/v2/models/echo/stats")).json()["model_stats"][0]
        everything = (await http.get("/v2/models/stats")).json()["model_stats"]
    assert told["inference_stats"]["success"]["count"] == 1
    counts = {each["name"]: each["inference_stats"]["success"]["count"] for each in everything}
    assert (counts["echo"], counts["other"]) == (1, 0)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v2/repository/models/org%2Ftiny/load"),
        ("POST", "/v2/repository/models/tiny/unload"),
        ("POST", "/v2/cudasharedmemory/region/r/register"),
        ("GET", "/v2/trace/setting"),
        ("POST", "/v2/trace/setting"),
        ("GET", "/v2/models/tiny/trace/setting"),
        ("POST", "/v2/models/tiny/trace/setting"),
        ("GET", "/v2/logging"),
        ("POST", "/v2/logging"),
    ],
)
async def test_what_is_not_done_here_says_so(method: str, path: str) -> None:
    async with asking() as http:
        answer = await http.request(method, path, json={} if method == "POST" else None)
    assert failed(answer, 400) == "unsupported"


# --- callers ------------------------------------------------------------------------------------

NEEDED = {
    "GET /v2": "read",
    "GET /v2/health/live": "nothing",
    "GET /v2/health/ready": "nothing",
    "GET /v2/models/stats": "read",
    "GET /v2/models/{model}": "read",
    "GET /v2/models/{model}/ready": "nothing",
    "GET /v2/models/{model}/config": "read",
    "GET /v2/models/{model}/stats": "read",
    "POST /v2/models/{model}/infer": "generate",
    "POST /v2/models/{model}/generate": "generate",
    "POST /v2/models/{model}/generate_stream": "generate",
    "POST /v2/repository/index": "read",
    "POST /v2/repository/models/{model}/load": "admin",
    "POST /v2/repository/models/{model}/unload": "admin",
    "GET /v2/trace/setting": "admin",
    "GET /v2/models/{model}/trace/setting": "admin",
    "GET /v2/logging": "admin",
}


def test_each_route_asks_for_what_it_does(engine: FakeEngine) -> None:
    found: dict[str, str] = {}
    for route in make_app(engine, Config()).routes:
        assert isinstance(route, PolicyRoute)
        if route.path.startswith("/v2"):
            method = "GET" if "GET" in (route.methods or ()) else "POST"
            path = route.path_format.replace("/versions/{version}", "")
            needed = found.setdefault(f"{method} {path}", route.needed)
            assert needed == route.needed
    memory = {name: found.pop(name) for name in list(found) if "sharedmemory" in name}
    assert found == NEEDED
    assert len(memory) == 10
    assert set(memory.values()) == {"generate"}
