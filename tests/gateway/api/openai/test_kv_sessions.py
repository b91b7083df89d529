"""Sessions over HTTP: the field of requests, what usage says of it, and calls between turns."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from nano_inference.bus.public import (
    Completion,
    GenerateRequest,
    KVSession,
    KVSessionResult,
    Output,
)
from nano_inference.config import RequestError

from ...fake import Client
from ...made import interleaved, whole
from .streamed import Recorded, stream_of

HELLO: Any = [{"role": "user", "content": "hello"}]
CLIPPED = KVSessionResult(outcome="clipped", num_tokens=32, tier="device", reason="the share")
AS_JSON = {"outcome": "clipped", "num_tokens": 32, "tier": "device", "reason": "the share"}
TURN = {"id": "agent", "ttl_s": 9, "after": "demote"}


def clipped(request: GenerateRequest) -> list[Output]:
    """The outputs of a turn, of which a part is pinned."""
    *chunks, end = interleaved(request) if request.stream else whole(request)
    assert isinstance(end, Completion)
    return [*chunks, msgspec.structs.replace(end, kv_session=CLIPPED)]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "98 +"}),
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/inference/v1/generate", {"token_ids": [5]}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 3}),
    ],
)
async def test_a_turn_reaches_the_engine_and_its_outcome_the_client(
    http: Client, path: str, body: dict[str, Any]
) -> None:
    http.engine.outputs = clipped
    answer = (await http.post(path, json=body | {"kv_session": TURN})).json()
    assert http.engine.requests[0].kv_session == KVSession(id="agent", ttl_s=9, after="demote")
    assert answer["usage"]["kv_session"] == AS_JSON
    http.engine.outputs = whole
    answer = (await http.post(path, json=body)).json()
    assert http.engine.requests[1].kv_session is None
    assert "kv_session" not in answer["usage"]


async def test_a_stream_has_the_outcome_with_its_usage(http: Client) -> None:
    http.engine.outputs = clipped
    options = {"stream": True, "stream_options": {"include_usage": True}}
    body = {"prompt": "98 +", "kv_session": {"id": "agent"}}
    answer = await http.post("/v1/completions", json=body | options)
    assert Recorded(stream_of(answer)).usages[-1]["kv_session"] == AS_JSON


@pytest.mark.parametrize(
    ("given", "code", "param"),
    [
        ({"prompt": ["a", "b"], "kv_session": {"id": "agent"}}, "invalid_kv_session", "kv_session"),
        ({"prompt": "a", "kv_session": {}}, "invalid_request", "kv_session"),
        ({"prompt": "a", "kv_session": "agent"}, "invalid_request", "kv_session"),
        (
            {"prompt": "a", "kv_session": {"id": "a", "after": "keep"}},
            "invalid_request",
            "kv_session.after",
        ),
        ({"prompt": "a", "kv_session": {"id": "a", "ttl": 3}}, "unsupported", "kv_session.ttl"),
    ],
)
async def test_wrong_fields_are_refused_by_their_place(
    http: Client, given: dict[str, Any], code: str, param: str
) -> None:
    answer = await http.post("/v1/completions", json=given)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == code
    assert error["param"].startswith(param)
    assert not http.engine.requests


async def test_a_finished_session_lets_go_of_its_kv(http: Client) -> None:
    http.engine.session_result = KVSessionResult(outcome="unknown")
    answer = await http.post("/finish_session", params={"session_id": "t-1"})
    assert answer.json() == {"status": "ok"}
    called = http.engine.last("kv_session")
    assert (called["session"], called["action"]) == ("t-1", "release")
    assert (await http.post("/finish_session")).json()["error"]["param"] == "session_id"


async def test_a_call_reaches_the_session_of_the_callers_tenant(http: Client) -> None:
    http.engine.session_result = CLIPPED
    body = {"action": "prefetch", "ttl_s": 60, "model": "tiny"}
    answer = await http.post(
        "/v1/kv_sessions/a/7", json=body, headers={"X-Tenant": "the other side"}
    )
    assert answer.json() == {"id": "a/7", "object": "kv_session", **AS_JSON}
    called = http.engine.last("kv_session")
    assert called == {
        "session": "a/7",
        "action": "prefetch",
        "ttl_s": 60,
        "tenant": "the other side",
    }


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({}, 400, "invalid_request", "action"),
        ({"action": "keep"}, 400, "invalid_request", "action"),
        ({"action": "pin", "ttl_s": "long"}, 400, "invalid_request", "ttl_s"),
        ({"action": "pin", "ttl": 3}, 400, "unsupported", "ttl"),
        ({"action": "pin", "model": "other"}, 404, "model_not_found", "model"),
    ],
)
async def test_wrong_calls_are_refused(
    http: Client, body: dict[str, Any], status: int, code: str, param: str
) -> None:
    answer = await http.post("/v1/kv_sessions/a", json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert not http.engine.names


async def test_an_error_of_the_engine_is_answered(http: Client) -> None:
    http.engine.failures["kv_session"] = RequestError("no", code="invalid_kv_session")
    answer = await http.post("/v1/kv_sessions/a", json={"action": "pin"})
    assert answer.json()["error"]["code"] == "invalid_kv_session"
