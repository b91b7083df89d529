"""A call with an idempotency key is computed once, by every interface that generates."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import numpy as np
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from nano_inference.kserve.protobuf import message

from .api.kserve.calls import served
from .errors import code_of
from .fake import Client, FakeEngine, app_of, http_of
from .interfaces import STREAMED
from .made import interleaved

KEY = {"Idempotency-Key": "workflow-1.step-2", "X-Tenant": "me"}
TENSORS = {"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["a"]}]}
CALLS = [
    *STREAMED.items(),
    *((path, body | {"stream": True}) for path, body in STREAMED.items()),
    ("/v2/models/tiny/generate", {"text_input": "a"}),
    ("/v2/models/tiny/generate_stream", {"text_input": "a", "stream": True}),
    ("/v2/models/tiny/infer", TENSORS),
    ("/v2/models/tiny.tokens/generate", {"input_ids": [5, 6]}),
]
each_call = pytest.mark.parametrize(("path", "body"), CALLS)
SETTINGS = {"gateway.message_format": "off"}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(interleaved)


@each_call
async def test_a_call_with_a_key_is_computed_once(
    http: Client, other: Client, path: str, body: dict[str, Any]
) -> None:
    """At two gateways: while it runs, and once it has ended."""
    engine = http.engine
    engine.hold()
    first = asyncio.create_task(http.post(path, json=body, headers=KEY))
    await engine.until(lambda: bool(engine.requests))
    second = asyncio.create_task(other.post(path, json=body, headers=KEY))
    await asyncio.sleep(0)
    engine.go()
    answers = [await first, await second, await other.post(path, json=body, headers=KEY)]
    assert {each.status_code for each in answers} == {200}, answers[1].text
    assert {each.text for each in answers} == {answers[0].text}
    assert len(engine.requests) == 1
    more = {"id": "x"} if path.startswith("/v2") else {"budget_ms": 60_000}
    changed = await other.post(path, json=body | more, headers=KEY)
    assert code_of(changed, 422) == "idempotency_key_reused"
    stranger = await other.post(path, json=body, headers=KEY | {"X-Tenant": "you"})
    assert (stranger.status_code, len(engine.requests)) == (200, 2)


@each_call
async def test_a_call_with_a_key_survives_its_client(
    engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    """The client is killed, and a new one sends the call again."""
    engine.hold()
    app = app_of(engine, SETTINGS)
    async with http_of(app) as http:
        first = asyncio.create_task(http.post(path, json=body, headers=KEY))
        await engine.until(lambda: bool(engine.requests))
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.create_task(http.post(path, json=body, headers=KEY))
        await asyncio.sleep(0)
        engine.go()
        assert (await second).status_code == 200
    assert len(engine.requests) == 1
    assert "cancel" not in engine.names


class Impatient(httpx2.AsyncBaseTransport):
    """A client's way to a gateway, whose first call gets no answer in time."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._way = httpx2.ASGITransport(app_of(engine, SETTINGS))

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        asked = asyncio.create_task(self._way.handle_async_request(request))
        if self._engine.requests:
            self._engine.go()
            return await asked
        await self._engine.until(lambda: bool(self._engine.requests))
        asked.cancel()
        await asyncio.wait([asked])
        raise httpx2.ReadTimeout("no answer", request=request)


@pytest.mark.parametrize("named", ["by the call", "by the client"])
@pytest.mark.parametrize("kind", [AsyncOpenAI, AsyncAnthropic])
async def test_the_retry_of_a_client_library_gets_the_first_calls_answer(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, kind: Any, named: str
) -> None:
    engine.hold()
    monkeypatch.setattr(kind, "_calculate_retry_timeout", lambda *given: 0.0)
    headers = {"X-Tenant": "me"}
    async with (
        httpx2.AsyncClient(transport=Impatient(engine)) as way,
        kind(
            base_url="http://127.0.0.1/v1" if kind is AsyncOpenAI else "http://127.0.0.1",
            api_key="none",
            http_client=way,
        ) as client,
    ):
        if named == "by the client":
            client._idempotency_header = "Idempotency-Key"
        else:
            headers |= KEY
        made = client.chat.completions if kind is AsyncOpenAI else client.messages
        messages = [{"role": "user", "content": "a"}]
        await made.create(model="tiny", messages=messages, max_tokens=4, extra_headers=headers)
    assert len(engine.requests) == 1


async def test_a_request_of_kserve_may_have_its_key_as_a_parameter(http: Client) -> None:
    """In a stream of gRPC one header would be that of all requests."""
    path, keyed = "/v2/models/tiny/infer", {"parameters": {"idempotency_key": "k"}}
    for _ in range(2):
        assert (await http.post(path, json=TENSORS | keyed)).status_code == 200
    assert len(http.engine.requests) == 1
    both = await http.post(path, json=TENSORS | keyed, headers=KEY)
    assert code_of(both, 400) == "invalid_idempotency_key"
    several = await http.post(
        "/v2/models/tiny.best_of/generate", json={"input_ids": [5]}, headers=KEY
    )
    assert code_of(several, 400) == "unsupported"


async def test_the_key_of_a_call_over_grpc_is_its_metadata(engine: FakeEngine) -> None:
    """Of a stream each request has its own, as a parameter."""
    data = np.array([5, 6])

    def request(**parameters: str) -> Any:
        return message("ModelInferRequest")(
            model_name="tiny.tokens",
            inputs=[{"name": "input_ids", "datatype": "INT64", "shape": data.shape}],
            raw_input_contents=[data.tobytes()],
            parameters={name: {"string_param": value} for name, value in parameters.items()},
        )

    async with served(engine=engine) as (_, call):
        own = (("idempotency-key", "k"), ("x-tenant", "me"))
        answers = [await call("ModelInfer", request(), metadata=own) for _ in range(2)]
        assert answers[0] == answers[1]
        assert (len(answers[0].outputs) > 0, len(engine.requests)) == (True, 1)
        stream = call.stream(metadata=(("x-tenant", "me"),))
        for key in ("a", "b", "a"):
            await stream.send(request(idempotency_key=key))
            assert (await stream.read()).infer_response.outputs
    assert len(engine.requests) == 3
