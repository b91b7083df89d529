"""Administration over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from nano_inference.config import Config
from nano_inference.gateway.app import GatewayApp

from ..fake import Client, app_of, http_of
from .conftest import Made, bearer


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
