"""A web page that somebody has open can't use the gateway that their browser reaches."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import structlog

from nano_inference.config import STAGES, ConfigError, load_config
from nano_inference.gateway.app import make_app
from nano_inference.gateway.policy.administration import Administration
from nano_inference.gateway.server.server import HttpServer
from nano_inference.pipeline.health import lanes_of, verdict, weights_trouble
from nano_inference.store.board import StageReport

from ..gateway.errors import error_of
from ..gateway.fake import FakeEngine, report

LAN = "http://10.0.0.5:30000"
FIREFOX = "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0"
EVIL = "https://evil.example"
OURS = "https://lab.example"
LIMIT_S = 20

EFFECTS = ["/flush_cache", "/release_memory_occupation", "/resume_memory_occupation"]
WRITES = [
    *(*EFFECTS, "/generate", "/abort_request", "/pause_generation", "/continue_generation"),
    *("/begin_weight_update", "/update_weights_from_disk", "/update_weight_version"),
]


@asynccontextmanager
async def gateway(
    engine: FakeEngine, base_url: str = LAN, policy: str = "off", **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client without headers but a key if there is a policy, and a gateway with settings."""
    overrides = {f"gateway.{name}": value for name, value in settings.items()}
    config = load_config(env={}, overrides=overrides | {"policy.backend": policy})
    app = make_app(engine, config)
    transport = httpx.ASGITransport(HttpServer(app, config.gateway).calls)
    async with httpx.AsyncClient(transport=transport, base_url=base_url) as client:
        client.headers.clear()
        if policy != "off":
            made = await Administration(app.policy.store).create_key({"name": "a page"})
            client.headers["Authorization"] = f"Bearer {made['key']}"
        yield client


def browser(**headers: str) -> dict[str, str]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return {"User-Agent": FIREFOX, "Accept": "*/*", "Accept-Language": "en"} | named


# What a page makes a browser send without asking first, by how it does it.
BY_POST = {
    "fetch(no-cors)": browser(Origin=EVIL, Content_Type="text/plain;charset=UTF-8"),
    "fetch(Blob without a type)": browser(Origin=EVIL),
    "form": browser(Origin=EVIL, Content_Type="application/x-www-form-urlencoded"),
    "form text/plain": browser(Origin=EVIL, Content_Type="text/plain"),
    "sandboxed frame": browser(Origin="null", Content_Type="text/plain"),
    "without an Origin": browser(Content_Type="text/plain"),
    "form without an Origin": browser(Content_Type="application/x-www-form-urlencoded"),
    "files without an Origin": browser(Content_Type="multipart/form-data; boundary=x"),
    "without Origin or type": browser(),
    "beacon": browser(Origin=EVIL, Content_Type="multipart/form-data; boundary=x"),
    "ping": browser(Origin=EVIL, Content_Type="text/ping", Sec_Fetch_Site="cross-site"),
    "fetch to this machine": browser(Origin=EVIL, Sec_Fetch_Site="cross-site"),
    "another port here": browser(Origin="http://10.0.0.5:8000", Sec_Fetch_Site="same-site"),
}

BY_GET = {
    "image": browser(Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors"),
    "image without TLS": browser(),
    "link": browser(Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate"),
    "link in a mail": browser(Sec_Fetch_Site="none", Sec_Fetch_Mode="navigate"),
    "fetch(cors)": browser(Origin=EVIL, Sec_Fetch_Site="cross-site"),
    "no name": {"Accept": "*/*"},
}


ASK = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}
"""Before a call that a page may not make without asking."""


@pytest.mark.parametrize("way", BY_POST)
async def test_no_page_has_an_effect_by_post(engine: FakeEngine, way: str) -> None:
    codes = ("forbidden_origin", "unsupported_media_type")
    async with gateway(engine, effects_by_get="all") as http:
        for path in WRITES:
            answer = await http.post(path, content=b'{"text": "a"}', headers=BY_POST[way])
            assert answer.status_code in (403, 415), path
            assert error_of(answer, answer.status_code) in codes, path
            assert not engine.calls, path
            assert not engine.requests, path


@pytest.mark.parametrize("way", BY_POST)
async def test_no_page_calls_a_model_of_kserve(engine: FakeEngine, way: str) -> None:
    """There bytes are taken as well, and from programs bodies of which nothing is said."""
    body = b'{"text_input": "a", "inputs": []}'
    async with gateway(engine) as http:
        for what in ("models/tiny/infer", "models/tiny/generate", "systemsharedmemory/unregister"):
            answer = await http.post(f"/v2/{what}", content=body, headers=BY_POST[way])
            assert answer.status_code in (403, 415)
        assert not engine.requests


@pytest.mark.parametrize("agent", [None, "python/gevent-http-client-2.4"])
async def test_programs_may_omit_the_content_type_for_kserve(
    engine: FakeEngine, agent: str | None
) -> None:
    headers = {"User-Agent": agent} if agent else {}
    async with gateway(engine) as http:
        answer = await http.post(
            "/v2/models/tiny/generate", content=b'{"text_input": "a"}', headers=headers
        )
    assert answer.status_code == 200
    assert len(engine.requests) == 1


@pytest.mark.parametrize("path", EFFECTS)
async def test_no_page_has_an_effect_without_a_body(engine: FakeEngine, path: str) -> None:
    """Browsers give the origin with every POST; programs need no type for no body."""
    async with gateway(engine) as http:
        for origin in (EVIL, "null"):
            answer = await http.post(path, headers=browser(Origin=origin))
            assert error_of(answer, 403) == "forbidden_origin"
        assert not engine.calls
        assert (await http.post(path)).status_code == 200


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("way", BY_GET)
async def test_no_page_has_an_effect_by_get(engine: FakeEngine, method: str, way: str) -> None:
    """Not where the settings allow it to programs, either."""
    async with gateway(engine, effects_by_get="all") as http:
        for path in EFFECTS:
            answer = await http.request(method, path, headers=BY_GET[way])
            assert answer.status_code == 403, path
            assert not engine.calls, path


@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_a_page_under_a_name_of_its_own_for_this_machine_has_no_effect(
    engine: FakeEngine, method: str
) -> None:
    """DNS rebinding: to the browser the gateway is the page's own server."""
    async with gateway(engine, "http://evil.example:30000", effects_by_get="all") as http:
        for path in (*EFFECTS, "/server_info", "/generate"):
            headers = browser(Sec_Fetch_Site="same-origin", Content_Type="application/json")
            answer = await http.request(method, path, content=b"{}", headers=headers)
            assert error_of(answer, 403) == "forbidden_host"
            assert "gateway.allowed_hosts" in answer.text
    assert not engine.calls


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:30000",
        "LocalHost.:30000",
        "127.0.0.1:30000",
        "10.0.0.5",
        "[::1]:30000",
        "[fe80::1]",
        f"{socket.gethostname()}:30000",
        "gateway.cluster.local:30000",
        "own.name:30000",
    ],
)
async def test_names_that_the_gateway_has(engine: FakeEngine, host: str) -> None:
    settings = {"allowed_hosts": ["gateway.cluster.local"], "host": "own.name"}
    async with gateway(engine, **settings) as http:
        assert (await http.get("/health", headers={"Host": host})).status_code == 200


STRANGE_HOSTS = """
    evil.example localhost.evil.example 127.0.0.1.evil.example [evil]:1 a@localhost localhost/..
    127.0.0.1.nip.io 0x7f000001
"""


async def test_names_that_it_does_not_have(engine: FakeEngine) -> None:
    async with gateway(engine) as http:
        for host in ("", "a b", "x" * 9000, *STRANGE_HOSTS.split()):
            answer = await http.get("/health", headers={"Host": host})
            assert (host, error_of(answer, 403)) == (host, "forbidden_host")


@pytest.mark.parametrize(
    "agent", ["python-requests/2.32.3", "python-httpx/0.28.1", "Python/3.11 aiohttp/3.9", "curl/8"]
)
async def test_trainers_flush_by_get_as_they_do(engine: FakeEngine, agent: str) -> None:
    """slime and miles: while they wait for the server with a type and no body, later without."""
    async with gateway(engine) as http:
        first = {"User-Agent": agent, "Content-Type": "application/json; charset=utf-8"}
        assert (await http.get("/flush_cache", headers=first)).status_code == 200
        assert (await http.get("/flush_cache", headers={"User-Agent": agent})).status_code == 200
        assert (await http.post("/flush_cache", headers={"User-Agent": agent})).status_code == 200
        for path in EFFECTS[1:]:
            answer = await http.get(path, headers={"User-Agent": agent})
            assert error_of(answer, 405) == "method_not_allowed"
            assert "POST" in answer.json()["error"]["message"]
    assert engine.names == ["flush_cache"] * 3


async def test_which_effects_are_there_by_get_is_a_setting(engine: FakeEngine) -> None:
    program = {"User-Agent": "python-requests/2.32.3"}
    async with gateway(engine, effects_by_get="none") as http:
        assert (await http.get("/flush_cache", headers=program)).status_code == 405
    assert not engine.calls
    async with gateway(engine, effects_by_get="all") as http:
        for path in EFFECTS:
            assert (await http.get(path, headers=program)).status_code == 200


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=utf-8", "application/merge-patch+json"]
)
async def test_json_is_taken(engine: FakeEngine, kind: str) -> None:
    async with gateway(engine) as http:
        headers = {"Content-Type": kind}
        answer = await http.post("/pause_generation", content=b"{}", headers=headers)
        assert answer.status_code == 200


async def test_a_body_that_is_empty_may_be_declared_as_bytes(engine: FakeEngine) -> None:
    """aiohttp does; a page's script can't without a preflight."""
    headers = {"Content-Type": "application/octet-stream"}
    async with gateway(engine) as http:
        answer = await http.post("/finish_session?session_id=a", headers=headers)
        assert answer.status_code == 200
        answer = await http.post("/flush_cache", content=b"{}", headers=headers)
        assert error_of(answer, 415) == "unsupported_media_type"


async def test_the_default_content_type_of_curl_is_refused_with_the_header_to_add(
    engine: FakeEngine,
) -> None:
    headers = {"User-Agent": "curl/8.5.0", "Content-Type": "application/x-www-form-urlencoded"}
    async with gateway(engine) as http:
        answer = await http.post("/generate", content=b'{"text": "a"}', headers=headers)
        assert error_of(answer, 415) == "unsupported_media_type"
        assert "Content-Type: application/json" in answer.text


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "", "text/plain"])
async def test_json_declared_as_a_form_is_taken_by_ollama_s_calls_from_programs_alone(
    engine: FakeEngine, kind: str
) -> None:
    """As `curl -d` and LiteLLM send it. A page's script can send it without a preflight."""
    declared = {"Content-Type": kind} if kind else {}
    async with gateway(engine) as http:
        for agent, status in (("curl/8.5.0", 200), (FIREFOX, 415)):
            answer = await http.post(
                "/api/generate",
                content=b'{"prompt": "a", "stream": false}',
                headers=declared | {"User-Agent": agent},
            )
            assert answer.status_code == (415 if kind == "text/plain" else status), answer.text
        stated = declared | {"User-Agent": "curl/8", "Sec-Fetch-Site": "same-origin"}
        answer = await http.post("/api/generate", content=b"{}", headers=stated)
        assert answer.status_code == 415
    assert len(engine.requests) == (kind != "text/plain")


async def test_pages_that_are_named_may_call(engine: FakeEngine) -> None:
    """After the browser has asked; those of other origins are told nothing."""
    async with gateway(engine, allowed_origins=[OURS]) as http:
        answer = await http.options("/generate", headers=browser(Origin=OURS) | ASK)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == OURS
        assert "content-type" in answer.headers["access-control-allow-headers"]
        headers = browser(Origin=OURS, Sec_Fetch_Site="cross-site")
        answer = await http.post("/generate", json={"text": "a"}, headers=headers)
        assert (answer.status_code, len(engine.requests)) == (200, 1)
        assert answer.headers["access-control-allow-origin"] == OURS
        # They see why they are refused.
        answer = await http.post("/generate", content=b"{}", headers=headers)
        assert answer.status_code == 415
        assert "access-control-allow-origin" in answer.headers
        answer = await http.options("/generate", headers=browser(Origin=EVIL) | ASK)
        assert error_of(answer, 403) == "forbidden_origin"
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("headers", "code", "words"),
    [
        (
            {"Origin": "http://localhost:3000"},
            "forbidden_origin",
            ("http://localhost:3000", "gateway.allowed_origins"),
        ),
        ({"Origin": "null"}, "forbidden_origin", ("can't be allowed", "gateway.allowed_origins")),
        ({"Host": "box.example"}, "forbidden_host", ("box.example", "gateway.allowed_hosts")),
    ],
)
async def test_the_body_and_the_log_name_the_setting_that_refused_a_preflight(
    engine: FakeEngine, headers: dict[str, str], code: str, words: tuple[str, str]
) -> None:
    ask = browser(**headers) | ASK
    async with gateway(engine) as http:
        with structlog.testing.capture_logs() as lines:
            answer = await http.options("/v1/chat/completions", headers=ask)
    assert error_of(answer, 403) == code
    (line,) = lines
    assert line["event"] == code
    for word in words:
        assert word in answer.json()["error"]["message"]
        assert word in line["error"]


async def test_pages_of_ours_may_bring_a_key(engine: FakeEngine) -> None:
    """A browser asks without it whether it may send one."""
    async with gateway(engine, policy="bus", allowed_origins=[OURS]) as http:
        key = http.headers.pop("Authorization")
        answer = await http.options("/generate", headers=browser(Origin=OURS) | ASK)
        assert answer.status_code == 200
        assert "authorization" in answer.headers["access-control-allow-headers"]
        headers = browser(Origin=OURS, Sec_Fetch_Site="cross-site")
        # It sees that it lacks one; and no cookie is ever asked for.
        answer = await http.post("/generate", json={"text": "a"}, headers=headers)
        assert error_of(answer, 401) == "missing_api_key"
        assert answer.headers["access-control-allow-origin"] == OURS
        assert "access-control-allow-credentials" not in answer.headers
        with_key = headers | {"Authorization": key}
        answer = await http.post("/generate", json={"text": "a"}, headers=with_key)
        assert (answer.status_code, len(engine.requests)) == (200, 1)
        # A key makes no page of others' one of ours.
        answer = await http.post(
            "/generate", json={"text": "a"}, headers=with_key | {"Origin": EVIL}
        )
        assert error_of(answer, 403) == "forbidden_origin"


async def test_pages_are_answered_before_all_limits_and_may_read_the_refusals(
    engine: FakeEngine,
) -> None:
    """A browser that got 429 for its question would tell its page nothing at all."""
    headers = browser(Origin=OURS, Sec_Fetch_Site="cross-site")
    engine.outputs = lambda request: []
    async with gateway(engine, allowed_origins=[OURS], max_connections=1) as http:
        running = asyncio.create_task(http.post("/v1/completions", json={"prompt": "a"}))
        async with asyncio.timeout(LIMIT_S):
            await engine.until(lambda: len(engine.requests) == 1)
        answer = await http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert error_of(answer, 429) == "overloaded"
        assert answer.headers["retry-after"] == "1"
        assert answer.headers["access-control-allow-origin"] == OURS
        assert "Retry-After" in answer.headers["access-control-expose-headers"]
        answer = await http.options("/v1/completions", headers=browser(Origin=OURS) | ASK)
        assert answer.status_code == 200
        # Those of others are refused as ever, and not for want of room.
        answer = await http.post("/v1/completions", json={}, headers=browser(Origin=EVIL))
        assert error_of(answer, 403) == "forbidden_origin"
        running.cancel()


async def test_pages_may_read_that_the_gateway_has_failed(engine: FakeEngine) -> None:
    engine.failures["flush_cache"] = ZeroDivisionError()  # type: ignore[assignment]
    async with gateway(engine, allowed_origins=[OURS]) as http:
        answer = await http.post("/flush_cache", headers=browser(Origin=OURS))
        assert error_of(answer, 500) == "internal_error"
        assert answer.headers["access-control-allow-origin"] == OURS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allowed_origins", ["*"]),
        ("allowed_origins", ["null"]),
        ("allowed_origins", ["https://a.example/"]),
        ("allowed_hosts", ["http://a"]),
        ("allowed_hosts", ["a:80"]),
        ("allowed_hosts", ["*.a"]),
        ("effects_by_get", "some"),
    ],
)
def test_misleading_lists_of_origins_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"gateway.{name}"):
        load_config(env={}, overrides={f"gateway.{name}": value})


# --- health -------------------------------------------------------------------------------------


def lane(**executor: Any) -> list[StageReport]:
    return [report(stage=stage, load=executor if stage == "executor" else {}) for stage in STAGES]


@pytest.mark.parametrize(
    ("load", "why"),
    [
        ({}, ""),
        ({"lacks": "weights"}, "weights"),
        ({"lacks": "weights, kv_cache"}, "kv_cache"),
        ({"behind_version": 7}, "version 7"),
    ],
)
def test_a_lane_whose_weights_are_lacking_has_trouble(load: dict[str, Any], why: str) -> None:
    lanes = lanes_of(lane(**load))
    assert verdict(lanes) == "", "its stages do work"
    found = weights_trouble(lanes)
    assert bool(found) == bool(why)
    assert why in found


async def test_health_is_not_ok_while_weights_are_released(engine: FakeEngine) -> None:
    """At once, though the executors tell about once a second."""
    async with gateway(engine) as http:
        assert (await http.get("/health")).status_code == 200
        await http.post("/release_memory_occupation", json={"tags": ["weights"]})
        answer = await http.get("/health")
        assert error_of(answer, 503) == "not_ready"
        assert "weights" in answer.text
        assert (await http.get("/health_generate")).status_code == 200
        await http.post("/resume_memory_occupation", json={"tags": ["weights"]})
        assert (await http.get("/health")).status_code == 200


async def test_the_consoles_own_page_may_write_and_no_other_origin_may(engine: FakeEngine) -> None:
    def page(origin: str, **more: str) -> dict[str, str]:
        return browser(Origin=origin, Content_Type="application/json", **more)

    others = (
        "http://10.0.0.5:8000",
        "https://10.0.0.5:30000",
        "http://10.0.0.5.evil.example:30000",
    )
    async with gateway(engine) as client:
        assert (await client.post("/pause_generation", headers=page(LAN))).status_code == 200
        for other in others:
            answer = await client.post("/pause_generation", headers=page(other))
            assert error_of(answer, 403) == "forbidden_origin", other
        # Behind a proxy with TLS; no page can make a browser say so for another origin.
        behind = page("https://10.0.0.5:30000", Sec_Fetch_Site="same-origin")
        assert (await client.post("/pause_generation", headers=behind)).status_code == 200
    # The page's own name, made to resolve to this machine.
    async with gateway(engine, base_url="http://evil.example:30000") as client:
        answer = await client.post("/pause_generation", headers=page("http://evil.example:30000"))
        assert error_of(answer, 403) == "forbidden_host"
    async with gateway(engine, console=False) as client:
        answer = await client.post("/pause_generation", headers=page(LAN))
        assert error_of(answer, 403) == "forbidden_origin"
