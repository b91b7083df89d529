"""Addresses and paths of the server that no client of a gateway may read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import structlog

from nano_inference import BusClient
from nano_inference.config import load_config
from nano_inference.gateway.api.routes import PolicyRoute
from nano_inference.gateway.app import make_app
from nano_inference.gateway.policy.administration import Administration
from nano_inference.store.loaded_adapter import LoadedAdapter

from ..cli.servers import free_port
from ..gateway.fake import FakeEngine, app_of, http_of, report
from ..gateway.policy.conftest import Made, bearer

FOLDER = "/srv/confidential/adapters/pirate"

CALLS: list[tuple[str, str, dict[str, Any] | None]] = [
    ("POST", "/generate", {"text": "a"}),
    ("POST", "/generate", {"text": "a", "stream": True}),
    ("POST", "/encode", {"text": "a"}),
    ("POST", "/abort_request", {"rid": "r"}),
    ("POST", "/flush_cache", None),
    ("POST", "/v1/completions", {"prompt": "a", "stream": True}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("POST", "/v1/responses", {"input": "a"}),
    ("POST", "/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}),
    ("POST", "/v1/embeddings", {"input": "a"}),
    ("POST", "/v1/kv_sessions/s", {"action": "pin"}),
    ("POST", "/v1/replay/r", None),
    ("GET", "/v1/responses/resp_1", None),
    ("GET", "/v1/streams/cmpl-1", None),
    ("GET", "/v1/models", None),
    ("POST", "/v2/models/tiny/generate", {"text_input": "a"}),
    ("GET", "/v2/models/tiny/ready", None),
    ("GET", "/admin/dead_letters", None),
    *(
        ("GET", path, None)
        for path in (
            *("/health", "/healthz", "/readyz", "/progressz", "/status", "/model_info"),
            *("/server_info", "/v1/loads", "/get_weight_version", "/console/requests"),
        )
    ),
]


@pytest.fixture
async def port() -> int:
    return free_port()


@pytest.fixture(params=["off", "bus"])
async def lost(request: pytest.FixtureRequest, port: int) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway whose bus can't be reached, without keys and with keys on that bus."""
    url = f"redis://operator:s3cret@127.0.0.1:{port}/7"
    config = load_config(env={}, overrides={"bus.url": url, "policy.backend": request.param})
    client = BusClient.connect(config.bus)
    headers = {"Authorization": "Bearer ni-0123456789ab-x"} if request.param == "bus" else {}
    async with http_of(make_app(client, config), headers=headers) as http:
        yield http
    await client.aclose()


@pytest.mark.parametrize(("method", "path", "body"), CALLS)
async def test_an_unreachable_bus_is_named_in_the_log_only(
    lost: httpx.AsyncClient, port: int, method: str, path: str, body: dict[str, Any] | None
) -> None:
    with structlog.testing.capture_logs() as logs:
        answer = await lost.request(method, path, json=body)
    for secret in (str(port), "127.0.0.1:", "operator", "s3cret", "redis://"):
        assert secret not in answer.text
    if answer.status_code == 503 and path not in ("/readyz", "/health"):
        assert any(f"127.0.0.1:{port}" in str(line.get("error")) for line in logs)


async def test_only_an_administrator_reads_paths_of_the_server() -> None:
    engine = FakeEngine()
    adapter = LoadedAdapter("pirate", 1, FOLDER, 4, 100)
    engine.stage_reports = [report(adapters=(adapter,)), report(stage="executor")]
    config = load_config(env={}, overrides={"policy.backend": "bus"})
    app, model = app_of(engine, config), str(config.engine.model_folder)
    made = Made(Administration(app.policy.store))
    paths = [
        route.path
        for route in app.routes
        if isinstance(route, PolicyRoute)
        and route.needed in ("read", "nothing")
        and "GET" in (route.methods or ())
        and "{" not in route.path
        and route.path != "/console/events"
    ]
    assert {"/server_info", "/get_model_info", "/v1/models", "/status", "/v2"} <= {*paths}
    async with http_of(app, engine) as http:
        for scopes in (("read",), ("generate", "weights")):
            key = bearer(await made(*scopes))
            for path in (*paths, "/v1/models/tiny", "/v1/models/pirate", "/v2/models/tiny"):
                answer = await http.get(path, headers=key)
                assert "confidential" not in answer.text, path
                assert model not in answer.text, path
        admin = bearer(await made("admin"))
        assert (await http.get("/server_info", headers=admin)).json()["model_path"] == model
        cards = (await http.get("/v1/models", headers=admin)).json()["data"]
        assert [each["root"] for each in cards][1:] == [FOLDER]
