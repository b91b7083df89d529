"""The requests that the console shows: bounded, and to those alone who may see them."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from nano_inference.bus.public import GenerateRequest, Usage
from nano_inference.gateway.call import Call
from nano_inference.gateway.policy.administration import Administration
from nano_inference.gateway.serving import request_log
from nano_inference.gateway.serving.request_log import TENANT_WINDOW_NS, RequestLog
from nano_inference.telemetry.instruments import REQUEST_LOG_FAILED

from ..fake import Client, FakeEngine, app_of, chunk, completion, http_of, refused
from ..recorded import Recorded

CHAT = {"prompt": "98 + 25 =", "max_tokens": 4}
EVIL = '<img src=x onerror="alert(1)"></script>'


async def ask(http: Client, **more: Any) -> str:
    answer = await http.post("/v1/completions", json=CHAT | more)
    return str(answer.json().get("id", ""))


async def listed(http: Client, **more: Any) -> list[dict[str, Any]]:
    answer = await http.get("/console/requests", **more)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-type"] == "application/json"
    found: list[dict[str, Any]] = answer.json()["requests"]
    return found


async def test_a_request_is_listed_with_its_end(http: Client) -> None:
    request_id = await ask(http)
    (found,) = await listed(http)
    assert (found["id"], found["state"], found["finish"]) == (request_id, "done", "length")
    assert found["prompt"].strip().startswith("98 + 25")
    assert found["answer"] == "five six"
    assert (found["prompt_tokens"], found["completion_tokens"]) == (4, 2)
    one = (await http.get(f"/console/requests/{request_id}")).json()
    (sample,) = one["detail"]["samples"]
    assert sample["weight_versions"] == [[3, 0]]
    assert len(sample["tokens_text"]) == 2
    assert one["detail"]["timings"]["received_ns"] == 10**9


async def test_an_error_is_listed_with_its_code(http: Client, engine: FakeEngine) -> None:
    engine.outputs = refused("exceeds_kv_capacity", "shorten it")
    await ask(http)
    (found,) = await listed(http)
    assert (found["state"], found["code"]) == ("error", "exceeds_kv_capacity")
    assert found["message"] == "shorten it"


async def test_a_refused_call_is_listed_with_its_reason(http: Client) -> None:
    await http.post("/v1/completions", json=CHAT | {"max_tokens": "many"})
    await http.post("/v1/nothing", json=CHAT)
    await http.post("/v1/completions", content=b"x", headers={"Content-Type": "text/plain"})
    for _ in range(2):
        await http.get("/console/requests/unknown")  # of the page itself
        await http.get("/livez")
    found = await listed(http)
    assert [(each["state"], each["status"], each["code"]) for each in found] == [
        ("refused", 400, "invalid_request"),
        ("refused", 404, "not_found"),
        ("refused", 415, "unsupported_media_type"),
    ]
    assert "max_tokens" in found[0]["message"]
    assert found[0]["prompt"] == "POST /v1/completions"
    one = (await http.get(f"/console/requests/{found[0]['id']}")).json()
    assert (one["request"]["code"], one["detail"]) == ("invalid_request", {})


async def test_a_call_without_a_key_is_shown_to_administrators_alone(engine: FakeEngine) -> None:
    app = app_of(engine, {"policy.backend": "bus"})
    administration = Administration(app.policy.store)
    async with http_of(app, engine) as http:
        await http.post("/v1/completions", json=CHAT, headers={"X-Tenant": "acme"})
        seen = {}
        for tenant, scope in (("acme", "generate"), ("root", "admin")):
            made = await administration.create_key({"name": tenant, "scopes": [scope]})
            key = {"Authorization": f"Bearer {made['key']}"}
            seen[tenant] = [each["code"] for each in await listed(http, headers=key)]
    assert seen == {"acme": [], "root": ["missing_api_key"]}


async def test_texts_are_json_and_nothing_else(http: Client) -> None:
    await ask(http, prompt=EVIL)
    answer = await http.get("/console/requests")
    assert answer.headers["content-type"] == "application/json"
    assert "onerror" in answer.json()["requests"][0]["prompt"]


async def test_only_changes_are_sent(http: Client) -> None:
    await ask(http)
    first = (await http.get("/console/requests")).json()
    assert (first["more"], len(first["requests"])) == (False, 1)
    second = (await http.get("/console/requests", params={"after": first["next"]})).json()
    assert second["requests"] == []
    for bad in ("-1", "x", "1e3"):
        assert (await http.get("/console/requests", params={"after": bad})).status_code == 400


async def test_a_long_list_is_compressed(engine: FakeEngine) -> None:
    app = app_of(engine)
    log = app.request_log
    assert log is not None
    log.arrived("acme", [request(f"r{number}") for number in range(100)], "tiny")
    async with http_of(app, engine) as http:
        assert len(await listed(http)) == 100
        for coding in ("gzip", "identity"):
            headers = {"accept-encoding": coding}
            answer = await http.get("/console/requests", headers=headers)
            assert answer.headers.get("content-encoding", "identity") == coding
            assert len(answer.json()["requests"]) == 100


async def test_a_key_lists_the_requests_of_its_tenant(engine: FakeEngine) -> None:
    app = app_of(engine, {"policy.backend": "bus"})
    administration = Administration(app.policy.store)
    keys = {}
    for name, scope in (("acme", "generate"), ("blue", "read"), ("root", "admin")):
        made = await administration.create_key({"name": name, "scopes": [scope]})
        keys[name] = {"Authorization": f"Bearer {made['key']}"}
    async with http_of(app, engine) as http:
        answer = await http.post("/v1/completions", json=CHAT, headers=keys["acme"])
        request_id = answer.json()["id"]
        seen = {name: len(await listed(http, headers=key)) for name, key in keys.items()}
        assert seen == {"acme": 1, "blue": 0, "root": 1}
        status = {
            name: (await http.get(f"/console/requests/{request_id}", headers=key)).status_code
            for name, key in keys.items()
        }
        assert status == {"acme": 200, "blue": 404, "root": 200}
        for path in ("session", "events", "requests", f"requests/{request_id}"):
            assert (await http.get(f"/console/{path}")).status_code == 401
        session = (await http.get("/console/session", headers=keys["blue"])).json()
        assert (session["scopes"], session["tenant"]) == (["read"], "blue")
        assert session["default_model"] == "tiny"
        (model,) = session["models"]
        assert model["id"] == "tiny"
        assert (model["bundled"], model["chat"], model["images"]) == (True, True, False)


@pytest.mark.parametrize("broken", ["_forget_detail", "_end", "_change"])
async def test_an_error_in_the_list_fails_no_request(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """It is counted each time, and logged once."""

    def fail(*args: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(RequestLog, broken, fail)
    recorded = Recorded()
    async with http_of(app_of(engine, measures=recorded.measures), engine) as http:
        with capture_logs() as logs:
            for stream in (False, True, False):
                answer = await http.post("/v1/completions", json=CHAT | {"stream": stream})
                assert answer.status_code == 200
                assert "five" in answer.text
        (failed,) = recorded.values(REQUEST_LOG_FAILED).values()
        assert failed >= 3
        lines = [line["where"] for line in logs if line["event"] == "request_not_listed"]
        assert 0 < len(lines) == len(set(lines))
        assert (await http.get("/console/requests")).status_code == 200


# --- the log ------------------------------------------------------------------------------------


def request(request_id: str, prompt: str = "hello") -> GenerateRequest:
    return GenerateRequest(request_id=request_id, prompt=prompt)


def end(log: RequestLog, request_id: str, tenant: str = "acme", **changed: Any) -> None:
    """Let a request come and end."""
    asked = request(request_id)
    log.arrived(tenant, [asked], "tiny")
    log.began(request_id)
    log.output(asked, completion(asked, **changed))


def test_the_log_is_bounded_in_number_and_bytes() -> None:
    log = RequestLog(most=3, most_bytes=600)
    for number in range(10):
        end(log, f"r{number}")
    rows, _ = log.changed_after(0, 100)
    assert [each.id for each in rows] == ["r7", "r8", "r9"]
    assert log.detail("r9")
    assert not log.detail("r7"), "its details made room"


def test_refused_calls_leave_room_for_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "MOST_REFUSED", 2)
    log = RequestLog(most=5)
    for number in range(3):
        end(log, f"r{number}")
    for number in range(9):
        log.refused(Call(id=f"c{number}", code="not_found", status=404))
    rows, _ = log.changed_after(0, 100)
    assert [each.name for each in rows] == ["r0", "r1", "r2", "c7", "c8"]


def test_texts_that_are_cut_have_a_mark() -> None:
    log, asked = RequestLog(), request("r", "a" * 200)
    log.arrived("acme", [asked], "tiny")
    for _ in range(100):
        log.output(asked, chunk(asked))
    ((found,), _) = log.changed_after(0, 10)
    assert (found.prompt, found.answer) == ("…" + "a" * 160, "<7>" * 53 + "<…")


def test_pages_are_complete() -> None:
    log = RequestLog()
    for number in range(10):
        end(log, f"r{number}")
    seen, after = [], 0
    while True:
        rows, after = log.changed_after(after, 4)
        if not rows:
            break
        seen += [each.id for each in rows]
    assert seen == [f"r{number}" for number in range(10)]


def test_new_tokens_change_a_request_while_a_viewer_is_connected() -> None:
    log, asked = RequestLog(), request("r")
    log.arrived("acme", [asked], "tiny")
    log.began("r")
    _, after = log.changed_after(0, 10)
    for _ in range(5):
        log.output(asked, chunk(asked))
    assert log.changes == after
    ((found,), _) = log.changed_after(after, 10)
    assert (found.state, found.completion_tokens, found.answer) == ("running", 5, "<7>" * 5)


@pytest.mark.parametrize(
    ("code", "began", "state"),
    [
        ("", True, "cancelled"),
        ("expired", False, "expired"),
        ("lane_failed", True, "error"),
        ("rate_limit_exceeded", False, "refused"),
    ],
)
def test_unfinished_requests_end_with_their_call(code: str, began: bool, state: str) -> None:
    log = RequestLog()
    log.arrived("acme", [request("r")], "tiny")
    if began:
        log.began("r")
    log.left(["r"], code, "why")
    ((found,), _) = log.changed_after(0, 10)
    assert (found.state, found.code) == (state, code)
    assert found.ended_ns


def test_tenants_are_counted_by_their_tokens() -> None:
    log = RequestLog()
    end(log, "a", usage=Usage(prompt_tokens=7, completion_tokens=3))
    end(log, "b", usage=Usage(prompt_tokens=1, completion_tokens=1))
    log.arrived("blue", [request("c")], "tiny")
    uses = {each.tenant: (each.tokens, each.running, each.waiting) for each in log.tenants()}
    assert uses == {"acme": (12, 0, 0), "blue": (0, 0, 1)}


def test_nothing_of_ended_requests_stays_without_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams, whose growth only a console would read, are dropped too."""
    log = RequestLog(most=10)
    for number in range(100):
        asked = request(f"r{number}")
        log.arrived("acme", [asked], "tiny")
        log.output(asked, chunk(asked))
        if number % 2:
            log.output(asked, completion(asked))
        else:
            log.left([asked.request_id], "", "")
        monkeypatch.setattr(request_log, "now_ns", lambda at=number: at * TENANT_WINDOW_NS // 10)
    assert (len(log), len(log._running), len(log._grown)) == (10, 0, 0)
    assert 0 < len(log._used) <= 10, "of the last minute alone"
