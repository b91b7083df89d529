"""Two tenants that give the same names at once: each has its own request, line, answer and call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import httpx
import pytest

from nano_inference.bus.public import GenerateRequest, Output
from nano_inference.gateway.caller import ANYBODY, Caller
from nano_inference.gateway.serving.request_ids import bus_id, ids_of, name_of

from ..errors import error_of
from ..fake import Client, FakeEngine, app_of, chunk, http_of
from ..made import embedded
from .conftest import Made, bearer
from .test_replay import recorded

Headers = dict[str, str]
Asked = asyncio.Task[httpx.Response]


NAMED: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"rid": "job", "text": "mine"}),
    ("/generate", {"rid": "job", "text": ["mine", "too"]}),
    ("/generate", {"rid": ["job", "hob"], "text": ["mine", "too"], "stream": True}),
    ("/encode", {"rid": "job", "text": "mine"}),
]
"""Every call by which a client names requests."""


def outputs(request: GenerateRequest) -> list[Output]:
    return [chunk(request), recorded(request)]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(outputs)


@pytest.fixture
async def one(made: Made) -> Headers:
    return bearer(await made(tenant="one"))


@pytest.fixture
async def other(made: Made) -> Headers:
    return bearer(await made(tenant="other"))


@asynccontextmanager
async def asked(http: Client, headers: Headers, **body: Any) -> AsyncIterator[Asked]:
    """A call of `/generate`."""
    http.engine.hold()
    body = {"text": "mine"} | body
    task = asyncio.ensure_future(http.post("/generate", json=body, headers=headers))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def running(http: Client, headers: Headers, **body: Any) -> AsyncIterator[Asked]:
    """A call of `/generate` that is held in the pipeline."""
    before = len(http.engine.requests)
    async with asked(http, headers, **body) as task:
        await http.engine.until(lambda: len(http.engine.requests) > before)
        yield task


async def lines(http: Client, headers: Headers) -> list[tuple[str, str, str]]:
    """Name, state and prompt of each line of the console."""
    found = (await http.get("/console/requests", headers=headers)).json()["requests"]
    return [(each["name"], each["state"], each["prompt"]) for each in found]


def cancelled(http: Client) -> list[str]:
    return [given["request_id"] for name, given in http.engine.calls if name == "cancel"]


@pytest.mark.parametrize(("path", "body"), NAMED)
async def test_both_are_answered_under_the_name_that_they_gave(
    http: Client, one: Headers, other: Headers, path: str, body: dict[str, Any]
) -> None:
    http.engine.hold()
    if path == "/encode":
        http.engine.outputs = embedded
    calls = [asyncio.ensure_future(http.post(path, json=body, headers=key)) for key in (one, other)]
    prompts = len(body["text"]) if isinstance(body["text"], list) else 1
    await http.engine.until(lambda: len(http.engine.requests) == 2 * prompts)
    ids = [each.request_id for each in http.engine.requests]
    assert len(set(ids)) == len(ids)
    assert {each.split("/")[0] for each in ids} == {"one", "other"}
    http.engine.go()
    answers = await asyncio.gather(*calls)
    assert {answer.status_code for answer in answers} == {200}
    assert "one/" not in answers[0].text
    assert "other/" not in answers[1].text
    assert answers[0].text == answers[1].text


async def test_each_ends_its_own_request_only(http: Client, one: Headers, other: Headers) -> None:
    async with running(http, one, rid="job-2") as mine:
        for rid in ("job-2", "job", "one/job-2", "job-2_0"):
            answer = await http.post("/abort_request", json={"rid": rid}, headers=other)
            assert error_of(answer, 403) == "insufficient_scope"
        async with running(http, other, rid="job-2") as theirs:
            await http.post("/abort_request", json={"rid": "job-2"}, headers=other)
            assert (await theirs).json()["meta_info"]["finish_reason"]["type"] == "abort"
            assert not mine.done()
        assert cancelled(http) == ["other/job-2"]
        assert (await http.post("/abort_request", json={"rid": "job-2"}, headers=one)).is_success
        assert (await mine).json()["meta_info"]["id"] == "job-2"


async def test_each_tenant_gets_its_own_line_only(
    http: Client, one: Headers, other: Headers
) -> None:
    async with running(http, one, rid="job", text="secret"):
        async with running(http, other, rid="job", text="theirs"):
            assert await lines(http, one) == [("job", "running", "secret")]
            assert await lines(http, other) == [("job", "running", "theirs")]
            for key, prompt in ((one, "secret"), (other, "theirs")):
                found = (await http.get("/console/requests/job", headers=key)).json()["request"]
                assert found["prompt"] == prompt
            path = "/console/requests/one/job"
            assert (await http.get(path, headers=one)).is_success
            assert error_of(await http.get(path, headers=other), 404) == "not_found"
        assert await lines(http, one) == [("job", "running", "secret")]
        assert await lines(http, other) == [("job", "cancelled", "theirs")]


async def test_a_name_in_use_is_refused_and_changes_nothing(http: Client, one: Headers) -> None:
    async with running(http, one, rid="job") as mine:
        for body in ({"text": "again", "rid": "job"}, {"text": ["a", "b"], "rid": ["x", "job"]}):
            again = await http.post("/generate", json=body, headers=one)
            assert error_of(again, 400) == "duplicate_request"
            assert "'job'" in again.json()["error"]["message"]
        refused = (mock.ANY, "refused", "POST /generate")
        assert await lines(http, one) == [refused, refused, ("job", "running", "mine")]
        assert [each.prompt for each in http.engine.requests] == ["mine"]
        assert (await http.post("/abort_request", json={"rid": "job"}, headers=one)).is_success
        assert (await mine).json()["meta_info"]["finish_reason"]["type"] == "abort"
    http.engine.go()
    assert (
        await http.post("/generate", json={"text": "new", "rid": "job"}, headers=one)
    ).is_success


async def test_another_tenants_request_is_named_by_its_id_on_the_bus(
    http: Client, made: Made, one: Headers
) -> None:
    trainer = bearer(await made("generate", "weights", "admin", tenant="trainer"))
    async with running(http, one, rid="job") as mine:
        async with running(http, trainer, rid="job") as own:
            await http.post("/abort_request", json={"rid": "job"}, headers=trainer)
            assert (await own).json()["meta_info"]["finish_reason"]["type"] == "abort"
            assert not mine.done()
        for path in ("one/job", "one%2Fjob"):
            assert (await http.get(f"/console/requests/{path}", headers=trainer)).is_success
        await http.post("/abort_request", json={"rid": "one/job"}, headers=trainer)
        assert (await mine).json()["meta_info"]["finish_reason"]["type"] == "abort"
    http.engine.go()
    await http.post("/generate", json={"rid": "done", "text": "mine"}, headers=one)
    answer = await http.post("/v1/replay/one%2Fdone", headers=trainer)
    assert [each["request_id"] for each in answer.json()["requests"]] == ["one/done"]


KEYED = [
    ("/v1/completions", {"prompt": "mine", "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "mine"}]}),
    ("/v1/responses", {"input": "mine"}),
    ("/v1/responses", {"input": "mine", "background": True}),
]


@pytest.mark.parametrize(("path", "body"), KEYED)
async def test_each_has_its_own_call_of_an_idempotency_key(
    http: Client, one: Headers, other: Headers, path: str, body: dict[str, Any]
) -> None:
    key = {"Idempotency-Key": "job"}
    answers = [await http.post(path, json=body, headers=who | key) for who in (one, other)]
    assert {answer.status_code for answer in answers} == {200}
    await http.engine.until(lambda: len(http.engine.requests) == 2)
    assert {each.tenant for each in http.engine.requests} == {"one", "other"}
    changed = await http.post(path, json=body | {"user": "x"}, headers=other | key)
    assert error_of(changed, 422) == "idempotency_key_reused"
    assert (await http.post(path, json=body, headers=one | key)).is_success
    assert len(http.engine.requests) == 2


async def test_a_session_is_its_tenants(http: Client, one: Headers, other: Headers) -> None:
    for key in (one, other):
        await http.post("/v1/kv_sessions/job", json={"action": "pin"}, headers=key)
        wish = {"prompt": "a", "kv_session": {"id": "job"}}
        await http.post("/v1/completions", json=wish, headers=key)
    named = [given["tenant"] for name, given in http.engine.calls if name == "kv_session"]
    assert named == [each.tenant for each in http.engine.requests] == ["one", "other"]


async def test_without_keys_the_id_is_the_name(engine: FakeEngine) -> None:
    async with http_of(app_of(engine), engine) as http:
        for number, tenant in enumerate(("one", "other")):
            body = {"rid": f"job/{number}", "text": "mine"}
            await http.post("/generate", json=body, headers={"X-Tenant": tenant})
    assert [each.request_id for each in engine.requests] == ["job/0", "job/1"]


def test_no_two_tenants_share_an_id() -> None:
    parts = ["a", "/", "~", "~0", "~1", "a/", "/a", "~1a", "a~"]
    callers = [Caller(tenant=each) for each in parts]
    ids = [bus_id(caller, name) for caller in callers for name in ["", *parts]]
    assert len(set(ids)) == len(ids)
    for caller in callers:
        assert [name_of(caller, bus_id(caller, name)) for name in parts] == parts
    assert ids_of(ANYBODY, "job") == ("job",)
