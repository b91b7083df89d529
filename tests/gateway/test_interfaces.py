"""Promises for the calls of every interface."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anyio
import msgspec
import pytest

from nano_inference.bus.public import GenerateRequest, Output
from nano_inference.gateway.serving.lane_state import Readiness

from . import by_hand
from .errors import code_of
from .fake import Client, FakeEngine, app_of, chunk, completion, data_of, http_of, sample
from .interfaces import BODIES, STREAMED
from .made import cut

SETTINGS = {"gateway.max_priority": 3, "gateway.message_format": "off"}
CALLS = [*BODIES.items(), *((path, body | {"stream": True}) for path, body in STREAMED.items())]
each_call = pytest.mark.parametrize(("path", "body"), CALLS)


@pytest.mark.parametrize(("path", "body"), BODIES.items())
async def test_headers_give_a_request_its_tenant_and_its_time(
    http: Client, path: str, body: dict[str, Any]
) -> None:
    await http.post(path, json=body, headers={"X-Tenant": "mine", "X-Budget-Ms": "60000"})
    assert {request.tenant for request in http.engine.requests} == {"mine"}
    assert all(0 < (request.budget_ns or 0) <= 60 * 10**9 for request in http.engine.requests)


@pytest.mark.parametrize(
    ("path", "body"),
    [*STREAMED.items(), ("/v2/models/tiny/generate_stream", {"text_input": "a"})],
)
async def test_a_stream_has_the_same_lines_for_every_reader(
    path: str, body: dict[str, Any]
) -> None:
    """Readers that follow Unicode, as HTTPX's `iter_lines`, see no line end within an event."""
    text = "a\u2028b\u2029c\x85d"

    def outputs(request: GenerateRequest) -> list[Output]:
        last = sample((7,), text=text, finish_reason="stop")
        return [chunk(request, (7,), text, finish_reason="stop"), completion(request, last)]

    async with http_of(app_of(FakeEngine(outputs), SETTINGS)) as http:
        answer = await http.post(path, json=body | {"stream": True})
    assert answer.text.splitlines() == answer.text.removesuffix("\n").split("\n")
    # Calls by tokens have no text.
    texts = json.dumps([data_of(answer)])
    assert json.dumps(text)[1:-1] in texts or path == "/inference/v1/generate"


@each_call
async def test_a_call_without_time_is_refused(
    http: Client, path: str, body: dict[str, Any]
) -> None:
    answer = await http.post(path, json=body, headers={"X-Budget-Ms": "0"})
    assert (code_of(answer, 504), http.engine.requests) == ("expired", [])


@each_call
async def test_a_draining_gateway_refuses_calls(
    engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    readiness = Readiness(engine.deployment)  # type: ignore[arg-type]
    readiness.draining = True
    async with http_of(app_of(engine, readiness=readiness)) as http:
        answer = await http.post(path, json=body)
    assert (code_of(answer, 503), engine.requests) == ("shutting_down", [])
    assert answer.headers["retry-after"] == "1"


@each_call
async def test_a_priority_above_the_limit_is_refused(
    http: Client, path: str, body: dict[str, Any]
) -> None:
    """SGLang's higher priorities are earlier; those of others are later."""
    sign = 1 if path in ("/generate", "/encode") else -1
    answer = await http.post(path, json=body | {"priority": 4 * sign})
    assert (code_of(answer, 400), http.engine.requests) == ("invalid_priority", [])
    assert f"priority is {4 * sign}; it must be from " in answer.text
    assert "(gateway.max_priority)" in answer.text
    if "param" in answer.text:
        assert answer.json()["error"]["param"] == "priority"
    assert (await http.post(path, json=body | {"priority": -1001 * sign})).status_code == 400
    assert (await http.post(path, json=body | {"priority": 3 * sign})).status_code == 200
    assert {request.priority for request in http.engine.requests} == {3}


MALFORMED = [
    *(b"{", b"[]", b"5", b'"text"', b"\xff\xfe", b'{"a": "\xff"}', b'{"a": "\\ud800"}'),
    *(b'{"a": NaN}', b'{"a": Infinity}', b'{"a": 1e999}'),
    *(b'{"a": ' + b"[" * 100_000, b'{"a": ' + b'{"a":' * 100_000),
]
COUNTS = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")


@pytest.mark.parametrize("path", [*BODIES, *COUNTS])
async def test_a_malformed_body_is_refused(http: Client, path: str) -> None:
    for body in MALFORMED:
        answer = await http.post(path, content=body)
        assert code_of(answer, 400) == "malformed", body[:100]
    assert not http.engine.requests


NOTHING: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"function_call": "auto", "functions": [], "stream_reasoning": True},
        {"reasoning_effort": "none", "include_reasoning": False, "separate_reasoning": False},
        {"response_format": {"type": "text"}, "user": "u", "metadata": {"a": "b"}},
        {"stop": None, "seed": None, "logprobs": None, "stream_options": None},
        {"skip_special_tokens": True, "length_penalty": 1.0, "service_tier": "auto"},
        {"stop": "", "top_k": -1, "logit_bias": {}, "best_of": None, "whatever": None},
    ],
    "/v1/responses": [
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": None},
        {"text": {"format": {"type": "text"}}, "truncation": "disabled", "background": False},
        {"include": ["reasoning.encrypted_content"], "service_tier": "auto", "user": "u"},
    ],
    "/v1/messages": [
        {"tools": [], "tool_choice": {"type": "auto"}, "thinking": {"type": "disabled"}},
        {"metadata": {"user_id": "u"}, "service_tier": "auto", "speed": "standard"},
        {"cache_control": {"type": "ephemeral"}, "stop_sequences": None, "container": None},
    ],
}


@pytest.mark.parametrize("path", NOTHING)
async def test_fields_that_ask_for_nothing_change_nothing(http: Client, path: str) -> None:
    for fields in ({}, *NOTHING[path]):
        answer = await http.post(path, json=BODIES[path] | fields)
        assert answer.status_code == 200, answer.text
    first, *others = http.engine.requests
    for other in others:
        same = (first.sampling, first.prompt_token_ids)
        assert (other.sampling, other.prompt_token_ids) == same


@pytest.mark.parametrize(("path", "body"), STREAMED.items())
async def test_interfaces_share_the_places(
    engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    """One tenant has one place, and one more call may wait."""
    engine.outputs = cut
    app = app_of(engine, {"gateway.max_in_flight": 2, "gateway.max_waiting": 1})
    async with http_of(app) as http, anyio.create_task_group() as group:
        group.start_soon(lambda: http.post("/generate", json={"text": "a"}))
        await engine.until(lambda: len(engine.requests) == 1)
        calls = [asyncio.create_task(http.post(path, json=body)) for _ in range(2)]
        # One waits, and the newest is refused; another tenant finds the place that is left.
        (refused,), (waiting,) = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        assert code_of(refused.result(), 429) == "overloaded"
        assert refused.result().headers["retry-after"]
        group.start_soon(lambda: http.post(path, json=body, headers={"X-Tenant": "other"}))
        await engine.until(lambda: len(engine.requests) == 2)
        assert engine.requests[1].tenant == "other"
        waiting.cancel()
        group.cancel_scope.cancel()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), STREAMED.items())
async def test_disconnect_cancels_the_request(
    engine: FakeEngine, path: str, body: dict[str, Any], stream: bool
) -> None:
    engine.outputs = cut
    left = anyio.Event()
    async with anyio.create_task_group() as group:
        app, asked = app_of(engine), body | {"stream": stream}
        group.start_soon(by_hand.post, app, path, asked, by_hand.ignore, left)
        await engine.until(lambda: len(engine.requests) == 1)
        left.set()
    assert engine.left == [engine.requests[0].request_id]


# --- schemas --------------------------------------------------------------------------------------

LARGE = 10**30
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": LARGE}}}
FORMAT = {"type": "json_schema", "name": "x", "schema": SCHEMA}
OBJECT = {"type": "json_object", "schema": SCHEMA}
NESTED = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
OUTPUTS = {"structured_outputs": {"json": SCHEMA}}
FUNCTION = {"name": "f", "parameters": SCHEMA}
STRICT = FUNCTION | {"strict": True}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"response_format": NESTED}),
        ("/v1/completions", {"response_format": OBJECT}),
        ("/v1/completions", {"guided_json": SCHEMA}),
        ("/v1/chat/completions", {"tools": [{"type": "function", "function": STRICT}]}),
        ("/v1/chat/completions", {"response_format": OBJECT}),
        ("/v1/responses", {"tools": [{"type": "function"} | FUNCTION]}),
        ("/v1/responses", {"text": {"format": FORMAT}}),
        ("/v1/responses", {"text": {"format": OBJECT}}),
        ("/v1/messages", {"tools": [{"name": "f", "input_schema": SCHEMA}]}),
        ("/v1/messages", {"output_config": {"format": FORMAT}}),
        ("/v1/messages", {"output_config": {"format": OBJECT}}),
        ("/inference/v1/generate", {"sampling_params": OUTPUTS}),
        ("/v2/models/tiny/generate", {"sampling_parameters": OUTPUTS}),
    ],
)
async def test_a_schema_with_an_integer_beyond_64_bits_is_kept(
    engine: FakeEngine, path: str, fields: dict[str, Any]
) -> None:
    async with http_of(app_of(engine)) as http:
        # With a key, the call is stored.
        body, headers = BODIES[path] | fields, {"Idempotency-Key": "k"}
        answer = await http.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    (request,) = engine.requests
    constraint = request.sampling.constraint
    # Tools that are not strict constrain nothing.
    assert (constraint is None) == ("tools" in fields and "strict" not in str(fields))
    if constraint is not None:
        assert str(LARGE) in msgspec.json.encode(constraint).decode()
