"""The audit log: one line for each call and each change, and never a key."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog

from nano_inference.bus.codec import decode_output
from nano_inference.bus.public import Completion, GenerateRequest, Output
from nano_inference.config import ConfigError, TelemetryConfig, load_config
from nano_inference.gateway.app import GatewayApp
from nano_inference.gateway.policy.administration import Administration
from nano_inference.gateway.policy.audit import text_hash
from nano_inference.gateway.server.calls import ObservedCalls
from nano_inference.gateway.server.measures import Measures
from nano_inference.telemetry import setup_logging

from .. import by_hand
from ..fake import Client, FakeEngine, app_of, completion, http_of, refused
from ..made import cut, interleaved, scores
from .conftest import Made, bearer

AUDIT_KEY = "of its own"
ANSWER = "five six"


class Audited:
    """A gateway with an audit log, and a client of it."""

    def __init__(self, app: GatewayApp, observed: ObservedCalls, http: Client, path: Path) -> None:
        self.policy = app.policy
        self.observed = observed
        (self.durable,) = app.durable_calls()
        self.http, self.engine = http, http.engine
        self._path = path

    @property
    def administration(self) -> Administration:
        return Administration(self.policy.store)

    async def made(self, *scopes: str) -> dict[str, Any]:
        return await Made(self.administration)(*scopes, tenant="acme")

    async def text(self) -> str:
        """The log's content after it was closed."""
        await self.policy.aclose()
        return self._path.read_text()

    async def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (await self.text()).splitlines()]

    async def line(self) -> dict[str, Any]:
        (line,) = await self.lines()
        return line


def app_observed(app: GatewayApp) -> ObservedCalls:
    routes = [path for each in app.routes if (path := getattr(each, "path", ""))]
    return ObservedCalls(app, Measures(), routes, on_call=app.on_call)


@asynccontextmanager
async def audited(
    engine: FakeEngine, path: Path, more: dict[str, str] | None = None, **settings: Any
) -> AsyncIterator[Audited]:
    given = {"backend": "bus", "audit_file": str(path), "audit_key": AUDIT_KEY, **settings}
    overrides = {f"policy.{name}": each for name, each in given.items()} | (more or {})
    app = app_of(engine, overrides)
    await app.policy.open()
    observed = app_observed(app)
    async with http_of(observed, engine, raise_app_exceptions=False) as client:
        yield Audited(app, observed, client, path)
    await app.policy.aclose()


@pytest.fixture
async def gateway(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[Audited]:
    async with audited(engine, tmp_path / "audit") as gateway:
        yield gateway


def hashed(*texts: str) -> str:
    return text_hash(AUDIT_KEY.encode(), texts)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_has_a_line(gateway: Audited, stream: bool) -> None:
    key = await gateway.made()
    headers = bearer(key) | {"X-Request-Id": "mine"}
    body = {"prompt": ["one", "two"], "stream": stream}
    assert (await gateway.http.post("/v1/completions", json=body, headers=headers)).is_success
    line = await gateway.line()
    assert line.pop("duration_ms") >= 0
    assert line.pop("time").endswith("Z")
    assert line == {
        "event": "call",
        "call_id": "mine",
        "key_id": key["id"],
        "key_name": "somebody",
        "tenant": "acme",
        "client": "127.0.0.1",
        "method": "POST",
        "route": "/v1/completions",
        "model": "tiny",
        "status": 200,
        "code": "",
        "complete": True,
        "prompt_tokens": 2 * 4,
        "completion_tokens": 2 * 2,
        "prompt_hmac": hashed("one", "two"),
        "answer_hmac": hashed(ANSWER, ANSWER),
    }


async def test_text_is_recorded_only_if_the_settings_say_so(
    engine: FakeEngine, tmp_path: Path
) -> None:
    for shown in (False, True):
        path = tmp_path / f"audit-{shown}"
        async with audited(engine, path, audit_text=shown) as gateway:
            headers = bearer(await gateway.made())
            await gateway.http.post("/v1/completions", json={"prompt": "one"}, headers=headers)
            chat = {"messages": [{"role": "user", "content": "whisper"}]}
            await gateway.http.post("/v1/chat/completions", json=chat, headers=headers)
            text = await gateway.text()
        assert ("whisper" in text, ANSWER in text) == (shown, shown)
        if shown:
            one, other = (json.loads(line) for line in text.splitlines())
            assert (one["prompt"], one["answer"]) == (["one"], [ANSWER])
            # For `replay`, without the text, which is there already.
            (end,) = (decode_output(each.encode()) for each in one["recorded"])
            assert isinstance(end, Completion)
            assert (end.samples[0].token_ids, end.samples[0].text) == ((5, 6), "")
            assert "user\nwhisper" in other["prompt"][0]


async def test_requests_of_a_composite_model_are_in_the_line_of_its_call(
    engine: FakeEngine, tmp_path: Path
) -> None:
    engine.outputs = lambda request: [completion(request, **scores(request))]
    async with audited(engine, tmp_path / "audit", audit_text=True) as gateway:
        body = {"input_ids": [40, 41], "best_of": 2}
        path, headers = "/v2/models/tiny.best_of/generate", bearer(await gateway.made())
        assert (await gateway.http.post(path, json=body, headers=headers)).is_success
        line = await gateway.line()
    # Two samples of one prompt, and of each sample its score.
    sampled, *scored = line["prompt"]
    assert len(scored) == 2
    assert all(each.startswith(sampled) and each != sampled for each in scored)
    assert (line["model"], line["prompt_tokens"]) == ("tiny.best_of", 3 * 4)


@pytest.mark.parametrize(
    ("path", "headers", "status", "code"),
    [
        ("/v1/models", {}, 401, "missing_api_key"),
        ("/v1/models", {"api-key": "ni-000000000000-" + "x" * 43}, 401, "invalid_api_key"),
        ("/nowhere/ni-0", {}, 404, "not_found"),
        ("/v1/messages", {}, 405, "method_not_allowed"),
    ],
)
async def test_a_refused_call_has_a_line(
    gateway: Audited, path: str, headers: dict[str, str], status: int, code: str
) -> None:
    assert (await gateway.http.get(path, headers=headers)).status_code == status
    line = await gateway.line()
    assert (line["status"], line["code"], line["key_id"]) == (status, code, "")
    assert line["route"] == ("" if status == 404 else path)


async def test_a_caller_without_the_scope_is_named(gateway: Audited) -> None:
    key = await gateway.made("read")
    await gateway.http.post("/v1/completions", json={"prompt": "a"}, headers=bearer(key))
    line = await gateway.line()
    assert (line["status"], line["code"]) == (403, "insufficient_scope")
    assert (line["key_id"], line["tenant"]) == (key["id"], "acme")


async def test_a_blocked_prompt_is_recorded(gateway: Audited) -> None:
    await gateway.administration.set_guardrails({"literals": ["bad"]})
    headers = bearer(await gateway.made())
    await gateway.http.post("/v1/completions", json={"prompt": "so bad"}, headers=headers)
    line = await gateway.line()
    assert (line["status"], line["code"]) == (400, "content_filter")
    assert line["prompt_hmac"] == hashed("so bad")
    assert "answer_hmac" not in line


async def test_an_answer_is_recorded_as_it_left(gateway: Audited) -> None:
    await gateway.administration.set_guardrails({"literals": ["six"]})
    headers = bearer(await gateway.made())
    for stream in (False, True):
        body = {"prompt": "a", "stream": stream}
        await gateway.http.post("/v1/completions", json=body, headers=headers)
    for line in await gateway.lines():
        assert (line["status"], line["code"]) == (200, "content_filter")
        assert line["answer_hmac"] == hashed("five ")


async def test_a_failure_after_the_first_event_is_recorded(gateway: Audited) -> None:
    def outputs(request: GenerateRequest) -> list[Output]:
        return [*cut(request), *refused("lane_failed")(request)]

    gateway.engine.outputs = outputs
    body = {"prompt": "a", "stream": True}
    headers = bearer(await gateway.made())
    answer = await gateway.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200
    line = await gateway.line()
    assert (line["status"], line["code"]) == (200, "lane_failed")
    assert line["answer_hmac"] == hashed("five")


async def test_the_answer_until_a_disconnect_is_recorded(gateway: Audited) -> None:
    gateway.engine.outputs = lambda request: interleaved(request)[:2]  # and then it hangs
    key = await gateway.made()
    left = anyio.Event()

    async def send(message: Any) -> None:
        if b"six" in message.get("body", b""):
            left.set()

    body = {"prompt": "a", "stream": True, "max_tokens": 9}
    headers = bearer(key).items()
    await by_hand.post(gateway.observed, "/v1/completions", body, send, left, headers)
    line = await gateway.line()
    assert not line["complete"]
    assert line["answer_hmac"] == hashed("five six")


async def test_a_response_in_the_background_has_a_line_of_its_own(gateway: Audited) -> None:
    key = await gateway.made()
    body = {"input": "whisper", "background": True}
    made = (await gateway.http.post("/v1/responses", json=body, headers=bearer(key))).json()
    background = gateway.durable._tasks
    while background:
        await asyncio.wait(background)
    await gateway.durable.aclose()
    (line,) = [line for line in await gateway.lines() if line["event"] == "background"]
    assert (line["key_id"], line["tenant"], line["model"]) == (key["id"], "acme", "tiny")
    assert (line["request_ids"], line["code"]) == ([made["id"]], "")
    assert (line["prompt_tokens"], line["completion_tokens"]) == (4, 2)
    assert line["answer_hmac"] == hashed(ANSWER)
    assert len(line["prompt_hmac"]) == 64


async def test_probes_have_no_line(gateway: Audited) -> None:
    for path in ("/livez", "/healthz", "/version", "/health"):
        await gateway.http.get(path)
    assert await gateway.lines() == []


async def test_changes_have_a_line_with_their_administrator(gateway: Audited) -> None:
    admin = await gateway.made("admin")
    http, headers = gateway.http, bearer(admin)
    made = (await http.post("/admin/keys", json={"name": "new"}, headers=headers)).json()
    key = f"/admin/keys/{made['id']}"
    await http.patch(key, json={"name": "newer"}, headers=headers)
    await http.put("/admin/tenants/acme", json={"weight": 2.0}, headers=headers)
    await http.delete("/admin/tenants/acme", headers=headers)
    await http.put("/admin/guardrails", json={"literals": ["bad"]}, headers=headers)
    await http.delete(key, headers=headers)
    await http.patch(key, json={"name": "gone"}, headers=headers)
    await http.put("/admin/guardrails", json={"literals": 3}, headers=headers)
    text = await gateway.text()
    lines = [json.loads(line) for line in text.splitlines()]
    changes = [line for line in lines if line["event"] != "call"]
    assert [(line["event"], line["changed"]) for line in changes] == [
        ("create_key", made["id"]),
        ("change_key", made["id"]),
        ("set_tenant", "acme"),
        ("remove_tenant", "acme"),
        ("set_guardrails", "guardrails"),
        ("revoke_key", made["id"]),
    ]
    assert {line["key_id"] for line in changes} == {admin["id"]}
    assert changes[1]["now"]["name"] == "newer"
    assert changes[2]["now"]["weight"] == 2.0
    # A refused change is a call like any other; a route is recorded without its parameters.
    assert [line["status"] for line in lines if line["event"] == "call"][-2:] == [404, 400]
    assert lines[3]["route"] == "/admin/keys/{key_id}"
    secret = made["key"].removeprefix(f"ni-{made['id']}-")
    assert secret not in text
    assert "digest" not in text


@pytest.fixture
def full_disk_for_the_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    with open("/dev/full", "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        setup_logging(TelemetryConfig())
        yield
    structlog.reset_defaults()
    root.handlers[:], root.level = before


@pytest.mark.usefixtures("full_disk_for_the_log")
async def test_calls_are_refused_while_lines_can_not_be_written(
    engine: FakeEngine, tmp_path: Path
) -> None:
    """The disk is full, also for the process's own log."""
    path = tmp_path / "audit"
    path.symlink_to("/dev/full")
    async with audited(engine, path, audit_when_full="refuse") as gateway:
        headers = bearer(await gateway.made("generate", "admin"))
        body, paths = {"prompt": "a"}, "/v1/completions"
        while (await gateway.http.post(paths, json=body, headers=headers)).is_success:
            await anyio.lowlevel.checkpoint()
        served = len(engine.requests)
        for method, refused_path in (
            ("POST", paths),
            ("GET", "/v1/models"),
            ("GET", "/admin/keys"),
        ):
            answer = await gateway.http.request(
                method, refused_path, json=body if method == "POST" else None, headers=headers
            )
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "policy_unavailable"
        assert (await gateway.http.get("/livez")).status_code == 200
        assert len(engine.requests) == served
        path.unlink()
        while not (await gateway.http.post(paths, json=body, headers=headers)).is_success:
            await anyio.lowlevel.checkpoint()
        lines = await gateway.lines()
    # Every served call has its line.
    assert [line["status"] for line in lines].count(200) == len(engine.requests)


async def test_calls_without_keys_are_audited(engine: FakeEngine, tmp_path: Path) -> None:
    async with audited(engine, tmp_path / "audit", backend="off") as gateway:
        answer = await gateway.http.post(
            "/v1/completions", json={"prompt": "a"}, headers={"X-Tenant": "me"}
        )
        assert answer.status_code == 200
        line = await gateway.line()
    assert (line["tenant"], line["key_id"], line["status"]) == ("me", "", 200)


async def test_hashes_need_a_key() -> None:
    with pytest.raises(ConfigError, match="audit_key"):
        load_config(env={}, overrides={"policy.audit_file": "audit"})


async def test_without_a_tokenizer_a_prompt_is_its_tokens(
    engine: FakeEngine, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    more = {"engine.model_path": str(folder)}
    async with audited(engine, tmp_path / "audit", more, backend="off") as gateway:
        await gateway.http.post("/v1/completions", json={"prompt": [5, 6]})
        assert (await gateway.line())["prompt_hmac"] == hashed("5 6")
