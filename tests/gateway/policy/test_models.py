"""A key for some models reaches no call of another model, though its tenant has begun it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from nano_inference.store.loaded_adapter import LoadedAdapter

from ..fake import Client, FakeEngine, report
from ..made import interleaved
from .conftest import Made, bearer

COMPLETIONS = ("/v1/completions", {"prompt": "98 +", "stream": True})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True})
RESPONSES = ("/v1/responses", {"input": "a", "stream": True})
NAMES = ("one", "two")


@pytest.fixture
def engine(engine: FakeEngine) -> FakeEngine:
    """Its model has two adapters."""
    adapters = tuple(LoadedAdapter(id=name, version=1) for name in NAMES)
    engine.stage_reports = [report(adapters=adapters)]
    engine.outputs = interleaved
    return engine


def ids_of(answer: httpx.Response) -> tuple[str, str]:
    """Return the ids of the answer and of the first event of its stream."""
    assert answer.status_code == 200, answer.text
    event_id = next(line[4:] for line in answer.text.splitlines() if line.startswith("id: "))
    return event_id.partition(".")[0], event_id


@pytest.mark.parametrize(("path", "body"), [COMPLETIONS, CHAT, RESPONSES])
async def test_a_stream_of_another_model_looks_missing(
    http: Client, made: Made, path: str, body: dict[str, Any]
) -> None:
    """Neither to be read nor to be ended, by no address and with no header."""
    mine, other = [bearer(await made(tenant="t", models=[name])) for name in NAMES]
    asked = body | {"model": "one"}
    call_id, event_id = ids_of(await http.post(path, json=asked, headers=mine))
    stream, response = f"/v1/streams/{call_id}", f"/v1/responses/{call_id}"
    last = {"Last-Event-ID": event_id}
    calls: list[tuple[str, str, dict[str, str], Any]] = [
        ("GET", stream, {}, None),
        ("GET", f"{stream}?after={event_id}", {}, None),
        ("GET", stream, last, None),
        ("POST", path, last, asked),
        ("POST", path, last, body | {"model": "two"}),
        ("POST", f"{stream}/cancel", {}, None),
        ("DELETE", stream, {}, None),
    ]
    if path == RESPONSES[0]:
        follow = {"input": "b", "model": "two", "previous_response_id": call_id}
        calls += [
            ("GET", response, {}, None),
            ("GET", f"{response}?stream=true", {}, None),
            ("GET", f"{response}/input_items", {}, None),
            ("POST", path, {}, follow),
            ("DELETE", response, {}, None),
        ]
    keyed = {"Idempotency-Key": "k"}
    await http.post(path, headers=mine | keyed, json=asked)
    calls.append(("POST", path, keyed, asked))
    before = len(http.engine.requests)
    for method, url, headers, content in calls:
        answer = await http.request(method, url, headers=other | headers, json=content)
        assert answer.status_code in (400, 404), (method, url, content, answer.text)
        assert "text" not in answer.json()
    assert len(http.engine.requests) == before
    assert "cancel" not in http.engine.names
    # Whose key is for its model finds it as it was.
    assert (await http.get(stream, headers=mine | last)).status_code == 200


async def test_a_request_of_another_model_is_not_aborted(http: Client, made: Made) -> None:
    http.engine.outputs = lambda request: []
    mine, other = [bearer(await made(tenant="t", models=[name])) for name in NAMES]
    asked = {"prompt": [1], "model": "one"}
    running = asyncio.create_task(http.post("/v1/completions", json=asked, headers=mine))
    await http.engine.until(lambda: bool(http.engine.requests))
    for headers, status in ((other, 403), (mine, 200)):
        assert "cancel" not in http.engine.names
        body = {"rid": http.engine.requests[0].request_id}
        answer = await http.post("/abort_request", json=body, headers=headers)
        assert answer.status_code == status, answer.text
    assert "cancel" in http.engine.names
    running.cancel()


LONG = "a " * 5000
CHATS = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
    ("/v1/responses", {"input": LONG}),
    ("/v1/responses/input_tokens", {"input": LONG}),
    ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": LONG}]}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": LONG}]}),
    ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
]


@pytest.mark.parametrize(("path", "body"), CHATS)
async def test_an_unknown_model_is_refused_before_its_prompt(
    http: Client, made: Made, path: str, body: dict[str, Any]
) -> None:
    """The error doesn't name models that the key is not for."""
    anybody, limited = bearer(await made()), bearer(await made(models=["one"]))
    for headers, names in ((anybody, NAMES), (limited, ())):
        answer = await http.post(path, json=body | {"model": "none"}, headers=headers)
        assert answer.status_code == 404, answer.text
        said = answer.json()["error"]["message"]
        assert "'none'" in said
        assert all((f"'{name}'" in said) == (name in names) for name in NAMES), said
