"""API keys: authentication, authorisation and administration."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from nano_inference.config import Config
from nano_inference.gateway.api.routes import PolicyRoute
from nano_inference.gateway.app import GatewayApp
from nano_inference.gateway.caller import SCOPES, Scope, may

from ..errors import code_of
from ..fake import Client, FakeEngine, app_of, http_of
from .conftest import Made, bearer

CALLS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "read": ("GET", "/v1/models", {}),
    "generate": ("POST", "/generate", {"text": "a"}),
    "weights": ("POST", "/flush_cache", {}),
    "admin": ("GET", "/admin/keys", {}),
}


async def call(http: httpx.AsyncClient, scope: str, **more: Any) -> httpx.Response:
    method, path, body = CALLS[scope]
    return await http.request(method, path, json=body if method == "POST" else None, **more)


def test_every_route_declares_its_scope(app: GatewayApp) -> None:
    assert [each for each in app.routes if not isinstance(each, PolicyRoute)] == []
    free = {each.path_format for each in app.routes if getattr(each, "needed", "") == "nothing"}
    kserve = {"/v2/health/live", "/v2/health/ready", "/v2/models/{model}/ready"}
    kserve.add("/v2/models/{model}/versions/{version}/ready")
    probes = {"/livez", "/healthz", "/readyz", "/progressz", "/health", "/liveness"}
    console = {"/console", "/console/", "/console/static/{file}"}  # not its data
    assert free == {"/", "/version", "/api/version", *probes, *kserve, *console}


@pytest.mark.parametrize("scope", SCOPES)
async def test_a_scope_allows_its_endpoints_and_reading(
    http: Client, made: Made, scope: Scope
) -> None:
    headers = bearer(await made(scope))
    for needed in SCOPES:
        answer = await call(http, needed, headers=headers)
        if may((scope,), needed):
            assert answer.status_code == 200
        else:
            assert code_of(answer, 403) == "insufficient_scope"
    assert [may((scope,), needed) for needed in SCOPES].count(True) == 1 + (scope != "read")


async def test_probes_need_no_key(http: Client) -> None:
    assert (await http.get("/livez")).status_code == 200
    assert (await http.get("/version")).status_code == 200


@pytest.mark.parametrize(
    "names", [["Authorization"], ["api-key"], ["x-api-key"], ["Authorization", "x-api-key"]]
)
async def test_headers_for_a_key(http: Client, made: Made, names: list[str]) -> None:
    """tests/security/test_policy_attacks.py has what is refused."""
    text = (await made())["key"]
    headers = {name: f"bearer  {text} " if name == "Authorization" else text for name in names}
    assert (await call(http, "generate", headers=headers)).status_code == 200


async def test_an_expired_key_is_refused(
    http: Client, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await made(expires_in_s=60)
    assert (await call(http, "generate", headers=bearer(key))).status_code == 200
    monkeypatch.setattr("time.time_ns", lambda: key["expires_ns"])
    assert (await call(http, "generate", headers=bearer(key))).status_code == 401


async def test_the_tenant_is_the_key_s(http: Client, made: Made) -> None:
    headers = bearer(await made(tenant="gold")) | {"X-Tenant": "silver"}
    assert (await call(http, "generate", headers=headers)).status_code == 200
    assert [request.tenant for request in http.engine.requests] == ["gold"]


@pytest.mark.parametrize(
    ("own", "tenant", "got"), [(None, None, 0), (5, None, 5), (5, 3, 3), (None, 2, 2), (-1, 7, -1)]
)
async def test_a_priority_is_limited_by_key_and_tenant(
    http: Client, made: Made, own: Any, tenant: Any, got: int
) -> None:
    key = await made(tenant="gold", max_priority=own)
    if tenant is not None:
        admin = bearer(await made("admin"))
        body = {"max_priority": tenant}
        await http.put("/admin/tenants/gold", json=body, headers=admin)
    higher, lower = {"text": "a", "priority": got}, {"prompt": [1], "priority": -got}
    for path, body, more in (("/generate", higher, 1), ("/v1/completions", lower, -1)):
        await http.post(path, json=body, headers=bearer(key))
        body = body | {"priority": body["priority"] + more}
        answer = await http.post(path, json=body, headers=bearer(key))
        # Without a priority a request runs as high as it may.
        assert answer.status_code == (200 if not body["priority"] else 400)
        if answer.status_code == 400:
            limited = own is not None or tenant is not None
            setting = "max_priority of the key or its tenant" if limited else "gateway.max_priority"
            assert f"({setting})" in answer.json()["error"]["message"]
    assert {request.priority for request in http.engine.requests} == {got}
    assert len(http.engine.requests) == (2 if got >= 0 else 4)


async def test_other_models_look_missing(http: Client, made: Made) -> None:
    allowed, other = await made(models=["tiny"]), await made(models=["large"])
    assert (await call(http, "generate", headers=bearer(allowed))).status_code == 200
    answer = await call(http, "generate", headers=bearer(other))
    assert code_of(answer, 404) == "model_not_found"
    listed = await http.get("/v1/models", headers=bearer(other))
    assert listed.json()["data"] == []
    assert (await http.get("/v1/models/tiny", headers=bearer(other))).status_code == 404


async def test_errors_have_the_shape_of_their_interface(http: Client) -> None:
    openai = await http.post("/v1/chat/completions", json={})
    assert openai.json()["error"]["type"] == "authentication_error"
    anthropic = await http.post("/v1/messages", json={})
    assert anthropic.status_code == 401
    assert anthropic.json()["type"] == "error"
    assert anthropic.json()["error"]["type"] == "authentication_error"


async def test_only_own_requests_can_be_aborted(http: Client, made: Made) -> None:
    key = bearer(await made())
    for body in ({"rid": "somebody-s"}, {"abort_all": True}):
        answer = await http.post("/abort_request", json=body, headers=key)
        assert code_of(answer, 403) == "insufficient_scope"
        trainer = bearer(await made("weights", "generate"))
        answer = await http.post("/abort_request", json=body, headers=trainer)
        assert answer.status_code == 200


async def test_calls_are_refused_while_the_policy_is_unreadable(
    http: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await http.engine.bus.store.policy.replace("", b"{damaged")
    answer = await call(http, "read", headers={"api-key": "k"})
    assert code_of(answer, 503) == "policy_unavailable"


async def test_without_a_policy_every_call_is_allowed(engine: FakeEngine) -> None:
    async with http_of(app_of(engine)) as http:
        for scope in ("read", "generate", "weights"):
            answer = await call(http, scope, headers={"Authorization": "Basic eDp5"})
            assert answer.status_code == 200
        answer = await call(http, "admin")
        assert code_of(answer, 400) == "unsupported"


async def test_a_key_is_random_and_long(made: Made) -> None:
    texts = {(await made())["key"] for _ in range(10)}
    assert len({text[-43:] for text in texts}) == 10
    assert all(re.fullmatch(r"ni-[0-9a-f]{12}-[\w-]{43}", text) for text in texts)


async def test_turns_are_by_existing_keys(app: GatewayApp, made: Made) -> None:
    """Before anybody has looked at a request; names that are made up count for nothing."""
    key = (await made(tenant="gold"))["key"]
    other = f"ni-{'0' * 12}-{key[16:]}"

    def client_of(*lines: str) -> str:
        head = "\r\n".join(("POST /generate HTTP/1.1", "Host: a", *lines, "", ""))
        client: bytes = app.policy.client_of(head.encode())
        return client.decode()

    assert client_of(f"Authorization: Bearer {key}") == "gold"
    assert client_of(f"authorization:bearer  {key}", "X-Tenant: iron") == "gold"
    assert client_of(f"API-Key: {key}") == client_of(f"x-api-key: {key}") == "gold"
    assert client_of("X-Tenant: gold") == client_of() == client_of("api-key: x") == ""
    assert client_of(f"Authorization: Bearer {other}") == ""


# --- administration over HTTP ---------------------------------------------------------------------


@pytest.fixture
async def admin(http: Client, made: Made) -> Client:
    http.headers.update(bearer(await made("admin", name="the admin")))
    return http


async def test_a_key_s_life(admin: Client) -> None:
    wish = {"name": "ci", "scopes": ["generate"], "tenant": "t", "models": ["tiny"]}
    wish |= {"limits": {"requests_per_minute": 5}, "max_priority": 2, "expires_in_s": 3600}
    answer = await admin.post("/admin/keys", json=wish)
    assert answer.status_code == 201
    key = answer.json()
    shown = (await admin.get(f"/admin/keys/{key['id']}")).json()
    assert shown == {name: value for name, value in key.items() if name != "key"}
    assert (shown["tenant"], shown["models"], shown["expired"]) == ("t", ["tiny"], False)
    assert shown["limits"]["requests_per_minute"] == 5
    change = {"name": "cd", "models": None, "limits": {}}
    changed = (await admin.patch(f"/admin/keys/{key['id']}", json=change)).json()
    assert (changed["name"], changed["models"], changed["tenant"]) == ("cd", None, "t")
    assert changed["limits"]["requests_per_minute"] is None
    assert changed["expires_ns"] == key["expires_ns"]
    own = bearer(key)
    assert (await admin.get("/v1/models", headers=own)).status_code == 200
    gone = (await admin.delete(f"/admin/keys/{key['id']}")).json()
    assert gone == {"id": key["id"], "object": "key", "deleted": True}
    assert (await admin.get("/v1/models", headers=own)).status_code == 401
    assert (await admin.get(f"/admin/keys/{key['id']}")).status_code == 404
    listed = (await admin.get("/admin/keys")).json()["data"]
    assert [each["name"] for each in listed] == ["the admin"]
    assert "digest" not in listed[0]
    assert "key" not in listed[0]


async def test_other_gateways_take_a_revoked_key_no_more(
    admin: Client, made: Made, config: Config
) -> None:
    other = app_of(admin.engine, config)
    async with http_of(other) as elsewhere:
        key = await made()
        assert (await elsewhere.get("/v1/models", headers=bearer(key))).status_code == 200
        await admin.delete(f"/admin/keys/{key['id']}")
        await other.policy.store.refresh()
        assert (await elsewhere.get("/v1/models", headers=bearer(key))).status_code == 401


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "keys", {}, 400),
        ("POST", "keys", {"name": ""}, 400),
        ("POST", "keys", {"name": "a\nb"}, 400),
        ("POST", "keys", {"name": "a", "scopes": []}, 400),
        ("POST", "keys", {"name": "a", "scopes": ["everything"]}, 400),
        ("POST", "keys", {"name": "a", "scope": "admin"}, 400),
        ("POST", "keys", {"name": "a", "limits": {"requests_per_minute": 0}}, 400),
        ("POST", "keys", {"name": "a", "limits": {"requests_per_minute": 1.5}}, 400),
        ("POST", "keys", {"name": "a", "expires_in_s": -1}, 400),
        ("POST", "keys", {"name": "a", "max_priority": 2**70}, 400),
        ("PATCH", "keys/none", {"name": "b"}, 404),
        ("DELETE", "keys/none", None, 404),
        ("PUT", "tenants/t", {"weight": 0}, 400),
        ("PUT", "tenants/t", {"weights": 1}, 400),
        ("PUT", "tenants/" + "t" * 200, {"weight": 1}, 400),
        ("DELETE", "tenants/t", None, 404),
        ("PUT", "guardrails", {"literals": "a"}, 400),
        ("PUT", "guardrails", {"literals": [""]}, 400),
        ("PUT", "guardrails", {"literals": ["\u200b"]}, 400),
        ("PUT", "guardrails", {"patterns": ["(a"]}, 400),
        ("PUT", "guardrails", {"words": []}, 400),
    ],
)
async def test_a_malformed_call_changes_nothing(
    admin: Client, app: GatewayApp, method: str, path: str, body: Any, status: int
) -> None:
    before = await app.policy.store.document()
    answer = await admin.request(method, f"/admin/{path}", json=body)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]
    assert await app.policy.store.document() == before


async def test_tenants_and_guardrails(admin: Client) -> None:
    policy = {"weight": 3.0, "limits": {"max_in_flight": 2}}
    set_to = (await admin.put("/admin/tenants/a/b c", json=policy)).json()
    assert (set_to["weight"], set_to["limits"]["max_in_flight"]) == (3.0, 2)
    assert (await admin.get("/admin/tenants")).json() == {"a/b c": set_to}
    assert (await admin.delete("/admin/tenants/a/b c")).status_code == 200
    assert (await admin.get("/admin/tenants")).json() == {}
    blocked = {"literals": ["secret"], "patterns": ["a+b"]}
    assert (await admin.put("/admin/guardrails", json=blocked)).json() == blocked
    assert (await admin.get("/admin/guardrails")).json() == blocked
